"""Move compiled MPI calls between processes: take handles out of a program, put others in.

MPI's handle of a communicator, type or operation is a number that only one process understands; under Open MPI,
an address. mpi4jax's calls hold it as an attribute, which an executable keeps as text and parses on loading. So
programs are compiled with placeholders of equal length, which each rank overwrites with its handles.
"""

import re
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

_ATTRIBUTES = ("comm", "dtype", "op", "recvtype", "sendtype", "status")
_TARGET = re.compile(r"mpi_\w+_ffi")
_PLACE = 7_314_159_265_358_979_000  # the first placeholder; MLIR's parser skips the blanks before a shorter number
_MOST = 999


def take_out(module: ir.Module) -> list[int]:
    """Replace the handles in a program by numbers that are the same in every process, and return them, in order."""
    # If they are too many or too long, none is returned, and nothing is changed.
    calls: list[tuple[Any, dict[str, Any]]] = []
    found: dict[int, int] = {}

    def look(op: Any) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and _TARGET.fullmatch(op.attributes["call_target_name"].value):
            given = ir.DictAttr(op.attributes["mhlo.backend_config"])
            attributes = {given[i].name: given[i].attr for i in range(len(given))}
            calls.append((op, attributes))
            for name in filter(attributes.__contains__, _ATTRIBUTES):
                found.setdefault(ir.IntegerAttr(attributes[name]).value, len(found))
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    if len(found) > _MOST or any(len(str(handle)) > len(str(_PLACE)) for handle in found):
        return []
    with module.context:
        for op, attributes in calls:
            for name in filter(attributes.__contains__, _ATTRIBUTES):
                place = _PLACE + found[ir.IntegerAttr(attributes[name]).value]
                attributes[name] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), place)
            op.attributes["mhlo.backend_config"] = ir.DictAttr.get(attributes)
    return list(found)


def put_in(executable: bytes, handles: Sequence[int]) -> bytes:
    """Return the executable with these handles in its calls."""
    width = len(str(_PLACE))
    places = {b"%d" % (_PLACE + i): b"%*d" % (width, handle) for i, handle in enumerate(handles)}
    if not places:
        return executable
    return re.sub(rb"7314159265358979\d{3}", lambda found: places[found[0]], executable)
