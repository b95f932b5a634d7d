"""What the channel beside the training guarantees: strangers are kept out and do no harm; messages arrive."""

import contextlib
import os
import pickle
import random
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest
from harness import jobs
from harness.errors import missing
from harness.listening import listening

SCRIPT = str(Path(__file__).parent / "scripts" / "channel.py")


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def framed(content: bytes) -> bytes:
    return struct.pack("!Q", len(content)) + content


def messages(rng: random.Random, said: bytes, evil: bytes) -> list[bytes]:
    """What somebody who does not know the secret may send, and what the port said first."""
    return [
        b"",
        rng.randbytes(rng.randrange(1, 5000)),
        said,
        framed(evil),
        said + framed(evil),
        said[:8] + rng.randbytes(64) + framed(evil),
        said[:8] + rng.randbytes(64) + struct.pack("!Q", rng.choice([0, 2**40, 2**64 - 1])) + b"x" * 10,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(40),
    ]


def attack(rng: random.Random, ports: Collection[int], count: int, evil: bytes) -> list[socket.socket]:
    """So many connections; some stay open, some end with a reset."""
    kept: list[socket.socket] = []
    for number in range(count):
        try:
            sock = socket.create_connection(("127.0.0.1", rng.choice(sorted(ports))), 5)
        except OSError:
            continue
        with contextlib.suppress(OSError):
            sock.settimeout(0.05)
            said = sock.recv(40) if rng.random() < 0.5 else b""
            every = messages(rng, said, evil)
            sock.sendall(every[number % len(every)])
        if number % 3 == 0:
            kept.append(sock)
            continue
        if number % 3 == 1:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    return kept


@contextlib.contextmanager
def job() -> Iterator[jobs.Job]:
    """Whatever happens, its processes end."""
    made = jobs.Job()
    try:
        yield made
    finally:
        made.kill()


def there(rank: int, port: int, **more: str | None) -> dict[str, str | None]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}


def ports_of(running: jobs.Job) -> set[int]:
    return {port for process in running.processes for _, port in listening(process.pid)}


def wait_for_port(running: jobs.Job, port: int) -> None:
    end = time.monotonic() + 60
    while port not in ports_of(running):
        assert time.monotonic() < end, running.everything()
        time.sleep(0.05)


def test_a_job_goes_on_bit_for_bit_whatever_strangers_send(tmp_path: Path) -> None:
    """Half of it while rank 0 waits for the other one, half while both train; messages come whole and in order."""
    count = 60
    stop, pwned, port, rng = tmp_path / "stop", tmp_path / "pwned", jobs.free_port(), random.Random(count)
    command, evil = [sys.executable, SCRIPT, "rounds", str(stop)], pickle.dumps(Evil(pwned))
    with job() as running:
        running.start(command, there(0, port, JAXDIST_SECRET="ours"))
        wait_for_port(running, port)
        kept = attack(rng, {port}, count // 2, evil)
        running.start(command, there(1, port, JAXDIST_SECRET="ours"))
        undisturbed = running.wait_for(lambda text: text.count("ROUND") >= 2).splitlines()[:1]
        kept += attack(rng, ports_of(running) or {port}, count // 2, evil)
        rounds = running.text(0).count("ROUND")
        running.wait_for(lambda text: text.count("ROUND") > 2 * rounds + 2)
        stop.touch()
        result = running.end(60)
    assert result.returncode == 0, result.output
    assert set(re.findall("ROUND .*", result.stdout)) == set(undisturbed)
    assert not pwned.exists()
    for sock in kept:
        sock.close()


def joining(rank: int, url: str, env: Mapping[str, str | None], size: int = 2, timeout: str = "30") -> jobs.Job:
    command = [sys.executable, SCRIPT, "joins", url, str(rank), str(size)]
    return jobs.Job().start(command, {**env, "JAXDIST_TIMEOUT": timeout})


@pytest.mark.slow
def test_a_stranger_takes_no_place() -> None:
    """And hears which address has not let it in; then comes who belongs to the job."""
    url, own = f"tcp://127.0.0.1:{jobs.free_port()}", {"JAXDIST_SECRET": "ours"}
    root = joining(0, url, own)
    wait_for_port(root, int(url.rpartition(":")[2]))
    refused = joining(1, url, {"JAXDIST_SECRET": "theirs"}, timeout="1.5").end(60)
    assert refused.returncode == 1, refused.output
    assert "REFUSED TimeoutError" in refused.stdout, refused.output
    assert url in refused.stdout
    right = joining(1, url, own)
    results = [one.end(60) for one in (root, right)]
    assert [result.returncode for result in results] == [0, 0], [result.output for result in results]


@pytest.mark.slow
def test_a_root_that_gives_up_says_that_strangers_came() -> None:
    url = f"tcp://127.0.0.1:{jobs.free_port()}"
    root = joining(0, url, {"JAXDIST_SECRET": "ours"}, timeout="4")
    wait_for_port(root, int(url.rpartition(":")[2]))
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))):
        said = root.end(60).stdout
    assert missing(("REFUSED TimeoutError", "missing: rank 1", "1 connection", "secret"), said) == [], said


