"""Processes of a job, without a rank in them."""

import os
import signal
import subprocess

from jaxdist.launch import processes


def test_what_killed_a_job_is_named_though_its_peer_was_seen_first() -> None:
    """A peer that fails of the loss may be heard of before the system has told of the loss."""
    bodies = ("exit 1", "kill -9 $$")
    commands = [processes.Command(f"rank {rank}", ["sh", "-c", body], {}) for rank, body in enumerate(bodies)]
    running = {rank: subprocess.Popen(command.argv) for rank, command in enumerate(commands)}
    events = processes.queue.SimpleQueue()
    codes = [processes._ended(process) for process in running.values()]
    assert codes == [1, 128 + signal.SIGKILL]
    for rank, code in enumerate(codes):
        events.put(processes._Exited(rank, code))
    failed: list[processes.Failed] = []
    assert processes._supervise(commands, running, events, failed.append) == 128 + signal.SIGKILL
    assert failed == [("rank 1", 128 + signal.SIGKILL)]


def test_a_program_that_has_ended_is_still_there_to_be_asked() -> None:
    process = subprocess.Popen(["sh", "-c", "exit 3"])
    assert [processes._ended(process), processes._ended(process, os.WNOHANG), process.wait()] == [3, 3, 3]
    running = subprocess.Popen(["sleep", "60"])
    assert processes._ended(running, os.WNOHANG) == 0
    running.kill()
    assert processes._ended(running) == 128 + signal.SIGKILL
    running.wait()
