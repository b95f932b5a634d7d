"""The collectives of a compiled program in running order: bytes, turns, and overlap.

In a scheduled program, XLA writes an asynchronous collective as two operations, ``-start`` and
``-done``. The operations between the two run while the bytes are sent.
"""

import math
import re
from collections.abc import Iterator

from jaxdist.ir.compiled import Computations, Instruction, computations
from jaxdist.ir.wire import Collective

# These start no kernel, or only copy existing values.
_FREE = {
    "add-dependency", "after-all", "bitcast", "constant", "copy", "copy-done", "copy-start", "get-tuple-element",
    "iota", "opt-barrier", "parameter", "partition-id", "replica-id", "tuple",
}  # fmt: skip


def collectives(text: str, devices: int) -> list[Collective]:
    """List the collectives of a compiled program (https://openxla.org/xla/async_ops)."""
    found, entry = computations(text)
    return list(_walk(found, entry, devices, 1))


def _walk(computations: Computations, name: str, devices: int, times: int) -> Iterator[Collective]:
    body = computations.get(name, [])
    types = {one.name: one.type for one in body}
    for i, one in enumerate(body):
        started = one.opcode.endswith("-start")
        own = _collective(one, computations)
        if kind := own.kind:
            groups = own.groups or (tuple(range(devices)),)
            size, dtype = _moved(one.type, kind, started)
            if kind == "reduce-scatter" and not started:
                size *= max(map(len, groups))
            hidden = started and _hidden(body, i, types)
            yield Collective(kind, dtype, size, groups, times, hidden)
            continue
        turns = int(one.attribute(r'"known_trip_count":\{"n":"(\d+)"') or 1)
        for other in one.called:
            yield from _walk(computations, other, devices, times * turns)


def _collective(one: Instruction, computations: Computations) -> Instruction:
    """Return the collective instruction that `one` starts: itself, or the only one it wraps."""
    if one.opcode != "async-start":
        return one
    found = [inner for name in one.called for inner in computations.get(name, ()) if inner.kind]
    return found[0] if len(found) == 1 else one


def _hidden(body: list[Instruction], start: int, types: dict[str, str]) -> bool:
    """Check whether a kernel on more than scalars runs between a collective's start and its end, if that is here."""
    work = False
    for one in body[start + 1 :]:
        if one.opcode.endswith("-done") and body[start].name in one.operands:
            return work
        if one.opcode not in _FREE and not one.opcode.endswith(("-start", "-done", "-update")):
            work = work or any(re.search(r"\[\d", types.get(x, "")) for x in (one.name, *one.operands))
    return False


def _moved(type_: str, kind: str, started: bool) -> tuple[int, str]:
    """Return the bytes and dtypes of the whole arrays: the larger of input and output, if known."""
    parts = _parts(type_)
    if started and kind != "all-reduce" and len(parts) > 1:
        # (operands, results, …); an all-reduce's start has the type of its results.
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
