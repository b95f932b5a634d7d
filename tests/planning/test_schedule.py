"""The collectives of a program's text: bytes, turns, groups, and what runs meanwhile."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.planning.schedule import Collective, collectives

# As XLA's compiler for GPUs writes it, shortened: a loop of 12 turns whose body gathers two arrays in one message with
# nothing to do meanwhile and reduces beside a kernel; then a message wrapped in an asynchronous call.
GPU = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: bf16[64,4]) -> bf16[64,4] {
  %p = bf16[64,4]{1,0} parameter(0)
  ROOT %a2a = bf16[64,4]{1,0} all-to-all(%p), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}

%body (arg: (s32[], f32[1,96], f32[2,8])) -> (s32[], f32[1,96], f32[2,8]) {
  %arg = (s32[], f32[1,96]{1,0}, /*index=2*/f32[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[1,96]{1,0} get-tuple-element(%arg), index=1
  %y = f32[2,8]{1,0} get-tuple-element(%arg), index=2
  %ag = ((f32[1,96]{1,0}, f32[2,8]{1,0}), (f32[8,96]{1,0}, f32[16,8]{1,0})) all-gather-start(%x, %y), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, metadata={op_name="jit(step)/while/body/gather"}
  %next = s32[] fusion(%i), kind=kLoop, calls=%add
  %agd = (f32[8,96]{1,0}, f32[16,8]{1,0}) all-gather-done(%ag)
  %w = f32[16,8]{1,0} get-tuple-element(%agd), index=1
  %rs = ((f32[16,8]{1,0}), (f32[2,8]{1,0})) reduce-scatter-start(%w), channel_id=2, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add, backend_config={"is_sync":false}
  %z = f32[1,96]{1,0} fusion(%x), kind=kLoop, calls=%add
  %rsd = f32[2,8]{1,0} reduce-scatter-done(%rs)
  ROOT %out = (s32[], f32[1,96]{1,0}, f32[2,8]{1,0}) tuple(%next, %z, %rsd)
}

%cond (arg: (s32[], f32[1,96], f32[2,8])) -> pred[] {
  %arg = (s32[], f32[1,96]{1,0}, f32[2,8]{1,0}) parameter(0)
  ROOT %lt = pred[] constant(true)
}

ENTRY %main (p0: f32[1,96], p1: f32[2,8], p2: bf16[64,4]) -> f32[4] {
  %p0 = f32[1,96]{1,0} parameter(0)
  %p1 = f32[2,8]{1,0} parameter(1)
  %p2 = bf16[64,4]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %t = (s32[], f32[1,96]{1,0}, f32[2,8]{1,0}) tuple(%zero, %p0, %p1)
  %start = ((bf16[64,4]{1,0}), bf16[64,4]{1,0}) async-start(%p2), calls=%wrapped
  %loop = (s32[], f32[1,96]{1,0}, f32[2,8]{1,0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %done = bf16[64,4]{1,0} async-done(%start)
  %x = f32[1,96]{1,0} get-tuple-element(%loop), index=1
  ROOT %ar = f32[1,96]{1,0} all-reduce(%x), replica_groups={}, to_apply=%add
}
"""  # noqa: E501


def test_a_schedule() -> None:
    exchange, gather, scatter, reduce = collectives(GPU, 8)
    everyone = (tuple(range(8)),)
    assert exchange == Collective("all-to-all", "bf16", 512, ((0, 1, 2, 3), (4, 5, 6, 7)), 1, True)
    assert exchange.sent == 512 * 3 / 4
    # Only a counter is increased while they travel.
    assert gather == Collective(
        "all-gather", "f32", 4 * (8 * 96 + 16 * 8), everyone, 12, False, "jit(step)/while/body/gather"
    )
    assert scatter == Collective("reduce-scatter", "f32", 4 * 16 * 8, everyone, 12, True)
    assert scatter.sent == 12 * 4 * 16 * 8 * 7 / 8
    assert reduce == Collective("all-reduce", "f32", 4 * 96, everyone, 1, False)


def one(line: str, devices: int = 8) -> Collective:
    (found,) = collectives(f"ENTRY %main (x: f32[1]) -> f32[1] {{\n  ROOT %c = {line}\n}}", devices)
    return found


@pytest.mark.parametrize(
    ("line", "size", "dtype"),
    [
        ("f32[4,8]{1,0} reduce-scatter(%x), dimensions={0}", 4 * 4 * 8 * 8, "f32"),  # the result is a part of it
        ("f32[4,8]{1,0} all-gather(%x), dimensions={0}", 4 * 4 * 8, "f32"),
        ("(f32[3]{0}, bf16[5]{0}) all-reduce(%x, %y), to_apply=%add", 12 + 10, "f32+bf16"),
        ("pred[3,3]{1,0} all-reduce(%x), to_apply=%or", 9, "pred"),
        ("f64[] all-reduce(%x), to_apply=%add", 8, "f64"),
        ("s4[7]{0} all-gather(%x), dimensions={0}", 4, "s4"),
        ("f8e4m3fn[7]{0} all-gather(%x), dimensions={0}", 7, "f8e4m3fn"),
        ("f32[8,2]{1,0:T(8,128)} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", 64, "f32"),
    ],
)
def test_bytes(line: str, size: int, dtype: str) -> None:
    assert (one(line).bytes, one(line).dtype) == (size, dtype)


@given(st.lists(st.integers(1, 40), max_size=4), st.integers(1, 50), st.integers(2, 16))
def test_loops_multiply(shape: list[int], turns: int, devices: int) -> None:
    dims, known = ",".join(map(str, shape)), f'{{"known_trip_count":{{"n":"{turns}"}}}}'
    text = (
        f"%b (x: f32[{dims}]) -> f32[{dims}] {{\n  ROOT %r = f32[{dims}] all-reduce(%x), to_apply=%add\n}}\n"
        f"%a (x: f32[{dims}]) -> f32[{dims}] {{\n"
        f"  ROOT %w = f32[{dims}] while(%x), condition=%c, body=%b, backend_config={known}\n}}\n"
        f"ENTRY %main (x: f32[{dims}]) -> f32[{dims}] {{\n  ROOT %w = f32[{dims}] while(%x), condition=%c, body=%a\n}}"
    )
    (found,) = collectives(text, devices)
    size = 4 * math.prod(shape)
    assert (found.times, found.bytes) == (turns, size)
    assert found.sent == round(turns * size * 2 * (devices - 1) / devices)


def test_what_is_not_finished_is_not_hidden() -> None:
    text = """ENTRY %m (x: f32[4]) -> f32[4] {
  %s = f32[4] all-reduce-start(%x), to_apply=%add
  %f = f32[4] fusion(%x)
}"""
    assert [c.overlapped for c in collectives(text, 2)] == [False]
    assert not collectives("", 2)
