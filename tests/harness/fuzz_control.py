"""Strangers at the ports of a running job: `fuzz_control.py MESSAGES SEED`.

Half of the messages come while rank 0 waits for the other rank, half while both train. Prints what was sent and how
the job ended; the exit code is 0 if it went on and each of its rounds had the very same weights as the first one, which
nobody disturbed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import pickle
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from harness import jobs
from harness.listening import listening

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

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def message(rng: random.Random, challenge: bytes, port: int, evil: bytes) -> tuple[str, bytes]:
    """A kind and the bytes of a message that somebody who knows all but a secret may send."""
    hello = struct.pack("!IIQ64s64s", 1, 2, 4711, b"node1", b"127.0.0.1") + rng.randbytes(32)
    public = hashlib.sha256(f"jaxdist port {port}".encode()).digest()
    whole = hello + hmac.digest(public, b"rank" + challenge + hello, "sha256")
    frame = lambda content: struct.pack("!i", len(content)) + content
    kinds = {
        "random": rng.randbytes(rng.randrange(1, 5000)),
        "nothing": b"",
        "hello": whole,
        "part of a hello": whole[: rng.randrange(len(whole))],
        "mutated hello": _mutated(rng, whole),
        "hello twice": whole + whole,
        "echo": challenge + whole,
        "pickle": frame(evil),
        "pickle after a hello": whole + frame(evil),
        "pickled hello": frame(pickle.dumps((1, 2, ("node1", 4711, "127.0.0.1")))),
        "length": struct.pack("!i", rng.choice([0, 1, -1, 2**31 - 1])) + rng.randbytes(rng.randrange(16)),
        "long length": struct.pack("!iQ", -1, rng.choice([0, 2**40, 2**62, 2**64 - 1])) + b"x" * 10,
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(40),
    }
    return rng.choice(list(kinds.items()))


def _mutated(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randrange(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def attack(rng: random.Random, ports: Collection[int], count: int, evil: bytes) -> None:
    """Send so many messages to the ports."""
    sent: Counter[str] = Counter()
    kept: list[socket.socket] = []
    while sum(sent.values()) < count:
        port = rng.choice(sorted(ports))
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
    print(f"at ports {sorted(ports)}: {dict(sorted(sent.items()))}", flush=True)


def run(count: int, seed: int) -> list[str]:
    """Run a job of two ranks under attack.

    Args:
      count: number of messages.
      seed: of the messages.

    Returns:
      What went wrong; nothing if all is well.
    """
    with tempfile.TemporaryDirectory(prefix="jaxdist-fuzz-") as folder:
        return _run(Path(folder), count, random.Random(seed))


def _run(folder: Path, count: int, rng: random.Random) -> list[str]:
    stop, pwned = folder / "stop", folder / "pwned"
    evil = pickle.dumps(_Evil(pwned))
    port = jobs.free_port()
    job = jobs.Job()

    def start(rank: int) -> None:
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "JAXDIST_SECRET": "ours"}
        job.start([sys.executable, "-c", _JOB, str(stop)], {**shared, "RANK": str(rank)})

    def ports() -> set[int]:
        return {port for process in job.processes for _, port in listening(process.pid)}

    try:
        start(0)
        end = time.monotonic() + 60
        while port not in ports() and time.monotonic() < end:
            time.sleep(0.05)
        attack(rng, {port}, count // 2, evil)
        start(1)
        undisturbed = set(job.wait_for(lambda text: text.count("ROUND") >= 2).splitlines()[:1])
        attack(rng, ports(), count - count // 2, evil)
        rounds = job.text(0).count("ROUND")
        job.wait_for(lambda text: text.count("ROUND") > 2 * rounds + 2)
        stop.touch()
        results = job.finish(120)
    finally:
        job.kill()
    problems = [f"rank {i} ended with {r.returncode}:\n{r.output}" for i, r in enumerate(results) if r.returncode]
    for i, result in enumerate(results):
        if (found := set(result.stdout.splitlines())) != undisturbed:
            problems.append(f"rank {i} has other weights: {found}, not {undisturbed}")
    if pwned.exists():
        problems.append("a stranger's pickle was unpickled")
    print(f"{results[0].stdout.count('ROUND')} rounds of 20 steps, problems: {problems or 'none'}", flush=True)
    return problems


if __name__ == "__main__":
    sys.exit(1 if run(int(sys.argv[1]), int(sys.argv[2])) else 0)
