"""`value_and_grad` and `grad`: JAX's, plus gradient accumulation with one reduction and exact weighted means."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist import compat
from jaxdist.errors import StepError
from jaxdist.step.interpreter import contains
from jaxdist.step.primitives import AXIS, Op, all_reduce, all_reduce_p, per_part
from jaxdist.step.trace import inside_step

Weight = jax.Array | Callable[..., jax.Array]


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    microbatches: int = 1,
    weight: Weight | None = None,
    batch_argnums: int | Sequence[int] = -1,
    reduce: Op | None = None,
) -> Callable[..., Any]:
    """As ``jax.value_and_grad``, with gradient accumulation and weights.

    Needed only for these two, and for models that JAX's varying-axes types can't follow (the error of
    `jaxdist.data_parallel` says so). Outside a decorated step it computes the same on one device.

    Args:
      fun: ``fun(*args, **kwargs) -> loss``, or ``(loss, aux)`` with `has_aux`.
      argnums: argument(s) to differentiate with respect to.
      has_aux: as in JAX.
      holomorphic: as in JAX.
      allow_int: as in JAX.
      microbatches: compute the gradient in this many equal parts of the (device's) batch, one after the other, in the
        memory of one part. The parts' gradients are summed on the device and reduced over the devices once. Of `aux`,
        leaves with one entry an example are concatenated, other integers are summed, other floats averaged.
      weight: how much this device's loss counts, for an exact global mean when devices hold unequal numbers of
        examples or tokens: ``sum(weight * loss) / sum(weight)`` over microbatches and devices, where `loss` is the mean
        over what has weight. A scalar; an array of one entry an example (its sum counts); or a function of
        `fun`'s arguments that returns one of these. Floating scalars of `aux` are averaged with the same weights. A
        part of weight 0 counts nothing, whatever its loss (0/0, say).
      batch_argnums: position(s) of the batch among the arguments, for `microbatches`: arrays whose first dimension is
        that of the examples.
      reduce: ``"mean"`` or ``"sum"``, how the losses of microbatches combine; default: that of the decorated step.

    Returns:
      A function of `fun`'s arguments that returns ``(loss, gradients)`` or ``((loss, aux), gradients)``. In a decorated
      step the gradients are reduced over the devices; the loss is the device's own, unless there is a weight.

    Raises:
      ValueError: a batch that can't be divided into `microbatches`, or another argument that looks like a batch.
      StepError: with `microbatches` or `weight`, a `fun` that takes gradients itself.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> loss_fn = lambda w, batch: jnp.mean((batch @ w) ** 2)
      >>> loss, grads = jaxdist.value_and_grad(loss_fn, microbatches=4)(jnp.ones(3), jnp.ones((8, 3)))
      >>> float(loss)
      9.0

    References:
      Goyal et al., arXiv 1706.02677, section 3 (gradient aggregation is a sum; normalise by the whole batch);
      ``torch.nn.parallel.DistributedDataParallel.no_sync``.
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"microbatches={microbatches!r}: a positive integer")
    if reduce not in (None, "mean", "sum"):
        raise ValueError(f"reduce={reduce!r}: 'mean' or 'sum'")
    differentiate = jax.value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if microbatches == 1 and weight is None and (compat.checking_types() or not inside_step()):
            return differentiate(*args, **kwargs)  # JAX's types reduce it
        _refuse_nested(fun, args, kwargs)
        shared, local = _local_copies(args, argnums)
        seen: list[Any] = []  # structure of aux, and the dtypes before any weight

        def part(args: Sequence[Any], weight: Any) -> _Part:
            out, grads = differentiate(*args, **kwargs)
            loss, aux = out if has_aux else (out, None)
            leaves, tree = jax.tree.flatten(aux)
            seen.append((tree, jax.tree.map(jnp.result_type, (loss, grads, leaves))))
            if callable(weight):
                weight = weight(*args, **kwargs)
            return _weigh(loss, grads, leaves, weight)

        if microbatches == 1:
            got = part(local, weight)
        else:
            batch = _positions(batch_argnums, args)
            if both := batch & _positions(argnums, args):
                raise ValueError(
                    f"argument {min(both)} is differentiated and split into microbatches: its gradient has no one "
                    "meaning. Use microbatches=1, or other batch_argnums"
                )
            got = _accumulate(part, local, batch, microbatches, weight, reduce)
        tree, dtypes = seen[-1]
        loss, grads, leaves = jax.tree.map(
            lambda x, dtype: x if jnp.result_type(x) == dtype else x.astype(dtype), _across_devices(got, shared), dtypes
        )
        aux = jax.tree.unflatten(tree, leaves)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    **settings: Any,
) -> Callable[..., Any]:
    """As ``jax.grad``, with the settings of `jaxdist.value_and_grad`.

    Args:
      fun: as in `jaxdist.value_and_grad`.
      argnums: as in JAX.
      has_aux: as in JAX.
      holomorphic: as in JAX.
      allow_int: as in JAX.
      **settings: `microbatches`, `weight`, `batch_argnums`, `reduce`.

    Returns:
      A function that returns the gradients, or ``(gradients, aux)`` with `has_aux`.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> jaxdist.grad(lambda w: jnp.sum(w ** 2))(jnp.ones(2)).tolist()
      [2.0, 2.0]
    """
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, **settings)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out, grads = both(*args, **kwargs)
        return (grads, out[1]) if has_aux else grads

    return wrapped


