"""Faults in the program that is emitted for a step, each of which `jaxdist.verify` has to see.

All faults of a program are in it at once: at each place stands ``where(fault == number, wrong, right)``, and the first
argument of the step is the number of the fault. So a program is compiled once, and not for each of its hundreds.
`PYTHONPATH=tests python -m harness.program_faults` tries all of `PROGRAMS`, from the K-th on.
"""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import idioms
from harness import oracle, quick
from harness.check import On, decorated
from jax import lax
from jax.core import Tracer

from jaxdist.placements.emit.emitter import Emitter  # private: faults are put into what it emits
from jaxdist.placements.model.block import Node  # private: as above
from jaxdist.placements.model.values import REPLICATED, Partial, Split  # private: as above
from jaxdist.proof import compare  # private: compiled once for all faults
from jaxdist.step import proving  # private: as above

NONE = np.int32(-1)
POINTS = 8  # what a comparison hides at one point is there at another
CONSTANT = "a constant is off by a bit"


class Fault(NamedTuple):
    """A fault of one place of a program."""

    kind: str
    place: str  # where it is: the operation and its line
    named: Collection[tuple[str, str]]  # the operations, with their lines, that verify may name


class Outcome(NamedTuple):
    """What became of a fault."""

    fault: Fault
    changes: bool  # results of the program with any of the batches, by more than rounding
    points: int | None  # at how many points it was seen; None: at none
    first: str  # the operation that verify names, and its line
    named: bool  # whether that is where the fault is


