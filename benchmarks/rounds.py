"""Jobs of pinned ranks that stay alive and take turns, so that compared variants run in the same period."""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TextIO

from worker import steps_in

HERE = Path(__file__).resolve().parent
TIMEOUT = 600.0  # seconds for any request to a job


class Job:
    """Ranks of ``worker.py`` under mpirun.

    Args:
      side: ``module:function`` that builds their variants, and its arguments.
      ranks: the number of ranks.
      python: their interpreter.

    Raises:
      SystemExit: (from every method) a rank failed, or did not reply within `TIMEOUT` seconds.
    """

    def __init__(self, side: Sequence[str], ranks: int, python: str = sys.executable):
        from jaxdist.launch.mpi import OVERSUBSCRIBE_ENV, ROOT_ENV  # not at the top, since torch's ranks lack it

        self.side, self._folder = " ".join(side), tempfile.mkdtemp(prefix="benchmark-")
        self._streams: dict[socket.socket, TextIO] = {}
        path = f"{self._folder}/socket"
        mpirun = Path(sys.executable).with_name("mpirun")
        command = [mpirun if mpirun.exists() else "mpirun", "-np", str(ranks), "--bind-to", "none"]
        command += [python, HERE / "worker.py", *side]
        env = {
            **os.environ, **ROOT_ENV, **OVERSUBSCRIBE_ENV, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            "BENCHMARK_SOCKET": path, "TMPDIR": self._folder,
        }  # fmt: skip
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            server.settimeout(1.0)
            for attempt in (1, 2, 3):
                self._process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
                )
                self._accept(server, ranks)
                # On a loaded machine, Open MPI sometimes fails: "listener thread failed to start".
                if self._streams or attempt == 3:
                    break
        if len(self._streams) < ranks:
            self._give_up("did not start")
        self._replies()

    def _accept(self, server: socket.socket, ranks: int) -> None:
        end = time.monotonic() + 60
        while len(self._streams) < ranks and time.monotonic() < end:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    return
            else:
                self._streams[connection] = connection.makefile()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end()

    def ask(self, do: str, name: str, **more: Any) -> list[dict[str, Any]]:
        """Send all ranks a request for one variant; return their replies, in any order."""
        for connection in self._streams:
            connection.sendall(json.dumps({"do": do, "name": name, **more}).encode() + b"\n")
        return self._replies()

    def run(self, name: str, steps: int) -> float:
        """Return the slowest rank's milliseconds per step."""
        return round(max(reply["ms"] for reply in self.ask("run", name, steps=steps)), 5)

    def end(self) -> None:
        """Stop the ranks."""
        for connection, stream in self._streams.items():
            stream.close()
            connection.close()
        self._streams = {}
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _replies(self) -> list[dict[str, Any]]:
        """Return one reply per rank, in any order: others may wait for a failed rank."""
        replies = []
        waiting = list(self._streams)
        while waiting:
            ready = select.select(waiting, [], [], TIMEOUT)[0]
            if not ready:
                self._give_up(f"was silent for {TIMEOUT:g} s")
            for connection in ready:
                waiting.remove(connection)
                line = self._streams[connection].readline()
                if not line:
                    self._give_up("has ended")
                replies.append(json.loads(line))
                if "error" in replies[-1]:
                    self._give_up(f"failed.\n{replies[-1]['error']}")
        return replies

    def _give_up(self, what: str) -> NoReturn:
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        raise SystemExit(f"the job {self.side!r} {what}")

    def _kill(self) -> None:
        self._process.send_signal(signal.SIGTERM)  # mpirun ends its ranks
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Built(NamedTuple):
    """The first steps of a variant.

    Attributes:
      first_call_s: trace, compile and run time, on the slowest rank.
      losses: mean losses over the ranks for the first three steps, or empty.
      steps: the number of steps that fill a turn.
    """

    first_call_s: float
    losses: list[float]
    steps: int


def build(tasks: dict[str, tuple[Job, str]], seconds: float) -> dict[str, Built]:
    """Compile all variants.

    Args:
      tasks: label in tables -> job, and the variant's name there.
      seconds: length of a turn.
    """
    found = {}
    for label, (job, name) in tasks.items():
        replies = job.ask("build", name)
        print(f"{label}: first call {replies[0]['first_call_s']:.1f} s", file=sys.stderr, flush=True)
        each = [r["losses"] for r in replies]
        found[label] = Built(
            max(r["first_call_s"] for r in replies),
            [] if each[0][0] is None else [statistics.mean(step) for step in zip(*each, strict=True)],
            steps_in(seconds, max(r["step_s"] for r in replies)),
        )
    return found


def take_turns(tasks: dict[str, tuple[Job, str]], built: dict[str, Built], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds per step of each variant in each round."""
    return in_turns({x: functools.partial(job.run, name, built[x].steps) for x, (job, name) in tasks.items()}, rounds)


def in_turns(turns: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return what each turn measures in each round. The first one changes from round to round, since what comes
    after heavy work is slower."""
    measured: dict[str, list[float]] = {label: [] for label in turns}
    order = list(turns)
    for i in range(rounds):
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
        for label in order:
            measured[label].append(turns[label]())
        order.append(order.pop(0))
    return measured


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
