"""`zero`: any optax transformation with its state, the gradients and the parameters in shards; `shard`, `unshard`."""

import copy
import functools
import inspect
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.compat import under_no_mesh
from jaxdist.ir.primitives import mark
from jaxdist.ir.trace import inside_step
from jaxdist.mesh import NAMES, in_a_row
from jaxdist.placements.model.layouts import Padded, on_device, physical
from jaxdist.placements.search.groups import Within, check_within
from jaxdist.placements.search.owners import Way, check_split
from jaxdist.precision import DTYPES, Precision, mixed
from jaxdist.runtime.context import Context, started
from jaxdist.step.data_parallel import data_parallel, parallel
from jaxdist.text import say_once
from jaxdist.tracebacks import api_boundary

Level = Literal[0, 1, 2, 3]


def zero(
    tx: optax.GradientTransformation,
    level: Level = 1,
    within: Within = None,
    split: Way = None,
    offload: bool = False,
    precision: Precision | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Shard the state of `tx`, the gradients, and the parameters over the devices of a decorated step (ZeRO).

    Results do not change. Each device updates one slice of each leaf; leaves with fewer entries than devices stay
    whole. A matrix that an optimizer needs whole (Muon, Shampoo) is sent to one device and back. Wrap the complete
    optimizer.

    Args:
      tx: any optax transformation.
      level: what to shard, with the bytes per parameter on each of N devices (float32, Adam). 0: nothing (16). 1: the
        optimizer state (8 + 8/N). 2: gradients too (4 + 12/N). 3: parameters too (16/N), gathered where they are used;
        needs ``tx.update(grads, opt_state, params)``.
      within: the devices that share a leaf: all (None), each host or TPU slice alone (``"host"``), or this many in
        a row. Only slices of gradients are sent between groups (hybrid sharding).
      split: ``"owners"`` computes each whole matrix on one device, ``"slices"`` on all where possible. None chooses.
      offload: keep the optimizer state in host memory between steps. No effect on CPUs.
      precision: ``"bf16"`` or ``"fp16"`` for parameters in 16 bits, rounded from a float32 copy that `tx` updates. With
        ``"fp16"``, multiply the loss by `jaxdist.loss_scale`; the update divides by it.

    Returns:
      A transformation with the class, states, and arguments of `tx`. With `precision`, its state has `master` (the
      copy), `inner` (the state of `tx`), and `loss_scale`.

    Raises:
      TypeError: `tx` is not a gradient transformation, or `offload` is not a bool.
      ValueError: an argument is invalid; (at compilation) groups do not divide the devices, devices cannot use host
        memory, or level 3 without parameters.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist, optax
      >>> tx = jaxdist.zero(optax.adam(0.1), level=2)
      >>> @jaxdist.data_parallel
      ... def step(w, opt_state, batch):
      ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
      ...     updates, opt_state = tx.update(grads, opt_state, w)
      ...     return optax.apply_updates(w, updates), opt_state
      >>> w, opt_state = step(jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones((8, 3)))
      >>> [round(float(x), 3) for x in w]
      [0.9, 0.9, 0.9]

    References:
      Rajbhandari et al., *ZeRO*, arXiv 1910.02054; Zhao et al., *PyTorch FSDP*, VLDB 2023, section 3.2.2;
      Micikevicius et al., *Mixed Precision Training*, arXiv 1710.03740.
    """
    _check(tx, level, within, split, offload, precision)
    if not hasattr(tx, "_replace"):  # not one of optax's NamedTuples
        tx = copy.copy(tx)  # which is returned: attributes that are set on it count
    parameters = inspect.signature(tx.update).parameters.values()
    extra = isinstance(tx, optax.GradientTransformationExtraArgs) or any(p.kind is p.VAR_KEYWORD for p in parameters)
    kind = optax.GradientTransformationExtraArgs if extra else optax.GradientTransformation
    inner = optax.with_extra_args_support(kind(tx.init, tx.update))
    if precision is not None:
        inner = mixed(inner, precision)
    marked = functools.partial(_marked, level=level, within=within, split=split)

    def init(params: Any) -> Any:
        if not inside_step() and any(type(x) is Padded for x in jax.tree.leaves(params)):
            return data_parallel(init, batch_argnums=())(params)  # outside, JAX cuts no array into uneven shards
        state = inner.init(params)
        return marked(state, "state", offload=offload) if inside_step() else state

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if not inside_step():
            _say_that_it_is_outside(started())
            return inner.update(updates, state, params, **extra)
        return inner.update(
            updates if _of_each_example(updates, params) else marked(updates, "gradient", offload=offload),
            marked(state, "state", offload=offload),
            marked(params, "parameter"),
            **extra,
        )

    return _with_functions(tx, init, update)


def _with_functions(tx: Any, init: Any, update: Any) -> Any:
    """Return `tx` with these functions. Loops and wrappers ask for its class: an `Aggregator`, `MultiSteps`."""
    if type(tx) is optax.GradientTransformation:
        return optax.GradientTransformationExtraArgs(init, update)
    if hasattr(tx, "_replace"):  # a NamedTuple, optax's or the user's own
        return tx._replace(init=init, update=update)
    for name, function in (("init", init), ("update", update)):
        object.__setattr__(tx, name, function)  # it may be a frozen dataclass
    return tx


def _check(tx: Any, level: Any, within: Any, split: Any, offload: Any, precision: Any) -> None:
    """Refuse what `zero` does not take."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(f"zero takes an optax gradient transformation (init and update), not {tx!r}")
    if type(level) is not int or level not in (0, 1, 2, 3):
        raise ValueError(
            f"zero(level={level!r}): 0 (nothing in shards), 1 (the optimizer's state), 2 (and gradients) or 3 (and "
            "parameters)"
        )
    check_within(within)
    check_split(split)
    if type(offload) is not bool:
        raise TypeError(f"zero(offload={offload!r}): True (the optimizer's state in the host's memory) or False")
    if offload and not level:
        raise ValueError(
            "zero(level=0, offload=True): at level 0 each device has all of the optimizer's state, and the host's "
            "memory would hold it as many times. Take level 1, 2 or 3"
        )
    if precision not in (None, *DTYPES):
        raise ValueError(f"zero(precision={precision!r}): 'bf16', 'fp16' or None (parameters of any type)")


def _say_that_it_is_outside(ctx: Context | None) -> None:
    """Warn that each rank trains alone on its own part of the data; nothing else would show it."""
    if ctx is not None and ctx.size > 1 and ctx.is_root:
        say_once(
            "jaxdist.zero's update was called outside a step that jaxdist.data_parallel decorates: nothing is added "
            f"up over the ranks, and each of the {ctx.size} trains alone"
        )


@api_boundary
def shard(tree: Any, within: Within = None) -> Any:
    """Shard the leaves of a tree that `zero` does not manage, such as a moving average. Every process calls it.

    Decorated steps keep sharded leaves sharded. Leaves with fewer entries than devices stay whole.

    Args:
      tree: arrays; rank 0's are used. In a decorated step, values that may be returned sharded.
      within: see `zero`.

    Returns:
      Global arrays in the tree's structure. If the devices do not divide a dimension, the leaf is a `Padded` with the
      array's shape and dtype, which ``numpy.asarray`` accepts.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> jaxdist.unshard(jaxdist.shard({"w": jnp.arange(3.0)}))["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    check_within(within)
    if inside_step():
        return _marked(tree, "requested", 3, within)
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    return jax.tree.unflatten(structure, [x for (x,) in _sharder(within)(leaves)])


@api_boundary
@under_no_mesh
def unshard(tree: Any) -> Any:
    """Return the tree with plain, whole arrays on this process's first device. Every process calls it.

    Decorated functions accept sharded arrays directly; use it for evaluation elsewhere, and for export.

    Args:
      tree: a pytree of arrays. Arrays that are not on the mesh are returned unchanged, others copied.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> jaxdist.unshard({"w": jnp.arange(3.0)})["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    leaves, structure = jax.tree.flatten(tree)
    split: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        own = getattr(physical(x), "sharding", None)
        if not isinstance(own, NamedSharding):
            continue
        mesh = in_a_row(own.mesh)
        if not set(mesh.axis_names).issubset(NAMES):  # a mesh of the user's own
            leaves[i] = jnp.copy(jax.device_put(x, NamedSharding(own.mesh, P())).addressable_data(0))
        elif type(x) is Padded or not own.is_fully_replicated:
            split.setdefault(mesh, []).append(i)
        else:
            leaves[i] = jnp.copy(on_device(x).addressable_data(0))
    for mesh, at in split.items():
        for i, (whole,) in zip(at, _gatherer(mesh)([leaves[i] for i in at]), strict=True):
            leaves[i] = whole.addressable_data(0)
    return jax.tree.unflatten(structure, leaves)


@functools.cache
def _sharder(within: Within) -> Any:
    # A tuple around each leaf: not the next value of the argument, which would be kept as it came.
    def shard_leaves(leaves: list[Any]) -> list[Any]:
        return [(mark(x, "requested", 3, within),) for x in leaves]

    shard_leaves.__qualname__ = "jaxdist.shard"  # in messages

    return data_parallel(shard_leaves, batch_argnums=())


@functools.cache
def _gatherer(mesh: Mesh) -> Any:
    def unshard_leaves(leaves: list[Any]) -> list[Any]:
        return [(x,) for x in leaves]

    unshard_leaves.__qualname__ = "jaxdist.unshard"

    return parallel(unshard_leaves, batch_argnums=(), mesh=mesh)


def _marked(tree: Any, role: str, level: int, within: Within, split: Way = None, offload: bool = False) -> Any:
    return jax.tree.map(lambda x: mark(x, role, level, within, split, offload), tree)


def _of_each_example(updates: Any, params: Any) -> bool:
    """Check whether gradients have one more axis than the parameters: the examples, which are split already."""
    pairs = list(zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=False))
    return bool(pairs) and all(jnp.ndim(u) and jnp.shape(u)[1:] == jnp.shape(p) for u, p in pairs)
