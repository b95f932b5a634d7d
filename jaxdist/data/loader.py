"""`loader`: each rank's batches of a data set, on grain: shuffled as one, of equal number, resumable on other ranks."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.collectives.public import allgather
from jaxdist.data.batches import MOST, BatchReader, Sampling, close, fingerprint, known, open_source, stream, to_devices
from jaxdist.mesh import Sizes
from jaxdist.runtime.context import Context, get_context, parts_of_ranks
from jaxdist.zero import unshard

Tail = Literal["drop", "pad", "keep"]
State = dict[str, int | bool]
_ERRORS = ValueError, TypeError, OSError


def loader(
    source: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    tail: Tail = "drop",
    transform: Callable[..., Any] | None = None,
    workers: int = 0,
    threads: int = 1,
    prefetch: int = 2,
    on_devices: bool = False,
    mesh: Mesh | Sizes | None = None,
) -> Loader:
    """This rank's batches of a data set; every process makes the same one.

    An epoch is one order of all examples, the same for any number of ranks: step g takes the next ``batch_size * size``
    of them, and rank r the r-th part of these (but see `mesh`). Every rank makes the same number of steps. Each ``for``
    loop is the next epoch, in another order, with or without `Loader.set_epoch`.

    Args:
      source: an array, or a dict or tuple (of any depth) of arrays with one entry an example; or a list of examples, a
        grain source or ``MapDataset``, or anything else with ``__len__`` and ``__getitem__``. An example is a pytree of
        arrays and numbers.
      batch_size: examples a process and step: ``256 // ctx.size`` for 256 in all. They are divided over the process's
        devices. In lanes: examples a lane and step, ``256 // ctx.parts()[1]``.
      shuffle: in an order given by seed and epoch; False: in the source's.
      seed: of the order, and of a random `transform`.
      tail: what to do at the end of an epoch that can't fill a batch on every rank. ``"drop"`` it: the loader yields
        ``batch``. ``"keep"`` it: the last batch is smaller, and a decorated step computes what one device would with
        these examples alone (on several processes the parts have one length, and know how many examples are real; give
        them to the step as they are). ``"pad"`` it with examples from the epoch's start: the loader yields
        ``(batch, weight)``, in each step, where `weight` is a float32 an example: 1, and 0 for what was added. With it
        means are exact, ``jnp.sum(losses * weight) / jnp.sum(weight)``; see `gather_for_metrics`.
      transform: ``example -> example``, or ``(example, rng) -> example`` with a ``numpy.random.Generator``, another one
        for each example and epoch.
      workers: processes that read and transform; 0: this one does. Each gets a copy of source and transform by pickle.
      threads: batches that a process reads at once; source and transform have to allow it.
      prefetch: batches (a worker) to read ahead in the background; 0: none.
      on_devices: yield global arrays that are on the mesh of the job already, moved there ahead in the background,
        instead of this process's part as numpy arrays. Costs the memory of `prefetch` batches there.
      mesh: that of `jaxdist.parallel`, on which processes that differ on other axes than that of data read the same
        examples (see `Context.parts`: ``256 // ctx.parts(mesh)[1]`` for 256 in all); default: each reads its own.

    Returns:
      A `Loader`.

    Raises:
      ValueError: (on every rank) a bad setting, an empty source, leaves of different lengths, fewer examples than one
        batch of all ranks with ``tail="drop"``, or ranks whose sources or settings differ.
      TypeError: a source without random access.
      ControlError: a rank did not come within the timeout of `jaxdist.init`.

    Example:
      >>> import jaxdist, numpy as np
      >>> batches = jaxdist.loader({"x": np.arange(5)}, 2, shuffle=False, tail="pad")
      >>> for batch, weight in batches:
      ...     print(batch["x"].tolist(), weight.tolist())
      [0, 1] [1.0, 1.0]
      [2, 3] [1.0, 1.0]
      [4, 0] [1.0, 0.0]
    """
    ctx = get_context()
    settings = {"workers": workers, "threads": threads, "prefetch": prefetch}
    return Loader(ctx, source, batch_size, shuffle, seed, tail, transform, on_devices, mesh, **settings)


class Loader:
    """Iterates over one epoch in each loop; made by `loader`.

    Where it stands is where the next batch begins: what was read ahead does not count.

    Example:
      >>> import jaxdist, numpy as np
      >>> batches = jaxdist.loader(np.arange(10), 4, shuffle=False)
      >>> len(batches), [batch.tolist() for batch in batches], batches.epoch
      (2, [[0, 1, 2, 3], [4, 5, 6, 7]], 1)
    """

    def __init__(
        self,
        context: Context,
        source: Any,
        batch_size: int,
        shuffle: bool,
        seed: int,
        tail: Tail,
        transform: Callable[..., Any] | None,
        on_devices: bool = False,
        mesh: Mesh | Sizes | None = None,
        workers: int = 0,
        threads: int = 1,
        prefetch: int = 0,
    ):
        self._context, self._transform = context, transform
        self._source: Any
        self._sampling: Sampling
        self._workers, self._threads, self._prefetch = workers, threads, prefetch
        self._place: Callable[[Any], Any] | None = None
        self._stream: list[Any] = []  # grain's iterator, if any; what it gives next is the batch at (epoch, position)
        # At exit: while the interpreter still has what grain's iterators need to clean up.
        weakref.finalize(self, close, self._stream)
        self._peeked: list[Any] = []
        self._epoch, self._position = 0, 0
        self._begun = False  # a loop is in the midst of this epoch, or was left there
        self._loop: object = None  # the latest one

        def check() -> dict[str, Any]:
            least = {"batch_size": 1, "threads": 1}
            given = {"batch_size": batch_size, "seed": seed, "workers": workers, "threads": threads}
            for name, value in (given | {"prefetch": prefetch}).items():
                _check_integer(f"{name}={value!r}", value, least.get(name, 0))
            if tail not in ("drop", "pad", "keep"):
                raise ValueError(f"tail={tail!r}: 'drop', 'keep' or 'pad'")
            self._source, length = open_source(source)
            own, parts = context.parts(mesh)
            size, seed_, whole = operator.index(batch_size), operator.index(seed), batch_size * parts
            if not 0 < length <= MOST:
                raise ValueError(f"the data set has {length} examples: expected at least one, at most {MOST}")
            if tail == "drop" and length < whole:
                raise ValueError(
                    f"the data set has {length} examples, fewer than one batch of all ranks ({batch_size} on each of "
                    f"{parts}, {whole} in all): with tail='drop' there would be no step. Use a smaller "
                    "batch_size or tail='keep'"
                )
            self._sampling = Sampling(length, size, own, parts, bool(shuffle), seed_, tail == "pad", tail == "keep")
            if on_devices:
                self._place = to_devices(context, self._sampling, mesh)
            return {
                "len(source)": length, "batch_size": size, "shuffle": bool(shuffle), "seed": seed_, "tail": tail,
                "mesh": dict(mesh.shape) if isinstance(mesh, Mesh) else mesh,
                "the checksum of the first and last example": fingerprint(self._source),
            }  # fmt: skip

        self._agree("loader", check)

    def __len__(self) -> int:
        """Steps of a whole epoch, on every rank."""
        return self._sampling.steps(0)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        """The next epoch; after `set_state` the rest of the one in which that was made."""
        if self._begun:  # the last loop was left before its end: its order is not to come again
            self._go(self._epoch + 1, 0)
        self._loop = loop = object()
        return self._run(loop)

    def _run(self, loop: object) -> Iterator[Any]:
        last = False
        while not last:
            if self._loop is not loop:
                raise RuntimeError(
                    "this loop over the loader is over: another one began, or set_epoch or set_state was called. Make "
                    "a second loader for a loop within a loop"
                )
            batch = self._draw()
            epoch, self._position = self._epoch, self._position + self._sampling.whole
            self._normalise()
            last = self._epoch > epoch
            self._begun = not last
            yield batch

    def peek(self) -> Any:
        """The batch that comes next, without moving: for shapes, say. (``next(iter(loader))`` begins an epoch.)

        Example:
          >>> import jaxdist, numpy as np
          >>> batches = jaxdist.loader({"x": np.zeros((10, 3))}, 4)
          >>> batches.peek()["x"].shape
          (4, 3)
        """
        if not self._peeked:
            self._peeked = [self._draw()]
        return self._peeked[0]

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop that of an epoch; all ranks the same. Not needed to get another order in each.

        Keeps the place within the epoch that `set_state` has restored, if it is in this one.

        Args:
          epoch: from 0.

        Example:
          >>> import jaxdist, numpy as np
          >>> batches = jaxdist.loader(np.arange(10), 4)
          >>> batches.set_epoch(7)
          >>> batches.epoch
          7
        """
        _check_integer(f"set_epoch({epoch!r})", epoch, 0)
        if self._begun or epoch != self._epoch:
            self._go(operator.index(epoch), 0)
        self._loop = None

    def get_state(self) -> State:
        """Where the loader stands, for a checkpoint: a small dict for JSON, the same on every rank.

        It counts examples of the whole job, so that any number of ranks can go on from it.

        Returns:
          Epoch, examples of it that are done, and what must be the same when it is restored.

        Example:
          >>> import jaxdist, numpy as np
          >>> batches = jaxdist.loader(np.arange(10), 4)
          >>> _ = next(iter(batches))
          >>> batches.get_state()
          {'epoch': 0, 'position': 4, 'length': 10, 'seed': 0, 'shuffle': True}
        """
        sampling = self._sampling
        fixed: State = {"length": sampling.length, "seed": sampling.seed, "shuffle": sampling.shuffle}
        return {"epoch": self._epoch, "position": self._position} | fixed

    def set_state(self, state: State) -> None:
        """Go on where `get_state` was called: the next loop is the rest of that epoch. Every rank calls it.

        Number of ranks, `batch_size`, `tail`, `workers` and `prefetch` may be others than they were.

        Args:
          state: of a loader of the same data set, seed and shuffle.

        Raises:
          ValueError: (on every rank) it is of another data set, seed or shuffle, or not the same on all ranks.

        Example:
          >>> import jaxdist, numpy as np
          >>> batches = jaxdist.loader(np.arange(8), 4, shuffle=False)
          >>> _ = next(iter(batches))
          >>> other = jaxdist.loader(np.arange(8), 2, shuffle=False)
          >>> other.set_state(batches.get_state())
          >>> [batch.tolist() for batch in other]
          [[4, 5], [6, 7]]
        """

        def check() -> State:
            mine = self.get_state()
            if not isinstance(state, dict) or set(state) != set(mine):
                raise ValueError(f"not the state of a loader: {state!r}")
            given: State = {k: bool(v) if k == "shuffle" else int(v) for k, v in state.items()}
            for name in ("length", "seed", "shuffle"):
                if given[name] != mine[name]:
                    what = "a data set of length" if name == "length" else name
                    raise ValueError(
                        f"the state is of {what} {given[name]}, and this loader's is {mine[name]}: the order of its "
                        "examples would be another. Make the loader as it was, or start over with set_epoch"
                    )
            if given["epoch"] < 0 or not 0 <= given["position"] <= given["length"]:
                raise ValueError(f"not the state of a loader: {state!r}")
            return given

        agreed = self._agree("loader state", check)
        self._go(agreed["epoch"], agreed["position"])
        self._loop = None

    def close(self) -> None:
        """End worker processes and what is read ahead; the next loop starts them again.

        Example:
          >>> import jaxdist, numpy as np
          >>> batches = jaxdist.loader(np.arange(10), 4)
          >>> _ = batches.peek()
          >>> batches.close()
        """
        self._peeked = []
        close(self._stream)

    def _go(self, epoch: int, position: int) -> None:
        was = self._epoch, self._position
        self._epoch, self._position, self._begun = epoch, position, False
        self._normalise()
        if was != (self._epoch, self._position):
            self.close()

    def _normalise(self) -> None:
        """The end of an epoch is the start of the next: a position always has a batch."""
        if not self._sampling.steps(self._position):
            self._epoch, self._position = self._epoch + 1, 0

    def _draw(self) -> Any:
        if self._peeked:
            return self._peeked.pop()
        try:
            if not self._stream:
                read = BatchReader(self._sampling, self._epoch, self._position, self._source, self._transform)
                self._stream.append(stream(read, self._workers, self._threads, self._prefetch, self._place))
            batch = next(self._stream[0])
            return batch if self._place else known(self._sampling, batch)
        except BaseException:
            # Grain's iterator may have moved on. It waits up to 25 s for workers that are still starting, but not here:
            # perhaps one was killed, and the job has to end.
            streams, self._stream[:] = list(self._stream), []
            threading.Thread(target=close, args=(streams,), name="jaxdist-loader", daemon=True).start()
            raise

    def _agree(self, what: str, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `check` returns, if it does so on every rank and returns the same; else an error on every rank."""

        def part() -> Part[dict[str, Any]]:
            mine = check()
            return Part(mine, tuple((name, repr(value)) for name, value in mine.items()))

        advice = "Give the same data set (all of it) and settings on every rank"
        return on_every_rank(self._context, what, part, raises=_ERRORS, advice=lambda _: advice)[0]


def _check_integer(given: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise ValueError(f"{given}: expected an integer of at least {least}")


def gather_for_metrics(tree: Any, weight: Any, mesh: Mesh | Sizes | None = None) -> Any:
    """What an evaluating step made of the real examples of all ranks, on every process; every process calls it.

    Args:
      tree: arrays with one entry an example, as a decorated step returns them (global), or this process's own.
      weight: of a loader with ``tail="pad"``, or as the step returned it.
      mesh: that of the loader.

    Returns:
      Of the structure of `tree`: numpy arrays, without the entries of weight 0. Over an epoch each example of the data
      set is in them once.

    Raises:
      ValueError: an array does not have one entry an example.

    Example:
      >>> import jaxdist, numpy as np
      >>> from jaxdist import gather_for_metrics
      >>> gather_for_metrics({"label": np.array([7, 3, 7])}, np.array([1.0, 1.0, 0.0]))["label"].tolist()
      [7, 3]
    """

    ctx = get_context()
    own, parts = ctx.parts(mesh)
    passed = parts_of_ranks(ctx, mesh)
    once = [next((r, of.index(part)) for r, of in enumerate(passed) if part in of) for part in range(parts)]

    def whole(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and isinstance(x.sharding, jax.sharding.NamedSharding):
            return np.asarray(unshard(x))
        rows = np.asarray(x)
        if not rows.ndim or len(own) == parts:
            return rows
        most = max(map(len, passed))  # a rank with fewer parts fills up
        rows = rows.reshape(len(own), -1, *rows.shape[1:])
        rows = np.concatenate([rows, np.repeat(rows[:1], most - len(own), 0)])
        everyone = np.asarray(allgather(rows)).reshape(ctx.size, *rows.shape)
        return np.concatenate([everyone[at] for at in once])

    real = whole(weight) > 0

    def select(path: Any, x: Any) -> np.ndarray:
        rows = whole(x)
        if rows.shape[:1] != real.shape:
            name = jax.tree_util.keystr(path) or "tree"
            raise ValueError(f"{name} has shape {rows.shape}, and there are {len(real)} examples with a weight")
        return rows[real]

    return jax.tree_util.tree_map_with_path(select, tree)


__all__ = ["Loader", "State", "gather_for_metrics", "loader"]
