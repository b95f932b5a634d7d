"""`value_and_grad` and `grad`: JAX's, plus gradient accumulation over microbatches."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

P = ParamSpec("P")
R = TypeVar("R")
_NOTHING = jax.dtypes.float0  # of the gradient of an integer


def value_and_grad(
    fun: Callable[P, R],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
) -> Callable[P, tuple[R, Any]]:
    """Return ``jax.value_and_grad(fun)`` with gradient accumulation: the mean over microbatches, computed one by one.

    In a decorated step, gradients are reduced over the devices once. Microbatch i of k has the examples ``i::k``.

    Args:
      fun: ``fun(*args, **kwargs) -> loss``, or ``(loss, aux)`` with `has_aux`. The loss must be a mean over the
        examples.
      argnums: the arguments to differentiate.
      has_aux: see `jax.value_and_grad`, as for `holomorphic` and `allow_int`.
      microbatches: the number k of equal parts; only one has its activations in memory at a time. In `aux`, leaves with
        one entry per example keep the batch's order, other integers are summed, and other floats are averaged.
      batch_argnums: the positions of the batch. The default is the last argument, if no other has as many entries.

    Returns:
      A function with the arguments of `fun` that returns ``(loss, gradients)`` or ``((loss, aux), gradients)``.

    Raises:
      ValueError: the batch cannot be divided into `microbatches`, or an argument is both differentiated and split.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> loss_fn = lambda w, batch: jnp.mean((batch @ w) ** 2)
      >>> loss, grads = jaxdist.value_and_grad(loss_fn, microbatches=4)(jnp.ones(3), jnp.ones((8, 3)))
      >>> float(loss)
      9.0

    References:
      Goyal et al., arXiv 1706.02677, section 3.
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"microbatches={microbatches!r}: a positive integer")
    differentiate = jax.value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)
    if microbatches == 1:
        return differentiate

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        batch = _positions(-1 if batch_argnums is None else batch_argnums, args)
        if batch_argnums is None:
            _check_last(args, kwargs, _positions(argnums, args))
        if both := batch & _positions(argnums, args):
            raise ValueError(
                f"argument {min(both)} is differentiated and split into microbatches: its gradient has no one "
                "meaning. Use microbatches=1, or other batch_argnums"
            )
        _check_batch(args, batch, microbatches)
        trees: list[Any] = []

        def part(args: Sequence[Any]) -> Results:
            out, grads = differentiate(*args, **kwargs)
            loss, aux = out if has_aux else (out, None)
            (means, tree), (leaves, of_aux) = jax.tree.flatten((loss, grads)), jax.tree.flatten(aux)
            trees.append((tree, of_aux))
            return means, leaves

        means, leaves = _accumulate(part, args, batch, microbatches)
        tree, of_aux = trees[-1]
        loss, grads = jax.tree.unflatten(tree, means)
        return ((loss, jax.tree.unflatten(of_aux, leaves)) if has_aux else loss), grads

    return wrapped


