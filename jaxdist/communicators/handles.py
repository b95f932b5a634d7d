"""Compiled MPI calls that are right in another process: a program without its handles, an executable with one's own.

What MPI calls a communicator, a type or an operation is a number that only one process understands: under Open MPI an
address. mpi4jax's calls hold it as an attribute of theirs, which an executable keeps as text, parsed when it is loaded.
So a program is compiled with numbers of equal length in their place, and each rank writes its own over them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

_ATTRIBUTES = ("comm", "dtype", "op", "recvtype", "sendtype", "status")
_TARGET = re.compile(r"mpi_\w+_ffi")
_PLACE = 7_314_159_265_358_979_000
"""The first of the numbers that stand for handles; blanks before a shorter one are skipped by MLIR's parser."""
_MOST = 999


def take_out(module: ir.Module) -> list[int]:
    """Put numbers that are the same in every process in place of a program's handles.

    Returns the handles, in the order in which they first occur; none, and nothing is changed, if they are too many or
    long.
    """
    calls: list[tuple[Any, dict[str, Any]]] = []
    found: dict[int, int] = {}

    def look(op: Any) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and _TARGET.fullmatch(op.attributes["call_target_name"].value):
            given = ir.DictAttr(op.attributes["mhlo.backend_config"])
            calls.append((op, {given[i].name: given[i].attr for i in range(len(given))}))
            for name in _ATTRIBUTES:
                if name in calls[-1][1]:
                    found.setdefault(ir.IntegerAttr(calls[-1][1][name]).value, len(found))
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    if len(found) > _MOST or any(len(str(handle)) > len(str(_PLACE)) for handle in found):
        return []
    with module.context:
        for op, attributes in calls:
            for name in _ATTRIBUTES:
                if name in attributes:
                    place = _PLACE + found[ir.IntegerAttr(attributes[name]).value]
                    attributes[name] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), place)
            op.attributes["mhlo.backend_config"] = ir.DictAttr.get(attributes)
    return list(found)


def put_in(executable: bytes, handles: Sequence[int]) -> bytes:
    """An executable whose calls hold these handles."""
    width = len(str(_PLACE))
    places = {b"%d" % (_PLACE + i): b"%*d" % (width, handle) for i, handle in enumerate(handles)}
    if not places:
        return executable
    return re.sub(rb"7314159265358979\d{3}", lambda found: places[found[0]], executable)
