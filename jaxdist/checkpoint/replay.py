"""Steps again from a checkpoint, on one process: what `jaxdist replay` makes of a script's calls.

The script restores that checkpoint, whichever it asks for, saves and logs nothing, and ends after the last step, of
whose state the hash is printed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "JAXDIST_REPLAY"


class Replay(NamedTuple):
    """What is asked for.

    Attributes:
      path: of the checkpoints of a run.
      step: of the one to begin from.
      last: the step to end after, as the script's log counts it.
    """

    path: Path
    step: int
    last: int


def variable(checkpoint: Path, last: int) -> str:
    """What the script's process has in `VARIABLE`.

    Args:
      checkpoint: of one step, such as run/checkpoints/100.
      last: the step to end after.

    Raises:
      ValueError: that is no checkpoint of a step.
    """
    if not checkpoint.name.isdecimal() or not checkpoint.is_dir():
        raise ValueError(f"{checkpoint} is not the checkpoint of one step, such as run/checkpoints/100")
    return f"{last}:{checkpoint.absolute()}"


def asked() -> Replay | None:
    """What this process is to repeat; None: it trains."""
    last, _, path = os.environ.get(VARIABLE, "").partition(":")
    return Replay(Path(path).parent, int(Path(path).name), int(last)) if path else None


def seen(replay: Replay, step: int, state: Any, digest: Callable[[Any], int]) -> None:
    """The script has come to the end of a step: of the last one it prints the hash, and ends.

    Args:
      replay: what was asked for.
      step: as the script counts.
      state: after it.
      digest: `jaxdist.digest`.
    """
    if step == replay.last:
        print(f"step {step} from {replay.path / str(replay.step)}: hash {digest(state)}", flush=True)
        raise SystemExit(0)
    if step > replay.last:
        raise SystemExit(f"the script went on from step {replay.step} with step {step}: there is no step {replay.last}")