def grad(
    fun: Callable[P, Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **settings: Any
) -> Callable[P, Any]:
    """Return ``jax.grad(fun)`` with the arguments of `jaxdist.value_and_grad`.

    Returns:
      A function that returns the gradients, or ``(gradients, aux)`` with `has_aux`.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> jaxdist.grad(lambda w: jnp.sum(w ** 2))(jnp.ones(2)).tolist()
      [2.0, 2.0]
    """
    both = value_and_grad(fun, argnums, has_aux, **settings)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out, grads = both(*args, **kwargs)
        return (grads, out[1]) if has_aux else grads

    return wrapped


def _positions(argnums: int | Sequence[int], args: Sequence[Any]) -> set[int]:
    return {range(len(args))[n] for n in ((argnums,) if isinstance(argnums, int) else argnums)}


Results = tuple[list[Any], list[Any]]  # leaves: of the loss and the gradients, and of aux


def _accumulate(part: Callable[[Sequence[Any]], Results], args: Sequence[Any], batch: set[int], k: int) -> Results:
    """Average `part` over `k` microbatches in a loop. On leaves: a user's node may refuse other values."""
    parts, structure = jax.tree.flatten([a for i, a in enumerate(args) if i in batch])
    rows = {i: _microbatches(jnp.asarray(x), k) for i, x in enumerate(parts) if jnp.ndim(x)}

    def of_microbatch(rows: dict[int, Any]) -> Results:
        arguments = iter(jax.tree.unflatten(structure, [rows.get(i, x) for i, x in enumerate(parts)]))
        return part([next(arguments) if i in batch else a for i, a in enumerate(args)])

    # An aux leaf whose shape follows the batch has one entry per example: join the parts.
    small = jax.eval_shape(lambda: of_microbatch({i: x[0] for i, x in rows.items()}))
    whole = jax.eval_shape(lambda: part(args))
    kept = [a.shape != b.shape for a, b in zip(small[1], whole[1], strict=True)]
    _check_joinable(small[1], whole[1], k)

    def select(out: Results) -> Results:
        means, aux = out
        summed = [x for x, keep in zip(aux, kept, strict=True) if not keep]
        return [*means, *summed], [x for x, keep in zip(aux, kept, strict=True) if keep]

    def body(total: Any, rows: Any) -> Any:
        sums, outs = select(of_microbatch(rows))
        add = lambda t, x: t if x.dtype == _NOTHING else t + jnp.asarray(x).astype(t.dtype)
        return jax.tree.map(add, total, sums), outs

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, _wide(a.dtype)), select(small)[0])
    totals, outs = lax.scan(body, zeros, rows)

    def mean(total: Any, like: Any) -> Any:
        if like.dtype == _NOTHING:
            return np.zeros(like.shape, _NOTHING)
        return (total / k if jnp.issubdtype(like.dtype, jnp.inexact) else total).astype(like.dtype)

    averages = [mean(total, like) for total, like in zip(totals, select(small)[0], strict=True)]
    n = len(small[0])
    stacked, merged_sums = iter(map(_joined, outs)), iter(averages[n:])
    return averages[:n], [next(stacked) if keep else next(merged_sums) for keep in kept]


def _microbatches(x: Any, k: int) -> Any:
    """Examples as `k` microbatches: every k-th is in one, so that each device's examples stay its own."""
    return jnp.moveaxis(x.reshape(x.shape[0] // k, k, *x.shape[1:]), 1, 0)


def _joined(x: Any) -> Any:
    """The examples of microbatches in their order."""
    k, rows, *shape = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(rows * k, *shape)


def _check_joinable(small: Sequence[Any], whole: Sequence[Any], k: int) -> None:
    """Refuse aux values whose parts, of one microbatch each, do not make the whole batch's along axis 0."""
    for a, b in zip(small, whole, strict=True):
        if a.shape != b.shape and (not a.shape or (a.shape[0] * k, *a.shape[1:]) != b.shape):
            raise ValueError(
                f"an aux value has shape {b.shape} for the whole batch and {a.shape} for one of {k} microbatches: "
                "microbatches can be put together only along axis 0"
            )


def _wide(dtype: Any) -> Any:
    """Sums of many 16-bit floats are kept in 32 bits."""
    if dtype == _NOTHING:
        return jnp.dtype(bool)
    return jnp.dtype("float32") if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def _check_last(args: Sequence[Any], kwargs: Mapping[str, Any], differentiated: set[int]) -> None:
    """Refuse to take the last argument alone for the batch where a different one looks as much like it."""
    last = _length(args[-1])
    others = {i: a for i, a in enumerate(args[:-1]) if i not in differentiated}
    for name, size in ((name, _length(a)) for name, a in (*others.items(), *kwargs.items())):
        if size is not None and last is not None and size >= last:
            fix = (
                f"batch_argnums={name}, {len(args) - 1} or ({name}, {len(args) - 1}) says so"
                if name in others
                else f"pass it by position if so; if not, batch_argnums={len(args) - 1} says so"
            )
            raise ValueError(
                f"argument {name} has {size} entries along its first dimension, and the last one by position {last}: "
                f"which is the batch that microbatches splits? {fix}"
            )


def _length(arg: Any) -> int | None:
    """Return the length along the first dimension that all leaves of an argument have."""
    lengths = {x.shape[0] for x in jax.tree.leaves(arg) if getattr(x, "shape", ())}  # a number is for all examples
    return lengths.pop() if len(lengths) == 1 else None


def _check_batch(args: Sequence[Any], batch: set[int], k: int) -> None:
    sizes = {len(x) for i in batch for x in jax.tree.leaves(args[i]) if jnp.ndim(x)}  # a number is for all examples
    if len(sizes) != 1:
        raise ValueError(
            f"microbatches={k} splits the batch (argument {sorted(batch)}) along its first dimension, and its leaves "
            f"have {sorted(sizes) or 'no'} entries there: batch_argnums= says which arguments are the batch"
        )
    (size,) = sizes
    if size % k:
        raise ValueError(f"a batch of {size} examples can't be divided into {k} microbatches")
