"""Faults of loaders' workers, many of them at once; or, by `worker_faults.py RANK`, of the thread of one rank."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grain
import numpy as np

import jaxdist


class Own(Exception):
    """No module has it by this name in a worker."""


class TwoArguments(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, path: str, line: int):
        super().__init__(f"{path}:{line}")


class Panic(BaseException):
    """As of pyo3."""


class Example(NamedTuple):
    """A type of the script's own."""

    x: int


def raises(error: BaseException) -> Callable[..., Any]:
    def transform(x: int) -> int:
        if x == 9:
            raise error
        return x

    return transform


def holds_a_lock(x: int) -> Any:
    if x == 9:
        error = ValueError("with a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error
    return x


def returns_a_lock(x: int) -> Any:
    return np.array(threading.Lock() if x == 9 else 1, object)


def ends(how: Callable[[], object]) -> Callable[..., Any]:
    return lambda x: how() if x == 9 else x


FAULTS: dict[str, Callable[..., Any]] = {
    "own": raises(Own("no image")),
    "two arguments": lambda x: raises(TwoArguments("a", 1))(x),
    "lock": holds_a_lock,
    "panic": raises(Panic("in Rust")),
    "exit 3": raises(SystemExit(3)),
    "stop": raises(StopIteration("too far")),
    "returned": returns_a_lock,
    "os exit 0": ends(lambda: os._exit(0)),
    "bus": ends(lambda: os.kill(os.getpid(), signal.SIGBUS)),
    "good": Example,
}


def read(batches: Iterable[Any]) -> tuple[str, str, int]:
    count = 0
    try:
        for batch in batches:
            assert np.asarray(batch).size == 4
            assert isinstance(batch, Example | np.ndarray)
            count += 1
    except Own as error:  # as the script would
        return "Own", str(error), count
    except BaseException as error:
        return type(error).__name__, str(error), count
    return "", "", count


def of_grain() -> Any:
    """A pipeline of grain's own, whose workers are not the loader's."""
    examples = grain.MapDataset.range(24).map(FAULTS["own"]).to_iter_dataset()
    return examples.mp_prefetch(grain.MultiprocessingOptions(num_workers=1))


def main() -> None:
    ctx = jaxdist.init()
    loader_of = lambda fault, workers=1: jaxdist.loader(
        np.arange(24), 4 * ctx.size, shuffle=False, transform=FAULTS[fault], workers=workers
    )
    if ctx.size > 1:
        for _ in loader_of("exit 3" if ctx.rank == int(sys.argv[1]) else "good", 0):
            pass
        ctx.barrier()
        return
    loaders = {name: loader_of(name, 2 if name == "stop" else 1) for name in FAULTS}
    loaders["grain's"] = jaxdist.loader(of_grain(), 4, shuffle=False)
    with ThreadPoolExecutor(len(loaders)) as pool:
        print(json.dumps(dict(zip(loaders, pool.map(read, loaders.values()), strict=True))))


if __name__ == "__main__":
    main()
