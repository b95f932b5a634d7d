"""Processes of a job, without a rank in them."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from jaxdist.launch import command, processes, ranks


def test_what_killed_a_job_is_named_though_its_peer_was_seen_first() -> None:
    """A peer that fails of the loss may be heard of before the system has told of the loss."""
    bodies = ("exit 1", "kill -9 $$")
    commands = [command.Command(f"rank {rank}", ["sh", "-c", body], {}) for rank, body in enumerate(bodies)]
    running = {rank: subprocess.Popen(one.argv) for rank, one in enumerate(commands)}
    events = processes.queue.SimpleQueue()
    codes = [command.ended(process) for process in running.values()]
    assert codes == [1, 128 + signal.SIGKILL]
    for rank, code in enumerate(codes):
        events.put(processes._Exited(rank, code))
    failed: list[processes.Failed] = []
    assert processes._supervise(commands, running, events, failed.append) == 128 + signal.SIGKILL
    assert failed == [("rank 1", 128 + signal.SIGKILL)]


def test_a_program_that_has_ended_is_still_there_to_be_asked() -> None:
    process = subprocess.Popen(["sh", "-c", "exit 3"])
    assert [command.ended(process), command.ended(process, os.WNOHANG), process.wait()] == [3, 3, 3]
    running = subprocess.Popen(["sleep", "60"])
    assert command.ended(running, os.WNOHANG) == 0
    running.kill()
    assert command.ended(running) == 128 + signal.SIGKILL
    running.wait()


def test_one_that_ends_because_of_another_is_not_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 ends last: JAX would abort the others."""
    says = "echo '[jaxdist rank 1] rank 0 (host, pid 7) ended its script with exit code 3' >&2; exit 3"
    bodies = ("trap 'exit 3' TERM; sleep 30 & wait", f"sleep 0.3; {says}")
    commands = ranks.own_processes(["sh"], range(2), {}, False, None)
    commands = [dataclasses.replace(c, argv=["sh", "-c", body]) for c, body in zip(commands, bodies, strict=True)]
    failed: list[processes.Failed] = []
    assert processes.run_job(commands, on_failure=failed.append) == 3
    assert failed == [("rank 0", 3)]
    assert "rank 0 failed with exit code 3; ending the other 1" in capfd.readouterr().err


_IGNORING = """
import os, signal, sys
from jaxdist.launch.command import Command
from jaxdist.launch.processes import run_job
first = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
for number in first:
    signal.signal(number, signal.SIG_IGN if number.name in sys.argv[1] else signal.SIG_DFL)
rank = "import signal; print([n.name for n in (1, 2, 15) if signal.getsignal(n) is signal.SIG_IGN])"
rank = rank.replace("(1, 2, 15)", "map(signal.Signals, (1, 2, 15))")
send = lambda: [os.kill(os.getpid(), signal.Signals[name]) for name in sys.argv[2].split()]
print("code", run_job([Command("rank 0", [sys.executable, "-c", rank], {})], on_start=send), flush=True)
print([signal.getsignal(number).name for number in first])
"""


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGTERM"])
def test_a_signal_that_is_ignored_stays_ignored_here_and_in_the_ranks(name: str) -> None:
    """`nohup jaxdist run ... &`; what a shell's script starts in the background ignores SIGINT."""
    command = [sys.executable, "-c", _IGNORING, name]
    done = subprocess.run([*command, name], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[:2] == [f"['{name}']", "code 0"], done.stderr
    assert done.stdout.count("SIG_IGN") == 1


def test_a_signal_that_is_not_ignored_ends_the_job() -> None:
    command = [sys.executable, "-c", _IGNORING, "SIGHUP", "SIGTERM"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert f"code {128 + signal.SIGTERM}" in done.stdout
