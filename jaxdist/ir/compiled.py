"""Parse the text of a compiled program into computations, with instructions in running order."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import Mesh

from jaxdist import compat
from jaxdist.mesh import Groups, axes_of_groups, axes_of_mesh
from jaxdist.sources import is_ours, of_the_user

_KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
_FLOW = {"while", "conditional", "call", "async-start", "call-start"}  # the last on a TPU's sparse cores
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|(?:true|false)_computation)=%?([\w.\-]+)")
_MPI = re.compile(r"jaxdist_mpi_([a-z]+)")
_GROUPS = r"replica_groups=(.*?)(?=, (?!device_ids)\w+=|$)"


@dataclass(frozen=True)
class Instruction:
    """A line ``name = type opcode(operands), attributes``; `rest` is the text after the opcode."""

    name: str
    type: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest[: _closing(self.rest)])

    @property
    def kind(self) -> str | None:
        """Return the kind of collective that this is or starts, if any."""
        return _KINDS.get(self.opcode.removesuffix("-start"))

    @property
    def called(self) -> list[str]:
        """Return the computations that run as part of it, except inside kernels."""
        if self.opcode not in _FLOW:
            return []
        names = _CALLED.findall(self.rest)
        if branches := self.attribute(r"branch_computations=\{([^}]*)\}"):
            names += re.findall(r"%?([\w.\-]+)", branches)
        return names

    @property
    def groups(self) -> Groups | None:
        """Return a collective's groups of devices, or (sender, receiver) pairs; None means all."""
        listed = self.attribute(r"source_target_pairs=(\{[\d,{}]*\})")
        if listed is None and (found := self.attribute(_GROUPS)) not in (None, "{}"):
            listed = compat.listed_groups(found)
        groups = re.findall(r"\{([\d,]+)\}", listed or "")
        return tuple(tuple(map(int, group.split(","))) for group in groups) or None

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of a regular expression."""
        match = re.search(pattern, self.rest)
        return match and match[1]


Computations = dict[str, list[Instruction]]


def computations(text: str) -> tuple[Computations, str]:
    """Return the computations of a module by name, and the name of its entry computation."""
    found: Computations = {}
    entry = ""
    body: list[Instruction] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            body = found[head[2]] = []
            entry = head[2] if head[1] else entry
        elif one := _instruction(line):
            body.append(one)
    return found, entry


def _instruction(line: str) -> Instruction | None:
    if (name := _NAME.match(line)) is None:
        return None
    rest = line[name.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    return opcode and Instruction(name[1], rest[:end], opcode[1], rest[opcode.end(1) :])


def _closing(text: str) -> int:
    """Return the index of the parenthesis that closes the one at the start of the text."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    return len(text) - 1


class Collective(NamedTuple):
    """A collective in a program: its kind, its mesh axes, and the line that makes its operand."""

    kind: str
    axis: str = ""
    line: str = ""


def collectives_of(text: str, meshes: Sequence[Mesh]) -> dict[str, Collective]:
    """Return the collectives of a module by name, on one of these meshes."""
    frames, found = _frames(text), dict[str, Collective]()
    for body in computations(text)[0].values():
        lines = dict[str, str]()
        for one in body:  # comes after its operands: jaxdist's collectives have the lines of those
            own = frames.get(one.attribute(r"stack_frame_id=(\d+)") or "", "")
            line = lines[one.name] = own or next(filter(None, (lines.get(name) for name in one.operands)), "")
            if one.kind:
                axes = next(filter(None, (axes_of_groups(one.groups, axes_of_mesh(mesh)) for mesh in meshes)), ())
                found[one.name] = Collective(one.kind, "+".join(axes), line)
            elif by_mpi := _MPI.match(one.name):
                found[one.name] = Collective(f"MPI {by_mpi[1]}", "", line)
    return found


def _frames(text: str) -> dict[str, str]:
    """Map the stack frames of a module to the user's lines."""
    parts = dict(part.split("\n", 1) for part in text.split("\n\n") if re.match(r"File|StackFrames", part))
    files = dict(re.findall(r'^(\d+) "(.*)"$', parts.get("FileNames", ""), re.MULTILINE))
    places = re.findall(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", parts.get("FileLocations", ""), re.MULTILINE)
    at = {place: (files[file], line) for place, file, line in places}
    line_of = {"0": ""}
    pattern = r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)"
    for frame, place, parent in re.findall(pattern, parts.get("StackFrames", ""), re.MULTILINE):
        file, line = at[place]
        outer = line_of[str(int(parent) - 1)]  # counted from 1: the outermost frame's parent is 1
        line_of[frame] = f"{file}:{line}" if of_the_user(file) else "" if is_ours(file) else outer
    return line_of
