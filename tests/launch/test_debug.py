"""A person at a terminal: pdb on any rank of a job, and prompts."""

import contextlib
import os
import pty
import re
import select
import signal
import sys
from pathlib import Path

import pytest
from harness import jobs
from harness.started import CLI

SCRIPT = str(Path(__file__).parent / "scripts" / "debugging.py")
MARKS = (pytest.mark.mpi, pytest.mark.slow)


class Terminal:
    """A command in a terminal of its own, and what it shows."""

    def __init__(self, *command: str, **env: str):
        self.text, self._read = "", 0
        self._pid, self._screen = pty.fork()
        if self._pid == 0:
            jobs.hear_ctrl_c()
            os.execvpe(command[0], command, jobs.environment(env))

    def shows(self, pattern: str, answer: str = "") -> re.Match[str]:
        """Wait for a text after the last one that was waited for, and type an answer."""
        while not (match := re.compile(pattern).search(self.text, self._read)):
            assert self._reads(), f"{pattern} was not shown:\n{self.text}"
        self._read = match.end()
        os.write(self._screen, answer.encode())
        return match

    def end(self) -> int:
        while self._reads():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _reads(self) -> bool:
        if not select.select([self._screen], [], [], 60)[0]:
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # the command has ended
            self.text += os.read(self._screen, 1 << 16).decode()
            return True
        return False


def job(launcher: str, *words: str, **env: str) -> Terminal:
    if launcher == "plain":
        return Terminal(jobs.mpirun_path(), "-np", "2", sys.executable, SCRIPT, *words, **env)
    return Terminal(*CLI, "run", "-n", "2", "--launcher", launcher, *words[2:], SCRIPT, *words[:2], **env)


@pytest.mark.parametrize("how", ["env", *[pytest.param(how, marks=MARKS) for how in ("mpirun", "plain")]])
def test_the_others_wait_beyond_the_timeout_and_say_for_whom(how: str) -> None:
    terminal = job(how, "1", JAXDIST_TIMEOUT="8")
    where, prompt = r"rank 1\] [^\n]*debugger[^\n]*debugging\.py:1[34]", r"\(Pdb, rank 1\)"
    terminal.shows(f"(?s){where}.*{prompt}|{prompt}.*{where}")  # on stderr and stdout, in either order
    terminal.shows(r"rank 0\] .* 8 s.*rank 1 \(.*debugger.*debugging\.py:1[34]", "p turn + 40\n")
    terminal.shows(r"41\s", "c\n")
    assert terminal.end() == 0, terminal.text
    assert terminal.text.count("TOTAL 4.0") == 2, terminal.text


def test_ranks_that_stop_take_turns(launcher: str) -> None:
    terminal, turns = job(launcher, "01"), dict.fromkeys("01", 0)
    while sum(turns.values()) < 4:
        rank = terminal.shows(r"\(Pdb, rank (\d)\)", "p ctx.rank * 7 + 25 * 2\n")[1]
        terminal.shows(
            rf"{50 + 7 * int(rank)}\s+(TOTAL [\d.]+\s+)?\(Pdb, rank {rank}\)", "c\n" if turns[rank] else "n\n"
        )
        turns[rank] += 1
    assert terminal.end() == 0, terminal.text
    assert terminal.text.count("TOTAL 4.0") == 2, terminal.text


def test_post_mortem_of_the_rank_that_is_named(launcher: str) -> None:
    terminal = job(launcher, "", "fails", "--debug", "1")
    terminal.shows(r"\(Pdb, rank 1\)", "p total + 10 * ctx.rank\n")
    terminal.shows(r"14\.0\s", "q\n")
    assert terminal.end() == 1, terminal.text
    assert "(Pdb, rank 0)" not in terminal.text


def test_ctrl_c_at_the_prompt_ends_the_job(launcher: str) -> None:
    terminal = job(launcher, "01")
    terminal.shows(r"\(Pdb, rank \d\)", "\x03")
    assert terminal.end() == 130, terminal.text
    assert re.search("Traceback|prterun", terminal.text) is None


def test_a_prompt_is_seen_before_its_line_ends() -> None:
    program = "import sys; print('name?', end=' ', flush=True); print('hello', sys.stdin.readline())"
    terminal = Terminal(*CLI, "run", "--launcher", "env", "--prefix", "python", "-c", program)
    terminal.shows(r"\[0\] name\? ", "me\n")
    terminal.shows(r"hello me")
    assert terminal.end() == 0
