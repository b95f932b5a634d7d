"""A number for all bits of a state, whoever holds which part of it."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from jaxdist.checkpoint.checksum import MODULUS, checksum, share_of
from jaxdist.placements.layouts import Padded
from jaxdist.runtime.context import get_context
from jaxdist.zero import unshard


def digest(tree: Any) -> int:
    """A number that is the same for states of the same bits, however they are kept and on however many processes.

    Every process calls it. In lanes (``jaxdist run --lanes``) runs on several numbers of processes can be compared by
    it: one that differs is on a host that computes something else.

    Args:
      tree: of arrays and numbers: state, or whatever a decorated step returns.

    Returns:
      52 bits of a SHA-256 of names, types and checksums of the leaves, on every process.

    Raises:
      ControlError: a rank is in another call, has left, or did not come within the timeout of `init`.

    Example:
      >>> import jaxdist, numpy as np
      >>> w = {"w": np.arange(3.0)}
      >>> jaxdist.digest(w) == jaxdist.digest(w), jaxdist.digest(w) == jaxdist.digest({"w": np.arange(1.0, 4.0)})
      (True, False)
    """
    ctx = get_context()
    names, shares = list[str](), list[int]()
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(x, str):
            names.append(f"{jax.tree_util.keystr(path)}: {x!r}")
            continue
        if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        if isinstance(x, Padded):
            x = unshard(x)
        if isinstance(x, jax.Array) and not x.is_fully_replicated:
            shares.append(share_of(x))
        else:
            x = np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x)
            shares.append(checksum(x, (0,) * x.ndim) if ctx.is_root else 0)
        names.append(f"{jax.tree_util.keystr(path)}: {x.dtype}{list(x.shape)}")
    everyone = ctx.control.exchange("digest", shares, ctx.timeout)
    sums = [sum(of) % MODULUS for of in zip(*everyone, strict=True)]
    return int(hashlib.sha256(repr((names, sums)).encode()).hexdigest()[:13], 16)
