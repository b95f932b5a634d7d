"""What a process has started ends with it, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from jaxdist.control import guard

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="NO /proc: nothing of the guard was tried")

# Prints the numbers of all it has started, by name; ends when told.
RANK = """
import os, subprocess, sys, time
from jaxdist.control import guard

def tell(name, pid):
    os.write(1, f"{name} {pid}\\n".encode())

sleep = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
tell("before", subprocess.Popen(sleep).pid)
guard.start(whole_job=sys.argv[1] == "whole")
tell("program", subprocess.Popen(sleep).pid)
tell("session", subprocess.Popen(sleep, start_new_session=True).pid)
tell("stubborn", subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]).pid)
if (pid := os.fork()) == 0:
    tell("bare", subprocess.Popen(sleep, env={}).pid)  # of a fork that lives
    time.sleep(300)
tell("fork", pid)
tell("ready", 0)
sys.stdin.readline()
os._exit(3) if sys.argv[2] == "abruptly" else sys.exit(0)
"""


class Rank:
    """A process with a guard, and what it has started."""

    def __init__(self, how: str, end: str):
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, how, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        seen = guard.look(self.process.pid)
        assert seen is not None
        self.name = seen.name
        self.children: dict[str, guard.Name] = {}
        while not {"ready", "bare"} <= self.children.keys():
            name, pid = self.process.stdout.readline().split()
            seen = guard.look(int(pid) or os.getpid())
            assert seen is not None
            self.children[name] = seen.name
        del self.children["ready"]

    def end(self) -> int:
        """Let it end; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.wait(60)

    def left(self, seconds: float, but: Collection[str] = ()) -> set[str]:
        """What still runs when all but these have ended, or after this time."""
        end = time.monotonic() + seconds
        while True:
            found = {name for name, child in self.children.items() if (s := guard.look(child.pid)) and s.name == child}
            if found <= set(but) or time.monotonic() > end:
                return found
            time.sleep(0.05)


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    started: list[Rank] = []
    yield started
    for rank in started:
        rank.process.kill()
        for child in rank.children.values():
            if (seen := guard.look(child.pid)) and seen.name == child:
                os.kill(child.pid, signal.SIGKILL)
        rank.process.communicate()


def guards_of(rank: Rank) -> set[int]:
    found = set()
    for seen in guard.running():
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{seen.name.pid}/cmdline").read_bytes().split(b"\0")
            if guard.__file__.encode() in arguments and str(rank.name).encode() in arguments:
                found.add(seen.name.pid)
    return found


def guard_that_knows_all(rank: Rank, but: Collection[int]) -> int:
    """The number of a guard which has been told of what the rank has started."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        new = guards_of(rank) - set(but)
        # The process that starts a guard is waited for last.
        children = " ".join(p.read_text() for p in Path(f"/proc/{rank.process.pid}/task").glob("*/children")).split()
        if len(new) == 1 and {int(pid) for pid in children} <= {child.pid for child in rank.children.values()}:
            return new.pop()
        time.sleep(0.05)
    pytest.fail(f"guards: {guards_of(rank)}, of which were killed: {but}")


def test_whatever_a_killed_process_has_started_ends_though_its_guard_was_killed_too(ranks: list[Rank]) -> None:
    ranks.append(Rank("whole", "abruptly"))
    killed: list[int] = []
    for _ in range(2):
        killed.append(guard_that_knows_all(ranks[0], killed))
        os.kill(killed[-1], signal.SIGKILL)
    guard_that_knows_all(ranks[0], killed)
    assert ranks[0].left(0.0) == {"before", "program", "session", "stubborn", "bare", "fork"}
    ranks[0].process.kill()
    assert ranks[0].left(20.0) == set()


@pytest.mark.parametrize(
    ("how", "end", "code", "stay"),
    [
        ("whole", "in order", 0, {"session"}),
        # A notebook's kernel that is restarted takes the workers of its loaders along, and not the user's servers.
        ("alone", "abruptly", 3, {"session"}),
        ("alone", "in order", 0, {"before", "program", "session", "stubborn", "bare", "fork"}),
    ],
)
def test_what_was_meant_to_stays(how: str, end: str, code: int, stay: set[str], ranks: list[Rank]) -> None:
    ranks.append(Rank(how, end))
    assert ranks[0].end() == code
    if end == "in order" and how == "alone":
        time.sleep(2)  # for whom would end it
    assert ranks[0].left(20.0, but=stay) == stay


def test_a_process_that_got_the_number_of_another_is_left_alone() -> None:
    """The rank had ended before its guard came, and its number belongs to a stranger, with children of its own."""
    with subprocess.Popen(
        ["sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as stranger:
        assert stranger.stdout is not None
        child, seen = int(stranger.stdout.readline()), guard.look(stranger.pid)
        assert seen is not None
        try:
            other = guard.Name(stranger.pid, seen.name.born - 1)
            command = [sys.executable, "-I", "-S", guard.__file__, str(other), str(seen.session), "job"]
            subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=True)
            time.sleep(2)
            assert guard.look(child) is not None
            assert stranger.poll() is None
        finally:
            os.killpg(stranger.pid, signal.SIGKILL)


def test_it_is_no_child_that_a_script_would_wait_for_and_no_child_writes_to_it(tmp_path: Path) -> None:
    """One that has closed all its files opens others, of the same numbers."""
    script = """
import os, sys
from jaxdist.control import guard
guard.start(whole_job=True)
try:
    while True:
        os.wait()
except ChildProcessError:
    print("none", flush=True)
if os.fork() == 0:
    os.closerange(3, 256)
    files = [os.open(f"{sys.argv[1]}/{i}", os.O_CREAT | os.O_RDWR) for i in range(64)]
    if os.fork() != 0:
        os.wait()
    os._exit(0)
os.wait()
"""
    command = [sys.executable, "-W", "ignore:This process", "-c", script, str(tmp_path)]  # forks, and has threads
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("none\n", "")
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {str(i): 0 for i in range(64)}
