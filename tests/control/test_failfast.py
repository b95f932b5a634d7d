"""One rank fails, the job ends: exceptions, signals, exit codes; under mpirun and by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import jobs

from jaxdist.control import failfast

pytestmark = pytest.mark.slow  # together

_SCRIPT = """
import os, sys, time
what, culprit = sys.argv[1], int(sys.argv[2])
from jaxdist.runtime.context import init
ctx = init(timeout=60)
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
x = jax.make_array_from_process_local_data(
    NamedSharding(ctx.mesh, P("data")), np.ones((ctx.size, 1000), np.float32))
step = jax.jit(lambda x: x.sum(0))
step(x).block_until_ready()
ctx.barrier()
print("READY", ctx.rank, os.getpid(), flush=True)
if what == "between":
    if ctx.rank == culprit:
        raise ValueError("boom on purpose")
    time.sleep(100)
if what == "idle":
    time.sleep(100)
if what == "interrupt":
    if ctx.rank == culprit:
        ctx.connector.barrier()  # alone in MPI_Barrier, which heeds no signal
    time.sleep(100)
for i in range(2000):
    if i == 3 and ctx.rank == culprit:
        if what == "inside":
            def host(v):
                raise ValueError("boom on purpose")
            jax.block_until_ready(jax.jit(
                lambda v: jax.pure_callback(host, jax.ShapeDtypeStruct((), v.dtype), v))(1.0))
        if what == "exit":
            sys.exit(3)
    step(x).block_until_ready()
    time.sleep(0.05)
"""


def _start(how: str, what: str, culprit: int = 1) -> jobs.Job:
    start = jobs.start_mpirun if how == "mpirun" else jobs.start_env
    return start(2, ["-c", _SCRIPT, what, str(culprit)])


def _pids(job: jobs.Job) -> dict[int, int]:
    text = job.wait_for(lambda text: text.count("READY") == 2)
    found = [line.split("READY")[1].split() for line in text.splitlines() if "READY" in line]
    return {int(rank): int(pid) for rank, pid in found}


def _failed(job: jobs.Job, *words: str) -> str:
    """The job ends soon, each process non-zero, no orphan, and the output has the words."""
    results = job.finish(40)
    output = "\n".join(r.output for r in results)
    assert all(r.returncode != 0 for r in results), output
    assert all(word in output for word in words), output
    return output


@pytest.mark.parametrize(("how", "culprit"), [pytest.param("mpirun", 1, marks=pytest.mark.mpi), ("env", 0)])
def test_exception_between_steps(how, culprit):
    words = [f"[jaxdist rank {culprit}] {line}" for line in ("Traceback", "ValueError: boom on purpose")]
    told = f"[jaxdist rank {1 - culprit}] rank {culprit} ("
    _failed(_start(how, "between", culprit), *words, told, "failed: ValueError: boom on purpose")


@pytest.mark.mpi
def test_exception_inside_a_step():
    _failed(_start("mpirun", "inside"), "[jaxdist rank 1] Traceback", "boom on purpose")


def test_sigterm_to_one_rank():
    """JAX has a handler of its own, with which the signal would end nothing."""
    job = _start("env", "loop")
    os.kill(_pids(job)[1], signal.SIGTERM)
    _failed(job, "[jaxdist rank 0] rank 1 (", "died without a goodbye")


@pytest.mark.mpi
def test_ctrl_c_of_mpirun():
    job = _start("mpirun", "idle")
    _pids(job)
    job.processes[0].send_signal(signal.SIGINT)
    _failed(job)


@pytest.mark.mpi
def test_ctrl_c_of_a_rank_that_is_stuck_in_native_code():
    job = _start("mpirun", "interrupt")
    pids = _pids(job)
    time.sleep(1)  # to be inside
    os.kill(pids[1], signal.SIGINT)
    _failed(job, "rank 1] interrupted inside a collective")


@pytest.mark.mpi
def test_the_exit_code_of_one_rank_is_that_of_all():
    """Rank 0 ends last, and launchers go by the first."""
    job = _start("mpirun", "exit", culprit=0)
    output = _failed(job, "ended its script with exit code 3")
    assert "number of calls" not in output
    assert job.processes[0].returncode == 3


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


# --- what ranks end with, without a JAX that has started

_PAIRS = """
import atexit, json, os, signal, sys, threading, time
from pathlib import Path
from jaxdist.control import failfast, rendezvous
from jaxdist.control.channel import Control

def refuse(self, *args): raise RuntimeError("no words")
def hook(*args): print("A HOOK OF ANOTHER LIBRARY")
def odd(name, **members): return type(name, (ValueError,), members)
def interrupted(): os.kill(os.getpid(), signal.SIGINT); time.sleep(100)

folder, ends = Path(sys.argv[1]), json.loads(sys.argv[2])
ranks, codes = {}, {name: [None, None] for name in ends}

