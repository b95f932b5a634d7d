"""One rank fails, the job ends: exceptions, signals, exit codes; under mpirun and by hand."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import jobs
import pytest

from jaxdist.control import failfast

pytestmark = pytest.mark.slow  # together

_SCRIPT = """
import os, signal, sys, threading, time
what, culprit = sys.argv[1], int(sys.argv[2])
me = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
if what == "before" and me == culprit:
    raise ValueError("boom on purpose")
from jaxdist.runtime.context import init
ctx = init(timeout=6 if what == "before" else 60)
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
x = jax.make_array_from_process_local_data(
    NamedSharding(ctx.mesh, P("data")), np.ones((ctx.size, 1000), np.float32))
step = jax.jit(lambda x: x.sum(0))
step(x).block_until_ready()
ctx.barrier()
print("READY", ctx.rank, os.getpid(), flush=True)
if what == "between":
    if me == culprit:
        raise ValueError("boom on purpose")
    time.sleep(100)
if what == "idle":
    time.sleep(100)
if what == "barrier" and me != culprit:
    ctx.barrier()
if what == "interrupt" and me == culprit:
    ctx.connector.barrier()  # alone in MPI_Barrier, which heeds no signal
if what in ("interrupt", "barrier"):
    time.sleep(100)
for i in range(2000):
    if i == 3 and me == culprit:
        if what == "inside":
            def host(v):
                raise ValueError("boom on purpose")
            jax.block_until_ready(jax.jit(
                lambda v: jax.pure_callback(host, jax.ShapeDtypeStruct((), v.dtype), v))(1.0))
        if what == "thread":
            threading.Thread(target=lambda: [][1]).start()
        if what == "exit":
            sys.exit(3)
        if what == "exit()":
            exit(3)
        if what == "raise":
            raise SystemExit(3)
        if what == "caught":
            try:
                sys.exit(4)
            except SystemExit:
                print("CAUGHT")
    if what == "caught" and i == 6:
        break
    step(x).block_until_ready()
    time.sleep(0.05)
