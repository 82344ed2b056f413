"""Bytes and launches of training steps compiled for an H200."""

import pytest

from benchmarks.memory import classifier, compile_step
from tests.aot.program import TARGETS, launches
from tests.models.small import some_slow

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