class Faulty:
    """The faults of one program, as they are emitted along an axis."""

    def __init__(self, along: str) -> None:
        self._along = along
        self.faults: dict[Any, Fault] = {}  # by what is the same however often the program is emitted
        self._node: Node | None = None
        self._value: int | None = None  # the value that is brought into a form
        self._calls: dict[Any, int] = defaultdict(int)
        self._earlier: dict[Any, list[Any]] = defaultdict(list)  # values by their types
        self._constants: dict[int, Any] = {}  # scalars that depend on no argument, by id

    def _is_here(self, emitter: Emitter) -> bool:
        return emitter.block.outermost and emitter.axis == self._along

    def either(
        self,
        emitter: Emitter,
        kind: str,
        right: Any,
        wrong: Callable[[], Any],
        visible: Callable[[], Any] | None = None,
    ) -> Any:
        """Return ``where(fault == number, wrong(), right)``.

        With `visible`, a larger fault of the kind, which is no matter of rounding, is number ``-2 - number``.
        """
        dtype = getattr(right, "dtype", None)
        if not self._is_here(emitter) or dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
            return right
        node = self._node
        assert node is not None
        call = emitter.axis, id(node), kind, self._value
        self._calls[call] += 1
        key = *call, self._calls[call]
        number = list(self.faults).index(key) if key in self.faults else len(self.faults)
        if key not in self.faults:
            self.faults[key] = Fault(kind, f"{node.label} at {node.line}", self._named(emitter, node))
        fault = emitter._forms[emitter.block.inputs[0]][REPLICATED]
        changed = jnp.asarray(wrong()).astype(dtype)
        assert changed.shape == np.shape(right), (kind, changed.shape, np.shape(right))
        out = jnp.where(fault == number, changed, right)
        return out if visible is None else jnp.where(fault == -2 - number, jnp.asarray(visible(), dtype), out)

    def _named(self, emitter: Emitter, node: Node) -> set[tuple[str, str]]:
        """An operation itself; of a value in a form its maker and its users, as far as they only reshape it."""
        named, block, todo = {node}, emitter.block, [] if self._value is None else [self._value]
        for i in todo:
            if (maker := block.makers.get(i)) is not None:
                named.add(maker)
            users = [block.nodes[k] for k in block.users.get(i, ())]
            named.update(users)
            todo += [o for user in users if user.name in ("reshape", "squeeze", "transpose") for o in user.outs]
        return {(operation.label, operation.line) for operation in named}

    @contextmanager
    def emitted(self) -> Iterator[None]:
        """Put the faults into what is emitted."""
        names = "run bind _convert _reduce _scatter _exchange gather cut masked across"
        right = {name: getattr(Emitter, name) for name in names.split()}
        named_in_errors = Node.named_in_errors
        faulty, either = self, self.either

        def run(e: Emitter, xs: Any) -> Any:
            if faulty._is_here(e):
                faulty._calls.clear()
                faulty._earlier.clear()
                faulty._constants.clear()
            return right["run"](e, xs)

        def named(node: Node) -> Any:
            faulty._node = node
            return named_in_errors(node)

        def convert(e: Emitter, i: int, *args: Any) -> Any:
            before, faulty._value = faulty._value, i
            try:
                return right["_convert"](e, i, *args)
            finally:
                faulty._value = before

        def bind(e: Emitter, node: Node, xs: Sequence[Any], params: Any = None) -> Sequence[Any]:
            return faulty._bind(e, node, list(xs), lambda xs: right["bind"](e, node, xs, params))

        def reduce(e: Emitter, i: int, x: Any, summand: Partial) -> Any:
            out = right["_reduce"](e, i, x, summand)
            out = either(e, "a sum is not added up", out, lambda: x)
            out = either(e, "a sum is added up twice", out, lambda: e.n * out)
            return either(e, "a sum is rounded first", out, lambda: right["_reduce"](e, i, _rounded(x), summand))

        def scatter(e: Emitter, i: int, x: Any, summand: Partial, target: Split) -> Any:
            out = right["_scatter"](e, i, x, summand, target)
            out = either(e, "a sum is not added up", out, lambda: right["cut"](e, jnp.asarray(x), target))
            return either(e, "a slice of a sum is the neighbor's", out, lambda: _of_neighbor(e, out))

        def exchange(e: Emitter, x: Any, source: Split, target: Split) -> Any:
            out = right["_exchange"](e, x, source, target)
            out = either(e, "slices are exchanged with the neighbor", out, lambda: _of_neighbor(e, out))
            return either(e, "slices arrive in another order", out, lambda: jnp.roll(out, source.chunk, source.dim))

        def gather(e: Emitter, x: Any, dim: int, size: int) -> Any:
            out, chunk = right["gather"](e, x, dim, size), x.shape[dim]
            out = either(e, "slices are gathered in another order", out, lambda: jnp.roll(out, chunk, dim))
            again = lambda: lax.slice_in_dim(jnp.concatenate([x] * e.n, dim), 0, size, axis=dim)
            return either(e, "a value is not gathered", out, again)

        def cut(e: Emitter, x: Any, split: Split) -> Any:
            out = right["cut"](e, x, split)
            out = either(e, "a slice is the neighbor's", out, lambda: _of_neighbor(e, out))
            others = [d for d, n in enumerate(x.shape) if d != split.dim and n == x.shape[split.dim]]
            turned = lambda: right["cut"](e, x.swapaxes(split.dim, others[0]), split)
            return either(e, "another dimension is cut", out, turned) if others else out

        def masked(e: Emitter, x: Any, split: Split, identity: Any) -> Any:
            return either(e, "padding counts", right["masked"](e, x, split, identity), lambda: x)

        def across(e: Emitter, x: Any, kind: str) -> Any:
            return either(e, "an extreme is a device's own", right["across"](e, x, kind), lambda: x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Node, "named_in_errors", named)
            for name, wrong in {
                "run": run, "bind": bind, "_convert": convert, "_reduce": reduce, "_scatter": scatter,
                "_exchange": exchange, "gather": gather, "cut": cut, "masked": masked, "across": across,
            }.items():  # fmt: skip
                patch.setattr(Emitter, name, wrong)
            yield

    def _bind(self, e: Emitter, node: Node, xs: list[Any], bind: Callable[[list[Any]], Sequence[Any]]) -> Sequence[Any]:
        if not self._is_here(e):
            return bind(xs)
        initial = list(xs)
        if all(id(x) in self._constants or (not isinstance(x, Tracer) and np.ndim(x) == 0) for x in initial):
            outs = list(bind(xs))  # scalars that the program says are evaluated as floats
            self._constants |= {id(out): out for out in outs if np.ndim(out) == 0}
            return outs
        self._node, before = node, (self._node, self._value)
        if before[0] is not node:  # made where it is used
            self._value = None
        for k, x in enumerate(initial):
            if isinstance(x, Tracer):
                key = str(jax.typeof(x))
                for other in [y for y in self._earlier[key] if y is not x][-2:]:
                    xs[k] = self.either(e, "an operand is another value", xs[k], lambda other=other: other)  # type: ignore[misc]
            elif jnp.issubdtype(jnp.result_type(x), jnp.floating) and np.ndim(x) == 0:
                x = np.asarray(x, e.block.avals[node.ins[k]].dtype)
                xs[k] = self.either(e, CONSTANT, x, lambda x=x: np.nextafter(x, x + 1), lambda x=x: x * 1.01 + 0.01)  # type: ignore[misc]
        outs = list(bind(xs))
        for k, out in enumerate(outs):
            if jnp.issubdtype(jnp.result_type(out), jnp.inexact):
                outs[k] = self.either(e, "a result is times the devices", out, lambda out=out: out * e.n)  # type: ignore[misc]
            elif jnp.issubdtype(jnp.result_type(out), jnp.integer):
                outs[k] = self.either(e, "an integer is off by one", out, lambda out=out: out + 1)  # type: ignore[misc]
        if node.name == "scan":
            first = node.eqn.params["num_consts"]
            for k in range(node.eqn.params["num_carry"]):
                outs[k] = self.either(e, "a carry is lost", outs[k], lambda k=k: initial[first + k])  # type: ignore[misc]
        for x in (*initial, *outs):
            if isinstance(x, Tracer):
                self._earlier[str(jax.typeof(x))].append(x)
        self._node, self._value = before
        return outs


