"""The secret that the processes of a job prove to each other to know."""

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

_BYTES = 32
_SET = (
    "set JAXDIST_SECRET to the same random string on every rank (`export JAXDIST_SECRET=$(openssl rand -hex 32)` "
    "before they are started)"
)


def is_loopback(host: str) -> bool:
    """Whether `host` is written as a loopback address (no look-up: a name may map to 127.0.1.1)."""
    return host in ("localhost", "::1") or host.startswith("127.")


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
    """The secret in a file; a new one, unless another process is faster: whole when it appears."""
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
