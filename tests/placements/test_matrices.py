"""Work on whole matrices: found, and given to devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdist.machine import VIRTUAL
from jaxdist.mesh import AXIS, Axis
from jaxdist.placements.cost import seconds
from jaxdist.placements.infer import Infer
from jaxdist.placements.layouts import choose
from jaxdist.placements.matrices import Component, bytes_moved, components
from jaxdist.placements.owners import Owned, owners_p
from jaxdist.placements.strategy import Placed
from jaxdist.placements.values import REPLICATED, tile

SIZE = 64


def placed(f: Any, *shapes: tuple[int, ...], split: Any = None, devices: int = 4) -> tuple[Infer, Placed]:
    """A function of arrays in slices."""

    def dim(shape: tuple[int, ...]) -> int | None:
        how = choose(shape, devices)
        return how.dim if how else None

    infer = Infer(Axis(AXIS, devices), dim, split=split)
    block = infer.block(jax.make_jaxpr(f)(*[jnp.zeros(s) for s in shapes]))
    ins = [REPLICATED if dim(s) is None else tile(dim(s) or 0, s[dim(s) or 0], devices, stored=True) for s in shapes]
    return infer, infer.place(block, ins)


def found(f: Any, *shapes: tuple[int, ...]) -> list[Component]:
    infer, whole = placed(f, *shapes, split="slices")
    return components(infer, whole, bytes_moved(whole))


def owned_by(whole: Placed) -> Owned:
    (owned,) = [n for n in whole.block.nodes if isinstance(n, Owned)]
    return owned


def names(component: Component) -> list[str]:
    return [node.name for node in component.nodes if node.name != "transpose"]


def cube(x: Any) -> Any:
    return x @ x.T @ x


def cubes(*xs: Any) -> list[Any]:
    return [cube(x) for x in xs]


def largest(x: Any) -> Any:
    """The largest singular value."""
    return jnp.linalg.svd(x, compute_uv=False)[0]


def adam(a: Any, first: Any, second: Any) -> Any:
    y = cube(a)
    first, second = 0.9 * first + y, 0.9 * second + y * y
    return first, second, first / jnp.sqrt(second)


def by_their_norm(*xs: Any) -> list[Any]:
    xs = tuple(cubes(*xs))
    return cubes(*(x / jnp.sqrt(sum(jnp.sum(x**2) for x in xs)) for x in xs))


def by_one_of_them(*xs: Any, broadcast: bool = False) -> list[Any]:
    scale = largest(xs[0])
    return cubes(*(x / (jnp.broadcast_to(scale, x.shape) if broadcast else scale) for x in xs))


MATRIX = (SIZE, SIZE)
DOT = "dot_general"
FOUND: dict[str, tuple[Any, int, list[Any]]] = {
    "one of each": (lambda a, b: (cube(a) + a, cube(b)), 2, [[DOT] * 2] * 2),
    "what is between, not what follows": (lambda a: jnp.tanh(jnp.sin(cube(a)) @ a), 1, [[DOT, DOT, "sin", DOT]]),
    "what takes more than its results is done on slices": (adam, 3, [[DOT] * 2]),
    "what would move its results again": (lambda a: (lambda y: y + y.T)(cube(a)), 1, [[DOT, DOT, "add"]]),
    "products of products are joined": (lambda a, b: (a @ a.T) @ (b @ b.T), 2, [[DOT] * 3]),
    "those that meet in a number are not": (by_their_norm, 2, [0, 0, 1, 1]),
    "nor those that a number of one scales": (by_one_of_them, 4, [0, 1, 1, 1, 1]),
    "nor where it is broadcast": (functools.partial(by_one_of_them, broadcast=True), 4, [0, 1, 1, 1, 1]),
    "each scaled by its own": (lambda *xs: [cube(x / largest(x)) for x in xs], 4, [0, 0, 0, 0]),
}
"""Functions of so many matrices, and the operations, or the stage, of each component."""


@pytest.mark.parametrize("name", FOUND)
def test_components(name: str) -> None:
    f, matrices, expected = FOUND[name]
    components = found(f, *[MATRIX] * matrices)
    assert [one.stage if isinstance(expected[0], int) else names(one) for one in components] == expected
    if not isinstance(expected[0], int):
        assert {one.stage for one in components} == {0}
    if name == "each scaled by its own":  # it travels once
        assert [len(one.ins) for one in components] == [1] * 4


def test_an_entry_of_a_sorted_array_is_taken_by_its_owner() -> None:
    (one,) = found(lambda a: a * jnp.sort(a.ravel())[7], MATRIX)
    assert "sort" in names(one)
    assert [str(node.eqn.outvars[0].aval) for node in one.nodes][-1] == "float64[1]"


def test_control_flow_of_several_has_them_inside() -> None:
    def f(a: Any, b: Any, c: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, xs: jax.tree.map(cube, xs), (a, b, c))

    infer, whole = placed(f, MATRIX, MATRIX, MATRIX, split="owners")
    assert components(infer, whole, bytes_moved(whole)) == []
    (strategy,) = [s for s in whole.strategies if s.bodies]
    owned = owned_by(strategy.bodies[0])
    assert sorted(one.owner or 0 for one in owned.works) == [0, 1, 2]


def test_the_largest_come_first() -> None:
    sizes = (32, 64, 96, 128, 48)  # the cube of 128 is more than those of the others together
    _, whole = placed(cubes, *[(n, n) for n in sizes], split="owners", devices=2)
    owned = owned_by(whole)
    owners: dict[int, int | None] = {one.placed.block.avals[0].shape[0]: one.owner for one in owned.works}
    assert owners == {128: 0, 96: 1, 64: 1, 48: 1, 32: 1}
    (strategy,) = [s for s in whole.strategies if s.bodies]
    most = max(one.seconds for one in owned.works)  # of the device that has most to do
    assert sum(seconds(one, VIRTUAL) for one in strategy.bodies) == most


def test_what_follows_waits_for_it() -> None:
    def f(a: Any, b: Any) -> Any:
        x = jnp.sin(a)
        y = cube(x)
        z = b + y
        return cube(z) * x, jnp.sum(y) + jnp.sum(z)

    _, whole = placed(f, MATRIX, MATRIX, split="owners")
    made = set(whole.block.inputs) | set(whole.block.known)
    for node in whole.block.nodes:
        assert made.issuperset(node.ins)
        made.update(node.outs)
    assert made.issuperset(whole.block.outputs)


def test_what_others_wait_for_is_not_done_by_the_owner() -> None:
    """It would wait for what it has to give first."""

    def f(a: Any, b: Any) -> Any:
        x, y = jnp.sin(a), jnp.sin(a).T
        z = x + y
        return x @ y @ z @ (b * jnp.tanh(z))

    _, whole = placed(f, MATRIX, MATRIX, split="owners")
    order = ["add", "tanh", owners_p.name]
    assert [n.name for n in whole.block.nodes if n.name in order] == order


def test_one_matrix_of_many_devices_stays_on_slices_if_they_take_less() -> None:
    """A product of a wide matrix with a narrow one: its owner would do alone what all can."""
    _, whole = placed(lambda a, b: jnp.tanh(a) @ b, (512, 512), (512, 8), devices=8)
    assert not [n for n in whole.block.nodes if isinstance(n, Owned)]
    _, whole = placed(lambda a: jnp.linalg.svd(a, compute_uv=False), (512, 512), devices=8)
    assert [n for n in whole.block.nodes if isinstance(n, Owned)]


def test_a_giant_on_slices_does_not_keep_the_others_there() -> None:
    shapes = [(1024, 1024), *[(128, 128)] * 8]
    _, whole = placed(cubes, *shapes, devices=8)
    owned = owned_by(whole)
    assert [whole.block.avals[one.component.outs[0]].shape for one in owned.works] == shapes[1:]
    assert sorted(one.owner or 0 for one in owned.works) == list(range(8))