def _rounded(x: Any) -> Any:
    return x.astype(jnp.bfloat16).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _of_neighbor(e: Emitter, x: Any) -> Any:
    return lax.ppermute(x, e.axis, [(k, (k + 1) % e.n) for k in range(e.n)])


def outcomes(
    step: Callable[..., Any], state: Sequence[Any], batches: Sequence[Any], on: On, along: str = "data"
) -> list[Outcome]:
    """Try all faults along an axis of the program of ``step(*state, batch)`` on some devices."""
    faulty = Faulty(along)
    many = decorated(lambda fault, *args: step(*args), on)
    compiled: list[tuple[Any, Sequence[Any]]] = []

    def captured(placed: Any, whole: Sequence[Any], *_: Any) -> compare.Verified:
        compiled.append((placed, whole))
        return compare.Verified(True, 0, 0)

    with faulty.emitted(), pytest.MonkeyPatch.context() as patch:
        right = [jax.tree.leaves(many(NONE, *state, batch)) for batch in batches]
        patch.setattr(proving, "verified", captured)
        many.verified((NONE, *state, batches[0]), {}, 1, True)
        ((placed, whole),) = compiled
        comparison = compare.Comparison(placed, strict=True)
        points = list(compare.points(placed.avals, whole, POINTS))
        for point in points:
            assert not comparison.differing(point)
        assert not compare.first_difference(comparison, points[0], ()).operation
        faults = enumerate(faulty.faults.values())
        return [_outcome(fault, np.int32(k), right, many, comparison, points, state, batches) for k, fault in faults]


def _outcome(
    fault: Fault, number: np.int32, right: Sequence[Any], many: Any, comparison: compare.Comparison,
    points: Sequence[Any], state: Sequence[Any], batches: Sequence[Any],
) -> Outcome:  # fmt: skip
    visible = np.int32(-2 - number) if fault.kind == CONSTANT else number
    got = (jax.tree.leaves(many(visible, *state, batch)) for batch in batches)
    pairs = [(x, y) for a, b in zip(right, got, strict=True) for x, y in zip(a, b, strict=True)]
    changes = max(_apart(x, y) for x, y in pairs) > 1e-9
    for k, (order, (_, *xs)) in enumerate(points, 1):
        point = compare.Point(order, [number, *xs])
        if differing := comparison.differing(point):
            first = compare.first_difference(comparison, point, list(map(str, differing)))
            named = first.operation, first.line
            return Outcome(fault, changes, k, " at ".join(named), named in fault.named)
    return Outcome(fault, changes, None, "", False)


def _apart(right: Any, got: Any) -> float:
    """Return the largest difference, relative to the largest value."""
    if jnp.issubdtype(right.dtype, jax.dtypes.extended):
        right, got = jax.random.key_data(right), jax.random.key_data(got)
    x, y = np.asarray(right), np.asarray(got)
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return float(not np.array_equal(x, y))
    x, y = x[np.isfinite(x)], y[np.isfinite(x)]
    return float(np.abs(x - y).max(initial=0) / (np.abs(x).max(initial=0) or 1))


NAMES = [  # of steps of the catalogue that compile quickly
    "masked_mean", "in_batch_softmax", "vicreg", "pairwise_ranking", "listwise_ranking", "simclr", "topk_hard_mining",
    "quantile_clipping", "whitening_cholesky", "spearman_double_argsort", "fourier_layer", "built_weights",
    "private_map", "moco_queue", "mixup_permutation", "gradient_accumulation", "adversarial_examples", "infonce",
    "sinkhorn", "cnn_batchnorm",
]  # fmt: skip
ON: list[tuple[On, str]] = [
    (3, "data"), ({"data": 2, "model": 2}, "model"), (4, "data"), ({"data": 2, "model": 2}, "data")
]  # fmt: skip
PROGRAMS = [(name, *ON[k % 4], (0, 3, 1, 2, 3)[k % 5]) for k, name in enumerate(NAMES)]  # the last: the level of ZeRO


def main() -> None:
    """Try all faults of these programs, and print how many are seen."""
    total = Counter[str]()
    for name, on, along, level in PROGRAMS[int(sys.argv[1]) :] if sys.argv[1:] else PROGRAMS:
        began, rows = time.monotonic(), 20 if name in idioms.DIVISIBLE else 21
        case = oracle.idiom(name, rows, level, None)
        tried = outcomes(case.step, case.state, [idioms.batch(k, rows) for k in range(2)], on, along)
        counts = Counter(faults=len(tried))
        for fault, changes, points, first, named in tried:
            missed, misnamed, late = changes and not points, bool(points and not named), changes and (points or 0) > 2
            counts += Counter(change=changes, seen=bool(points), missed=missed, misnamed=misnamed, late=late)
            if missed or misnamed:
                print(f"  {'missed' if missed else f'named {first}'}: {fault.kind}, {fault.place}")
        total += counts
        where = f"{name} on {on} along {along}, level {level}"
        print(f"{where}: {dict(counts)}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"all: {dict(total)}")


if __name__ == "__main__":
    with quick.compilation(True):
        main()
