"""The reader of HLO of the ahead-of-time tests, on programs given as text."""

import pytest

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
    fusion, kernel = hlo.operations(text)
    assert fusion == hlo.Operation("fusion", (32, 16), (16,), in_place=False)
    assert kernel == hlo.Operation("k", (16, 16), (16, 4), in_place=True)


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
