"""One rank fails, differs, does not come or ends early: the job ends, with an error that says who, what and where.

A fault by the launchers and over the wires of its row; with JAXDIST_FULL set, over all.
"""

import os
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import jobs
from harness.errors import missing

FULL = "JAXDIST_FULL" in os.environ
SCRIPT = Path(__file__).parent / "scripts" / "faults.py"
WHO = "rank 1 ("
HAND, RUN, MPIRUN, GLOO = "hand", "run", "mpirun", "mpirun, gloo"
EVERYWHERE = (HAND, RUN, MPIRUN, GLOO)


class Fault(NamedTuple):
    """What one of some ranks does."""

    call: str  # arguments of the script
    tokens: tuple[str, ...]  # that the output holds
    on: tuple[str, ...] = (HAND,)  # how it is started, the first one in a quick test if it is one
    quick: bool = False  # whether it is
    code: int | None = None  # of the job; None: any that is not 0
    env: dict[str, str] = {}  # noqa: RUF012  # of the job
    ranks: int = 2  # of it


def line(text: str) -> str:
    """Where the script has this text, as a message names it."""
    (number,) = (i for i, one in enumerate(SCRIPT.read_text().splitlines(), 1) if text in one)
    return f"faults.py:{number}"


def differ(what: str, *tokens: str, on: tuple[str, ...] = (HAND,), quick: bool = False) -> Fault:
    """Two programs, of which none has run."""
    return Fault(what, ("different programs", "call 1", *tokens), on, quick)


SHORT = {"JAXDIST_TIMEOUT": "2"}
CALLS = ("step 'step'", "rank 0", "rank 1")
FAULTS = [
    # A rank that ends.
    Fault("raises", (WHO, "ValueError", "boom on purpose", 'faults.py", line'), (RUN, MPIRUN), True),
    Fault("raises 0 unhooked", ("rank 0 (", "failed: ValueError: boom on purpose"), (GLOO,)),
    Fault("raises_in_a_thread", (WHO, "IndexError"), (HAND,), code=1),
    Fault("raises_in_a_callback", ("rank 0 (", "ValueError: boom on purpose"), (MPIRUN, HAND)),
    Fault("runs_out_of_memory", ("call 3", WHO, "left it with JaxRuntimeError"), (RUN, MPIRUN), env=SHORT),
    Fault("exits 0", ("rank 0 (", "exit code 3"), (MPIRUN, RUN), True, 3),
    *[  # older ones do not tell which exceptions are raised, and caught
        Fault("raises_system_exit", (WHO, "exit code 4"), (RUN, MPIRUN), code=4),
        Fault("catches_an_exit", (), (RUN,), code=0),
    ] * (sys.version_info >= (3, 12)),
    Fault("dies", (), (RUN,), code=137),
    # mpirun's code is that of the rank whose end it sees first: of the one killed, or of one that left because of it.
    Fault("dies", ("rank 1", "signal 9"), (MPIRUN,)),
    Fault("dies 0", ("rank 0 (", "died"), (HAND,)),
    Fault("dies 1 SIGTERM", (WHO, "died"), (HAND,), True),
    Fault("dies 1 SIGTERM", ("rank 1", "signal 15"), (MPIRUN,)),  # prterun may lose what the others say as it ends them
    Fault("dies_at_the_end", (WHO, "died"), (HAND,)),
    Fault("dies_at_the_end 0", ("rank 0 (", "died"), (HAND,)),
    Fault("leaves_early", ("2 calls", "call 3", *CALLS), (RUN, MPIRUN)),
    Fault("leaves_unseen", ("2 calls", "call 3", *CALLS), (RUN,), env={"JAXDIST_TIMEOUT": "5"}),
    Fault("leaves_a_receiver", ("rank 0", "recv", "rank 1", "has left"), (RUN, MPIRUN)),
    Fault("stops_without_a_terminal", ("rank 1] in a debugger", "rank 0", "has ended", "BdbQuit"), (RUN,)),
    # A rank that does not come.
    Fault("stuck", ("call 3", "rank 0", WHO, line("# here"), "stuck_in_the_loader"), (MPIRUN,), env=SHORT, ranks=3),
    Fault("stuck 1 stops", ("call 3", WHO, "does not answer"), (RUN,), env=SHORT),
    Fault("stuck 0 stops", ("call 3", "rank 0", "does not answer"), (RUN,), env=SHORT, ranks=3),
    Fault("stuck_at_first", ("step 'step'", WHO, "stuck_in_the_loader"), env={"JAXDIST_TIMEOUT": "4"}),
    Fault("stuck_eagerly", ("allreduce", "[3]", WHO, "stuck_in_the_loader"), (MPIRUN,), env=SHORT),
    Fault("fails_eagerly", ("allreduce", "300000", WHO, "left it with RuntimeError"), (HAND, MPIRUN), env=SHORT),
    *(Fault(f"calls_in_a_handler {args}", ("rank 0", "signal handler", "RuntimeError")) for args in ("", "1 eagerly")),
    Fault("two_threads", ("two threads", "RuntimeError"), (HAND, MPIRUN)),
    # Ranks whose programs are not the same: an operation is named, and its line.
    differ("constant", "float32[3,2]", line("x @ given"), quick=True),
    differ("operation", "sin", "tanh", line("jnp.tanh(w)"), on=(MPIRUN,)),
    differ("order_of_collectives", line("w - summed(x)"), on=(MPIRUN,)),
    Fault("retraced", ("call 3", "2.0", "3.0", line("jnp.mean(x) * SCALE")), (HAND,)),
    Fault("settings", (*CALLS, "setting")),
    # Calls in another order, or with something else.
    # Either rank may be the first to see it: the one that asks, or the one that has gone on.
    Fault("rows", ("x", "rows", "jaxdist.loader"), (MPIRUN,)),
    Fault("order", (*CALLS, "step 'another'"), (HAND, MPIRUN), True),
    Fault("order_of_twins", (*CALLS, "step 'step#1'"), (RUN,)),
    Fault("eager_between", (*CALLS, "allreduce"), (HAND, MPIRUN)),
    Fault("changed_copy", (*CALLS, "w['b']"), (HAND,)),
    # No faults.
    Fault("slow", ("rank 0", "no rank is missing"), (HAND,), code=0, env={"JAXDIST_TIMEOUT": "1"}),
    Fault("ends_late", ("LATE", WHO), (RUN,), code=0, env=SHORT),
    Fault("raises_in_a_child", ("ZeroDivisionError", "child 1"), (HAND,), code=0),
    Fault("error_at_exit", ("caught", "no business of the job"), (MPIRUN,), code=0),
    Fault("sends", (), (HAND,), code=0),
    Fault("undecorated", ("2 ranks", "jaxdist.data_parallel"), (HAND,), code=0),
]  # fmt: skip


