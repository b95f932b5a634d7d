"""`spawn`: functions of a script and of a module on several ranks, their results, errors and end."""

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import jobs
from harness.errors import missing, raises

import jaxdist

SCRIPT = Path(__file__).parent / "scripts" / "spawning.py"


def started(*words: object) -> jobs.Job:
    env = {"PYTHONPATH": str(Path(jaxdist.__file__).parents[1]), "PYTHONUNBUFFERED": None}
    return jobs.Job().start([sys.executable, str(SCRIPT), *map(str, words)], env)


@pytest.mark.slow
def test_a_function_of_a_script_that_has_used_jax() -> None:
    """As in a notebook: JAX and jaxdist are in use, and what is needed is in `__main__`."""
    done = started("trains").finish(120)[0]
    assert (done.returncode, done.stdout) == (0, "done\n"), done.output
    assert done.stderr == "", "no warning of forks"


@pytest.mark.slow
def test_errors_of_ranks() -> None:
    done = started("errors").finish(120)[0]
    assert done.returncode == 0, done.output
    *errors, last = (text.strip() for text in done.stdout.split("END\n"))
    expected = [
        ["Mine", "went wrong", "rank 1 of 2", 'File "cell", line 6, in fail', 'raise Mine("went", "wrong")'],
        ["RuntimeError", "rank 0 of 1", "exit code 3"],
        ["RuntimeError", "rank 1 of 2", "SIGKILL"],
        ["RuntimeError", "rank 0 of 1", "exit code 0", "os._exit"],
        ["RuntimeError", "rank 1 of 2", "exit code 0", "os._exit"],
        ["TypeError", "_thread.lock"],
    ]
    for tokens, text in zip(expected, errors, strict=True):
        assert missing(tokens, text) == [], text
    assert "jaxdist/" not in errors[0], "the traceback is the user's own"
    assert last == "[None]"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_parent_is_that_of_the_ranks(number: signal.Signals) -> None:
    job = started("waits")
    job.wait_for(lambda text: text.count("ready") == 2)
    job.processes[0].send_signal(number)
    done = job.finish(30)[0]  # and nobody is left
    assert done.returncode == (0 if number == signal.SIGINT else -number), done.output
    assert ("stopped" in done.stdout) == (number == signal.SIGINT)


def test_where_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ValueError, "n=0"):
        jaxdist.spawn(print, 0)
    with raises(ValueError, "devices=0"):
        jaxdist.spawn(print, 2, devices=0)
    lock = threading.Lock()
    with raises(TypeError, "<lambda>", "lock"):
        jaxdist.spawn(lambda: lock, 2)
    with ThreadPoolExecutor() as pool, raises(RuntimeError, "thread"):
        pool.submit(jaxdist.spawn, print, 2).result()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with raises(RuntimeError, "rank"):
        jaxdist.spawn(print, 2)
