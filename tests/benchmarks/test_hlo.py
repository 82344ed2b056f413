"""The readers of HLO, on programs given as text."""

import pytest

from benchmarks import _hlo
from tests.aot import hlo


def test_the_reader_of_programs_counts_what_is_read():
    text = """
%fused (p.0: bf16[4,6], p.1: f32[4]) -> bf16[4,2] {
  %p.0 = bf16[4,6]{1,0} parameter(0)
  %p.1 = f32[4]{0} parameter(1)
  %a = bf16[4,2]{1,0} slice(%p.0), slice={[0:4], [0:2]}
  %b = bf16[4,6]{1,0} bitcast(%p.0)
  %c = bf16[4,2]{1,0} slice(%b), slice={[0:4], [2:4]}
  %d = f32[4,2]{1,0} broadcast(%p.1), dimensions={0}
  ROOT %e = bf16[4,2]{1,0} add(%a, %c)
}

ENTRY %main (x: bf16[4,6], y: f32[4]) -> (bf16[4,2], pred[4]) {
  %x = bf16[4,6]{1,0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %f = bf16[4,2]{1,0} fusion(%x, %y), kind=kLoop, calls=%fused
  %k = (bf16[4,2]{1,0}, pred[4]{0}) custom-call(%f, /*index=1*/%y), \
custom_call_target="k", output_to_operand_aliasing={{0}: (0, {})}
  ROOT %g = bf16[4,2]{1,0} get-tuple-element(%k), index=0
}
"""
    fusion, kernel = _hlo.operations(text)
    assert fusion == _hlo.Operation("fusion", (32, 16), (16,), in_place=False)
    assert kernel == _hlo.Operation("k", (16, 16), (16, 4), in_place=True)


LOOP = """
%fused.1 (p.0: f32[8,4], p.1: f32[4], p.2: s32[]) -> f32[8,4] {
  %p.0 = f32[8,4]{1,0} parameter(0)
  %p.1 = f32[4]{0} parameter(1)
  %p.2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,4]{1,0} dynamic-slice(%p.0, %p.2, %zero), dynamic_slice_sizes={1,4}
  %flat = f32[1,4]{1,0} bitcast(%p.1)
  %sum = f32[1,4]{1,0} add(%row, %flat), metadata={op_name="jit(f)/jvp(norm)/add"}
  ROOT %new = f32[8,4]{1,0} dynamic-update-slice(%p.0, %sum, %p.2, %zero)
}

%fused.2 (p.0: f32[8]) -> (f32[2], f32[]) {
  %p.0 = f32[8]{0} parameter(0)
  %two = f32[] constant(2)
  %scale = f32[8]{0} broadcast(%two), dimensions={}
  %double = f32[8]{0} multiply(%p.0, %scale)
  %less = f32[8]{0} subtract(%double, %p.0)
  %part = f32[2]{0} slice(%less), slice={[4:6]}
  %total = f32[] reduce(%part, %two), dimensions={0}, to_apply=%add
  ROOT %both = (f32[2]{0}, f32[]) tuple(%part, %total)
}

%body (state: (s32[], f32[8,4], f32[4])) -> (s32[], f32[8,4], f32[4]) {
  %state = (s32[], f32[8,4]{1,0}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %y = f32[4]{0} get-tuple-element(%state), index=2
  %f = f32[8,4]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%fused.1
  ROOT %next = (s32[], f32[8,4]{1,0}, f32[4]{0}) tuple(%i, %f, %y)
}

ENTRY %main (a: (s32[], f32[8,4], f32[4]), b: bf16[2,3], c: f32[8]) -> f32[2] {
  %a = (s32[], f32[8,4]{1,0}, f32[4]{0}) parameter(0)
  %b = bf16[2,3]{1,0} parameter(1)
  %c = f32[8]{0} parameter(2)
  %w = (s32[], f32[8,4]{1,0}, f32[4]{0}) while(%a), condition=%c.1, body=%body, trip_count=5
  %m = (f32[3,3]{1,0}, s8[64]{0}) custom-call(%b, %b), custom_call_target="__cublas$lt$matmul"
  %t = bf16[3,2]{1,0} transpose(%b), dimensions={1,0}
  ROOT %g = (f32[2]{0}, f32[]) fusion(%c), kind=kInput, calls=%fused.2
}
"""


def test_loops_updates_in_place_and_parts_of_arrays_count_as_what_they_are():
    looped, product, copy, reduction = _hlo.operations(LOOP)
    assert looped == _hlo.Operation("fusion", (16, 16, 4), (16,), in_place=False, times=5)
    assert product == _hlo.Operation("__cublas$lt$matmul", (12, 12), (36,), in_place=False)
    assert copy == _hlo.Operation("transpose", (12,), (12,), in_place=False)
    assert reduction == _hlo.Operation("fusion", (8,), (8, 4), in_place=False)
    found = _hlo.by_kind([looped, product, copy, reduction])
    assert found["norm"] == {"launches": 5, "tiny": 5, "bytes": 5 * 52}
    assert found["products"] == {"launches": 1, "tiny": 1, "bytes": 60}
    assert found["copies"]["bytes"] == 24
    assert found["reductions"]["bytes"] == 20
    assert sum(kind["launches"] for kind in found.values()) == 8


def test_the_heavier_branch_of_a_conditional_counts():
    text = """
%light (p.0: f32[4]) -> f32[4] {
  %p.0 = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} negate(%p.0)
}

%heavy (p.0: f32[4]) -> f32[4] {
  %p.0 = f32[4]{0} parameter(0)
  %b = f32[4]{0} negate(%p.0)
  ROOT %c = f32[4]{0} negate(%b)
}

ENTRY %main (i: s32[], x: f32[4]) -> f32[4] {
  %i = s32[] parameter(0)
  %x = f32[4]{0} parameter(1)
  ROOT %y = f32[4]{0} conditional(%i, %x, %x), branch_computations={%light, %heavy}, metadata={}
}
"""
    assert [x.kind for x in _hlo.operations(text)] == ["negate", "negate"]


UNIT = hlo.UNIT
TRITON = "__gpu$xla.gpu.triton"


@pytest.mark.parametrize(
    ("operation", "units"),
    [
        (hlo.Operation("fusion", (2 * UNIT, 64), (UNIT,), in_place=False), 3),
        # q and k, half of each, read and written
        (hlo.Operation(TRITON, (3 * UNIT,), (3 * UNIT,), in_place=True), 2),
        (hlo.Operation(TRITON, (3 * UNIT,), (UNIT, UNIT, UNIT), in_place=False), 6),
        (hlo.Operation(TRITON, (UNIT, UNIT, UNIT), (3 * UNIT,), in_place=False), 6),
        # and half of the saved q and k
        (hlo.Operation(TRITON, (UNIT, UNIT, UNIT, 3 * UNIT), (3 * UNIT,), in_place=False), 7),
        (hlo.Operation(TRITON, (UNIT, UNIT, UNIT, UNIT), (UNIT, UNIT), in_place=True), 3),
    ],
)
def test_units(operation, units):
    assert hlo.moved_bytes(operation, pairs=16) == pytest.approx(units * UNIT, abs=64)
