"""The far end of `jaxdist.spawn`: one rank, what it is sent and what it sends back.

All of it goes through files in a folder of the user's own: the parent waits for processes, not for messages, and
results of any size have room there.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import signal
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import cloudpickle
import jax
import numpy as np

from jaxdist import compat
from jaxdist.control import failfast
from jaxdist.errors import in_words, printed
from jaxdist.runtime import transfer
from jaxdist.runtime.context import Context, init

_TASK = "task"


@dataclass(frozen=True)
class Failure:
    """An error of a rank."""

    time: float  # when, of `time.monotonic`, which all processes of a machine share
    rank: int | None  # which; None: it had not joined the job
    aftermath: bool  # it may be one that a rank meets because another one is gone
    summary: str  # type and message
    traceback: str  # as Python prints it
    pickled: bytes  # the exception; b"" if it can't be


_reduce_code: Any = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _code(code: types.CodeType) -> Any:
    """With the name of its file, by which a traceback shows the line: cloudpickle leaves it out from 3.1.3 on."""
    make, args = _reduce_code(code)
    return make, tuple(code.co_filename if x == "<dynamic-code>" else x for x in args)


class _Pickler(cloudpickle.Pickler):
    """Functions and classes of `__main__` by value, as cloudpickle has it; arrays through the host."""

    dispatch_table: ClassVar[Any] = {**cloudpickle.Pickler.dispatch_table, types.CodeType: _code}

    def __init__(self, file: Any, array: Callable[[np.ndarray], Any]):
        super().__init__(file)
        self._array = array

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, jax.Array):
            return transfer.reduce_array(obj, self._array)
        if isinstance(obj, (jax.custom_jvp, jax.custom_vjp)):  # what they are made of is in their attributes alone
            return _bare, (type(obj),), obj.__dict__
        return super().reducer_override(obj)


def write_task(folder: Path, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What the ranks are to call, and the settings of JAX of this process."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, transfer.to_device).dump((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"jaxdist.spawn can't send {getattr(fn, '__qualname__', fn)!r}, or what it refers to, to the ranks: "
            f"{error}. Make such things inside the function"
        ) from error
    with (folder / _TASK).open("wb") as file:
        pickle.dump((_settings(), _cells()), file)
        file.write(buffer.getbuffer())


def read_result(folder: Path, rank: int) -> Any:
    """What a rank returned."""
    with (folder / f"result-{rank}").open("rb") as file:
        return pickle.load(file)


def read_failures(folder: Path) -> list[Failure]:
    """The errors of all ranks."""
    return [pickle.loads(file.read_bytes()) for file in folder.glob("failure-*")]


def main(folder: str) -> None:
    """Joins the job, calls the function, and writes down what it returns or raises."""
    ctx: Context | None = None
    failfast.one_line_for_interrupts()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Path(folder, _TASK).open("rb") as file:
            settings, cells = pickle.load(file)
            compat.use_settings(settings)
            linecache.cache.update(cells)
            ctx = init()  # before arrays of JAX are made of what was sent
            fn, args, kwargs = pickle.load(file)
        result = _call(fn, args, kwargs)
        with Path(folder, f"result-{ctx.rank}").open("wb") as file:
            _Pickler(file, _as_it_is).dump(result)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _write_failure(Path(folder), ctx, error)
        _end(ctx, error)


def _settings() -> dict[str, Any]:
    """Of JAX. Where the ranks compute, the environment says if it says anything: a GPU may be kept for them alone."""
    settings = compat.settings()
    if "JAX_PLATFORMS" in os.environ:
        settings.pop("jax_platforms", None)
    return settings


def _cells() -> dict[str, Any]:
    """The code of a notebook's cells, for the tracebacks of ranks: it is in no file."""
    known = [(name, entry[2]) for name, entry in list(linecache.cache.items()) if len(entry) == 4]
    return {name: (0, None, lines, name) for name, lines in known if not Path(name).exists()}


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return fn(*args, **kwargs)
    except SystemExit as end:  # as of a script's `sys.exit(main())`
        if end.code in (None, 0):
            return None
        raise


def _end(ctx: Context | None, error: BaseException) -> NoReturn:
    """The parent shows the error; here nothing is printed, and the other ranks hear of it."""
    if ctx is not None and ctx.size > 1 and not isinstance(error, SystemExit):
        failfast.end(ctx.control, error)
    sys.exit(error.code if isinstance(error, SystemExit) else 1)


def _write_failure(folder: Path, ctx: Context | None, error: BaseException) -> None:
    when = time.monotonic()
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # the user's part of it
    failure = Failure(
        time=when,
        rank=None if ctx is None else ctx.rank,
        aftermath=failfast.may_be_aftermath(error),
        summary=in_words(error),
        traceback=printed(error, trace),
        pickled=_pickled(error),
    )
    unfinished = folder / f"unfinished-{os.getpid()}"
    unfinished.write_bytes(pickle.dumps(failure))
    unfinished.rename(folder / f"failure-{os.getpid()}")


def _pickled(error: BaseException) -> bytes:
    try:
        return cloudpickle.dumps(error)
    except Exception:
        return b""


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array


def _bare(cls: type) -> Any:
    return object.__new__(cls)
