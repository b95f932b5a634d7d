"""Padding holds values that real rows hold, too, or zeros where a sum was scattered: so it makes no NaN of its own.

What each operation makes of a padded batch is looked at: a rule that lets something else into it is named.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import operations
from harness.check import decorated, mesh
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from jaxdist.communicators import lowering  # private: it runs the program
from jaxdist.placements.emit.emitter import Emitter, local_types  # private: the values inside a program
from jaxdist.placements.model.strategy import Propagation  # private: what they are
from jaxdist.placements.model.values import Partial, Split, form  # private: where their padding is


class Recorder(Emitter):
    """Returns the padded values of a program instead of its results."""

    def run(self, xs: Any) -> Any:
        super().run(xs)
        self.names, values = list[tuple[str, Split]](), []
        zeros = set[int]()  # values of whose padding some is zero
        for node, strategy in zip(self.block.nodes, self.placed.strategies, strict=True):
            for o, split in zip(node.outs, strategy.out_placements, strict=True):
                resolved = self.placed.placements[o]
                if (isinstance(split, Partial) and isinstance(resolved, Split)) or not zeros.isdisjoint(node.ins):
                    zeros.add(o)
                elif isinstance(split, Split) and split.is_padded(self.n) and not (split.of_state or split.whole):
                    x = self._forms[o][form(split)]
                    if x.size and not jnp.issubdtype(x.dtype, jax.dtypes.extended):
                        self.names.append((f"{node.name} at {node.line}", split))
                        values.append(jnp.moveaxis(x, split.dim, 0))
        return values


def recorded(propagation: Propagation, args: list[Any], devices: int) -> list[tuple[str, Split, np.ndarray]]:
    """Each padded value: the name of its operation, its slices, and these of all devices."""
    recorder, inputs, specs = Recorder(propagation), list[Any](), list[P]()
    for target, x in zip(propagation.in_forms, args, strict=True):
        if isinstance(target, Split):
            rows = np.minimum(np.arange(target.chunk * devices), target.size - 1)
            inputs.append(jnp.take(x, rows, axis=target.dim))
            specs.append(P(*[None] * target.dim, "data"))
        else:
            inputs.append(x)
            specs.append(P())
    closed, over = recorder.program(local_types(propagation)), mesh(devices)
    run = lambda *xs: [x[None] for x in lowering("xla", over).run(closed, *xs)]
    run = jax.shard_map(run, mesh=over, in_specs=tuple(specs), out_specs=P("data"), check_vma=False)
    return [(*name, np.asarray(x)) for name, x in zip(recorder.names, jax.jit(run)(*inputs), strict=True)]


def doubled(x: Any) -> Any:
    """In blocks of two rows, which are added to each other."""
    block = pl.BlockSpec((2, x.shape[1]), lambda i: (i, 0))
    add = lambda a, b: b.__setitem__(..., a[...] + a[...][::-1])
    return pl.pallas_call(add, x, grid=(len(x) // 2,), in_specs=[block], out_specs=block, interpret=True)(x)


def in_groups(w: Any, x: Any) -> Any:
    return lax.ragged_dot(x, w, jnp.array([1, len(x) - 1], jnp.int32))


KERNELS: Any = {"blocks": lambda w, x: doubled(x * w[0, :, 0]), "groups": in_groups}


@pytest.mark.parametrize(("devices", "rows"), [(4, 5), (3, 7), (4, 15)])
def test_padding_is_of_real_values(devices: int, rows: int) -> None:
    for k in range(0, len(operations.OPERATIONS), 30):
        names = [*operations.OPERATIONS][k : k + 30]
        run = lambda w, b, names=names: {name: operations.OPERATIONS[name](w, b) for name in names}
        check_padding(run, operations.state(), operations.batch(rows), devices)


def check_padding(run: Callable[[Any, Any], Any], state: Any, batch: Any, devices: int) -> None:
    (propagation,) = decorated(run, devices).program(state, batch).placed.emitted.propagations
    values = recorded(propagation, jax.tree.leaves((state, batch)), devices)
    assert values
    for name, split, x in values:
        place = np.arange(split.rows) % split.chunk + np.arange(devices)[:, None] * split.chunk
        real = place < split.size
        entries = np.unique(x[real])
        padding = x[~real].ravel()
        near = np.isclose(padding[:, None], entries[None], rtol=1e-6, equal_nan=True).any(1)
        assert near.all(), name


@pytest.mark.parametrize("name", KERNELS)
def test_padding_of_kernels(name: str) -> None:
    rng = np.random.default_rng(0)
    check_padding(KERNELS[name], rng.normal(size=(2, 4, 3)), rng.normal(size=(10, 4)), 3)
