"""`zero`: any optax transformation with its state, the gradients and the parameters in shards; `shard`, `unshard`."""

from __future__ import annotations

import functools
import inspect
import logging
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
from jaxdist.placements.groups import Within, check_within
from jaxdist.placements.layouts import Padded, on_device
from jaxdist.placements.owners import Way, check_split
from jaxdist.precision import DTYPES, Precision, mixed
from jaxdist.runtime.context import Context, started
from jaxdist.step.data_parallel import data_parallel, parallel

Level = Literal[0, 1, 2, 3]

_log = logging.getLogger("jaxdist")


def zero(
    tx: optax.GradientTransformation,
    level: Level = 1,
    within: Within = None,
    split: Way = None,
    offload: bool = False,
    precision: Precision | None = None,
) -> optax.GradientTransformationExtraArgs:
    """ZeRO: `tx` with its state, the gradients and the parameters in shards over the devices of a decorated step.

    The step's other lines stay as they are, and so does what it computes. Each device keeps and updates one slice of
    each leaf. Leaves with fewer entries than there are devices stay whole. Work on whole matrices (Muon, Shampoo, SOAP,
    GaLore) is divided over the devices: each matrix travels to one device and back. Other work that needs a whole value
    gathers it. Outside a decorated step this is `tx`, and the state has the structure that `tx` gives it
    (but see `precision`).

    Wrap all of the optimizer: what is outside of `zero` in a chain keeps its state whole on each device.

    Args:
      tx: any optax transformation.
      level: what is in shards. In parentheses: bytes per parameter on each of N devices (float32, Adam). 0: nothing
        (16). 1: the optimizer's state (8 + 8/N). 2: the gradients too, which are reduced straight into shards
        (4 + 12/N). 3: the parameters too (16/N). Each parameter is then gathered where it is used, in the forward and
        in the backward pass, one layer at a time where ``jax.lax.scan`` runs over the layers. Between steps it stays in
        shards: see `jaxdist.unshard`.
      within: which devices share a leaf. None: all. ``"host"``: those of each host. A number: so many in a row. Each
        group of devices then has all of the leaf (hybrid sharding): gathers stay within a group, and only slices of
        gradients travel between groups. For slow links between hosts.
      split: who does work on whole matrices. ``"owners"``: one device for each matrix. ``"slices"``: all devices, on
        slices where that is possible: for a few matrices so large that one device takes too long. None: the faster one
        by FLOPs and bytes.
      offload: keep the arrays of the optimizer's state in the host's memory between steps. A step brings each to its
        device when its gradient is there, and puts it back, so the state crosses PCIe twice in each step. For a state
        that does not fit otherwise. It changes nothing on CPU devices, which have one memory.
      precision: of parameters in 16 bits: ``"bf16"`` or ``"fp16"``. `tx` then updates a float32 copy of them, which is
        in the optimizer's state (``opt_state.master``, made of what ``tx.init`` is given), and the parameters are the
        copy, rounded. With ``"fp16"`` the state has a loss scale as well: multiply the loss by `jaxdist.loss_scale`
        before the gradient is taken; the update divides by it. A step whose gradients are not finite changes nothing
        and halves the scale, on all devices; 2000 steps in a row that are double it. Works at level 0 and outside a
        decorated step, too.

    Returns:
      A transformation with the states, updates and extra arguments of `tx`; with `precision` its state has the
      attributes `master`, `inner` (the state of `tx`) and `loss_scale`.

    Raises:
      TypeError: `tx` is no gradient transformation, `offload` no bool.
      ValueError: another level, `within`, `split` or `precision`; `offload` at level 0; (from ``update``) state or
        gradients that don't belong to the parameters, or parameters of which none is in the 16 bits of `precision`;
        (when the step is compiled) groups of that size don't divide the devices, or these can't use the host's memory.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist, optax
      >>> tx = jaxdist.zero(optax.adam(0.1), level=2)
      >>> @jaxdist.data_parallel
      ... def step(w, opt_state, batch):
      ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
      ...     updates, opt_state = tx.update(grads, opt_state, w)
      ...     return optax.apply_updates(w, updates), opt_state
      >>> w = jnp.ones(3)
      >>> w, opt_state = step(w, tx.init(w), jnp.ones((8, 3)))
      >>> [round(float(x), 3) for x in w]
      [0.9, 0.9, 0.9]

    References:
      Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, arXiv 1910.02054;
      Zhao et al., *PyTorch FSDP*, VLDB 2023, section 3.2.2 (hybrid sharding); Micikevicius et al., *Mixed Precision
      Training*, arXiv 1710.03740, section 3.
    """
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
    if precision is not None:
        if precision not in DTYPES:
            raise ValueError(f"zero(precision={precision!r}): 'bf16', 'fp16' or None (parameters of any type)")
        tx = mixed(tx, precision)
    if not any(arg.kind is arg.VAR_KEYWORD for arg in inspect.signature(tx.update).parameters.values()):
        tx = optax.with_extra_args_support(tx)  # else it takes them already, of whatever class it is (`MultiSteps`)
    inner = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    marked = functools.partial(_marked, level=level, within=within, split=split)

    def init(params: Any) -> Any:
        state = inner.init(params)
        return marked(state, "state", offload=offload) if inside_step() else state

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if not inside_step():
            _say_that_it_is_outside(started())
            return inner.update(updates, state, params, **extra)
        if level:
            _check(inner, updates, state, params, extra)
        updates, state = inner.update(
            updates if _of_each_example(updates, params) else marked(updates, "gradient", offload=offload),
            marked(state, "state", offload=offload),
            marked(params, "parameter"),
            **extra,
        )
        if params is None:  # then they are what these are added to
            updates = marked(updates, "update")
        return updates, state

    return optax.GradientTransformationExtraArgs(init, update)


