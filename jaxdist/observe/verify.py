"""`verify`: whether the program that is about to run is the step."""

from collections.abc import Callable
from typing import Any

from jaxdist.proof.compare import Verified, compared
from jaxdist.step.data_parallel import data_parallel
from jaxdist.step.decorated import DataParallel


class Verify:
    """`jaxdist.verify(step, *args)` compares a step with its program, `jaxdist.verify.same(f, g, *args)` two functions.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> step = jaxdist.data_parallel(lambda w, batch: w - 0.1 * jnp.tanh(batch @ w).mean())
      >>> bool(jaxdist.verify(step, jnp.ones(3), jnp.ones((8, 3))))
      True
    """

    def __call__(
        self, step: Callable[..., Any], *args: Any, points: int = 2, strict: bool = False, **kwargs: Any
    ) -> Verified:
        """Compare a step with its program of several devices, without tolerance and without training.

        Both are evaluated with numbers of a finite field in the place of floats: integers modulo the prime 2**31 - 1,
        in which sums and products are exact in any order. Other functions (``exp``, a factorization) become hashes of
        their operands, and the program runs on the real devices, with the real collectives. Integers and keys are those
        of the arguments; floats are drawn at random. Two polynomials that differ, of degree d, agree at a random point
        with a chance of at most d / 2**31 (Schwartz and Zippel). So rounding is not looked at: formulas are.

        Args:
          step: a decorated step, or a plain step, which is decorated with the defaults.
          *args: arguments of the step, as in a call; each process passes its rows of the batch.
          points: the number of random points.
          strict: if True, a cast to fewer bits is a function, too: a sum that is rounded before it is added up differs.
          **kwargs: keyword arguments of the step.

        Returns:
          A `Verified`, the same on every rank: true if they are equal. Otherwise it names the results that differ and
          the first operation, with your line, whose device results are not slices or summands of the step's; or,
          with ``equal=None``, an operation that has no exact counterpart. ``print`` it.

        Raises:
          ValueError: `points` is not positive, or ``strict=True`` with ``compress=``, which rounds gradients; (on every
            rank) the ranks make different calls, or have different programs, of which none has run.

        References:
          J. T. Schwartz, *Fast probabilistic algorithms for verification of polynomial identities*, J. ACM 27 (1980).
        """
        _check(points)
        decorated: DataParallel = step if isinstance(step, DataParallel) else data_parallel(step)  # type: ignore[assignment]
        return decorated.verified(args, kwargs, points, strict)

    def same(
        self, f: Callable[..., Any], g: Callable[..., Any], *args: Any, points: int = 2, strict: bool = False
    ) -> Verified:
        """Compare two functions of JAX in the same way: your own ``shard_map``, or a `jax.jit` that XLA divides.

        Args:
          f: a function. Arguments that are sharded stay so, and its shardings apply: XLA divides it.
          g: the same function for one device.
          *args: arguments of both.
          points: the number of random points.
          strict: see `verify`.

        Returns:
          A `Verified`, without an operation.

        Raises:
          ValueError: the functions return different types.

        Example:
          >>> import jax, jax.numpy as jnp, jaxdist
          >>> bool(jaxdist.verify.same(lambda x: x @ x, lambda x: jnp.einsum("ij,jk", x, x), jnp.ones((4, 4))))
          True
          >>> print(jaxdist.verify.same(lambda x: x * x, lambda x: x + x, jnp.ones(3)))
          result of the program is not the step's
        """
        _check(points)
        return compared(f, g, args, points, strict)


def _check(points: int) -> None:
    if type(points) is not int or points < 1:
        raise ValueError(f"points={points!r}: the number of random points, at least one")


verify = Verify()