def start(how: str, fault: Fault) -> jobs.Job:
    env = {"JAXDIST_TIMEOUT": "60", **fault.env}
    if how == GLOO:
        how, env["JAXDIST_COMMUNICATOR"] = "mpirun", "xla"
    return jobs.launch(how, fault.ranks, [str(SCRIPT), *fault.call.split()], env)


def marked() -> list[object]:
    found = []
    for fault in FAULTS:
        for i, how in enumerate(EVERYWHERE if FULL and "stops" not in fault.call else fault.on):
            marks = [pytest.mark.mpi] if "mpirun" in how else []
            marks += [] if fault.quick and i == 0 else [pytest.mark.slow]
            found.append(pytest.param(fault, how, marks=marks, id=f"{fault.call}, {how}"))
    return found


@pytest.mark.parametrize(("fault", "how"), marked())
def test_the_job_ends_and_says_why(fault: Fault, how: str) -> None:
    result = start(how, fault).end(60)
    assert missing(fault.tokens, result.output) == [], result.output
    assert len(set(re.findall(r"(rank \d) \([^)]*\) does not answer", result.output))) <= 1  # nobody else is blamed
    assert result.returncode == (result.returncode or 1 if fault.code is None else fault.code), result.output
    if fault.code != 0:  # no rank is through, unless it is that which leaves; and neither gloo nor MPI has ended it
        assert result.stdout.count("THROUGH") <= ("leaves" in fault.call), result.output
        assert "Aborted" not in result.output, result.output
    else:
        assert "[Gloo]" not in result.output
        assert ("no decorated step" in result.output) == (fault.call == "undecorated"), result.output


def test_by_hand_each_rank_says_why_and_where_it_is() -> None:
    results = start(HAND, Fault("stuck", (), env=SHORT)).finish(60)
    for rank, result in enumerate(results):
        assert result.returncode == 1
        assert f"[jaxdist rank {rank}] " in result.stderr
        assert WHO in result.stderr
        assert line("    time.sleep(100)  # here") in result.stderr
        assert result.seconds < 20, "the watchdog is on time"
        assert ("stuck_in_the_loader" if rank else "in train") in result.stderr, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", [RUN, pytest.param(MPIRUN, marks=pytest.mark.mpi)])
def test_ctrl_c_in_training_ends_all_ranks(how: str) -> None:
    """Without a traceback. Other signals, without JAX: launch/test_ends."""
    job = start(how, Fault("trains", ()))
    job.wait_for(lambda text: text.count("READY") == 2)
    job.processes[0].send_signal(signal.SIGINT)
    result = job.end(60)  # which fails if a process is left
    assert result.returncode == 130 or (how == MPIRUN and result.returncode)
    assert "THROUGH" not in result.stdout
    assert "Traceback" not in result.output, result.output
