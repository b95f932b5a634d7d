"""Faults of one rank for `faults.py`, with the expected outcome of each.

Only the standard library is imported here, since some faults occur before JAX is imported.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

if TYPE_CHECKING:
    from faulty import Training

When = Literal["start", "imported", "joined", "trace", "data", "loop", "calls", "end"]
Expected = Literal["fails", "goes on", "named"]

AT = 5  # the turn in which a fault of the loop occurs: its steps are known by then
BOOM = "boom on purpose"
UNDISTURBED = "worker_or_other_is_killed"  # it has no fault of its own


class Fault(NamedTuple):
    """A fault.

    Attributes:
      when: at the start of the script, after its imports, after `init`, during tracing, in the data, in one turn
      of the loop (all of these on the culprit only), in the calls of each turn, or after the loop (on every rank).
      do: causes the fault.
      expects: the job fails and names the culprit; it continues to its end; or the culprit is
      named, whether or not the job ends.
      code: the culprit's own exit code, if known. It is also the job's, unless it is 0.
      culprit: its rank, if fixed.
      stays: the culprit cannot exit: a launcher must end it; if started by hand, it stays.
      outside: a signal for the launcher; no rank is to blame.
    """

    when: When
    do: Callable[[Training], Any]
    expects: Expected = "fails"
    code: int | None = None
    culprit: int | None = None
    stays: bool = False
    outside: signal.Signals | None = None


FAULTS: dict[str, Fault] = {}


def fault(when: When, **declared: Any) -> Callable[[Callable[[Training], Any]], Callable[[Training], Any]]:
    """Return a decorator that adds a function to `FAULTS`."""

    def add(do: Callable[[Training], Any]) -> Callable[[Training], Any]:
        FAULTS[do.__name__] = Fault(when, do, **declared)
        return do

    return add


def mark() -> None:
    """Report that the fault occurs now; the last report counts."""
    os.write(2, f"FAULT {time.time():.3f}\n".encode())  # one write, to stay on one line


def boom(*_: Any, **__: Any) -> NoReturn:
    """Raise a user's error."""
    mark()
    raise ValueError(BOOM)


@fault("end", expects="goes on")
def none(t: Training) -> None:
    """Do nothing; nothing may be reported either."""


# --- before and in jaxdist.init


@fault("start", code=1)
def raises_before(t: Training) -> None:
    boom()


@fault("start", code=1)
def no_module(t: Training) -> None:
    __import__("no_such_module_at_all")


@fault("start", stays=True)
def never_comes(t: Training) -> None:
    time.sleep(10_000)


@fault("imported")
def bad_variable(t: Training) -> None:
    os.environ["JAXDIST_COMMUNICATOR"] = "quantum"


def _in_init(act: Callable[[], Any]) -> None:
    """Act in the middle of `init`, when the ranks know each other and JAX is about to start."""
    import jax

    def initialize(*_: Any, **__: Any) -> None:
        mark()
        act()

    jax.distributed.initialize = initialize


@fault("imported")
def init_raises(t: Training) -> None:
    _in_init(boom)


@fault("imported")
def init_sigkill(t: Training) -> None:
    _in_init(lambda: os.kill(os.getpid(), signal.SIGKILL))


@fault("imported", stays=True)
def init_sigstop(t: Training) -> None:
    _in_init(lambda: os.kill(os.getpid(), signal.SIGSTOP))


# --- while a step is traced, in the data, in a callback


@fault("trace")
def trace_raises(t: Training) -> None:
    boom()


@fault("trace", expects="goes on")
def trace_is_slow(t: Training) -> None:
    time.sleep(t.options.late)


@fault("trace")
def other_program(t: Training) -> None:
    import jax.numpy as jnp

    t.reduction = jnp.max


@fault("data")
def data_raises(t: Training) -> None:
    """See `Examples`."""


@fault("data")
def data_worker_raises(t: Training) -> None:
    """See `Examples`."""


@fault("data", expects="goes on")
def worker_or_other_is_killed(t: Training) -> None:
    """Wait for `faults.py --kills` to act from outside."""


@fault("calls", culprit=0)  # callbacks run on the root
def callback_raises(t: Training) -> None:
    t.step()


def on_the_host(x: Any) -> Any:
    """Fail in a callback."""
    global _called
    _called += 1
    return x if _called < AT else boom()


_called = 0


# --- errors and exits between two steps


@fault("loop")
def raises(t: Training) -> None:
    boom()


@fault("loop")
def thread_raises(t: Training) -> None:
    threading.Thread(target=boom).start()


@fault("loop", expects="goes on")
def child_raises(t: Training) -> None:
    child = multiprocessing.get_context("fork").Process(target=boom)
    child.start()
    child.join()


