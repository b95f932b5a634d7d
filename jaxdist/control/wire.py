"""One connection between two processes of a job: each proves to know the job's secret, then come whole messages.

Nothing is unpickled before the proof. (multiprocessing's own challenge is HMAC-MD5 on Python 3.11, which FIPS hosts
refuse, and its connections block.)
"""

import asyncio
import hmac
import pickle
import secrets
import socket
import struct
from typing import Any

SECONDS = 5.0  # for the whole proof

# The root begins, with _MAGIC and a nonce. A rank answers with a nonce and its proof over both, the root with its own.
_MAGIC = b"jaxdist3"
_NONCE = _PROOF = 32
_LENGTH = struct.Struct("!Q")
_LONGEST = 1 << 32
BUFFERED = 1 << 20


class Link:
    """A connection, used by the thread of the event loop alone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.sock: socket.socket = writer.get_extra_info("socket")  # to look at, and to set options of
        self._reader, self._writer = reader, writer

    async def prove_root(self, key: bytes) -> bool:
        """The root's side: whether the other end knows the secret."""
        challenge = _MAGIC + secrets.token_bytes(_NONCE)
        self._writer.write(challenge)
        answer = await self._reader.readexactly(_NONCE + _PROOF)
        transcript = challenge + answer[:_NONCE]
        if not hmac.compare_digest(answer[_NONCE:], _proof(key, b"rank", transcript)):
            return False
        self._writer.write(_proof(key, b"root", transcript))
        return True

    async def prove_rank(self, key: bytes) -> bool:
        """The other side: whether this is the root of the job."""
        challenge = await self._reader.readexactly(len(_MAGIC) + _NONCE)
        if not challenge.startswith(_MAGIC):
            return False
        nonce = secrets.token_bytes(_NONCE)
        self._writer.write(nonce + _proof(key, b"rank", challenge + nonce))
        return hmac.compare_digest(await self._reader.readexactly(_PROOF), _proof(key, b"root", challenge + nonce))

    def send(self, message: Any) -> None:
        """Send something picklable; waits for nobody."""
        content = pickle.dumps(message)
        self._writer.write(_LENGTH.pack(len(content)))
        self._writer.write(content)

    async def receive(self) -> Any:
        """The next message. Raises EOFError or OSError at the end of the connection."""
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if length > _LONGEST:
            raise OSError(f"a message of {length} bytes")
        return pickle.loads(await self._reader.readexactly(length))

    @property
    def ended(self) -> bool:
        """Whether the other end has closed it, and nothing is left to read."""
        return self._reader.at_eof()

    def close(self) -> None:
        """Send what is left, and end it."""
        self._writer.close()


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + transcript, "sha256")
