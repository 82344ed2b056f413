"""Bytes and launches of training steps compiled for an H200."""

import pytest

from benchmarks.memory import classifier, compile_step
from tests.aot.program import Launch, launches

# Model -> images; GB, launches and those under 2 MB at most, of all that is neither product nor
# attention. A launch that moves less than 2 MB takes about as long as an empty one.
LIMITS = {"vit_s16": (256, 26.2, 395, 160)}


@pytest.mark.parametrize("name", LIMITS)
def test_steps_move_no_more_than_before(name, gpus):
    batch, gigabytes, most, most_tiny = LIMITS[name]
    all_launches = launches(compile_step(classifier(name), gpus[:1], batch).text)
    others = [x for x in all_launches if not x.kind.startswith(("__cu", "__gpu$xla.gpu.triton"))]
    tiny = [x for x in others if x.bytes < 2e6]
    assert sum(x.times * x.bytes for x in others) <= gigabytes * 1e9
    assert len(others) <= most
    assert len(tiny) <= most_tiny


def test_loops_and_repeated_operands_are_counted():
    text = """
%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %f = f32[8,4]{1,0} fusion(%x, %x), kind=kLoop, calls=%fused
  ROOT %next = (s32[], f32[8,4]{1,0}) tuple(%state, %f)
}

ENTRY %main (a: (s32[], f32[8,4]), b: bf16[2,3]) -> f32[3,3] {
  %a = (s32[], f32[8,4]{1,0}) parameter(0)
  %b = bf16[2,3]{1,0} parameter(1)
  %w = (s32[], f32[8,4]{1,0}) while(%a), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %m = (f32[3,3]{1,0}, pred[4]{0}) custom-call(%b, /*index=1*/%b), custom_call_target="k"
}
"""
    assert launches(text) == [Launch("fusion", 256, times=5), Launch("k", 12 + 36 + 4)]