@functools.cache
def _say_that_it_is_outside(ctx: Context | None) -> None:
    """Once: each rank trains by itself, on its own part of the data, and nothing else would tell."""
    if ctx is not None and ctx.size > 1 and ctx.is_root:
        _log.warning(
            "jaxdist.zero's update was called outside a step that jaxdist.data_parallel decorates: nothing is added "
            "up over the ranks, and each of the %d trains by itself", ctx.size,
        )  # fmt: skip


def shard(tree: Any, within: Within = None) -> Any:
    """Put the leaves of a tree into shards, as `zero` keeps parameters at level 3.

    For trees that `zero` does not know: a moving average of the parameters, or parameters for an evaluation. Whatever
    comes in shards, a decorated step keeps in shards. Leaves with fewer entries than there are devices, and leaves that
    are no arrays of numbers, are whole on each device.

    Args:
      tree: logical arrays, the same on every process (the root's are taken). In a decorated step: values that may be
        returned in shards.
      within: as of `zero`.

    Returns:
      The tree, with global arrays as leaves; where the devices don't divide the dimension, a `Padded`, which has the
      shape and dtype of the array and which ``numpy.asarray`` takes. Every process must call it.

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


@under_no_mesh
def unshard(tree: Any) -> Any:
    """Make plain arrays, whole, on this process, of a state that is in shards.

    For evaluation outside a decorated step, export and tests. (A decorated function takes shards as they are.) Every
    process must call it.

    Args:
      tree: of arrays; those that are not on the mesh stay as they are.

    Returns:
      The tree, each leaf with its logical shape on this process's first device. They are copies: a step that is given
      the original may take its memory.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> jaxdist.unshard({"w": jnp.arange(3.0)})["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    leaves, structure = jax.tree.flatten(tree)
    split: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        own = getattr(x, "sharding", None)
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

    return data_parallel(shard_leaves, batch_argnums=())


@functools.cache
def _gatherer(mesh: Mesh) -> Any:
    def unshard_leaves(leaves: list[Any]) -> list[Any]:
        return [(x,) for x in leaves]

    return parallel(unshard_leaves, batch_argnums=(), mesh=mesh)


def _marked(tree: Any, role: str, level: int, within: Within, split: Way = None, offload: bool = False) -> Any:
    return jax.tree.map(lambda x: mark(x, role, level, within, split, offload), tree)


def _check(
    tx: optax.GradientTransformationExtraArgs, updates: Any, state: Any, params: Any, extra: dict[str, Any]
) -> None:
    """Say what does not belong together before `tx` stumbles over it, or broadcasts one to the other."""
    if params is None:
        return
    alike = jax.tree.structure(updates) == jax.tree.structure(params)  # else it may be meant (`optax.lookahead`)
    if alike and not _of_each_example(updates, params) and (problem := _difference(updates, params)):
        raise ValueError(f"the gradients are not those of the parameters: {problem}")
    # An update may leave a state of another structure than the first one has (`optax.monitor`).
    first = lambda _, params: tx.init(params)
    later = lambda updates, params: tx.update(updates, tx.init(params), params, **extra)[1]
    problems = []
    for made in (first, later):
        try:
            expected = jax.eval_shape(made, updates, params)
        except Exception:  # an init that wants real numbers: then `tx` itself has to find what is wrong
            return
        problems.append(_difference(state, expected))
        if problems[-1] is None:
            return
    raise ValueError(
        f"the optimizer's state was not made for these parameters: {problems[0]}. Make a new one with tx.init(params), "
        "or restore both from one checkpoint"
    )


def _of_each_example(updates: Any, params: Any) -> bool:
    """Whether gradients have one more axis than the parameters: of the examples, which are split already."""
    pairs = list(zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=False))
    return bool(pairs) and all(jnp.ndim(u) and jnp.shape(u)[1:] == jnp.shape(p) for u, p in pairs)


def _difference(tree: Any, expected: Any) -> str | None:
    """The first leaf in which two trees differ, in place or shape."""
    ours, ours_tree = jax.tree_util.tree_flatten_with_path(tree)
    theirs, theirs_tree = jax.tree_util.tree_flatten_with_path(expected)
    mine, wanted = (
        {jax.tree_util.keystr(path) or "the only leaf": jnp.shape(x) for path, x in leaves} for leaves in (ours, theirs)
    )
    for name in [*wanted, *mine]:
        if name not in mine:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} is not expected"
        if mine[name] != wanted[name]:
            return f"{name} has shape {mine[name]}, expected {wanted[name]}"
    return None if ours_tree == theirs_tree else f"their structures are {ours_tree} and {theirs_tree}"
