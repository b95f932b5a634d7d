"""`init`, and the `Context` it makes: this process's rank, the other ranks, and the devices."""

import math
import operator
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from jax.sharding import Mesh

from jaxdist import communicators, connectors, streams
from jaxdist.communicators import Rules
from jaxdist.compat import under_no_mesh
from jaxdist.connectors import Connector
from jaxdist.control import failfast
from jaxdist.control.channel import Control
from jaxdist.control.watchdog import Watchdog
from jaxdist.device_map import DeviceMap
from jaxdist.machine import Machine, kind_of
from jaxdist.mesh import AXIS, Sizes, mesh_of
from jaxdist.runtime import farewell, start
from jaxdist.runtime.devices import number_asked

COMMUNICATORS = ("auto", "xla", "mpi")
TIMEOUT = 300.0  # seconds

_context: "Context | None" = None
_requested: tuple[Any, ...] = ()
_lock = threading.RLock()

T = TypeVar("T")


class Context:
    """The job as this process sees it. Made by `init`.

    Attributes:
      rank: this process, from 0 to size - 1.
      size: the number of processes.
      local_rank: the index among the processes of this host.
      local_size: the number of processes on this host.
      is_root: whether this process is rank 0, which prints and writes.
      num_devices: the number of devices of all processes, as many of each.
      devices: all devices, in rank order.
      local_devices: the devices of this process.
      hosts: the host name of each rank.
      mesh: the mesh over all devices, with one axis, "data".
      communicator: "xla", "mpi", or "lanes" ("xla" with sums in a fixed order).
      timeout: seconds that a collective waits for missing ranks before the job ends with an error.

    Example:
      >>> import jaxdist
      >>> ctx = jaxdist.init()
      >>> ctx.is_root, ctx.local_rank, ctx.mesh.axis_names
      (True, 0, ('data',))
    """

    def __init__(
        self, connector: Connector, control: Control, watchdog: Watchdog, timeout: float, found: start.Started,
        rules: Rules | None,
    ):  # fmt: skip
        self.connector, self.control, self.watchdog, self.timeout = connector, control, watchdog, timeout
        self.rank, self.size = connector.rank, connector.size
        self.local_rank, self.local_size = connector.local_rank, connector.local_size
        self.is_root = self.rank == 0
        self.devices, self.hosts, self.mesh, self.communicator, self.kind = found
        self.num_devices = len(self.devices)
        self.rules = rules
        self.divided: dict[int, None] = {}  # rows of the batches whose parts ranks have passed, the last one last
        self._parts: dict[Any, Any] = {}

    @property
    def local_devices(self) -> list[Any]:
        each = len(self.devices) // self.size
        return self.devices[self.rank * each : (self.rank + 1) * each]

    def only(self, kind: "Callable[[Context], T]") -> T:
        """The one object of this kind in the job, made by ``kind(self)`` when it is first asked for."""
        if kind not in self._parts:
            self._parts[kind] = kind(self)
        return self._parts[kind]

    def rows(self, batch_size: int, mesh: Mesh | Sizes | None = None) -> slice:
        """Return the rows of a batch that this process passes to a decorated step, for data that no loader divides.

        The devices take equally many rows, in order; where they do not divide the batch, the last ones take fewer, or
        none. 64 rows on three processes are 22, 22 and 20. Processes with the same position on the data axis pass the
        same rows. Every rank calls it: jaxdist tells by it which batch the rows of a call are of.

        Args:
          batch_size: the number of rows of the whole batch.
          mesh: see `jaxdist.parallel`. The default is the mesh of `jaxdist.data_parallel`.

        Raises:
          ValueError: the devices of the job cannot form the mesh, or the batch size is negative.

        Example:
          >>> import jaxdist, numpy as np
          >>> ctx, images = jaxdist.init(), np.zeros((64, 28, 28))
          >>> images[ctx.rows(64)].shape
          (64, 28, 28)
        """
        if (total := operator.index(batch_size)) < 0:
            raise ValueError(f"batch_size={batch_size}: expected the number of rows of a batch")
        divides(self, total)
        return map_of(mesh_of(mesh or {AXIS: -1}, self.devices)).share(self.rank).rows(total)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every process makes this call.

        Args:
          timeout: seconds to wait. The default is the timeout of `init`.

        Raises:
          ControlError: a rank is missing, makes a different call, or has left.
          ValueError: the timeout is not positive.

        Example:
          >>> import jaxdist
          >>> jaxdist.init().barrier()
        """
        if timeout is not None and timeout <= 0:
            raise ValueError(f"barrier(timeout={timeout!r}): seconds, more than 0")
        self.control.exchange("barrier", None, self.timeout if timeout is None else timeout)

    def broadcast(self, tree_or_object: Any, root: int = 0) -> Any:
        """Return the root's value on every process.

        Args:
          tree_or_object: any object that pickle or cloudpickle can send. It is ignored on ranks other than the root.
          root: the rank whose value is returned.

        Returns:
          The value. JAX arrays are on this process's default device.

        Raises:
          ControlError: a rank is missing, makes a different call, names a different root, or has left.
          TypeError: the value cannot be sent.

        Example:
          >>> import jaxdist
          >>> jaxdist.init().broadcast({"lr": 0.1})
          {'lr': 0.1}
        """
        if not 0 <= root < self.size:
            raise ValueError(f"rank {self.rank}: broadcast root={root} is not a rank; valid: 0..{self.size - 1}")
        if self.size == 1:
            return tree_or_object
        from jaxdist.runtime import transfer  # here: cloudpickle takes its time

        packed, problem = transfer.pack(tree_or_object) if self.rank == root else (b"", "")
        received = self.control.broadcast_bytes(packed, root, self.timeout)
        if self.rank != root:
            tree_or_object, problem = pickle.loads(received)
        if problem:
            raise TypeError(f"rank {self.rank}: {problem}")
        return tree_or_object

    def __reduce__(self) -> Any:
        return get_context, ()  # where it is sent to it is the receiver's own

    def __repr__(self) -> str:
        return (
            f"Context(rank={self.rank}, size={self.size}, local_rank={self.local_rank}, local_size={self.local_size}, "
            f"num_devices={self.num_devices}, connector={self.connector.name!r}, communicator={self.communicator!r})"
        )


@under_no_mesh
def init(
    connector: str | Connector = "auto",
    communicator: str | Rules = "auto",
    *,
    timeout: float | None = None,
    rank: int | None = None,
    size: int | None = None,
    lanes: int | None = None,
    devices: int | None = None,
) -> Context:
    """Join the job. Call it before any JAX computation.

    Args:
      connector: how processes find each other: "mpi", "slurm", "env://", "tcp://host:port", "local", an object with the
        `Connector` protocol, or "auto" for JAXDIST_CONNECTOR or the launcher that is detected.
      communicator: how arrays are sent: "xla", "mpi", or "auto" for JAXDIST_COMMUNICATOR, "mpi" between CPU processes
        of an MPI job with mpi4jax, and "xla" otherwise. Or a table of lowering rules for the collectives of steps.
      timeout: seconds to wait for missing ranks, here and in each later collective and call of a step, before the job
        ends with an error that names them. The default is JAXDIST_TIMEOUT, or 300.
      rank: the rank, for tcp:// and env://, instead of RANK.
      size: the number of ranks, for tcp:// and env://, instead of WORLD_SIZE.
      lanes: the number of virtual CPU devices of the job, on which the bits that steps return depend, instead of the
        number of processes, which must divide it. The default is JAXDIST_LANES, or none.
      devices: the number of devices of each process. The default is JAXDIST_DEVICES; or one CPU; or the GPUs that only
        this process sees, or its part of those that all processes on the host see; or all devices, for a process alone.

    Returns:
      The context. A second call returns the same one.

    Raises:
      RuntimeError: a JAX backend was used before, or `init` was called with different arguments.
      ValueError: an argument, or a variable of the environment, is invalid or missing.
      ImportError: MPI was requested and is not installed. The message has the command that installs it.
      TimeoutError: a rank is missing. The message names it, or the address that was not reached.

    Example:
      >>> import jaxdist
      >>> ctx = jaxdist.init()
      >>> ctx.rank, ctx.size
      (0, 1)
    """
    global _context, _requested
    requested = (connector, communicator, timeout, rank, size, lanes, devices)
    with _lock:
        if _context is not None:
            _check_same(_context, _requested, requested)
            return _context
        if not isinstance(communicator, str):
            communicators.check(communicator)
        elif communicator not in COMMUNICATORS:
            raise ValueError(f"unknown communicator {communicator!r}; valid: {', '.join(COMMUNICATORS)}")
        _refuse_workers()
        wanted = communicator if isinstance(communicator, str) else "xla"
        if wanted == "auto":
            wanted = os.environ.get("JAXDIST_COMMUNICATOR") or "auto"
            if wanted not in COMMUNICATORS:
                raise ValueError(f"JAXDIST_COMMUNICATOR={wanted!r}; valid: {', '.join(COMMUNICATORS)}")
        number, devices_wanted = number_asked("lanes", lanes), number_asked("devices", devices)
        if number and not isinstance(communicator, str):
            raise ValueError("lanes: a communicator of your own adds up in an order of its own. Leave one of them out")
        timeout = _timeout(timeout)
        streams.open_closed()
        found = connectors.connect(connector, timeout=timeout, rank=rank, size=size)
        control = start.control_of(found, timeout)
        watchdog = Watchdog(control, timeout)
        failfast.install(control)  # from here on, a failure of one rank ends the job
        on_all = start.jax_started(found, control, wanted, timeout, number, devices_wanted)
        rules = None if isinstance(communicator, str) else communicator
        _context, _requested = Context(found, control, watchdog, timeout, on_all, rules), requested
        farewell.install(control, watchdog, timeout)
        return _context


def divides(context: Context, *totals: int) -> None:
    """Note that the ranks divide batches of these numbers of rows, the last one last."""
    for total in totals:
        context.divided.pop(total, None)
        context.divided[total] = None


def started() -> Context | None:
    """The context, if there is one already."""
    return _context


def get_context() -> Context:
    """Return the context from `init`, which is called with its defaults if necessary.

    Example:
      >>> import jaxdist
      >>> jaxdist.get_context() is jaxdist.init()
      True
    """
    return init() if _context is None else _context


def _refuse_workers() -> None:
    """Refuse a data worker that multiprocessing spawned: it imports the script again, under a different name."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__mp_main__":
            raise RuntimeError(
                "a data worker imports the script again, and its calls of jaxdist would join the job a second time: "
                'put the work of the script into a function, called under `if __name__ == "__main__":`'
            )
        frame = frame.f_back