@fault("loop")
def out_of_memory(t: Training) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 33)


@fault("loop", code=3)
def sys_exit_3(t: Training) -> None:
    sys.exit(3)


@fault("loop", code=3)
def raise_exit_3(t: Training) -> None:
    raise SystemExit(3)


@fault("loop", code=3)
def exit_3(t: Training) -> None:
    exit(3)  # the usual `exit` from `site`


@fault("loop", code=1)
def exit_with_words(t: Training) -> None:
    sys.exit("no more data")


@fault("loop", code=0)
def sys_exit_0(t: Training) -> None:
    sys.exit(0)


@fault("loop", expects="goes on")
def exits_caught(t: Training) -> None:
    for leave in (sys_exit_3, raise_exit_3):
        try:
            leave(t)
        except SystemExit:
            continue


@fault("loop", code=9)
def os_exit_9(t: Training) -> None:
    os._exit(9)


@fault("loop", code=0)
def os_exit_0(t: Training) -> None:
    os._exit(0)


@fault("loop", code=0)
def makes_fewer_steps(t: Training) -> None:
    t.stopped = True


# --- signals and hangs


def _to_itself(number: signal.Signals) -> Callable[[Training], None]:
    return lambda t: os.kill(os.getpid(), number)


for _number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP):
    FAULTS[_number.name.lower()] = Fault("loop", _to_itself(_number), stays=_number is signal.SIGSTOP)


@fault("loop")
def sigsegv(t: Training) -> None:
    ctypes.string_at(0)


@fault("loop")
def sleeps(t: Training) -> None:
    time.sleep(10_000)


@fault("loop")
def spins(t: Training) -> None:
    while True:
        pass


@fault("loop", stays=True)
def sleeps_with_lock(t: Training) -> None:
    ctypes.PyDLL(None).sleep(10_000)  # keeps the GIL


# --- calls that do not match


@fault("loop")
def new_shape(t: Training) -> None:
    t.step_larger()


@fault("loop")
def bad_batch(t: Training) -> None:
    t.step({"y": 3})


@fault("loop")
def barrier_alone(t: Training) -> None:
    t.barrier()


@fault("loop")
def allreduce_alone(t: Training) -> None:
    t.allreduce()


@fault("calls")
def order(t: Training) -> None:
    t.in_order(t.step, t.evaluate)


@fault("calls")
def order_of_twins(t: Training) -> None:
    t.in_order(t.step, t.twin)


@fault("calls")
def order_of_shapes(t: Training) -> None:
    t.in_order(t.step, t.step_larger)


@fault("calls")
def order_with_barrier(t: Training) -> None:
    t.in_order(t.step, t.barrier)


@fault("calls")
def order_with_eager(t: Training) -> None:
    t.in_order(t.step, t.allreduce)


@fault("calls")
def order_of_eager(t: Training) -> None:
    t.in_order(t.allreduce, lambda: t.allreduce(200))
    t.step()


@fault("calls")
def order_of_a_new_step(t: Training) -> None:
    t.in_order(t.step, *[t.evaluate] * (t.turn == AT))


# --- the end of the script


@fault("end", expects="goes on", culprit=0)
def late_root(t: Training) -> None:
    if t.guilty:
        mark()
        time.sleep(t.options.late)


@fault("end", expects="goes on")
def late_rank(t: Training) -> None:
    late_root(t)


@fault("end", culprit=0)  # the rank that writes whole arrays
def save_on_full_disk(t: Training) -> None:
    import jax

    import jaxdist

    if t.guilty:
        mark()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    big = jax.random.normal(jax.random.key(0), (1 << 20,))
    jaxdist.save(t.options.scratch, {"w": big}, 1, wait=False)


# Python prints an exception from an atexit handler, and exits with 0.
@fault("start", expects="goes on")
def last_atexit_raises(t: Training) -> None:
    atexit.register(boom)  # runs after jaxdist's handlers


@fault("joined", expects="goes on")
def first_atexit_raises(t: Training) -> None:
    atexit.register(boom)


@fault("joined")
def step_at_exit(t: Training) -> None:
    @atexit.register
    def _() -> None:
        mark()
        t.step()


@fault("joined", expects="named")
def hangs_at_exit(t: Training) -> None:
    atexit.register(_hang)


@fault("start", expects="named")
def hangs_last_at_exit(t: Training) -> None:
    atexit.register(_hang)


def _hang() -> None:
    mark()
    time.sleep(10_000)


# --- from outside: signals to the launcher


def _nothing(t: Training) -> None:
    """Wait for a signal from outside."""


for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
    FAULTS[f"launcher_{_number.name.lower()}"] = Fault("loop", _nothing, outside=_number)