class Cut(threading.Thread):
    """Passes bytes on to a port, and cuts its first connection when it is told to."""

    def __init__(self, port: int):
        super().__init__(daemon=True)
        self.server, self.port, self.first = socket.create_server(("127.0.0.1", 0)), port, list[socket.socket]()
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self.server.accept()
                theirs = socket.create_connection(("127.0.0.1", self.port))
                self.first = self.first or [ours, theirs]
                for source, target in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self.pass_on, args=(source, target), daemon=True).start()

    def pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def cut(self) -> None:
        for sock in self.first:
            sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_rank_that_does_not_hear_the_roots_answer_comes_again() -> None:
    port, env = jobs.free_port(), {"JAXDIST_SECRET": "ours"}
    root = joining(0, f"tcp://127.0.0.1:{port}", env, 3)
    wait_for_port(root, port)
    between = Cut(port)
    behind = joining(1, f"tcp://127.0.0.1:{between.server.getsockname()[1]}", env, 3)
    end = time.monotonic() + 60
    while not between.first:
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(1)  # until it has proved to be of the job, and waits for the third
    between.cut()
    results = [one.end(60) for one in (joining(2, f"tcp://127.0.0.1:{port}", env, 3), behind, root)]
    assert [result.returncode for result in results] == [0] * 3, [result.output for result in results]
    between.server.close()


@pytest.mark.slow
def test_a_rank_does_not_talk_to_a_stranger_that_listens_in_place_of_the_root() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        rank = joining(1, url, {"JAXDIST_SECRET": "ours"}, timeout="2")
        taken, _ = server.accept()
        taken.sendall(b"jaxdist3" + bytes(32) + framed(pickle.dumps("come in")))
        result = rank.end(60)
        taken.close()
    assert result.returncode == 1
    assert "REFUSED TimeoutError" in result.stdout, result.output
    assert url in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size", "tokens"), [((1, 1), 3, ("rank 1",)), ((1,), 3, ("size 3",))])
def test_one_rank_claimed_twice_and_other_sizes_are_refused(
    ranks: tuple[int, ...], size: int, tokens: tuple[str, ...]
) -> None:
    url, env = f"tcp://127.0.0.1:{jobs.free_port()}", {"JAXDIST_SECRET": "ours"}
    started = [joining(0, url, env, size if len(ranks) > 1 else 2), *(joining(rank, url, env, size) for rank in ranks)]
    for one in started:
        result = one.end(60)
        assert result.returncode != 0, result.output
        assert all(token in result.stdout for token in ("REFUSED ValueError", *tokens)), result.output


@pytest.mark.slow
def test_a_home_that_can_keep_no_secret_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    made = jobs.Job().start([sys.executable, SCRIPT, "homes"], {"HOME": str(tmp_path), "JAXDIST_SECRET": None})
    lines = made.end(60).stdout.splitlines()
    assert len(lines) == 3, lines
    assert all(line.startswith("REFUSED") and "JAXDIST_SECRET" in line for line in lines)
    assert "chmod 600" in lines[0]


@pytest.mark.slow
def test_who_has_heard_that_calls_differ_waits_in_the_next_one_for_who_has_not(tmp_path: Path) -> None:
    for result in jobs.launch("hand", 3, [SCRIPT, "mixes", str(tmp_path)]).finish():
        assert result.returncode == 0, result.output
        assert missing(("TOLD", "different calls", "rank 0 at 'broadcast'", "barrier", "MET"), result.stdout) == []
