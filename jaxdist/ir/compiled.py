"""The text of a compiled program: its computations, and the instructions of each in the order in which they run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxdist import compat
from jaxdist.mesh import Groups

_KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
_FLOW = {"while", "conditional", "call", "async-start"}
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|(?:true|false)_computation)=%?([\w.\-]+)")


_GROUPS = r"replica_groups=(.*?)(?=, (?!device_ids)\w+=|$)"


@dataclass(frozen=True)
class Instruction:
    """A line: ``name = type opcode(operands), attributes``; `rest` is what follows the opcode."""

    name: str
    type: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest[: _closing(self.rest)])

    @property
    def kind(self) -> str | None:
        """What it does, if it is a collective or starts one."""
        return _KINDS.get(self.opcode.removesuffix("-start"))

    @property
    def called(self) -> list[str]:
        """The computations that run as part of it; not those of a kernel."""
        if self.opcode not in _FLOW:
            return []
        names = _CALLED.findall(self.rest)
        if branches := self.attribute(r"branch_computations=\{([^}]*)\}"):
            names += re.findall(r"%?([\w.\-]+)", branches)
        return names

    @property
    def groups(self) -> Groups | None:
        """The devices that a collective is between, group by group, or pairs of sender and receiver; None: all."""
        listed = self.attribute(r"source_target_pairs=(\{[\d,{}]*\})")
        if listed is None:
            found = self.attribute(_GROUPS)
            if found in (None, "{}"):
                return None
            listed = compat.listed_groups(found)
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed))

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression."""
        match = re.search(pattern, self.rest)
        return match and match[1]


Computations = dict[str, list[Instruction]]


def computations(text: str) -> tuple[Computations, str]:
    """Those of a module, by name, and the name of the one that it runs.

    Source: https://openxla.org/xla/operation_semantics
    """
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
    name = _NAME.match(line)
    if name is None:
        return None
    rest = line[name.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    return opcode and Instruction(name[1], rest[:end], opcode[1], rest[opcode.end(1) :])


def _closing(text: str) -> int:
    """Where the parenthesis is closed with which the text begins."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    return len(text) - 1
