"""Pallas kernels on several devices: what JAX ships, and random ones. Divided or whole, they compute the same."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.kernels import KERNELS, Arrays
from harness.check import check, compare, decorated
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.ref import swap

import jaxdist

WHOLE = {
    "gpu layer norm": "each block of ln_backward_dw_db has all rows",
    "gpu rms norm": "each block of ln_backward_dw_db has all rows",
    "tpu megablox gmm": "a table says which group a block of rows is of",
}


@pytest.mark.filterwarnings("ignore:.*operations across examples")
@pytest.mark.parametrize("name", KERNELS)
def test_of_jax(name: str) -> None:
    kernel = KERNELS[name]
    batch = kernel.batch(kernel.examples)
    for devices in ((2, 3), (4, 8), (3, 8), (2, 4))[[*KERNELS].index(name) % 4]:
        check(kernel.step, kernel.weights, batch, on=devices, tolerance=2e-6)
        rows = jaxdist.explain(decorated(kernel.step, devices), kernel.weights, batch).rows
        assert any(row.what != "all-reduce" for row in rows) == (name in WHOLE), rows


@pytest.mark.parametrize("name", ["own attention", "gpu attention", "tpu flash attention", "tpu splash mha"])
def test_heads_over_a_model_axis(name: str) -> None:
    kernel = KERNELS[name]
    on = {"data": 2, "model": 2}
    check(kernel.step, kernel.weights, kernel.batch(8), on=on, tolerance=2e-6)
    rows = jaxdist.explain(decorated(kernel.step, on), kernel.weights, kernel.batch(8)).rows
    assert not any(row.operation == "broadcast_in_dim" for row in rows)  # statistics of rows, by head


@pytest.mark.parametrize(("block", "by", "steps"), [(2, 2, 24), (8, 2, 6), (4, 4, 22), (3, 2, 10)])
def test_steps_that_share_a_block_stay_on_a_device(block: int, by: int, steps: int) -> None:
    def body(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...].sum(0, keepdims=True) + y[...]

    rows = lambda size, by: pl.BlockSpec((size, 3), lambda i: (i // by, 0))
    kernel = pl.pallas_call(
        body, jax.ShapeDtypeStruct((steps, 3), float), grid=(steps,), in_specs=[rows(block, by), rows(1, 1)],
        out_specs=rows(1, 1), interpret=True,
    )  # fmt: skip
    x = np.random.default_rng(0).normal(size=(-(-steps // by) * block, 3))
    for devices in (2, 3, 4, 8):
        step = lambda x, y: (kernel(x, y), jnp.sin(kernel(x, y)).sum())
        over = decorated(step, devices, batch_argnums=(0, 1))
        compare(jaxdist.unshard(over(x, x[:steps])), jax.jit(step)(x, x[:steps]), 1e-12)


def add_up(total: Any, x: Any) -> None:
    """In memory that steps share, which only some rows clear."""
    pl.when(x[0, 0] == 1)(lambda: total.__setitem__(..., jnp.zeros(total.shape)))
    total[...] += x[...]


def in_scratch(x: Any, y: Any, total: Any) -> None:
    add_up(total, x)
    y[...] = total[...]


def in_the_second_turn(x: Any, y: Any, total: Any) -> None:
    lax.fori_loop(0, 2, lambda i, _: pl.when(i == 1)(lambda: in_scratch(x, y, total)) or 0, 0)


def in_the_second_step(x: Any, y: Any, total: Any) -> None:
    @pl.when((pl.program_id(1) == 0) & (x[0, 0] == 1))
    def clear() -> None:
        total[...] = jnp.zeros(total.shape)

    @pl.when(pl.program_id(1) > 0)
    def add() -> None:
        total[...] += x[...]
        y[...] = total[...]


def in_a_block_of_the_second_step(x: Any, y: Any, total: Any) -> None:
    """The first step clears its own block of the result, which the second one does not see."""
    pl.when(pl.program_id(1) == 0)(lambda: total.__setitem__(..., jnp.zeros(total.shape)))
    pl.when((pl.program_id(1) == 1) & (x[0, 0] == 1))(lambda: total.__setitem__(..., jnp.zeros(total.shape)))
    total[...] += x[...]
    y[...] = total[...]


def in_a_part(x: Any, y: Any, total: Any) -> None:
    y[...] = x[...]
    total[:, :1] = x[:, :1]
    add_up(total, x)
    y[...] = total[...]


def kernel_of_steps(body: Callable[..., None], keeps: str) -> Callable[[Any, Any], Any]:
    """A kernel of 24 rows, for each of which it runs twice; it keeps something in scratch memory, or in a result."""
    row, one = pl.BlockSpec((1, 3), lambda i, k: (i, 0)), pl.BlockSpec((1, 3), lambda i, k: (0, 0))
    rows, kept = jax.ShapeDtypeStruct((24, 3), jnp.float64), jax.ShapeDtypeStruct((1, 3), jnp.float64)
    call = functools.partial(pl.pallas_call, body, grid=(24, 2), interpret=True)
    if keeps == "scratch":
        memory = pltpu.VMEM((1, 3), jnp.float64)
        return lambda w, x: call(rows, in_specs=[row], out_specs=row, scratch_shapes=[memory])(x)
    if keeps == "all of an operand":
        specs = {"in_specs": [pl.BlockSpec((24, 3), lambda i, k: (0, 0)), row], "out_specs": row}
        return lambda w, x: call(rows, **specs, input_output_aliases={0: 0})(jnp.broadcast_to(w, (24, 3)), x)
    if "result" in keeps:
        two, both = pl.BlockSpec((1, 3), lambda i, k: (k, 0)), jax.ShapeDtypeStruct((2, 3), jnp.float64)
        shape, spec = (both, two) if keeps == "two results" else (kept, one)
        return lambda w, x: call([rows, shape], in_specs=[row], out_specs=[row, spec])(x)[0]
    return lambda w, x: call([kept, rows], in_specs=[one, row], out_specs=[one, row], input_output_aliases={0: 0})(
        w, x
    )[1]


def in_place(w: Any, x: Any, total: Any, y: Any) -> None:
    total[...] += x[...]
    y[...] = total[...]


def from_all_rows(w: Any, x: Any, y: Any) -> None:
    y[...] = x[...] + w[1:2]


@pytest.mark.parametrize(
    ("body", "keeps"),
    [(in_scratch, "scratch"), (in_the_second_turn, "scratch"), (in_the_second_step, "scratch"), (in_a_part, "scratch"),
     (in_scratch, "result"), (in_a_block_of_the_second_step, "two results"), (in_place, "operand"),
     (from_all_rows, "all of an operand")],
)  # fmt: skip
def test_steps_that_go_on_from_each_other_stay_together(body: Callable[..., None], keeps: str) -> None:
    """Every fourth row starts anew, and on four devices others start their slices."""
    starts = np.where(np.arange(24) % 4 == 0, 1.0, 0.0)
    x = np.stack([starts, *np.random.default_rng(0).normal(size=(2, 24))], axis=1)
    step = kernel_of_steps(body, keeps)
    check(step, np.ones((1, 3)), x, on=4)
    rows = jaxdist.explain(decorated(step, 4), np.ones((1, 3)), x).rows
    assert any(row.what == "repeated" for row in rows)


# --- steps that add to one result


def clear_if(first: Any, total: Any, start: float = 0.0) -> None:
    pl.when(first)(lambda: total.__setitem__(..., jnp.full(total.shape, start)))


def add(total: Any, x: Any) -> None:
    total[...] += jnp.sin(x[...]).sum(0, keepdims=True)


def total_of_rows(first: Callable[[], Any], start: float = 0.0) -> Callable[[Any, Any], None]:
    """A body that adds blocks up, and sets the total to `start` in the first step."""
    return lambda x, total: clear_if(first(), total, start) or add(total, x)


def row_by_row(x: Any, total: Any) -> None:
    clear_if(first_of_both(), total)
    lax.fori_loop(0, x.shape[0], lambda i, _: total.__setitem__(0, total[0, :] + jnp.sin(x[i, :])) or 0, 0)


def beside_rows(x: Any, total: Any, doubled: Any) -> None:
    total_of_rows(first_of_both)(x, total)
    doubled[...] = 2 * x[...]


def that_decay(x: Any, total: Any) -> None:
    clear_if(first_of_both(), total)
    total[...] = 0.5 * total[...] + jnp.sin(x[...]).sum(0, keepdims=True)


def cleared_late(x: Any, total: Any) -> None:
    """What was in it comes back after it is cleared."""
    before = total[...]
    clear_if(first_of_both(), total)
    total[...] = jnp.where(jnp.isnan(before), 0.0, before) + jnp.sin(x[...]).sum(0, keepdims=True)


def cleared_after(x: Any, total: Any) -> None:
    add(total, x)
    clear_if(first_of_both(), total)


def in_each_turn(x: Any, total: Any) -> None:
    first = first_of_both()
    lax.fori_loop(0, 2, lambda i, _: clear_if(first, total) or add(total, x) or 0, 0)


def by_place(x: Any, total: Any) -> None:
    total_of_rows(first_of_both)(x, total)
    total[...] += 1.0 * pl.program_id(0)


def more_at_first(x: Any, total: Any) -> None:
    clear_if(first_of_both(), total)
    total[...] += x[...].sum(0, keepdims=True) * lax.cond(first_of_both(), lambda: 2.0, lambda: 1.0)


def nothing_at_first(x: Any, total: Any) -> None:
    lax.cond(first_of_both(), lambda: clear_if(True, total), lambda: add(total, x))


def so_far(x: Any, total: Any, before: Any) -> None:
    """Beside each block, the total before it."""
    clear_if(first_of_both(), total)
    was = swap(total, (...,), total[...] + x[...].sum(0, keepdims=True))
    before[...] = jnp.broadcast_to(was, before.shape)


def onto_an_operand(start: Any, x: Any, total: Any) -> None:
    """The total has an operand's memory, of which a column is set to zero."""
    pl.when(first_of_both())(lambda: total.__setitem__((slice(None), slice(1)), jnp.zeros((1, 1))))
    add(total, x)


