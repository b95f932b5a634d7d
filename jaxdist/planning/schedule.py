"""The collectives of a compiled program in running order: bytes, turns, and overlap.

In a scheduled program, XLA writes an asynchronous collective as two operations, ``-start`` and
``-done``. The operations between the two run while the bytes are sent. XLA for TPUs writes both as
fusions, and repeats the collective in each fusion between the two; what slices send each other it
writes as ``send`` and ``recv``.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxdist.ir.compiled import Computations, Instruction, computations
from jaxdist.ir.wire import Collective
from jaxdist.mesh import Groups

# These start no kernel, or only copy existing values.
_FREE = {
    "add-dependency", "after-all", "bitcast", "constant", "copy", "copy-done", "copy-start", "get-tuple-element",
    "iota", "opt-barrier", "parameter", "partition-id", "replica-id", "tuple",
}  # fmt: skip

_BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce", "ALL_GATHER": "all-gather", "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
}  # fmt: skip
_FUSED = re.compile(r"async-collective-start((?:\.\d+)?)$")
_SAME = {"copy", "copy-start", "copy-done", "bitcast"}


def collectives(text: str, devices: int) -> list[Collective]:
    """List the collectives of a compiled program (https://openxla.org/xla/async_ops)."""
    found, entry = computations(text)
    return list(_walk(found, entry, devices, 1))


def _walk(computations: Computations, name: str, devices: int, times: int) -> Iterator[Collective]:
    body = computations.get(name, [])
    types = {one.name: one.type for one in body}
    for i, one in enumerate(body):
        if message := _message(one, computations, devices):
            size, dtype = _moved(message.type, message.kind, message.started)
            if message.kind == "reduce-scatter" and not message.started:
                size *= max(map(len, message.groups))
            hidden = message.ends_later and _hidden(body, i, types)
            yield Collective(message.kind, dtype, size, message.groups, times, hidden)
            continue
        turns = _turns(one, body, computations) if one.opcode == "while" else 1
        for other in one.called:
            yield from _walk(computations, other, devices, times * turns)


def _turns(loop: Instruction, body: list[Instruction], computations: Computations) -> int:
    """Return how often a loop runs: as XLA says, or as its counter and limit say; 1 if neither is known."""
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    outside = {one.name: one for one in body}
    test = computations.get(loop.attribute(r"condition=%?([\w.\-]+)") or "", ())
    carry = outside.get(loop.operands[0])
    limits = [int(n) for one in test if one.opcode == "constant" and (n := one.attribute(r"^\((\d+)\)"))]
    counters = [one.attribute(r"index=(\d+)") for one in test if one.opcode == "get-tuple-element"]
    if not limits or carry is None or carry.opcode != "tuple":
        return 1
    found = [_constant(carry.operands[int(index)], outside) for index in counters if index]
    starts = [start for start in found if start is not None]
    # A 64-bit integer is two 32-bit integers on TPUs, and the upper one is 0.
    return max(1, max(limits) - max(starts)) if starts and len(starts) == len(found) else 1


def _constant(name: str, body: Mapping[str, Instruction]) -> int | None:
    """Return the constant that a name stands for, through copies."""
    one = body.get(name)
    while one and one.opcode in _SAME:
        one = body.get(one.operands[0])
    value = one.attribute(r"^\((\d+)\)") if one and one.opcode == "constant" else None
    return None if value is None else int(value)


class _Message(NamedTuple):
    """The message that an instruction sends."""

    kind: str
    type: str  # of its results
    groups: Groups
    started: bool = False  # whether the type belongs to the start of an operation, which has the operands' too
    ends_later: bool = False  # whether a different instruction ends it


def _message(one: Instruction, computations: Computations, devices: int) -> _Message | None:
    """Return the message that an instruction sends, or starts: its own, or its only wrapped collective's."""
    if one.opcode == "recv" and (transfer := one.attribute(r'_xla_megascale_transfer_type="(\w+)"')):
        part = _parts(one.type)[0]
        return _Message(_BETWEEN_SLICES.get(transfer, "permute"), part, _across_slices(one, devices), ends_later=True)
    fused, started = one.opcode == "fusion", one.opcode.endswith("-start")
    called = re.findall(r"calls=%?([\w.\-]+)", one.rest) if fused else one.called if started else []
    wrapped = [inner for name in called for inner in computations.get(name, ()) if inner.kind]
    own = wrapped[0] if len(wrapped) == 1 else one
    begins = _FUSED.match(one.name) is not None
    if not own.kind or (fused and "chain_id=" in own.rest and not begins):  # it only continues, or ends
        return None
    groups, kind = own.groups or (tuple(range(devices)),), own.kind
    if fused and kind == "all-reduce" and called[0].startswith("all-reduce-scatter"):
        return _Message("reduce-scatter", one.type, groups)
    return _Message(kind, own.type if fused else one.type, groups, started, started or begins)


def _across_slices(one: Instruction, devices: int) -> Groups:
    """Return the groups of a message between TPU slices: the devices at one place of each slice."""
    target = one.attribute(r'_xla_megascale_target="?([^"]*?)"?,_xla') or ""
    if target.startswith("{{"):  # of each device, its slice, counted from 1, times 100,000, and its place there
        groups = [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", target)]
        each = devices // len({n // 100_000 for group in groups for n in group})
        return tuple(tuple((n // 100_000 - 1) * each + n % 100_000 for n in group) for group in groups)
    # ``{1,2}x{0:7}``: the places 0 to 7 of the slices 1 and 2.
    slices, places = (_numbers(text) for text in target.split("x"))
    return tuple(tuple(range(place, devices, devices // len(slices))) for place in places)


def _numbers(text: str) -> list[int]:
    """Return the numbers of ``{1,2}`` or ``{0:7}``, whose end is one of them."""
    ranges = [part.partition(":") for part in text.strip("{}").split(",")]
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def _hidden(body: list[Instruction], start: int, types: dict[str, str]) -> bool:
    """Check whether a kernel on more than scalars runs between a collective's start and its end, if that is here."""
    work = False
    fused = _FUSED.match(body[start].name)
    for one in body[start + 1 :]:
        if one.opcode.endswith("-done") and body[start].name in one.operands:
            return work
        if fused and one.name == f"async-collective-done{fused[1]}":
            return work
        if one.opcode not in _FREE and not one.opcode.endswith(("-start", "-done", "-update")):
            work = work or any(re.search(r"\[\d", types.get(x, "")) for x in (one.name, *one.operands))
    return False


def _moved(type_: str, kind: str, started: bool) -> tuple[int, str]:
    """Return the bytes and dtypes of the whole arrays: the larger of input and output, if known."""
    parts = _parts(type_)
    if started and len(parts) > 1 and (kind != "all-reduce" or parts[0].startswith("(")):
        # (operands, results, …); an all-reduce's start has the type of its results before jaxlib 0.12.
        parts = [parts[0] if kind == "reduce-scatter" else parts[1]]
    arrays = re.findall(r"([a-z]\w*)\[([\d,]*)\]", " ".join(parts))
    size = 0
    for dtype, dims in arrays:
        bits = re.search(r"\d+", dtype)
        width = int(bits[0]) if bits else 8
        size += -(-width * math.prod(int(n) for n in dims.split(",") if n) // 8)
    return size, "+".join(dict.fromkeys(dtype for dtype, _ in arrays))


def _parts(type_: str) -> list[str]:
    """Return the elements of a tuple type, or a list with any other type."""
    if not type_.startswith("("):
        return [type_]
    parts, depth, last = [], 0, 1
    for i, c in enumerate(type_):
        depth += (c in "([{") - (c in ")]}")
        if depth == 1 and c == ",":
            parts.append(type_[last:i])
            last = i + 1
    return [*parts, type_[last:-1]]
