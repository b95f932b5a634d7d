"""`spawn`: run a function on several ranks of this machine, from Python: a notebook's cell, a script, a test.

Arguments and results go through files in a folder of the user's own: results of any size have room there.
"""

import io
import linecache
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from jaxdist import compat, connectors
from jaxdist.control import failfast
from jaxdist.errors import in_words
from jaxdist.runtime.context import Context, init, started
from jaxdist.runtime.devices import number_asked
from jaxdist.runtime.transfer import Pickler, ResultPickler
from jaxdist.text import name_of

T = TypeVar("T")

# Ctrl-C before the rank has joined the job ends it without a traceback; `main` takes over.
_START = """import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path[:] = {path!r}
from jaxdist.launch.spawn import main
main({folder!r})"""


def spawn(
    fn: Callable[..., T],
    n: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: int | None = None,
    prefix: bool = False,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on n ranks of this machine, and return the results of all ranks.

    Each rank is a new process that joins the job before it calls the function, with the ``sys.path``, environment, and
    ``jax.config`` of this process. Its output appears here, line by line. Ctrl-C, a notebook's stop button, and the end
    of this process end all ranks.

    Args:
      fn: the function. It can call `jaxdist.get_context` for its rank.
      n: the number of ranks. They divide the GPUs, if there are any.
      args: arguments of the function. JAX arrays arrive as JAX arrays.
      kwargs: keyword arguments of the function.
      devices: the number of devices of each rank. By default one CPU, or its GPUs.
      prefix: write the rank before each line.

    Returns:
      The results in rank order, with NumPy arrays instead of JAX arrays.

    Raises:
      Exception: the exception of the rank that failed first, with the rank and its traceback in a note.
      RuntimeError: a rank ended without an exception, or with one that cannot be sent; or this process is a rank of a
        job, or this is not its main thread.
      TypeError: the function, or an object that it uses, cannot be sent.

    Example:
      >>> import jaxdist
      >>> def train(steps):
      ...     return jaxdist.get_context().rank * steps
      >>> jaxdist.spawn(train, 2, args=(10,))  # doctest: +SKIP
      [0, 10]
    """
    from jaxdist.launch.job import launch  # here: a rank needs none of it
    from jaxdist.launch.output import NOT_WRITTEN
    from jaxdist.launch.processes import ENDED_EARLY

    if type(n) is not int or n < 1:
        raise ValueError(f"spawn(fn, n={n!r}): expected a number of ranks, 1 or more")
    devices = number_asked("devices", devices)
    context = started()
    if (context is not None and context.size > 1) or connectors.choose() != "local":
        raise RuntimeError(
            "jaxdist.spawn starts a job, and this process is a rank of one already: call it in a process that no "
            "launcher started. (Ranks import the module of the function: put the call under "
            '`if __name__ == "__main__":`)'
        )
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("jaxdist.spawn was called outside the main thread, where Ctrl-C does not arrive")
    with tempfile.TemporaryDirectory(prefix="jaxdist-spawn-") as name:
        folder = Path(name)
        _write_task(folder, fn, tuple(args), dict(kwargs or {}))
        command = [sys.executable, "-c", _START.format(path=sys.path, folder=name)]
        environment = {"PYTHONUNBUFFERED": "1", "JAXDIST_RESTARTS": "0", "JAXDIST_COMMUNICATOR": "xla"}
        environment |= {"JAXDIST_DEVICES": str(devices)} if devices else {}
        ended = launch(command, n, None, environment, prefix=prefix)
        if ended.code in (0, NOT_WRITTEN) and not ended.failed:
            files = [folder / f"result of rank {rank}" for rank in range(n)]
            if missing := [file.name.removeprefix("result of ") for file in files if not file.exists()]:
                raise _error(folder, missing[0], ENDED_EARLY, n)
            return [pickle.loads(file.read_bytes()) for file in files]
        if not ended.failed:  # a signal to this process, which passed it on to the ranks
            signal.raise_signal(ended.code - 128)
        raise _error(folder, ended.failed, ended.ending, n)


def _write_task(folder: Path, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write the call for the ranks to make, and the settings of JAX of this process."""
    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"jaxdist.spawn can't send {name_of(fn)!r}, or an object it refers to, to the ranks: "
            f"{error}. Make such things inside the function"
        ) from error
    settings = compat.settings()
    if "JAX_PLATFORMS" in os.environ:  # where the ranks compute: a GPU may be kept for them alone
        settings.pop("jax_platforms", None)
    # The code of a notebook's cells is in no file: for the tracebacks of ranks.
    known = [(name, entry[2]) for name, entry in list(linecache.cache.items()) if len(entry) == 4]
    cells = {name: (0, None, lines, name) for name, lines in known if not Path(name).exists()}
    with (folder / "task").open("wb") as file:
        pickle.dump((settings, cells), file)
        file.write(buffer.getbuffer())


def _error(folder: Path, name: str, ending: str, n: int) -> BaseException:
    """Return the exception for a job that failed: the error of the rank that failed first."""
    try:
        summary, trace, pickled = pickle.loads((folder / f"error of {name}").read_bytes())
    except Exception:  # there is none, or not the whole of it
        return RuntimeError(f"{name} of {n} {ending}, without an exception; its output may say more")
    try:
        error = pickle.loads(pickled)
    except Exception:  # of a type that only the ranks know, or that pickles and does not unpickle
        error = None
    if not isinstance(error, Exception):
        error = RuntimeError(summary)
    error.add_note(f"Raised on {name} of {n}:\n\n{trace.rstrip()}")
    return error


def main(folder: str) -> None:
    """Run one rank: join the job, call the function, and write down its result or error."""
    ctx: Context | None = None
    try:
        with Path(folder, "task").open("rb") as file:
            settings, cells = pickle.load(file)
            compat.use_settings(settings)
            linecache.cache.update(cells)
            ctx = init()  # before JAX makes arrays from the data
            signal.signal(signal.SIGINT, signal.default_int_handler)
            fn, args, kwargs = pickle.load(file)
        result = None
        try:
            result = fn(*args, **kwargs)
        finally:  # of one that calls `sys.exit()`: None
            with Path(folder, f"result of rank {ctx.rank}").open("wb") as file:
                ResultPickler(file).dump(result)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the parent shows it
        trace = error.__traceback__ and error.__traceback__.tb_next  # without `main`
        try:
            pickled = cloudpickle.dumps(error)
        except Exception:
            pickled = b""
        text = "".join(traceback.format_exception(type(error), error, trace))
        said = pickle.dumps((in_words(error), text, pickled))
        Path(folder, f"error of rank {os.environ['RANK']}").write_bytes(said)
        if ctx is not None and ctx.size > 1:
            failfast.end(ctx.control, error)
        sys.exit(1)
