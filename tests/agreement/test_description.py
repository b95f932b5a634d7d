"""What is said of ranks that differ."""

from __future__ import annotations

import pytest

from jaxdist.agreement.description import Description, difference, first_problem, list_ranks, listed, unlike_the_root

ONE = Description("allreduce(op='sum')", (("x[0]", "float32[2]"), ("x[1]", "int8[]")))
TWO = Description("allreduce(op='sum')", (("x[0]", "float32[2]"),))


def advice(name: str) -> str:
    return f"Look at {name}"


@pytest.mark.parametrize(
    ("everyone", "said"),
    [
        (
            [ONE, TWO, ONE],
            "the ranks call allreduce(op='sum') with different arguments: x[1] is int8[] on rank 0, 2; absent on",
        ),
        (
            [ONE, Description("barrier()")],
            "the ranks make different calls: allreduce(op='sum') on rank 0; barrier() on rank 1. Nothing was sent.",
        ),
        ([ONE, Description("allreduce", problem="no")], "allreduce, on rank 1: no"),
        (
            [ONE, *[Description("save", problem=p) for p in ("disk full", "no")]],
            "save, on rank 1 (and on rank 2): disk full",
        ),
        (
            [Description("save", (("a", "1"), ("b", "2"))), Description("save", (("b", "2"), ("a", "1")))],
            "the ranks are at different calls of save, or name its arguments in another order",
        ),
    ],
)
def test_the_first_difference_is_told(everyone: list[Description], said: str) -> None:
    assert difference(everyone, advice).startswith(said)


def test_equal_fingerprints_are_equal_descriptions() -> None:
    assert ONE.fingerprint == Description(ONE.call, ONE.entries).fingerprint
    assert ONE.fingerprint != TWO.fingerprint
    assert 0 < ONE.fingerprint < 2**62  # an int64, and so is its complement
    assert Description("save", problem="disk full").fingerprint == 0
    assert str(TWO) == "allreduce(op='sum') of x[0]: float32[2]"


def test_many_ranks_are_counted() -> None:
    assert list_ranks(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert listed({"a": [0, 2], "b": [1]}) == "a on rank 0, 2; b on rank 1"
    assert first_problem("save", dict.fromkeys(range(10), "no")).startswith("save, on rank 0 (and on rank 1, 2, ")
    assert unlike_the_root([5, 6, 5]) == [1]
