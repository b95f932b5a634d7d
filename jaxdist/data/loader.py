"""`loader`: each rank's batches of a data set, on grain: one shuffle, equal counts, elastic resuming."""

import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.data.reader import Read, Reader, resumption
from jaxdist.data.sampling import MOST, Place, Sampling
from jaxdist.data.sources import Arrays, check_examples, is_stream
from jaxdist.device_map import DeviceMap, same_rows_somewhere
from jaxdist.errors import DataError
from jaxdist.extras import need
from jaxdist.mesh import AXIS, Sizes, mesh_of
from jaxdist.runtime import readers
from jaxdist.runtime.context import Context, divides, get_context, map_of
from jaxdist.step.batch import batch_part
from jaxdist.text import say_once

Tail = Literal["drop", "keep"]
State = dict[str, Any]
R = TypeVar("R")
_ERRORS = ValueError, TypeError, OSError, ImportError, DataError


def loader(
    source: Any,
    batch_size: int,
    *,
    shuffle: bool | int = True,
    seed: int = 0,
    tail: Tail = "drop",
    transform: Callable[..., Any] | None = None,
    workers: int = 0,
    prefetch: int = 2,
    mesh: Mesh | Sizes | None = None,
) -> "Loader":
    """Read this rank's rows of each batch of a data set. Every process makes the same loader.

    An epoch is one order of all examples, and a step takes the next `batch_size` of them, with any number of ranks
    and devices: each rank gets its rows (`jaxdist.Context.rows`). Each ``for`` loop runs the next epoch.

    Args:
      source: the complete data set, on every rank: arrays with one entry per example, or a dict or tuple of them; a
        list, a grain source, a torch ``Dataset``, or any object with ``__len__`` and ``__getitem__``. Or a stream,
        which each rank reads whole: a grain, torch or Hugging Face ``IterableDataset``, any iterable that can be read
        again, or a function of the epoch that returns one.
      batch_size: examples per step, on all devices together.
      shuffle: whether to order by seed and epoch; of a stream, the number of examples to shuffle in memory.
      seed: the seed of the order and of a random `transform`.
      tail: ``"drop"`` leaves out the last examples of an epoch if they do not fill a batch. ``"keep"`` yields a
        smaller last batch.
      transform: ``example -> example``, or ``(example, rng) -> example`` with a ``numpy.random.Generator`` that differs
        for each example and epoch.
      workers: the number of processes that read and transform, with pickled copies of both. With 0, this process does.
      prefetch: the number of batches (per worker) to read ahead.
      mesh: see `jaxdist.parallel`. Processes that differ only along axes other than data read the same examples.

    Returns:
      A `Loader`.

    Raises:
      ValueError: (on every rank) a setting is invalid, the source is empty or too small for a batch, its arrays have
        different lengths, or the ranks' sources or settings differ.
      TypeError: the source yields batches, has an unsupported type, or is a stream that can be read only once.
      ImportError: (on every rank) grain is not installed.
      ControlError: a rank does not make the call before the timeout of `jaxdist.init`.

    Example:
      >>> import jaxdist, numpy as np
      >>> for batch in jaxdist.loader({"x": np.arange(5)}, 2, shuffle=False, tail="keep"):
      ...     print(batch["x"].tolist())
      [0, 1]
      [2, 3]
      [4]
    """
    context = get_context()

    def check() -> tuple[tuple[Reader, DeviceMap], State]:
        need("grain", "jaxdist.loader")
        readers.guard()
        for name, value in {"batch_size": batch_size, "seed": seed, "workers": workers, "prefetch": prefetch}.items():
            _check_integer(f"{name}={value!r}", value, int(name == "batch_size"))
        if tail not in ("drop", "keep"):
            raise ValueError(f"tail={tail!r}: 'drop' or 'keep'")
        check_examples(source)
        device_map = map_of(mesh_of(mesh or {AXIS: -1}, context.devices))
        size, seed_ = operator.index(batch_size), operator.index(seed)
        data = Arrays(source) if isinstance(source, np.ndarray | jax.Array | dict | tuple) else source
        streams = is_stream(data)
        length = 1 if streams else len(data)
        sampling = Sampling(length, size, device_map.share(context.rank), bool(shuffle), seed_, tail == "keep")
        if streams:
            _check_stream(shuffle, workers)
        else:
            _check_length(sampling, shuffle)
        window = int(shuffle) if streams else None
        reader = Reader(data, sampling, window, transform, workers, prefetch, context.size > 1)
        return (reader, device_map), {
            "len(source)": None if streams else length, "batch_size": size, "shuffle": shuffle, "seed": seed_,
            "tail": tail, "mesh": dict(mesh.shape) if isinstance(mesh, Mesh) else mesh,
            "the checksum of the first and last example": data.ends() if isinstance(data, Arrays) else 0,
        }  # fmt: skip

    reader, device_map = _agree(context, "loader", check)
    rest = 0 if reader.streams or tail == "drop" else reader.sampling.length % reader.sampling.batch_size
    divides(context, *([rest] if rest else []), reader.sampling.batch_size)
    return Loader(context, reader, device_map)