"""


def _start(how: str, what: str, culprit: int = 1, n: int = 2) -> jobs.Job:
    start = jobs.start_mpirun if how == "mpirun" else jobs.start_env
    return start(n, ["-c", _SCRIPT, what, str(culprit)])


def _pids(job: jobs.Job, n: int = 2) -> dict[int, int]:
    text = job.wait_for(lambda text: text.count("READY") == n)
    found = [line.split("READY")[1].split() for line in text.splitlines() if "READY" in line]
    return {int(rank): int(pid) for rank, pid in found}


def _failed(job: jobs.Job, *words: str) -> str:
    """The job ends soon, each process non-zero, no orphan, and the output has the words."""
    results = job.finish(40)
    output = "\n".join(r.output for r in results)
    assert all(r.returncode != 0 for r in results), output
    assert all(word in output for word in words), output
    return output


BOTH = pytest.mark.parametrize("how", [pytest.param("mpirun", marks=pytest.mark.mpi), "env"])


@BOTH
def test_exception_before_init(how):
    words = ["ValueError: boom on purpose"]
    if how == "env":  # nobody tells the others: they give up in the time given, and name the rank
        words.append("missing: rank 1")
    _failed(_start(how, "before"), *words)


@BOTH
def test_exception_between_steps(how):
    output = _failed(_start(how, "between"), "[jaxdist rank 1] Traceback", "rank 1] ValueError: boom on purpose")
    assert "[jaxdist rank 0] rank 1 (" in output
    assert "failed: ValueError: boom on purpose" in output


@pytest.mark.mpi
def test_exception_inside_a_step():
    _failed(_start("mpirun", "inside"), "[jaxdist rank 1] Traceback", "boom on purpose")


def test_exception_on_the_root():
    _failed(_start("env", "between", culprit=0), "rank 0] ValueError: boom on purpose")


@BOTH
def test_sigkill_of_one_rank(how):
    job = _start(how, "loop", n=3)
    os.kill(_pids(job, 3)[1], signal.SIGKILL)
    if how == "env":
        output = _failed(job, "[jaxdist rank 0] rank 1 (", "[jaxdist rank 2] rank 1 (")
        assert "died without a goodbye" in output
    else:
        _failed(job)  # mpirun and the others' own goodbye race; either ends the job


def test_sigkill_of_the_root():
    job = _start("env", "idle")
    os.kill(_pids(job)[0], signal.SIGKILL)
    # JAX's own client aborts when its coordinator is gone: it may be faster than our message.
    _failed(job)


def test_sigterm_to_one_rank():
    job = _start("env", "loop")
    os.kill(_pids(job)[1], signal.SIGTERM)
    _failed(job)


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_mpirun(number):
    job = _start("mpirun", "idle")
    _pids(job)
    job.processes[0].send_signal(number)
    _failed(job)


def test_ctrl_c_of_one_rank():
    job = _start("env", "loop")
    os.kill(_pids(job)[1], signal.SIGINT)
    output = _failed(job, "rank 1] interrupted", "[jaxdist rank 0] rank 1 (", "was interrupted")
    assert "rank 1] Traceback" not in output


def test_ctrl_c_prints_one_line():
    job = _start("env", "loop", n=3)
    for pid in _pids(job, 3).values():
        os.kill(pid, signal.SIGINT)
    output = _failed(job)
    said = [line for line in output.splitlines() if line and "READY" not in line]
    assert len(said) == 1, output
    assert said[0].startswith("[jaxdist rank 0] interrupted at <string>:"), output


_ALONE = """
import sys, time
import jaxdist
jaxdist.init()
print("READY", flush=True)
while True: time.sleep(0.1)  # not one long sleep: a signal just before it would be noticed only after it
"""


@pytest.mark.parametrize("run", [(), ("-m", "jaxdist", "run", "-n", "1", "--launcher", "env")], ids=["python", "run"])
def test_ctrl_c_of_a_process_alone_prints_one_line(run, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_ALONE)
    job = jobs.Job()
    job.start([sys.executable, *run, str(script)])
    job.wait_for(lambda text: "READY" in text)
    job.processes[0].send_signal(signal.SIGINT)
    result = job.finish(40)[0]
    assert result.returncode == (130 if run else -signal.SIGINT)  # of a process: as Python's own
    expected = "jaxdist: interrupted: " if run else f"[jaxdist] interrupted at {script}:6"
    assert result.stderr.startswith(expected), result.output
    assert len(result.stderr.splitlines()) == 1, result.output


@pytest.mark.mpi
def test_ctrl_c_of_a_rank_that_is_stuck_in_native_code():
    job = _start("mpirun", "interrupt")
    pids = _pids(job)
    time.sleep(2)  # to be inside
    os.kill(pids[1], signal.SIGINT)
    _failed(job, "rank 1] interrupted inside a collective")


def test_exception_in_a_thread():
    _failed(_start("env", "thread"), "uncaught exception in thread", "IndexError")


@pytest.mark.parametrize(
    ("how", "what", "culprit"),
    [
        pytest.param("mpirun", "exit", 0, marks=pytest.mark.mpi),
        ("env", "exit()", 1),
        ("env", "raise", 0),
    ],
)
def test_failing_exit_code_of_one_rank(how, what, culprit):
    """It is that of all: rank 0 ends last, and launchers go by the first."""
    job = _start(how, what, culprit)
    processes = job.processes
    output = _failed(job, "ended its script with exit code 3")
    assert "number of calls" not in output
    assert [p.returncode for p in processes] == [3] * len(processes)


def test_a_caught_exit_and_a_normal_end_are_no_failure():
    for result in _start("env", "caught").finish(60):
        assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.output


_ODD = """
import sys, time
from jaxdist.runtime.context import init
ctx = init(timeout=30)
ctx.barrier()
def refuse(self, *args): raise RuntimeError("no words")
def hook(*args): print("A HOOK OF ANOTHER LIBRARY")
def odd(name, **members): return type(name, (ValueError,), members)
if ctx.rank == 1:
    {body}
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise odd('Odd', __str__=refuse)", "Odd: <exception str() failed>"),
        ("raise odd('Odd', __class__=property(refuse))('boom')", "Odd: boom"),
        ("raise odd('Odd', __cause__=property(refuse), __notes__=7)('boom')", "Odd: boom"),
        ("raise BaseExceptionGroup('two', [KeyError(1), SystemExit(0)])", "(2 sub-exceptions); the first is KeyError"),
        ("raise ValueError('boom' + 'x' * 3_000_000)", "x… (3,000,004 characters)"),
        (r"raise ValueError('a\0b\udc80\ud800c')", "ValueError: a\0b\\udc80\\ud800c"),
        ("raise ValueError('first\\nsecond')", "ValueError: first\n"),
        ("sys.excepthook = hook; raise ValueError('boom')", "ValueError: boom"),
        ("sys.excepthook = refuse; raise ValueError('boom')", "ValueError: boom"),
    ],
)
def test_whatever_the_error_is_made_of_the_others_are_told(body, told):
    results = jobs.start_env(2, ["-c", _ODD.format(body=body)]).finish(60)
    assert [result.returncode for result in results] == [1, 1], results[0].output
    assert re.search(rf"\[jaxdist rank 0\] rank 1 \(.*\) failed: .*{re.escape(told)}", results[0].output), (
        results[0].output[-3000:] + results[1].output[-3000:]
    )
    assert len(results[0].output) < 20_000


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("odd('Odd', __repr__=refuse)()", "<__main__.Odd object at "),
        ("'x' * 3_000_000", "… (3,000,002 characters)"),
    ],
)
def test_whatever_the_exit_code_is_made_of_the_others_are_told(code, told):
    results = jobs.start_env(2, ["-c", _ODD.format(body=f"sys.exit({code})")]).finish(60)
    assert [result.returncode for result in results] == [1, 1], results[0].output
    said = rf"\[jaxdist rank 0\] rank 1 \(.*\) ended its script with exit code .*{re.escape(told)}"
    assert re.search(said, results[0].output), results[0].output[-3000:]


def test_a_group_of_what_others_have_caused_may_be_aftermath():
    lost, own = ConnectionResetError(), ValueError()
    assert failfast.may_be_aftermath(ExceptionGroup("of a TaskGroup", [lost, ExceptionGroup("inner", [lost])]))
    assert not failfast.may_be_aftermath(ExceptionGroup("of a TaskGroup", [lost, ExceptionGroup("inner", [own])]))
