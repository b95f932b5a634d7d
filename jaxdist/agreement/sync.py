"""`check_sync`: is what should be the same on every process and every device the same, bit for bit?"""

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxdist.agreement.description import by_value, grouped, list_ranks, listed
from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.compat import under_no_mesh
from jaxdist.errors import SyncError
from jaxdist.ir.fingerprint import checksum, on_host, type_text
from jaxdist.placements.model.layouts import Padded, bounds, physical
from jaxdist.runtime.context import Context, get_context
from jaxdist.tracebacks import api_boundary

_ADVICE = (
    "Something changed it on some ranks outside a decorated step (code under `if rank == ...`, a file that is not "
    "the same everywhere, the order of a set, a different seed), or one of the machines computes or stores wrongly"
)


@api_boundary
@under_no_mesh
def check_sync(tree: Any) -> None:
    """Raise an error on every rank unless a tree is the same on all of them. Every process must call it.

    Replicated arrays, NumPy arrays, Python numbers, and strings must have the same bits everywhere. For sharded arrays,
    it compares type, layout, and the bits of slices that several groups of devices hold; for other leaves, the Python
    type. It waits for the arrays, copies them to the host, and sends only checksums (CRC-32).

    Args:
      tree: any pytree.

    Raises:
      SyncError: (on every rank) the trees differ. The message names the first leaf that differs, and the ranks and
        devices.
      ControlError: (on every rank that called it) a rank makes a different call, or is missing until the timeout.
      TypeError: called inside a step.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> jaxdist.check_sync({"w": jnp.ones(3), "epoch": 7})
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(
            "check_sync compares values and needs them: call it between steps, not inside one that jax traces (or "
            "say jaxdist.data_parallel(check_every=...))"
        )
    compare(get_context(), tree, "check_sync", "check_sync: tree")


class Leaf(NamedTuple):
    """The properties of a leaf that are compared."""

    name: str  # its path in the tree
    kind: str  # type, shape and layout
    # the value, "", or each slice that several devices have; and on this process's devices the checksum of its bits
    parts: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()


def compare(context: Context, tree: Any, tag: str, prefix: str) -> None:
    """`check_sync`, for `context`'s job."""

    def examine() -> Part[list[Leaf]]:
        leaves = [_leaf(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
        kinds = [(leaf.name, leaf.kind) for leaf in leaves]
        uniform = all(len({s for _, s in sums}) == 1 for leaf in leaves for _, sums in leaf.parts)
        bits = grouped((part, (leaf.name, sums[0][1])) for leaf in leaves for part, sums in leaf.parts)
        digest = _digest(sorted(kinds)) if uniform else ""
        return Part(leaves, told=(digest, {part: _digest(sorted(own)) for part, own in bits.items()}))

    leaves, told = on_every_rank(context, tag, examine, raises=(SyncError,))
    digests, parts = {digest for digest, _ in told}, grouped(one for _, own in told for one in own.items())
    if len(digests) == 1 and "" not in digests and all(len(set(own)) == 1 for own in parts.values()):
        return
    found = _differences(context.control.exchange(f"{tag} details", leaves, context.timeout))
    more = f" ({len(found) - 1} more of its leaves differ.)" if len(found) > 1 else ""
    raise SyncError(f"{prefix}{found[0]}.{more} {_ADVICE}")


def _differences(everyone: Sequence[Sequence[Leaf]]) -> list[str]:
    """A line for each leaf that is not the same everywhere."""
    tables = [{leaf.name: leaf for leaf in leaves} for leaves in everyone]
    found = []
    for name in dict.fromkeys(name for table in tables for name in table):
        kinds = by_value([table[name].kind if name in table else "absent" for table in tables])
        if len(kinds) > 1:
            found.append(f"{name} is {listed(kinds)}")
            continue
        parts = [dict(table[name].parts) for table in tables]
        for part in sorted({part for own in parts for part in own}):
            sums = [own.get(part, ()) for own in parts]
            places = lambda rank, device: f"rank {rank}" + (f" device {device}" if device else "")
            groups = grouped((s, places(rank, device)) for rank, own in enumerate(sums) for device, s in own)
            if len(groups) > 1:
                most, *rest = sorted(groups.values(), key=len, reverse=True)  # of equals the one with the lowest rank
                odd = "; others again on ".join(map(list_ranks, rest))
                where = f"{name} ({next(iter(kinds))}){part and f', {part},'}"
                found.append(f"{where} has other bits on {odd} than on {list_ranks(most)}")
    return found


def _leaf(name: str, x: Any) -> Leaf:
    """The compared properties of a leaf. Waits for it."""
    if isinstance(x, (jax.Array, Padded)):
        array = physical(x)
        if array.is_deleted():
            raise ValueError(f"{name} was donated to a step, which may have written over it: check what came back")
        own, n = array.sharding, len(array.sharding.device_set)
        where = f"on {n} device{'s' * (n != 1)}"
        if not own.is_fully_replicated:
            where = f"in shards{f' by {own.spec}' if isinstance(own, NamedSharding) else ''} over {n} devices"
            where += ", padded" * (type(x) is Padded)
        return Leaf(name, f"{type_text(x.dtype, x.shape)} {where}", _parts(array, x.shape))
    if isinstance(x, (bool, int, float, complex, str, bytes)):
        return Leaf(name, type(x).__name__, (("", (("", zlib.crc32(repr(x).encode())),)),))
    if not hasattr(x, "__array__"):
        return Leaf(name, type(x).__name__)
    host = np.asarray(x)
    kind = f"{type_text(host.dtype, host.shape)} on the host"
    return Leaf(name, kind, () if host.dtype.hasobject else (("", (("", checksum(host)),)),))


def _parts(x: jax.Array, shape: Sequence[int]) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    """Return this process's parts of an array, if several devices hold each part or one holds all of it."""
    places = [bounds(index, x.shape) for index in x.sharding.devices_indices_map(x.shape).values()]
    numbers = {place: i for i, place in enumerate(sorted(set(places)))}
    if 1 < len(numbers) == len(places):
        return ()
    found = []
    for shard in x.addressable_shards:
        place = bounds(shard.index, x.shape)
        real = tuple(slice(max(0, n - start)) for (start, _), n in zip(place, shape, strict=True))
        found.append((numbers[place], (str(shard.device), checksum(on_host(shard.data)[real]))))
    name = lambda i: f"slice {i + 1} of {len(numbers)}" if len(numbers) > 1 else ""
    return tuple((name(i), tuple(sums)) for i, sums in grouped(found).items())


def _digest(x: Any) -> str:
    return hashlib.sha256(repr(x).encode()).hexdigest()
