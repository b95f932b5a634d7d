"""What the processes of a job prove to each other to have: a secret, or being of one user on one host."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import NamedTuple

OPEN = "none"  # JAXDIST_SECRET=none: no secret, on purpose
_BYTES = 32
_SET = (
    "set JAXDIST_SECRET to the same random string on every rank (`export JAXDIST_SECRET=$(openssl rand -hex 32)` "
    f"before they are started), or to {OPEN!r} to let in anyone who reaches the port"
)


class Key(NamedTuple):
    """By what a job knows its own."""

    secret: bytes  # both ends of a connection prove that they know it
    # whether both ends have to be processes of one user, which the kernel tells for connections within a host: then
    # other users may know the secret
    same_user: bool = False


def is_loopback(host: str) -> bool:
    """Whether `host` is written as a loopback address (no look-up: a name may map to 127.0.1.1)."""
    return host in ("localhost", "::1") or host.startswith("127.")


def job_key(host: str, name: str) -> Key:
    """The key of a job whose root listens at `host`.

    JAXDIST_SECRET if it is set. Else on one host (a loopback address): what the kernel says. Else a secret in the home
    directory, `~/.jaxdist/secret`, which the user's hosts share and other users can't read.
    """
    given = os.environ.get("JAXDIST_SECRET")
    public = hashlib.sha256(f"jaxdist {name}".encode()).digest()
    if given == OPEN:
        return Key(public)
    if given:
        return Key(hashlib.sha256(given.encode()).digest())
    if is_loopback(host):
        if not _TABLES[socket.AF_INET].exists():
            raise ValueError(f"this system does not tell whose connections are (no /proc/net/tcp): {_SET}")
        return Key(public, same_user=True)
    return Key(hmac.digest(_of_this_user(host), public, "sha256"))


def _of_this_user(host: str) -> bytes:
    """The secret in the home directory, made when it is first wanted."""
    try:
        path = Path.home() / ".jaxdist" / "secret"
        for _ in range(3):  # a network disk may say for a moment that the file is not there
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                    raise ValueError(f"{path} has to be yours, and for you alone: chmod 600 {path}, or {_SET}")
                content = file.read(4 * _BYTES)
                if len(content) < _BYTES:
                    raise ValueError(f"{path} holds no secret: delete it, or {_SET}")
                return content
            _write(path)
    except (OSError, RuntimeError) as error:  # a RuntimeError: nobody knows where the home is
        reason = str(error)
    else:
        reason = f"{path} was written and has disappeared"
    raise ValueError(f"ranks on other hosts are to come to {host}, and no secret to recognise them by: {_SET}. "
                     f"(It could not be kept in the home directory: {reason})")  # fmt: skip


def _write(path: Path) -> None:
    """A new secret, unless another process is faster: whole when it appears."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    mine = path.with_name(f"{socket.gethostname()}.{os.getpid()}")
    mine.unlink(missing_ok=True)
    try:
        with open(mine, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secrets.token_bytes(_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
    finally:
        mine.unlink(missing_ok=True)


# --- whose connection is this?

_TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}


def peer_user(sock: socket.socket) -> int | None:
    """The id of the user whose process holds the other end of a TCP connection within this host."""
    try:
        here, there = sock.getsockname(), sock.getpeername()
    except OSError:
        return None
    for family, table in _TABLES.items():
        if not (ends := [_as_written(family, *end[:2]) for end in (there, here)]) or None in ends:
            continue
        with contextlib.suppress(OSError), table.open() as rows:
            for row in rows:
                fields = row.split(None, 9)
                if fields[1:3] == ends:
                    return int(fields[7])
    return None


def _as_written(family: int, ip: str, port: int) -> str | None:
    """An address as the kernel's table has it: the words of a sockaddr as hexadecimal numbers."""
    if family == socket.AF_INET:
        ip = ip.removeprefix("::ffff:")
        if ":" in ip:
            return None
        words = socket.inet_pton(socket.AF_INET, ip)
    else:
        words = socket.inet_pton(socket.AF_INET6, ip if ":" in ip else f"::ffff:{ip}")
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(words) // 4}I", words)) + f":{port:04X}"
