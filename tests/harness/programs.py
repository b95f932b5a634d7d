"""What one device runs and sends, read from the text of a lowered step: StableHLO, as any user can see it."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

KINDS = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "collective_permute": "permute",
}


class Op(NamedTuple):
    """An operation of a program."""

    name: str  # "dot_general", or the kind of a collective: "all-reduce", or "extreme" where that is of max or min
    shape: tuple[int, ...]  # of its (first) result
    dtype: str  # of it, as StableHLO writes it: "f64"
    loops: int  # how many loops it is in
    groups: tuple[tuple[int, ...], ...] = ()  # of a collective: its devices
    flops: int = 0  # of a product

    @property
    def size(self) -> int:
        """Entries of the result."""
        return math.prod(self.shape)


def _tensor(text: str) -> tuple[tuple[int, ...], str]:
    *shape, dtype = text.split("x")
    return tuple(map(int, shape)), dtype


def _tensors(text: str) -> list[tuple[tuple[int, ...], str]]:
    return [_tensor(found) for found in re.findall(r"tensor<([^>]*)>", text)]


def _meshes(text: str) -> dict[str, tuple[dict[str, int], np.ndarray]]:
    """By name: the sizes of the axes, and the devices."""
    meshes = {}
    for name, axes, ids in re.findall(r"sdy\.mesh @(\w+) = <\[(.*?)\](?:, device_ids=\[(.*?)\])?>", text):
        sizes = {axis: int(size) for axis, size in re.findall(r'"(\w+)"=(\d+)', axes)}
        devices = np.array([int(i) for i in ids.split(",")]) if ids else np.arange(math.prod(sizes.values()))
        meshes[name] = sizes, devices.reshape(list(sizes.values()))
    return meshes


def _groups(line: str, meshes: dict[str, tuple[dict[str, int], np.ndarray]]) -> tuple[tuple[int, ...], ...]:
    if found := re.search(r"replica_group_mesh_axes<mesh = @(\w+), axes = \[(.*?)\]>", line):  # jax 0.12
        sizes, devices = meshes[found[1]]
        across = re.findall(r'name = "(\w+)"', found[2])
        order = [axis for axis in sizes if axis not in across] + across
        moved = devices.transpose([list(sizes).index(axis) for axis in order])
        return tuple(map(tuple, moved.reshape(-1, math.prod(sizes[axis] for axis in across)).tolist()))
    found = re.search(r"replica_groups = dense<(.*?)> : tensor<(\d+)x(\d+)xi64>", line)
    if not found:
        return ()
    numbers = [int(n) for n in re.findall(r"\d+", found[1])]
    width = int(found[3])
    return tuple(tuple(numbers[i : i + width]) for i in range(0, len(numbers), width))


def operations(text: str) -> list[Op]:
    """All operations of a program in order, those of its functions where they are called."""
    bodies: dict[str, list[str]] = {}
    meshes = _meshes(text)
    name = ""
    for line in text.splitlines():
        if found := re.match(r"\s*func\.func .*?@([\w.]+)\(", line):
            name = found[1]
            bodies[name] = []
        elif name:
            bodies[name].append(line)

    def visit(name: str, loops: int) -> Iterator[Op]:
        regions: list[bool] = []  # the open ones: whether each is a loop's
        waiting: tuple[str, str] | None = None  # a collective whose type comes after its region
        for line in bodies[name]:
            inside = loops + sum(regions)
            if called := re.search(r"\bcall @([\w.]+)\(", line):
                yield from visit(called[1], inside)
            if found := re.search(r"stablehlo\.(\w+)", line):
                kind = KINDS.get(found[1], found[1])
                if line.rstrip().endswith("({"):
                    waiting = (kind, line)
                elif waiting and waiting[0] == "all-reduce" and found[1] in ("maximum", "minimum"):
                    waiting = ("extreme", waiting[1])
                elif (
                    not waiting and " : " in line and (types := _tensors(line.rpartition(" : ")[2].rpartition("->")[2]))
                ):
                    yield Op(kind, *types[0], inside, _groups(line, meshes), _flops(kind, line, types[0][0]))
            if waiting and (end := re.match(r"\s*\}\) : .*-> (.*)$", line)):
                for shape, dtype in _tensors(end[1]):
                    yield Op(waiting[0], shape, dtype, inside, _groups(waiting[1], meshes))
                waiting = None
            stripped = line.strip()
            if stripped.startswith("}") and regions and not stripped.startswith("} do"):
                regions.pop()
            if stripped.endswith("{") and not stripped.startswith("} do"):
                regions.append(stripped == "cond {")

    return list(visit("main", 0))


def _flops(kind: str, line: str, out: tuple[int, ...]) -> int:
    if kind != "dot_general":
        return 0
    (left, _), *_ = _tensors(line.rpartition(" : ")[2])
    found = re.search(r"contracting_dims = \[([\d, ]*)\]", line)
    contracted = [left[int(d)] for d in re.findall(r"\d+", found[1])] if found else []
    return 2 * math.prod(out) * math.prod(contracted)


def of(step: Callable[..., Any], *args: Any) -> list[Op]:
    """What a step (decorated, or under `jax.jit`) runs on a device."""
    return operations(step.lower(*args).as_text())  # type: ignore[attr-defined]


def sent(step: Callable[..., Any], *args: Any) -> list[tuple[str, tuple[int, ...], int]]:
    """(kind, shape of the result, loops around it) of each collective, in order."""
    kinds = {*KINDS.values(), "extreme"}
    return [(op.name, op.shape, op.loops) for op in of(step, *args) if op.name in kinds]


def flops(step: Callable[..., Any], *args: Any) -> int:
    """Of the products of a device, those in loops once."""
    return sum(op.flops for op in of(step, *args))
