"""What one collective call is, the same on every rank, and the layouts that both wires share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The parameters that each collective has, in the order of `jaxdist.collectives.in_step`.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "allreduce": ("op", "groups"),
    "allgather": ("axis", "groups"),
    "reduce_scatter": ("op", "axis", "groups"),
    "broadcast": ("root", "groups"),
    "reduce": ("root", "op", "groups"),
    "all_to_all": ("split_axis", "concat_axis", "groups"),
    "gather": ("root", "groups"),
    "scatter": ("root", "groups"),
    "permute": ("perm",),
    "barrier": (),
}


@dataclass(frozen=True)
class Call:
    """A checked call; parameters that its kind does not have keep their defaults."""

    kind: str  # key of `PARAMETERS`
    op: str = "sum"  # of `jaxdist.collectives.numerics.OPS`
    axis: int = 0  # along which is gathered or scattered; negative: from the end, of each leaf
    split_axis: int = 0  # of all_to_all
    concat_axis: int = 0  # of all_to_all
    root: int = 0  # position within the group
    perm: tuple[tuple[int, int], ...] = ()  # (source, destination) pairs
    groups: tuple[tuple[int, ...], ...] | None = None  # ranks of each group; None: all ranks are one

    def group(self, rank: int, size: int) -> Group:
        """The group of a rank; a rank in none is one by itself."""
        ranks = tuple(range(size))
        if self.groups is not None:
            ranks = next((g for g in self.groups if rank in g), (rank,))
        return Group(ranks, ranks.index(rank))

    def __str__(self) -> str:
        shown = ((name, getattr(self, name)) for name in PARAMETERS[self.kind])
        return f"{self.kind}({', '.join(f'{k}={v!r}' for k, v in shown if v is not None)})"


@dataclass(frozen=True)
class Group:
    """Ranks that act together."""

    ranks: tuple[int, ...]  # in the order of their positions
    me: int  # this rank's position

    @property
    def n(self) -> int:
        """How many they are."""
        return len(self.ranks)


def split(x: Any, axis: int, n: int) -> Any:
    """`x` in `n` slices along `axis`, stacked in a new leading dimension (a view, of a NumPy array)."""
    apart = x.reshape(*x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :])
    return apart.transpose(axis, *(i for i in range(apart.ndim) if i != axis))


def merge(parts: Any, axis: int) -> Any:
    """The inverse of `split`: slices joined along `axis`."""
    n, *shape = parts.shape
    order = [*range(1, axis + 1), 0, *range(axis + 1, parts.ndim)]
    return parts.transpose(order).reshape(*shape[:axis], n * shape[axis], *shape[axis + 1 :])


def gathered_shape(shape: tuple[int, ...], axis: int, n: int) -> tuple[int, ...]:
    """Of `n` arrays joined along `axis`; scalars make a vector."""
    return (n,) if not shape else (*shape[:axis], n * shape[axis], *shape[axis + 1 :])


def positive(axis: int, ndim: int) -> int:
    """An axis counted from the start; a scalar counts as a vector of one."""
    return axis + max(1, ndim) if axis < 0 else axis