def to_another_column(x: Any, total: Any) -> None:
    clear_if(first_of_both(), total)
    total[0, 0] = total[0, 1] + x[0, 0]
    total[0, 1] += x[0, 1]


first_of = lambda axis: lambda: pl.program_id(axis) == 0
first_of_both = lambda: (pl.program_id(0) == 0) & (pl.program_id(1) == 0)
SUMS = {
    "of blocks": (total_of_rows(first_of_both), True),
    "row by row": (row_by_row, True),
    "beside rows": (beside_rows, True),
    "cleared for each block of rows": (total_of_rows(first_of(1)), False),
    "cleared twice for the first block": (total_of_rows(first_of(0)), False),
    "cleared twice for a block of the total": (total_of_rows(first_of(0)), False),
    "from one on": (total_of_rows(first_of_both, 1.0), False),
    "that decay": (that_decay, False),
    "cleared late": (cleared_late, False),
    "cleared after": (cleared_after, False),
    "cleared in each turn": (in_each_turn, False),
    "by place": (by_place, False),
    "to another column": (to_another_column, False),
    "more in the first step": (more_at_first, False),
    "nothing in the first step": (nothing_at_first, False),
    "so far, beside rows": (so_far, False),
    "onto an operand": (onto_an_operand, False),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_in_a_kernel(name: str) -> None:
    """Over blocks of two rows, and for each over two halves of the columns. A block of padding would count."""
    body, is_divided = SUMS[name]
    parts = 4 if "of the total" in name else 2  # of the columns; two of them write to a block
    count = 2 if "beside rows" in name else 1
    aliased = name == "onto an operand"

    def step(w: Any, x: Any) -> Any:
        block = pl.BlockSpec((2, 8 // parts), lambda i, k: (i, k))
        total = pl.BlockSpec((1, 8 // parts), lambda i, k: (0, k // 2))
        shapes = [jax.ShapeDtypeStruct((1, 4), x.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)][:count]
        settings: dict[str, Any] = {"out_specs": [total, block][:count], "interpret": True}
        settings |= {"in_specs": [total, block] if aliased else [block]}
        settings |= {"input_output_aliases": {0: 0}} if aliased else {}
        operands = [w[None, :4], x * w] if aliased else [x * w]
        return pl.pallas_call(body, shapes[:count], grid=(len(x) // 2, parts), **settings)(*operands)

    w, x = np.ones(8), np.random.default_rng(0).normal(size=(24, 8))
    for examples in (24, 22):
        check(step, w, x[:examples], on=4)
        what = {row.what for row in jaxdist.explain(decorated(step, 4), w, x[:examples]).rows}
        assert ("repeated" not in what) == (is_divided and examples == 24), what


# Shape, block, and the index of each dimension.
Array = tuple[tuple[int, ...], tuple[int | None, ...], list[Callable[..., Any]]]


class Draw:
    """A random kernel, whose body does some of what steps may do: see `body`."""

    def __init__(self, rng: np.random.Generator, rows: int) -> None:
        self.rng, self.rows = rng, rows
        self.maps, self.in_axis = self.one_of(0, 0, 0, 1, 1, 2), self.one_of(0, 0, 1)  # of vmap
        self.table = bool(self.one_of(0, 0, 0, 0, 0, 0, 1))  # prefetched
        self.block: int | None = self.one_of(1, 1, 1, 2, 4, None)
        axes = self.one_of(1, 2, 3)
        self.main = int(rng.integers(axes))  # the axis that goes along the rows, if vmap does not
        self.grid = [self.one_of(2, 3, 4) for _ in range(axes)]
        if not self.maps:
            self.grid[self.main] = -(-rows // (self.block or 1))
        self.operands = [self.array(k == 0, False) for k in range(self.one_of(1, 2, 3))]
        self.results = [self.array(self.one_of(0, 1, 1, 1) > 0, True) for _ in range(self.one_of(1, 2))]
        self.aliased = self.one_of(0, 0, 0, 0, 0, 0, 1)
        if self.aliased:
            self.results[0] = self.operands[0]
        self.mixes = [self.one_of("no", "no", "no", "reverse", "cumsum", "sum") for _ in self.operands]
        self.reads = self.one_of("no", "no", "no", "no", "no", "place", "unused", "count")
        self.axis, self.when = (int(rng.integers(axes)) for _ in range(2))  # that it looks at
        self.scratch = self.one_of("no", "no", "no", "first", "carried", "when")
        self.adds = self.one_of(0, 0, 0, 1)

    def one_of(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def array(self, has_rows: bool, is_result: bool) -> Array:
        shape, block, index, axes = list[int](), list[int | None](), [], self.rng.permutation(len(self.grid)).tolist()
        for d in range(self.one_of(1, 2, 3)):
            size: int | None = self.one_of(None, 1, 2, 4)
            axis = axes.pop() if axes and self.one_of(0, 1, 1, 1, 1) else None
            entries = (size or 1) * (1 if axis is None else self.grid[axis]) + self.one_of(0, 0, 0, (size or 1) // 2)
            if d == 0 and has_rows and not self.maps:
                axes = [a for a in [*axes, axis] if a not in (self.main, None)]
                axis, entries, size = self.main, self.rows, self.one_of(*[self.block] * 6, 1, 2, 4)
            elif axis is None:
                size = entries
            shape.append(entries)
            block.append(size)
            index.append(self.index(axis, -(-entries // (size or 1)), is_result or (d == 0 and has_rows)))
        return tuple(shape), tuple(block), index

    def index(self, axis: int | None, n: int, mostly_itself: bool) -> Callable[..., Any]:
        """An index, of `n` blocks, as a function of a step's place and of what is prefetched."""
        if axis is None:
            return lambda i, t: 0
        other = int(self.rng.integers(len(self.grid)))
        kinds: list[Callable[..., Any]] = [
            lambda i, t: i[other] % n, lambda i, t: 0, lambda i, t: i[axis] // 2 % n, lambda i, t: i[axis] * 2 % n,
            lambda i, t: (i[axis] + 1) % n, lambda i, t: (i[axis] + i[other]) % n,
            lambda i, t: t[0][i[axis]] % n if t else 0,
        ]  # fmt: skip
        return self.one_of(*[lambda i, t: i[axis] % n] * (40 if mostly_itself else 7), *kinds)

    def body(self, *refs: Any) -> None:
        refs, last = refs[self.table :], len(self.operands) + len(self.results)
        if self.reads == "unused":
            pl.program_id(self.axis)
        xs = [mixed(ref[...], mix) for ref, mix in zip(refs, self.mixes, strict=False)]
        for r, ref in enumerate(refs[len(self.operands) : last]):
            y = sum(((k + 1.0) * fit(x, ref.shape) for k, x in enumerate(xs)), jnp.zeros(ref.shape))
            y *= 1.0 + pl.program_id(self.axis) if self.reads == "place" else 1
            y *= 1.0 * pl.num_programs(self.axis) if self.reads == "count" else 1
            if r == 0 and self.scratch != "no":
                self.remember(refs[last], y)
                y += refs[last][...]
            if self.adds:
                pl.when(pl.program_id(self.when) == 0)(lambda ref=ref: ref.__setitem__(..., jnp.zeros(ref.shape)))
                y += ref[...]
            ref[...] = y

    def remember(self, memory: Any, y: jax.Array) -> None:
        if self.scratch == "first":
            memory[...] = jnp.sin(y)
            return
        places = [pl.program_id(k) for k in ([self.when] if self.scratch == "when" else range(len(self.grid)))]
        pl.when(sum(places) == 0)(lambda: memory.__setitem__(..., y))
        if self.scratch == "carried":
            memory[...] += y

    def spec(self, array: Array) -> pl.BlockSpec:
        return pl.BlockSpec(array[1], lambda *i: tuple(f(i, i[len(self.grid) :]) for f in array[2]))

    def case(self) -> tuple[Callable[[Arrays, Arrays], Any], Any, dict[str, np.ndarray]]:
        memory = pltpu.VMEM([b for b in self.results[0][1] if b is not None], jnp.float64)
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=self.table, grid=tuple(self.grid), in_specs=list(map(self.spec, self.operands)),
            out_specs=list(map(self.spec, self.results)), scratch_shapes=[memory] * (self.scratch != "no"),
        )  # fmt: skip
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float64) for shape, *_ in self.results]
        aliases = {int(self.table): 0} if self.aliased else {}
        call = pl.pallas_call(self.body, shapes, grid_spec=grid, interpret=True, input_output_aliases=aliases)
        tables = [self.rng.integers(4, size=max(self.grid)).astype(np.int32)] * self.table
        weights, batch, axes = dict[str, np.ndarray](), dict[str, np.ndarray](), list[int | None]()
        for k, (shape, *_) in enumerate(self.operands):
            of_batch = k == 0 or (self.one_of(True, False) and bool(self.maps or shape[0] == self.rows))
            mapped = [self.rows, 3][: self.maps] if of_batch else []
            (batch if of_batch else weights)[str(k)] = self.rng.normal(size=(*mapped, *shape))
            axes.append(self.in_axis if mapped else None)

        def step(w: Arrays, b: Arrays) -> Any:
            xs = [b[str(k)] if str(k) in b else w[str(k)] for k in range(len(axes))]
            f = lambda *xs: call(*tables, *xs)
            f = jax.vmap(f, [None if a is None else 0 for a in axes]) if self.maps == 2 else f
            xs = [x if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(xs, axes, strict=True)]
            return jax.vmap(f, axes)(*xs) if self.maps else f(*xs)

        return step, weights, batch


def mixed(x: jax.Array, how: str) -> jax.Array:
    """The rows of a block reversed, or added up to each, or the block's sum added to them."""
    if how == "sum":
        return x + x.sum()
    return {"reverse": lambda: x[::-1], "cumsum": lambda: jnp.cumsum(x, 0), "no": lambda: x}[how if x.ndim else "no"]()


def fit(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast, and before that summed along dimensions that don't fit."""
    x = x.sum(tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
    x = x.reshape((1,) * (len(shape) - x.ndim) + x.shape)
    return jnp.broadcast_to(x.sum([d for d, n in enumerate(shape) if x.shape[d] not in (1, n)], keepdims=True), shape)


@pytest.mark.filterwarnings("ignore")
def test_random_ones() -> None:
    divided, seeds = 0, 60
    for seed in range(seeds):
        (step, w, x), want = drawn(rng := np.random.default_rng(seed))
        over = decorated(step, int(rng.integers(2, 5)))
        compare(jaxdist.unshard(over(w, x)), want, 1e-12)
        rows = jaxdist.explain(over, w, x).rows
        divided += not any(row.what == "repeated" and row.operation.startswith("pallas_call") for row in rows)
    assert divided > seeds / 3


def drawn(rng: np.random.Generator) -> tuple[Any, Any]:
    """A kernel that runs on one device and leaves nothing of its results unwritten, and its results."""
    while True:
        case = Draw(rng, int(rng.choice([7, 8, 12, 24]))).case()
        try:
            want = jax.device_get(jax.jit(case[0])(*case[1:]))
        except (ValueError, TypeError, IndexError):
            continue
        if all(np.isfinite(x).all() for x in want):
            return case, want
