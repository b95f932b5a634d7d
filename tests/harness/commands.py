"""The command `jaxdist`, in this process."""

import io
import signal
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points

import pytest
from harness.errors import missing


def command(*words: object) -> tuple[int, str]:
    """Run ``jaxdist WORDS``: the exit code and what it printed, on lines that are not broken."""
    (entry,) = entry_points(group="console_scripts", name="jaxdist")
    said, before = io.StringIO(), signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["jaxdist", *map(str, words)])
        patch.setenv("COLUMNS", "2000")
        patch.setattr(sys, "stdout", said)
        patch.setattr(sys, "stderr", said)
        with pytest.raises(SystemExit) as ended:
            entry.load()()
    signal.signal(signal.SIGINT, before)
    return int(ended.value.code or 0), " ".join(said.getvalue().replace("│", " ").split())


def refused(tokens: Iterable[str], *words: object) -> None:
    """The command refuses these words, with a message that holds the tokens."""
    code, said = command(*words)
    assert (code, missing(tokens, said)) == (2, []), said
