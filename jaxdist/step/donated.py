"""Memory that an earlier call has taken, and the error that says which call it was."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxdist.compilation.calling import Calling
from jaxdist.compilation.signature import Args, Leaf, leaf_name
from jaxdist.errors import DonatedError
from jaxdist.placements.model.layouts import physical


class Donation(NamedTuple):
    """The arrays whose memory a call has taken."""

    step: str
    call: int
    arrays: Sequence[jax.Array]


# The latest of each step, by its `Calls`. With the `Calls` it goes: it holds arrays that nobody else may need.
latest: "weakref.WeakKeyDictionary[object, Donation]" = weakref.WeakKeyDictionary()


def check_not_donated(
    step: str, calling: Calling, args: Args, keywords: tuple[str, ...], leaves: Sequence[Leaf]
) -> None:
    """Refuse an array whose memory an earlier call has taken."""
    if not any(map(is_deleted, leaves)):
        return
    path, array = next((path, x) for path, x in jax.tree_util.tree_leaves_with_path(args) if is_deleted(x))
    # By identity: a deleted array has no value left to compare, and is still the object that the call took.
    name, array = leaf_name(calling.of(len(args), keywords), path), physical(array)
    donations = [donation for donation in list(latest.values()) if any(x is array for x in donation.arrays)]
    by = "an earlier call of a step or of jax.jit, or a deletion,"
    if donations:
        by = f"call {donations[0].call} of step {donations[0].step!r}"
    raise DonatedError(
        f"step {step!r}: {name} is gone: {by} took its memory (donate=). Go on with what that call returned, pass it a "
        "copy (jax.numpy.copy), or leave donate= out where it was given"
    )


def is_deleted(x: Leaf) -> bool:
    """Check whether the memory of a leaf was taken or released."""
    deleted = getattr(x, "is_deleted", None)
    return deleted is not None and deleted()