def wait_for_one():
    pid, status = os.wait()
    name, rank = ranks.pop(pid)
    codes[name][rank] = os.waitstatus_to_exitcode(status)

for name, bodies in ends.items():
    while len(ranks) > 4:
        wait_for_one()
    server = rendezvous.bind("127.0.0.1", [0])
    for rank, body in enumerate(bodies):
        if (pid := os.fork()) == 0:
            file = os.open(folder / f"{name} {rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(file, 1), os.dup2(file, 2)
            control = Control(rank, 2, [server.getsockname()], server=None if rank else server, timeout=30)
            script = failfast.ScriptExit()
            failfast.install(control, script)
            atexit.register(failfast.end_if_failed, control, script)
            control.exchange("ready")
            exec(body)
            time.sleep(100)
        ranks[pid] = name, rank
    server.close()
while ranks:
    wait_for_one()
print(json.dumps(codes))
"""
_ENDS = {
    # What rank 1 does; the exit code of both; what rank 0 says.
    "no str": ("raise odd('Odd', __str__=refuse)", 1, "failed: Odd: <exception str() failed>"),
    "no class": ("raise odd('Odd', __class__=property(refuse))('boom')", 1, "failed: Odd: boom"),
    "no cause": ("raise odd('Odd', __cause__=property(refuse), __notes__=7)('boom')", 1, "failed: Odd: boom"),
    "a group": ("raise BaseExceptionGroup('two', [KeyError(1), SystemExit(0)])", 1,
                "(2 sub-exceptions); the first is KeyError"),
    "long": ("raise ValueError('boom' + 'x' * 3_000_000)", 1, "x… (3,000,004 characters)"),
    "no UTF-8": (r"raise ValueError('a\0b\udc80\ud800c')", 1, "failed: ValueError: a\0b\\udc80\\ud800c"),
    "lines": ("raise ValueError('first\\nsecond')", 1, "failed: ValueError: first\n"),
    "another hook": ("sys.excepthook = hook; raise ValueError('boom')", 1, "failed: ValueError: boom"),
    "a hook that fails": ("sys.excepthook = refuse; raise ValueError('boom')", 1, "failed: ValueError: boom"),
    "a thread": ("threading.Thread(target=lambda: [][1]).start()", 1, "failed: IndexError: "),
    "exit()": ("import site; exit(3)", 3, "ended its script with exit code 3"),
    "SystemExit": ("raise SystemExit(3)", 3, "ended its script with exit code 3"),
    "exit without words": ("sys.exit(odd('Odd', __repr__=refuse)())", 1, "exit code <__main__.Odd object at "),
    "exit with many": ("sys.exit('x' * 3_000_000)", 1, "… (3,000,002 characters)"),
    "Ctrl-C": ("interrupted()", 130, "was interrupted"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], list[str]]]:
    """By name, how two ranks that were forked off one process have ended: exit codes and outputs."""
    folder = tmp_path_factory.mktemp("pairs")
    bodies = {name: ["", body] for name, (body, _, _) in _ENDS.items()} | {"Ctrl-C of both": ["interrupted()"] * 2}
    job = jobs.Job()
    job.start([sys.executable, "-W", "ignore", "-c", _PAIRS, str(folder), json.dumps(bodies)])
    result = job.finish(90)[0]
    assert result.returncode == 0, result.output
    read = lambda path: Path(path).read_bytes().decode(errors="replace")
    return {
        name: (codes, [read(folder / f"{name} {rank}") for rank in range(2)])
        for name, codes in json.loads(result.stdout).items()
    }


@pytest.mark.parametrize("name", _ENDS)
def test_whatever_ends_a_rank_the_other_is_told(name, ended):
    _, code, told = _ENDS[name]
    codes, outputs = ended[name]
    assert codes == [code, code], outputs
    assert re.search(rf"\[jaxdist rank 0\] rank 1 \(.*\) .*{re.escape(told)}", outputs[0]), outputs[0][-3000:]
    assert len(outputs[0]) < 20_000
    if name == "a thread":
        assert "[jaxdist rank 1] uncaught exception in thread" in outputs[1]
    if name == "Ctrl-C":
        assert "[jaxdist rank 1] interrupted at <string>:" in outputs[1]
        assert "Traceback" not in outputs[1]


def test_ctrl_c_of_all_ranks_prints_one_line(ended):
    codes, outputs = ended["Ctrl-C of both"]
    assert all(codes)
    assert outputs[1] == ""
    (said,) = outputs[0].splitlines()
    assert said.startswith("[jaxdist rank 0] interrupted at <string>:")


def test_a_group_of_what_others_have_caused_may_be_aftermath():
    lost, own = ConnectionResetError(), ValueError()
    assert failfast.may_be_aftermath(ExceptionGroup("of a TaskGroup", [lost, ExceptionGroup("inner", [lost])]))
    assert not failfast.may_be_aftermath(ExceptionGroup("of a TaskGroup", [lost, ExceptionGroup("inner", [own])]))
