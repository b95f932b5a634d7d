"""The collectives as each device runs them along the data axis.

Each takes one array and gives each device its result; groups and root are already valid. They differentiate
the sum of all devices' losses, and the step turns that into the gradient of the mean loss.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from numpy.lib.array_utils import normalize_axis_index

from jaxdist import compat
from jaxdist.collectives.arguments import Groups, result_type
from jaxdist.communicators import exchange
from jaxdist.mesh import AXIS

_REDUCE: dict[str, Any] = {"sum": jnp.sum, "avg": jnp.mean, "prod": jnp.prod, "max": jnp.max, "min": jnp.min}


def allreduce(x: Any, op: str, groups: Groups) -> jax.Array:
    """Reduce over all devices; each gets the result."""
    x = jnp.asarray(x)
    out = result_type(op, x.dtype)
    x, op = _of_numbers(x.astype(out), op)
    if groups is None and op != "prod":
        total = {"sum": lax.psum, "avg": lax.pmean, "max": lax.pmax, "min": lax.pmin}[op](_wide(x), AXIS)
    else:  # `lax.psum` has no groups where JAX types values as replicated or varying
        total = _REDUCE[op](allgather(_wide(x)[None], 0, groups), 0)
    return total.astype(out)


def allgather(x: Any, axis: int, groups: Groups) -> jax.Array:
    """Concatenate the devices' arrays along `axis`."""
    x = jnp.atleast_1d(x)
    axis = normalize_axis_index(axis, x.ndim)
    equal, n = _equal(groups)
    if not x.size:  # XLA gathers nothing that is empty
        return jnp.concatenate([x] * n, axis)
    return lax.all_gather(_movable(x), AXIS, axis=axis, tiled=True, axis_index_groups=equal).astype(x.dtype)


def reduce_scatter(x: Any, op: str, axis: int, groups: Groups) -> jax.Array:
    """Return this device's slice along `axis` of the reduction."""
    x = jnp.asarray(x)
    out = result_type(op, x.dtype)
    x, op = _of_numbers(x.astype(out), op)
    axis = normalize_axis_index(axis, x.ndim)
    equal, n = _equal(groups)
    if not x.size:  # XLA scatters nothing that is empty
        return jnp.split(x, n, axis)[0].astype(out)
    if op in ("sum", "avg"):
        part = lax.psum_scatter(_wide(x), AXIS, scatter_dimension=axis, tiled=True, axis_index_groups=equal)
        return (part / n if op == "avg" else part).astype(out)
    parts = _wide(all_to_all(x, axis, axis, groups))
    parts = parts.reshape(*x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :])
    return _REDUCE[op](parts, axis).astype(out)


def broadcast(x: Any, root: int, groups: Groups) -> jax.Array:
    """Return the root's array on every device, bit by bit."""
    only = lambda x: allreduce(jnp.where(_is_root(root, groups), x, jnp.zeros_like(x)), "sum", groups)

    @jax.custom_jvp
    def sent(x: Any) -> jax.Array:
        bits, back = exchange.unsigned(_movable(x))  # a sum of floats would flush subnormal ones
        return back(only(bits)).astype(x.dtype)

    sent.defjvps(lambda tangent, *_: tangent if tangent.dtype == jax.dtypes.float0 else only(_movable(tangent)))
    return sent(jnp.asarray(x))


def reduce(x: Any, root: int, op: str, groups: Groups) -> jax.Array:
    """Return the reduction on the root, and its own array on every other device."""
    x = jnp.asarray(x)
    total = allreduce(x, op, groups)
    return jnp.where(_is_root(root, groups), total, x.astype(total.dtype))


def all_to_all(x: Any, split_axis: int, concat_axis: int, groups: Groups) -> jax.Array:
    """Send slice i along `split_axis` to device i; join received slices along `concat_axis`."""
    x = jnp.asarray(x)
    split_axis, concat_axis = (normalize_axis_index(axis, x.ndim) for axis in (split_axis, concat_axis))
    equal, n = _equal(groups)
    if not x.size:
        return jnp.concatenate([jnp.split(x, n, split_axis)[0]] * n, concat_axis)
    parts = lax.all_to_all(_movable(x), AXIS, split_axis, concat_axis, tiled=True, axis_index_groups=equal)
    return parts.astype(x.dtype)


def gather(x: Any, root: int, groups: Groups) -> jax.Array:
    """Concatenate along axis 0 on the root; other devices get zeros of that shape."""
    whole = allgather(x, 0, groups)
    return jnp.where(_is_root(root, groups), whole, jnp.zeros_like(whole))


def scatter(x: Any, root: int, groups: Groups) -> jax.Array:
    """Return this device's slice along axis 0 of the root's array."""
    parts = all_to_all(x, 0, 0, groups)
    rows = parts.shape[0] // _equal(groups)[1]
    return parts[root * rows : (root + 1) * rows]


def _of_numbers(x: Any, op: str) -> tuple[Any, str]:
    """Return booleans as 0 and 1, with the operation that means "or" or "and"."""
    return (x.astype(jnp.int8), {"sum": "max", "prod": "min"}.get(op, op)) if x.dtype == bool else (x, op)


def _movable(x: Any) -> Any:
    x = x.astype(jnp.int8) if x.dtype == bool else x
    return lax.pcast(x, AXIS, to="varying") if compat.is_invariant(x, AXIS) else x


def _wide(x: Any) -> Any:
    """Convert to the dtype in which to reduce."""
    return _movable(x.astype(exchange.reducible(x.dtype)))


def _is_root(root: int, groups: Groups) -> Any:
    if groups is None:
        return lax.axis_index(AXIS) == root
    roots = {group[root] for group in groups}
    return jnp.asarray([device in roots for device in range(lax.axis_size(AXIS))])[lax.axis_index(AXIS)]


def _equal(groups: Groups) -> tuple[list[list[int]] | None, int]:
    """Return groups (which have one size, and cover every device) and their size."""
    if groups is None:
        return None, lax.axis_size(AXIS)
    if len({len(group) for group in groups}) != 1 or sum(map(len, groups)) != lax.axis_size(AXIS):
        raise ValueError(
            f"groups={[list(group) for group in groups]} inside a step: expected groups of one size that cover "
            f"every device ({lax.axis_size(AXIS)}), since all run one program"
        )
    return [list(group) for group in groups], len(groups[0])
