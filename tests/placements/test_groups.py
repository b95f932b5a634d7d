"""`jaxdist.placements.groups`: which devices share a leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdist.ir.primitives import mark
from jaxdist.mesh import AXIS
from jaxdist.placements.groups import check_within, group
from jaxdist.placements.layouts import Cut, layout


def step(*asked: Any) -> Any:
    """A step with marks, one of them in a loop."""

    def body(carry: Any, x: Any) -> Any:
        return carry + mark(x, "gradient", 2, asked[0]), None

    def run(x: Any) -> Any:
        total, _ = jax.lax.scan(body, jnp.zeros(()), x)
        return total + sum(jnp.sum(mark(x, "state", 1, within)) for within in asked[1:])

    return jax.make_jaxpr(run)(jnp.ones(4))


TWO_HOSTS = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("within", "hosts", "size"),
    [
        (None, TWO_HOSTS, 0), ("host", TWO_HOSTS, 2), (2, TWO_HOSTS, 2), (4, TWO_HOSTS, 0), (1, TWO_HOSTS, 1),
        ("host", ["a"] * 4, 0), ("host", ["a", "b"], 1), ("host", ["a"], 0), (4, ["a"], 0),
    ],
)  # fmt: skip
def test_groups_are_so_many_in_a_row(within: Any, hosts: list[str], size: int) -> None:
    assert group(step(within), hosts) == size


def test_a_step_without_marks_has_none() -> None:
    assert group(jax.make_jaxpr(jnp.sin)(1.0), TWO_HOSTS) == 0


def test_groups_of_one_size() -> None:
    assert group(step("host", 2, 2), TWO_HOSTS) == 2
    with pytest.raises(ValueError, match="groups of 2 and of 4 devices: one step has groups of one size"):
        group(step(2, None), TWO_HOSTS)


@pytest.mark.parametrize("hosts", [["a", "b", "a", "b"], ["a", "a", "b"]])
def test_hosts_that_are_no_groups(hosts: list[str]) -> None:
    with pytest.raises(ValueError, match="as many devices on each host, their ranks in a row; the hosts of the"):
        group(step("host"), hosts)


def test_groups_that_do_not_divide_the_devices() -> None:
    with pytest.raises(ValueError, match="groups of 3 devices don't divide the 4 devices"):
        group(step(3), TWO_HOSTS)


@pytest.mark.parametrize("within", ["node", 0, -2, 1.5, True])
def test_what_is_no_group(within: Any) -> None:
    with pytest.raises(ValueError, match=f"within={within!r}: None .* 'host' .* or a number of devices"):
        check_within(within)


def test_there_is_one_layout_of_each_kind() -> None:
    assert layout(Cut(AXIS, 4, 0, 1)) is layout(Cut(AXIS, 4, 0, 1), host=False)
    assert layout(Cut(AXIS, 4, 0, 1)) is not layout(Cut(AXIS, 2, 0, 1))
