"""The text of compiled programs."""

from __future__ import annotations

import pytest

from jaxdist.ir.compiled import Instruction, computations

_TEXT = """HloModule step, is_scheduled=true

%wide (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main.1 (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %turns = (s32[], /*index=1*/f32[4]{0}) tuple(%n, %x)
  %loop.2 = (s32[], f32[4]{0}) while(%turns), condition=%wide, body=%turn.1, backend_config={"n":"3"}
  %branch = f32[4]{0} conditional(%i, %x, %x), branch_computations={%one, %two.3}
  %either = f32[4]{0} conditional(%yes, %x, %x), true_computation=%one, false_computation=%two.3
  %called = f32[4]{0} call(%either), to_apply=%body
  %begun = ((f32[4]{0}), f32[8]{0}, u32[]) async-start(%called), calls=%wrapped
  %sum-start = f32[4]{0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %kernel = f32[4]{0:T(8,128)} fusion(f32[4]{0} %x, f32[4]{0} %either), kind=kLoop, calls=%inside
}
"""


def _main() -> dict[str, Instruction]:
    found, entry = computations(_TEXT)
    assert list(found) == ["wide", "main.1"]
    assert entry == "main.1"
    return {one.name: one for one in found[entry]}


def test_what_an_instruction_calls() -> None:
    """The reduction of a sum is no part of the program's order, nor is what a kernel is made of."""
    assert {name: one.called for name, one in _main().items() if one.called} == {
        "loop.2": ["wide", "turn.1"], "branch": ["one", "two.3"], "either": ["one", "two.3"], "called": ["body"],
        "begun": ["wrapped"],
    }  # fmt: skip
    assert {"x", "sum-start", "kernel"} < set(_main())


def test_the_parts_of_an_instruction() -> None:
    main = _main()
    loop, kernel = main["loop.2"], main["kernel"]
    assert (loop.type, loop.opcode, loop.operands) == ("(s32[], f32[4]{0})", "while", ["turns"])
    assert (kernel.type, kernel.opcode, kernel.operands) == ("f32[4]{0:T(8,128)}", "fusion", ["x", "either"])
    assert kernel.attribute(r"kind=(\w+)") == "kLoop"
    assert kernel.attribute(r"kind=(\d+)") is None
    assert {name for name, one in main.items() if one.kind} == {"sum-start"}
    assert main["sum-start"].kind == "all-reduce"


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}", None),
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['data'=4] {'data'}", ((0, 1, 2, 3),)),
        ("mesh['data'=2,'model'=2] {'data'}", ((0, 2), (1, 3))),
        ("mesh['data'=2,'model'=2] {'model','data'}", ((0, 2, 1, 3),)),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((3, 1), (2, 0))),
        ("mesh['data'=8] {'data':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_groups_however_they_are_written(text: str, groups: object) -> None:
    rest = f"(%x), channel_id=1, replica_groups={text}"
    for more in (", use_global_device_ids=true, to_apply=%add", ""):
        assert Instruction("sum", "f32[4]", "all-reduce", rest + more).groups == groups


def test_pairs_and_what_names_no_devices() -> None:
    pairs = "(%x), channel_id=1, source_target_pairs={{0,1},{1,2}}"
    assert Instruction("sent", "f32[4]", "collective-permute", pairs).groups == ((0, 1), (1, 2))
    assert Instruction("copied", "f32[4]", "copy", "(%x)").groups is None
    with pytest.raises(ValueError, match="no groups of devices: several"):
        _ = Instruction("sum", "f32[4]", "all-reduce", "(%x), replica_groups=several").groups


def test_what_is_no_program_has_no_instructions() -> None:
    assert computations("") == ({}, "")
