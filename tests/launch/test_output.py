"""What a process writes, passed on: lines of any length, however they come, and whoever reads."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from jaxdist.launch import output
from jaxdist.launch.output import LineFilter, Pump


def write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


class Source:
    """A process's pipe, and a file in place of our own output."""

    def __init__(self, shown: LineFilter):
        reading, self.writing = os.pipe()
        self.seen: list[bytes] = []
        self.target = io.StringIO(newline="")

        def note(line: bytes) -> bytes | None:
            self.seen.append(line)
            return shown(line)

        self.pump = Pump(os.fdopen(reading, "rb"), self.target, note)
        self.pump.start()

    def write(self, *pieces: bytes, pause: float = 0.05) -> str:
        for piece in pieces:
            write_all(self.writing, piece)
            time.sleep(pause)  # mostly a read each: what is right does not depend on it
        os.close(self.writing)
        self.pump.join(60)
        assert not self.pump.is_alive()
        return self.target.getvalue()


def prefixed(line: bytes) -> bytes:
    return b"[1] " + line


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], "[1] one\n[1] two\n"),
        ([b"on", b"e\ntw", b"o"], "[1] one\n[1] two\n"),
        ([b"\r10%", b"\r20%\r"], "[1] \r[1] 10%\r[1] 20%\r"),
        ([b"windows\r\n", b"x\r", b"\ny\n"], "[1] windows\r\n[1] x\r\n[1] y\n"),
        ([b"\n\n"], "[1] \n[1] \n"),
        ([], ""),
    ],
)
def test_lines(pieces: list[bytes], expected: str) -> None:
    assert Source(prefixed).write(*pieces) == expected


def test_long_lines() -> None:
    line = "x" * (1 << 19)
    source = Source(prefixed)
    assert source.write(line.encode(), b"\n", pause=0.0) == f"[1] {line}\n"
    assert source.seen == [f"{line}\n".encode()]  # of reasonable length: in one piece
    line = "x" * (5 << 20)
    source = Source(prefixed)
    assert source.write(line.encode() + b"\nnext\n", pause=0.0) == f"[1] {line}\n[1] next\n"
    assert len(source.seen) == 2
    assert len(source.seen[0]) <= 1 << 21  # what was kept: no more than about a mebibyte
    source = Source(lambda line: None if line.startswith(b"x") else line)
    assert source.write(b"x" * (3 << 20) + b"xyz\n", b"next\n", pause=0.0) == "next\n"  # left out to its end


def test_a_reader_that_has_gone_is_seen_by_the_process_as_its_own() -> None:
    """`jaxdist run train.py | head`: what it writes fails, as without a launcher."""
    reading, writing = os.pipe()
    os.close(reading)
    program = "import time\nwhile True: print('x', flush=True); time.sleep(0.01)"
    with (
        os.fdopen(writing, "w") as target,
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        Pump(process.stdout, target, lambda line: line).start()
        assert b"BrokenPipeError" in process.stderr.read()


def test_output_that_can_not_be_written_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """`jaxdist run train.py > log` on a full disk; a job that succeeds does not, then."""
    program = "from jaxdist.launch.command import Command\nfrom jaxdist.launch.processes import run_job\n"
    program += "raise SystemExit(run_job([Command('rank 0', ['sh', '-c', COMMAND], {}, lambda line: line)]))"
    for command, code in [("echo hello", output.NOT_WRITTEN), ("echo hello; exit 3", 3)]:
        with Path("/dev/full").open("w") as target:
            argv = [sys.executable, "-c", program.replace("COMMAND", repr(command))]
            done = subprocess.run(argv, stdout=target, timeout=60, check=False)
        assert done.returncode == code
        assert capfd.readouterr().err == "jaxdist: output could not be written: No space left on device\n"


def test_a_pipe_that_does_not_block_loses_nothing() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    lines = b"x" * 99 + b"\n"
    with os.fdopen(writing, "w") as target, os.fdopen(reading, "rb") as source:
        writer = threading.Thread(target=output.write, args=(target, lines * 5000), daemon=True)
        writer.start()
        assert source.read(len(lines) * 5000) == lines * 5000
        writer.join(60)
        assert not writer.is_alive()


@pytest.fixture
def full() -> Iterator[tuple[int, TextIO]]:
    """A full pipe: its other end, and a stream into it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    target = os.fdopen(writing, "w")
    yield reading, target
    os.close(reading)  # frees the threads that wait
    target.close()


def test_a_word_that_nobody_reads_keeps_nobody(full: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, target = full
    monkeypatch.setattr(sys, "stderr", target)
    monkeypatch.setattr(output, "_SAY_S", 0.1)
    for _ in range(3):
        output.say("hello")  # hangs, without a time limit
    said = b""
    while said.count(b"jaxdist: hello\n") < 3:  # somebody reads it, later
        said += os.read(reading, 1 << 16)


def test_a_process_whose_output_nobody_reads_can_be_relieved(full: tuple[int, TextIO]) -> None:
    """And what it has written meanwhile comes when somebody reads, in order."""
    other_end, target = full
    reading, writing = os.pipe()
    pump = Pump(os.fdopen(reading, "rb"), target, lambda line: line)
    pump.start()
    os.write(writing, b"first\n")
    end = time.monotonic() + 30
    while not pump.writing and time.monotonic() < end:
        time.sleep(0.01)
    lines = b"".join(b"%d\n" % i for i in range(50_000))  # more than pipes hold
    done = threading.Event()

    def write() -> None:
        write_all(writing, lines)
        os.close(writing)
        done.set()

    threading.Thread(target=write, daemon=True).start()
    assert not done.wait(0.5)
    pump.relieve()
    assert done.wait(30)
    said = b""
    while not said.endswith(b"49999\n"):
        said += os.read(other_end, 1 << 16)
    assert said.lstrip(b".") == b"first\n" + lines
