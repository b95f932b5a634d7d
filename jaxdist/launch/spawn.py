"""`spawn`: run a function on several ranks of this machine, from Python: a notebook's cell, a script, a test."""

from __future__ import annotations

import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jaxdist import connectors
from jaxdist.control import scratch
from jaxdist.runtime.context import started

if TYPE_CHECKING:
    from jaxdist.launch.spawned import Failure

T = TypeVar("T")

# Ctrl-C while JAX is imported ends the rank without a traceback; `main` takes over.
_START = """import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path[:] = {path!r}
from jaxdist.launch.spawned import main
main({folder!r})"""


def spawn(
    fn: Callable[..., T],
    n: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    communicator: Literal["xla", "mpi"] = "xla",
    timeout: float | None = None,
    prefix: bool = False,
    only_rank: int | None = None,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on n ranks of this machine, and return the results of all ranks.

    Each rank is a new process, which joins the job (`jaxdist.init`) before it calls the function. This process may have
    used JAX before and is not a rank. The function can be defined in a notebook or in the running script; it is sent
    with the objects that it uses. Modules are imported by the ranks, with this process's ``sys.path``. The ranks use
    the settings of ``jax.config`` and the environment of this process.

    The ranks' output appears here, line by line. Ctrl-C, a notebook's stop button, and the end of this process end all
    ranks.

    Args:
      fn: the function. It can call `jaxdist.get_context` for its rank.
      n: the number of ranks. Each uses one GPU if there are GPUs.
      args: arguments of the function. JAX arrays arrive as JAX arrays.
      kwargs: keyword arguments of the function.
      communicator: how arrays are sent. For "mpi", mpirun starts the ranks.
      timeout: see `jaxdist.init`.
      prefix: write the rank before each line.
      only_rank: show the output of this rank only.

    Returns:
      The results in rank order. JAX arrays are returned as NumPy arrays, so that this process does not start JAX and
      reserve GPU memory that the next ranks need. If results are large, return None on all ranks except the root.

    Raises:
      Exception: the exception of the rank that failed first, with the rank and its traceback in a note.
      RuntimeError: a rank ended without an exception, or with one that cannot be sent; or this process is a rank of a
        job, or this is not its main thread.
      TypeError: the function, or an object that it uses, cannot be sent.
      ValueError: the arguments contradict each other, or the machine has no room for this many ranks.

    Example:
      >>> import jaxdist
      >>> def train(steps):
      ...     ctx = jaxdist.get_context()
      ...     return ctx.rank * steps
      >>> jaxdist.spawn(train, 2, args=(10,))  # doctest: +SKIP
      [0, 10]
    """
    # Here, not above: a rank needs none of it, and cloudpickle takes its time.
    from jaxdist.launch import spawned
    from jaxdist.launch.job import LauncherName, choose, launch
    from jaxdist.launch.output import NOT_WRITTEN
    from jaxdist.launch.processes import Failed

    _check(n, only_rank)
    launcher = LauncherName.mpirun if communicator == "mpi" else LauncherName.env
    mpirun = choose(launcher, communicator == "mpi")
    with scratch.folder("jaxdist-spawn-") as folder:
        spawned.write_task(Path(folder), fn, tuple(args), dict(kwargs or {}))
        command = [sys.executable, "-c", _START.format(path=sys.path, folder=folder)]
        environment = {"PYTHONUNBUFFERED": "1", "JAXDIST_RESTARTS": "0", "JAXDIST_COMMUNICATOR": communicator}
        if timeout is not None:
            environment["JAXDIST_TIMEOUT"] = str(timeout)
        failed: list[Failed] = []
        code = launch(
            command, n, mpirun, environment,
            prefix=prefix, only_rank=only_rank, whole_lines=True, on_failure=failed.append,
        )  # fmt: skip
        if code == 0 or (code == NOT_WRITTEN and not failed):
            return [spawned.read_result(Path(folder), rank) for rank in range(n)]
        if not failed:  # a signal that came to this process, and went on to the ranks
            signal.raise_signal(code - 128)
            failed.append(Failed("a rank", code))
        raise _error(*failed[0], spawned.read_failures(Path(folder)), n)


def _check(n: int, only_rank: int | None) -> None:
    if type(n) is not int or n < 1:
        raise ValueError(f"spawn(fn, n={n!r}): expected a number of ranks, 1 or more")
    if only_rank is not None and only_rank not in range(n):
        raise ValueError(f"only_rank={only_rank} is not one of the {n} ranks")
    context = started()
    if (context is not None and context.size > 1) or connectors.choose() != "local":
        raise RuntimeError(
            "jaxdist.spawn starts a job, and this process is a rank of one already: call it in a process that no "
            "launcher started. (Ranks import the module of the function: put the call under "
            '`if __name__ == "__main__":`)'
        )
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("jaxdist.spawn was called in another thread than the main one, where Ctrl-C does not arrive")


def _error(name: str, code: int, failures: list[Failure], n: int) -> BaseException:
    """What to raise for a job that failed: the first error that is not another failure's echo."""
    killed = signal.Signals(code - 128).name if code - 128 in set(signal.Signals) else ""
    first = min(failures, key=lambda failure: (failure.aftermath, failure.time), default=None)
    if first is None or (first.aftermath and killed):
        ended = f"was ended by {killed}" if killed else f"ended with exit code {code}"
        hint = " (the system ran out of memory?)" if killed == "SIGKILL" else ""
        who = name if name.startswith("rank ") else "a rank"  # not: mpirun
        return RuntimeError(f"{who} of {n} {ended}{hint}, without an exception; what it printed may say more")
    try:
        error = pickle.loads(first.pickled)
    except Exception:  # of a type that only the ranks know, or that pickles and does not unpickle
        error = None
    if not isinstance(error, Exception):  # SystemExit would end this process
        error = RuntimeError(first.summary)
    others = "".join(
        f"\nrank {failure.rank} failed, too: {failure.summary}"
        for failure in failures
        if failure is not first and not failure.aftermath
    )
    where = "a rank that had not joined the job" if first.rank is None else f"rank {first.rank} of {n}"
    error.add_note(f"Raised on {where}:\n\n{first.traceback.rstrip()}{others}")
    return error
