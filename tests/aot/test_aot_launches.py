"""Bytes and launches of training steps compiled for an H200."""

import pytest

from benchmarks.memory import classifier, compile_step
from tests.aot.program import TARGETS, Launch, launches
from tests.slow import some_slow

# Model -> images; GB, launches and those under 2 MB at most, of all that is neither product nor
# attention. A launch that moves less than 2 MB takes about as long as an empty one.
LIMITS = {
    "vit_s16": (256, 26.2, 395, 160),
    "dinov3_s16": (256, 27.0, 485, 200),
    "swin_t": (128, 23.5, 490, 225),
    "nat_mini": (128, 19.1, 670, 340),
}


@pytest.mark.parametrize("name", some_slow(LIMITS, ["vit_s16"]))
def test_steps_move_no_more_than_before(name, gpus):
    batch, gigabytes, most, most_tiny = LIMITS[name]
    all_launches = launches(compile_step(classifier(name), gpus[:1], batch).text)
    others = [x for x in all_launches if not x.kind.startswith(("__cu", *TARGETS.values()))]
    tiny = [x for x in others if x.bytes < 2e6]
    assert sum(x.times * x.bytes for x in others) <= gigabytes * 1e9
    assert len(others) <= most
    assert len(tiny) <= most_tiny


def test_loops_and_repeated_operands_are_counted():
    text = """
%fused (p: f32[8,4], q: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[8,4]{1,0} parameter(1)
  ROOT %sum = f32[8,4]{1,0} add(%p, %q)
}

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


def test_slices_and_updates_in_place_count_as_what_they_hold():
    """Asynchronous, too; several views of an array are one, and workspaces do not count."""
    text = """
%update (stack: f32[12,8], i: s32[], x: f32[8]) -> f32[12,8] {
  %stack = f32[12,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[8]{0} parameter(2)
  %row = f32[1,8]{1,0} bitcast(%x)
  ROOT %new = f32[12,8]{1,0} dynamic-update-slice(%stack, %row, %i)
}

%read (all: f32[12,8], i: s32[]) -> f32[8] {
  %all = f32[12,8]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %one = f32[1,8]{1,0} dynamic-slice(%all, %i.1), dynamic_slice_sizes={1,8}
  ROOT %flat = f32[8]{0} bitcast(%one)
}

ENTRY %main (a: f32[12,8], i: s32[], x: f32[8]) -> f32[8] {
  %a = f32[12,8]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %y = f32[8]{0} parameter(2)
  %start = ((f32[12,8]{1,0}, s32[], f32[8]{0}), f32[12,8]{1,0}, u32[]) \
fusion-start(%a, %n, %y), kind=kLoop, calls=%update
  %done = f32[12,8]{1,0} fusion-done(%start)
  %slice = f32[8]{0} fusion(%done, %n), kind=kLoop, calls=%read
  %q = f32[1,8]{1,0} bitcast(%slice)
  %k = f32[8,1]{1,0} bitcast(%slice)
  ROOT %m = (f32[8]{0}, s8[33554432]{0}) custom-call(%q, %k, %slice), custom_call_target="g"
}
"""
    row, index = 4 * 8, 4
    assert launches(text) == [
        Launch("fusion", 2 * row + index),
        Launch("fusion", 2 * row + index),
        Launch("g", 2 * row),
    ]