class _Part(NamedTuple):
    """What one microbatch, or the sum of several, gives. With a `count` all but integers are weighted sums."""

    loss: Any
    grads: Any
    aux: list[Any]
    count: Any


def _local_copies(args: Sequence[Any], argnums: int | Sequence[int]) -> tuple[Any, list[Any]]:
    """Which differentiated leaves are shared by the devices, in the gradients' structure, and arguments that aren't.

    Differentiating with respect to a varying copy gives the device's own gradient, to be reduced once at the end.
    """
    positions = _positions(argnums, args)
    local = [jax.tree.map(_vary, a) if i in positions else a for i, a in enumerate(args)]
    trees = [jax.tree.map(_is_shared, args[n]) for n in _tuple(argnums)]
    return (trees[0] if isinstance(argnums, int) else tuple(trees)), local


def _tuple(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _positions(argnums: int | Sequence[int], args: Sequence[Any]) -> set[int]:
    return {range(len(args))[n] for n in _tuple(argnums)}


def _is_shared(x: Any) -> bool:
    return AXIS not in compat.varying_axes(jax.typeof(x))


def _vary(x: Any) -> Any:
    if inside_step() and compat.checking_types() and _is_shared(x):
        return lax.pcast(x, AXIS, to="varying")
    return x


def _is_mean(leaf: Any) -> bool:
    """Whether an aux leaf is a mean over examples, as the loss is: a floating scalar."""
    return jnp.ndim(leaf) == 0 and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _weigh(loss: Any, grads: Any, aux: list[Any], weight: Any) -> _Part:
    if weight is None:
        return _Part(loss, grads, aux, None)
    count = jnp.sum(jnp.asarray(weight, jnp.promote_types(loss.dtype, jnp.float32)))

    def times(x: Any) -> Any:
        if x.dtype == jax.dtypes.float0:
            return x
        wide = jnp.promote_types(x.dtype, jnp.float32)  # a sum of thousands of 16-bit values would overflow
        # Nothing of a part without weight, not even its 0/0.
        return jnp.where(count > 0, x.astype(wide) * count.astype(wide), 0)

    aux = [times(jnp.asarray(x)) if _is_mean(x) else x for x in aux]
    return _Part(times(loss), jax.tree.map(times, grads), aux, count)


def _accumulate(
    part: Callable[[Sequence[Any], Any], _Part],
    args: Sequence[Any],
    batch: set[int],
    k: int,
    weight: Any,
    reduce: Op | None,
) -> _Part:
    """The sum, or mean, of `part` over `k` microbatches, in a loop."""
    size = _batch_size(args, batch, k)

    def split(x: Any) -> Any:
        return jnp.reshape(x, (k, size // k, *jnp.shape(x)[1:]))

    rows = [jax.tree.map(split, a) if i in batch else None for i, a in enumerate(args)]
    per_row = weight is not None and not callable(weight) and jnp.ndim(weight) > 0
    row_weights = split(weight) if per_row else None
    each = weight / k if weight is not None and not callable(weight) and not per_row else weight

    def one(rows: Sequence[Any], weight: Any) -> _Part:
        return part(
            [r if i in batch else a for i, (r, a) in enumerate(zip(rows, args, strict=True))],
            weight,
        )

    # An aux leaf whose shape follows the batch has one entry an example: the parts' are concatenated.
    first = jax.tree.map(lambda x: x[0], rows)
    small = jax.eval_shape(lambda: one(first, each if row_weights is None else row_weights[0]))
    whole = jax.eval_shape(lambda: part(args, weight))
    kept = [a.shape != b.shape for a, b in zip(small.aux, whole.aux, strict=True)]
    for a, b, keep in zip(small.aux, whole.aux, kept, strict=True):
        if keep and (not a.shape or (a.shape[0] * k, *a.shape[1:]) != b.shape):
            raise ValueError(
                f"an aux value has shape {b.shape} for the whole batch and {a.shape} for one of {k} microbatches: "
                "microbatches can be put together only along axis 0"
            )

    def widen(x: Any) -> Any:  # sums of many 16-bit floats are kept in 32 bits
        x = jnp.asarray(x)
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x

    def select(p: _Part) -> tuple[Any, list[Any]]:
        summed = [x for x, keep in zip(p.aux, kept, strict=True) if not keep]
        return (p.loss, p.grads, summed, p.count), [x for x, keep in zip(p.aux, kept, strict=True) if keep]

    def body(total: Any, xs: Any) -> Any:
        rows, w = xs
        sums, outs = select(one(rows, w if per_row else each))
        return jax.tree.map(lambda t, x: t + widen(x).astype(t.dtype), total, sums), outs

    zeros = jax.tree.map(lambda a: _vary(jnp.zeros(a.shape, widen(jnp.zeros((), a.dtype)).dtype)), select(small)[0])
    (loss, grads, summed, count), outs = lax.scan(body, zeros, (rows, row_weights))

    def combine(x: Any) -> Any:
        if count is not None or reduce == "sum":
            return x
        return per_part(x, k) if reduce is None and inside_step() else x / k

    def finish_aux(x: Any, like: Any) -> Any:
        if not jnp.issubdtype(like.dtype, jnp.inexact):
            return x.astype(like.dtype)
        return (x / k if like.shape else combine(x)).astype(like.dtype)  # a statistic, or a mean as the loss is

    summed_types = [a for a, keep in zip(small.aux, kept, strict=True) if not keep]
    merged = iter([finish_aux(x, a) for x, a in zip(summed, summed_types, strict=True)])
    stacked = iter([x.reshape(-1, *x.shape[2:]) for x in outs])
    return _Part(
        combine(loss).astype(small.loss.dtype),
        jax.tree.map(lambda g, a: combine(g).astype(a.dtype), grads, small.grads),
        [next(stacked) if keep else next(merged) for keep in kept],
        count,
    )


def _refuse_nested(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse a `fun` that takes gradients itself: from here on each device would use its own in place of the mean."""
    if not compat.checking_types():
        return
    body = jax.make_jaxpr(lambda args: fun(*args, **kwargs))(args)
    if contains(body.jaxpr, {all_reduce_p}):
        raise StepError(
            "jaxdist.value_and_grad with microbatches or weight, of a function that takes gradients itself (MAML, a "
            "penalty on a gradient): those would be each device's own. Use jax.value_and_grad, or neither setting"
        )


def _batch_size(args: Sequence[Any], batch: set[int], k: int) -> int:
    sizes = {jnp.shape(x)[0] if jnp.ndim(x) else None for i in batch for x in jax.tree.leaves(args[i])}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            f"microbatches={k} splits the batch (argument {sorted(batch)}) along its first dimension, and its leaves "
            f"have {sorted(map(str, sizes))} entries there: batch_argnums= says which arguments are the batch"
        )
    (size,) = sizes
    assert size is not None
    if size % k:
        raise ValueError(f"this device's batch of {size} examples can't be divided into {k} microbatches")
    for i, a in enumerate(args):
        leaves = jax.tree.leaves(a) if i not in batch else []
        if leaves and all(jnp.ndim(x) and jnp.shape(x)[0] == size for x in leaves) and not any(map(_is_shared, leaves)):
            raise ValueError(
                f"argument {i} holds one entry an example ({size}), as the batch (argument {sorted(batch)}) does, and "
                f"would not be split into microbatches: batch_argnums={(*sorted({*batch, i}),)}"
            )
    return size


def _across_devices(got: _Part, shared: Any) -> tuple[Any, Any, list[Any]]:
    """Loss, gradients and aux after the one reduction over the devices."""

    def total(x: Any, is_shared: bool = True, op: Op | None = "sum", wire: str | None = None) -> Any:
        movable = is_shared and inside_step() and x.dtype != jax.dtypes.float0
        return all_reduce(x, op=op, wire=wire) if movable else x

    if got.count is None:
        return got.loss, jax.tree.map(lambda g, s: total(g, s, None, "gradient"), got.grads, shared), got.aux
    count = total(got.count)

    def mean(x: Any, is_shared: bool = True, wire: str | None = None) -> Any:
        if x.dtype == jax.dtypes.float0:
            return x
        # No weight anywhere: no gradient.
        return jnp.where(count > 0, total(x, is_shared, "sum", wire) / count.astype(x.dtype), 0)

    aux = [mean(x) if _is_mean(x) else x for x in got.aux]
    return mean(got.loss), jax.tree.map(lambda g, s: mean(g, s, "gradient"), got.grads, shared), aux
