"""Strangers at the ports of a running job: `fuzz_control.py MESSAGES SEED [--other-user] [--no-secret]`.

Half of the messages come while rank 0 waits for the other rank, half while both train. Prints what was sent and how
the job ended; the exit code is 0 if it went on and each of its rounds had the very same weights as one without them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import hmac
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jobs
from listening import listening

NOBODY = 65534
_KEPT = 200  # connections that stay open

_JOB = """
import hashlib, sys, pathlib
import jax, jax.numpy as jnp, numpy as np
import jaxdist
ctx = jaxdist.init(timeout=60)
step = jaxdist.data_parallel(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w))
x = np.sin(np.arange(4 * 8, dtype=np.float32) + ctx.rank).reshape(4, 8)
while True:
    w = jnp.linspace(-1, 1, 64).reshape(8, 8)
    for _ in range(20):
        w = step(w, x)
    print("ROUND", hashlib.sha256(np.asarray(w.addressable_data(0)).tobytes()).hexdigest(), flush=True)
    if ctx.broadcast(pathlib.Path(sys.argv[1]).exists()):
        break
"""


class _Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def message(rng: random.Random, challenge: bytes, port: int, evil: bytes) -> tuple[str, bytes]:
    """A kind and the bytes of a message that somebody who knows all but a secret may send."""
    nonce = rng.randbytes(32)
    hello = struct.pack("!IIQ64s64s", 1, 2, 4711, b"node1", b"127.0.0.1") + nonce
    public = hashlib.sha256(f"jaxdist port {port}".encode()).digest()
    whole = hello + hmac.digest(public, b"rank" + challenge + hello, "sha256")
    frame = lambda content: struct.pack("!i", len(content)) + content
    kind = rng.choice(list(_KINDS))
    return kind, {
        "random": lambda: rng.randbytes(rng.randrange(1, 5000)),
        "nothing": lambda: b"",
        "hello": lambda: whole,
        "part of a hello": lambda: whole[: rng.randrange(len(whole))],
        "mutated hello": lambda: _mutated(rng, whole),
        "hello twice": lambda: whole + whole,
        "echo": lambda: challenge + whole,
        "pickle": lambda: frame(evil),
        "pickle after a hello": lambda: whole + frame(evil),
        "pickled hello": lambda: frame(pickle.dumps((1, 2, ("node1", 4711, "127.0.0.1")))),
        "length": lambda: struct.pack("!i", rng.choice([0, 1, -1, 2**31 - 1])) + rng.randbytes(rng.randrange(16)),
        "long length": lambda: struct.pack("!iQ", -1, rng.choice([0, 2**40, 2**62, 2**64 - 1])) + b"x" * 10,
        "http": lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "http2": lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(40),
    }[kind]()


_KINDS = (
    "random", "nothing", "hello", "part of a hello", "mutated hello", "hello twice", "echo", "pickle",
    "pickle after a hello", "pickled hello", "length", "long length", "http", "http2",
)  # fmt: skip


def _mutated(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randrange(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def attack(rng: random.Random, ports: Callable[[], list[int]], count: int, evil: bytes) -> Counter[str]:
    """Send so many messages to the ports, and see that nobody answers with more than a challenge."""
    sent: Counter[str] = Counter()
    kept: list[socket.socket] = []
    while sum(sent.values()) < count:
        found = ports()
        if not found:
            break
        port = rng.choice(found)
        try:
            sock = socket.create_connection(("127.0.0.1", port), 5)
        except OSError:
            sent["not let in"] += 1
            continue
        challenge = b""
        with contextlib.suppress(OSError):
            if rng.random() < 0.5:
                sock.settimeout(0.05)
                challenge = sock.recv(40)
            kind, content = message(rng, challenge, port, evil)
            sent[kind] += 1
            sock.sendall(content)
        how = rng.random()
        if how < 0.3:
            kept.append(sock)
            if len(kept) > _KEPT:
                kept.pop(rng.randrange(len(kept))).close()
            continue
        if how < 0.5:  # ends it with a reset
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    for sock in kept:
        sock.close()
    return sent


def run(count: int, seed: int, *, secret: bool = True, other_user: bool = False) -> list[str]:
    """Run a job of two ranks under attack.

    Args:
      count: number of messages.
      seed: of the messages.
      secret: whether the ranks have a JAXDIST_SECRET.
      other_user: the strangers are processes of another user (root only).

    Returns:
      What went wrong; nothing if all is well.
    """
    with tempfile.TemporaryDirectory(prefix="jaxdist-fuzz-") as folder:
        Path(folder).chmod(0o777)
        return _run(Path(folder), count, seed, secret, other_user)


def _run(folder: Path, count: int, seed: int, secret: bool, other_user: bool) -> list[str]:
    stop, pwned = folder / "stop", folder / "pwned"
    port = jobs.free_port()
    shared = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "JAXDIST_SECRET": "of this job" if secret else None,
    }  # fmt: skip

    def strangers(count: int, seed: int) -> None:
        pids = ",".join(str(process.pid) for process in job.processes)
        command = [sys.executable, __file__, "--strangers", pids, str(port), str(count), str(seed), str(pwned)]
        command += ["--other-user"] * other_user
        subprocess.run(command, check=True, timeout=3600)

    def quiet() -> str:
        job = jobs.Job()
        stop.touch()
        for rank in range(2):
            job.start([sys.executable, "-c", _JOB, str(stop)], {**shared, "RANK": str(rank)})
        results = job.finish(120)
        stop.unlink()
        assert all(r.returncode == 0 for r in results), [r.output for r in results]
        return results[0].stdout

    def attacked() -> list[jobs.Result]:
        job.start([sys.executable, "-c", _JOB, str(stop)], {**shared, "RANK": "0"})
        strangers(count // 2, seed)
        job.start([sys.executable, "-c", _JOB, str(stop)], {**shared, "RANK": "1"})
        job.wait_for(lambda text: text.count("ROUND") >= 2)
        strangers(count - count // 2, seed + 1)
        rounds = job.text(0).count("ROUND")
        job.wait_for(lambda text: text.count("ROUND") > 2 * rounds + 2)
        stop.touch()
        return job.finish(120)

    expected = set(quiet().splitlines())
    job = jobs.Job()
    try:
        results = attacked()
    finally:
        job.kill()
    problems = [f"rank {i} ended with {r.returncode}:\n{r.output}" for i, r in enumerate(results) if r.returncode]
    for i, result in enumerate(results):
        if set(result.stdout.splitlines()) != expected:
            problems.append(f"rank {i} has other weights: {set(result.stdout.splitlines())}, not {expected}")
    if pwned.exists():
        problems.append("a stranger's pickle was unpickled")
    print(f"{results[0].stdout.count('ROUND')} rounds of 20 steps, problems: {problems or 'none'}", flush=True)
    return problems


def _strangers(pids: str, port: str, count: str, seed: str, pwned: str, *, other_user: bool) -> None:
    known: list[int] = []

    def ports() -> list[int]:
        if not known:
            end = time.monotonic() + 60
            while not known and time.monotonic() < end:
                # While one rank waits, its rendezvous; then whatever the two listen at.
                mine = {p for pid in pids.split(",") for _, p in listening(int(pid))}
                known.extend([int(port)] if "," not in pids and int(port) in mine else mine if "," in pids else [])
                time.sleep(0.05)
            if other_user:
                socket.getaddrinfo("127.0.0.1", 1)  # imports what the other user may not read
                os.seteuid(NOBODY)
        return known

    sent = attack(random.Random(int(seed)), ports, int(count), pickle.dumps(_Evil(pwned)))
    print(f"at ports {known}: {dict(sorted(sent.items()))}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--strangers":
        _strangers(*sys.argv[2:7], other_user="--other-user" in sys.argv)
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("messages", type=int)
        parser.add_argument("seed", type=int)
        parser.add_argument("--other-user", action="store_true")
        parser.add_argument("--no-secret", action="store_true")
        asked = parser.parse_args()
        begin = time.monotonic()
        wrong = run(asked.messages, asked.seed, secret=not asked.no_secret, other_user=asked.other_user)
        print(f"{time.monotonic() - begin:.0f} s")
        sys.exit(1 if wrong else 0)
