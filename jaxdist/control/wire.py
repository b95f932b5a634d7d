"""One connection between two processes of a job: each proves to know the job's secret, then come whole messages.

Nothing is unpickled before the proof. (multiprocessing's own challenge is HMAC-MD5 on Python 3.11, which FIPS hosts
refuse, and its connections block.)
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import pickle
import secrets
import socket
import struct
import tempfile
from pathlib import Path
from typing import Any

SECONDS = 5.0  # for the whole proof

ROOT, RANK = b"root", b"rank"  # the two roles
_OTHER = {ROOT: RANK, RANK: ROOT}
# Both ends send _MAGIC and a nonce, then the digest of the secret, their role and both nonces.
_MAGIC = b"jaxdist4"
_NONCE = _PROOF = 32
_LENGTH = struct.Struct("!Q")
_LONGEST = 1 << 32
BUFFERED = 1 << 20

_BYTES = 32
_SET = (
    "set JAXDIST_SECRET to the same random string on every rank (`export JAXDIST_SECRET=$(openssl rand -hex 32)` "
    "before they are started)"
)


class Link:
    """A connection, used by the thread of the event loop alone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.sock: socket.socket = writer.get_extra_info("socket")  # to look at, and to set options of
        self._reader, self._writer = reader, writer
        # asyncio sets it only if the socket's `proto` says TCP, and an accepted socket's says 0. Without it, Nagle's
        # algorithm delays a small message until the previous one is acknowledged, up to 40 ms later.
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def proves(self, key: bytes, role: bytes) -> bool:
        """Prove to know the job's secret, and return whether the other end, in the other role, knows it too."""
        mine = _MAGIC + secrets.token_bytes(_NONCE)
        self._writer.write(mine)
        theirs = await self._reader.readexactly(len(mine))
        if not theirs.startswith(_MAGIC):
            return False
        self._writer.write(hmac.digest(key, role + mine + theirs, "sha256"))
        proof = await self._reader.readexactly(_PROOF)
        return hmac.compare_digest(proof, hmac.digest(key, _OTHER[role] + theirs + mine, "sha256"))

    def send(self, message: Any) -> None:
        """Send something picklable; waits for nobody."""
        content = pickle.dumps(message)
        self._writer.writelines((_LENGTH.pack(len(content)), content))  # one packet

    async def receive(self) -> Any:
        """The next message. Raises EOFError or OSError at the end of the connection."""
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if length > _LONGEST:
            raise OSError(f"a message of {length} bytes")
        return pickle.loads(await self._reader.readexactly(length))

    @property
    def ended(self) -> bool:
        """Check whether the other end has closed it, and nothing is left to read."""
        return self._reader.at_eof()

    def close(self) -> None:
        """Send the remaining data, and end it."""
        self._writer.close()


def job_key(host: str, name: str) -> bytes:
    """Return the secret that the ranks of a job prove to know, given the host where its root listens."""
    # JAXDIST_SECRET if it is set. Else a secret in the home directory, `~/.jaxdist/secret`, which the user's hosts
    # share and other users can't read.
    given = os.environ.get("JAXDIST_SECRET")
    public = hashlib.sha256(f"jaxdist {name}".encode()).digest()
    if given:
        return hashlib.sha256(given.encode()).digest()
    try:
        return hmac.digest(_kept(Path.home() / ".jaxdist" / "secret"), public, "sha256")
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"ranks are to come to {host}, and no secret to recognize them by: {_SET}. (It could not be kept in the "
            f"home directory: {error})"
        ) from None


def _kept(path: Path) -> bytes:
    """Return the secret in a file. Creates the file, whole when it appears, unless a parallel process is faster."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as draft:  # for this user alone
            draft.write(secrets.token_bytes(_BYTES))
            draft.flush()
            with contextlib.suppress(FileExistsError):
                os.link(draft.name, path)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError(f"{path} has to be yours, and for you alone: chmod 600 {path}, or {_SET}")
        content = file.read(4 * _BYTES)
    if len(content) < _BYTES:
        raise ValueError(f"{path} holds no secret: delete it, or {_SET}")
    return content