class Loader:
    """Iterate over one epoch in each loop. Made by `loader`.

    Example:
      >>> import jaxdist, numpy as np
      >>> batches = jaxdist.loader(np.arange(10), 4, shuffle=False)
      >>> len(batches), [batch.tolist() for batch in batches], batches.epoch
      (2, [[0, 1, 2, 3], [4, 5, 6, 7]], 1)
    """

    def __init__(self, context: Context, reader: Reader, device_map: DeviceMap):
        self._context, self._reader, self._device_map = context, reader, device_map
        self._running: list[Any] = []  # the current iterator, if any, at self._at
        # At exit: before the interpreter drops objects that grain's iterators need to clean up.
        weakref.finalize(self, _close, self._running)
        self._peeked: list[Read] = []
        self._at = Place()
        self._drawn = 0
        self._begun = False  # a loop is inside this epoch, or left it early
        self._loop: object = None  # the latest loop

    def __len__(self) -> int:
        """Return the number of steps in an epoch, equal on every rank. A stream has no length."""
        if self._reader.streams:
            raise TypeError("the loader of a stream has no length: the number of examples shows when they are read")
        return self._reader.sampling.steps(0)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._at.epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the next epoch; after `set_state`, over the rest of the epoch in `state`."""
        if self._begun:  # the last loop ended early: do not repeat its order
            self._go(Place(self._at.epoch + 1))
        self._loop = loop = object()
        return self._run(loop)

    def _run(self, loop: object) -> Iterator[Any]:
        last = False
        while not last:
            if self._loop is not loop:
                raise RuntimeError(
                    "this loop over the loader has ended: a new one began, or set_state was called. Make a second "
                    "loader for a loop within a loop"
                )
            read = self._draw()
            self._at = read.then
            self._drawn += 1
            last = read.then.epoch > read.at.epoch
            self._begun = not last
            yield self._marked(read)
            if read.digest and (last or not self._drawn & self._drawn - 1):  # a power of two
                said = {"the examples read": read.digest, "the end of the epoch": last}
                _agree(self._context, "loader's stream", lambda said=said: (None, said))

    def _marked(self, read: Read) -> Any:
        """Return a batch, with its size on all ranks where the number of rows does not tell it."""
        context = self._context
        divides(context, read.size)
        if context.size > 1 and any(same_rows_somewhere(self._device_map, read.size, n) for n in context.divided):
            return jax.tree.map(lambda x: batch_part(x, read.size), read.batch)
        return read.batch

    def peek(self) -> Any:
        """Return the next batch without advancing.

        Example:
          >>> import jaxdist, numpy as np
          >>> batches = jaxdist.loader({"x": np.zeros((10, 3))}, 4)
          >>> batches.peek()["x"].shape
          (4, 3)
        """
        if not self._peeked:
            self._peeked = [self._draw()]
        return self._marked(self._peeked[0])

    def get_state(self) -> State:
        """Return the position of the next batch as a small dict for JSON or a checkpoint, the same on every rank.

        Any number of ranks can continue from it. Of a stream, ``"stream"`` is text: grain's state and a digest.

        Example:
          >>> import jaxdist, numpy as np
          >>> batches = jaxdist.loader(np.arange(10), 4)
          >>> _ = next(iter(batches))
          >>> batches.get_state()
          {'epoch': 0, 'position': 4, 'length': 10, 'seed': 0, 'shuffle': True}
        """
        at, reader = self._at, self._reader
        inner: State = {"stream": at.inner} if reader.streams else {}
        return {"epoch": at.epoch, "position": at.position} | reader.fixed | inner

    def set_state(self, state: State) -> None:
        """Continue at the position of `get_state`; the next loop is the rest of that epoch. Every rank calls it.

        Args:
          state: the state of a loader with the same data set, seed, and shuffle. Other settings may differ.

        Raises:
          ValueError: (on every rank) the data set, seed, or shuffle differ, or the ranks pass different states.
          DataError: the stream does not continue with the expected example.

        Example:
          >>> import jaxdist, numpy as np
          >>> batches = jaxdist.loader(np.arange(8), 4, shuffle=False)
          >>> batches.set_state(batches.get_state() | {"position": 4})
          >>> [batch.tolist() for batch in batches]
          [[4, 5, 6, 7]]
        """

        def check() -> tuple[Place, State]:
            mine = self.get_state()
            if not isinstance(state, dict) or set(state) != set(mine):
                raise ValueError(f"not the state of a loader{' of a stream' * self._reader.streams}: {state!r}")
            given: State = {k: type(mine[k])(v) for k, v in state.items()}
            for name in self._reader.fixed:
                if given[name] != mine[name]:
                    what = "a data set of length" if name == "length" else name
                    raise ValueError(
                        f"the state has {what} {given[name]}, this loader {mine[name]}: the order of its "
                        "examples would differ. Make the loader with the same settings, or start over without the state"
                    )
            if given["epoch"] < 0 or not 0 <= given["position"] <= given.get("length", given["position"]):
                raise ValueError(f"not the state of a loader: {state!r}")
            at = Place(given["epoch"], given["position"], given.get("stream", ""))
            resumption(at)
            return at, given

        self._go(_agree(self._context, "loader state", check))
        self._loop = None

    def _go(self, at: Place) -> None:
        was, self._begun = self._at, False
        if not self._reader.streams and not self._reader.sampling.steps(at.position):
            at = Place(at.epoch + 1)  # an epoch's end is the start of the next
        self._at = at
        if was != at:
            self._peeked = []
            _close(self._running)
        if not at.inner:
            return
        if resumption(at)[1] is None and self._context.is_root:
            say_once(
                f"loader: rereading the stream from the start of epoch {at.epoch} to skip the {at.position} "
                "examples already done, which takes as long as reading them did. (Only the state of a "
                "grain.IterDataset is known to be exact)"
            )
        if not self._peeked:
            # If the rest of the stream does not fill a batch on these ranks, go to the next epoch.
            self._peeked = [self._draw()]
            self._at = self._peeked[0].at

    def _draw(self) -> Read:
        if self._peeked:
            return self._peeked.pop()
        try:
            if not self._running:
                self._running.append(self._reader.start(self._at))
            return next(self._running[0])
        except BaseException as error:
            # Grain's iterator may be past the batch. It waits up to 25 s for workers that are still starting, but
            # one of them may be dead and the job must end, so do not wait here.
            running, self._running[:] = list(self._running), []
            threading.Thread(target=_close, args=(running,), name="jaxdist-loader", daemon=True).start()
            if isinstance(error, SystemExit):
                sys.exit(error.code)  # in this thread: the other ranks hear of it
            raise


def _agree(context: Context, what: str, check: Callable[[], tuple[R, dict[str, Any]]]) -> R:
    """Return the result of `check()` if it succeeds, and its entries agree on every rank; else raise on every rank."""

    def part() -> Part[R]:
        result, entries = check()
        return Part(result, tuple((name, repr(value)) for name, value in entries.items()))

    advice = "Give the same data set (all of it) and settings on every rank"
    return on_every_rank(context, what, part, raises=_ERRORS, advice=advice)[0]


def _close(running: list[Any]) -> None:
    """Close the iterators from `Reader.start`, and drop them."""
    while running:
        running.pop().close()


def _check_integer(given: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise ValueError(f"{given}: expected an integer of at least {least}")


def _check_length(sampling: Sampling, shuffle: bool | int) -> None:
    length = sampling.length
    if not isinstance(shuffle, bool):
        raise ValueError(f"shuffle={shuffle!r}: expected True or False; only streams have a window")
    if not 0 < length <= MOST:
        raise ValueError(f"the data set has {length} examples: expected at least one, at most {MOST}")
    if not sampling.steps(0):
        raise ValueError(
            f"the data set has {length} examples, fewer than one batch ({sampling.batch_size}): with tail='drop' there "
            "would be no step. Use a smaller batch_size or tail='keep'"
        )


def _check_stream(shuffle: bool | int, workers: int) -> None:
    if shuffle is True:
        raise ValueError(
            "shuffle=True: a stream is shuffled in windows. Give their size, as shuffle=10_000 (examples, which each "
            "process holds in memory), or shuffle=False"
        )
    _check_integer(f"shuffle={shuffle!r}", shuffle or 0, 0)
    if workers:
        raise ValueError(f"workers={workers}: a stream is read by one thread. Use IterDataset.mp_prefetch on grain's")