def _timeout(given: float | None) -> float:
    name, value = ("timeout", given) if given is not None else ("JAXDIST_TIMEOUT", os.environ.get("JAXDIST_TIMEOUT"))
    try:
        seconds = TIMEOUT if value is None or value == "" else float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name}={value!r}: expected a positive number of seconds, such as {TIMEOUT:g}")
    return seconds


def _check_same(context: Context, before: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    names = ("connector", "communicator", "timeout", "rank", "size", "lanes", "devices")
    each = len(context.local_devices)
    used = (context.connector.name, *(getattr(context, name) for name in names[1:-2]), context.num_devices, each)
    for name, actual, old, new in zip(names, used, before, now, strict=True):
        if new not in (None, "auto", old, actual):  # the last spells out what auto found
            raise RuntimeError(
                f"jaxdist.init({name}={new!r}), but this process already called init with {name}={old!r} (in use: "
                f"{actual!r}). Call init once, at the start of the script, or with the same arguments. (Before it "
                "calls a function, jaxdist.spawn calls init: pass the number of devices to spawn)"
            )


def machine_of(mesh: Mesh) -> Machine:
    """The devices of a mesh as placements are priced for them."""
    job = _job_of(mesh)
    return Machine(job.kind if job else kind_of(mesh.devices.flat[0]), map_of(mesh).hosts)


def map_of(mesh: Mesh) -> DeviceMap:
    """Return where the devices of a mesh are. If they are not the job's, each of JAX's processes counts as a host."""
    if mesh.devices.flat[0].platform == "tpu":  # all chips of a slice have fast links, even across hosts
        return DeviceMap.of(mesh, [getattr(device, "slice_index", 0) for device in mesh.devices.flat])
    if (job := _job_of(mesh)) is None:
        return DeviceMap.of(mesh)
    # Lanes are on one host, wherever they are: bits follow from it.
    in_lanes = job.communicator == "lanes"
    return DeviceMap.of(mesh, [job.hosts[0 if in_lanes else d.process_index] for d in mesh.devices.flat])


def _job_of(mesh: Mesh) -> Context | None:
    return _context if _context is not None and set(mesh.devices.flat) <= set(_context.devices) else None
