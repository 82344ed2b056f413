"""What training steps compiled for an H200 read and write, and in how many launches."""

import pytest

from benchmarks import _hlo, memory

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

slow = pytest.mark.slow
# Model -> GB, launches and those under 2 MB at most, of all that is neither product nor attention.
LIMITS = {
    "ViT-S": (22.3, 380, 170),
    "Swin-T": (20.0, 440, 225),
    "NAT-Mini": (16.7, 615, 345),
}


@pytest.mark.parametrize(
    "label", [pytest.param(x, marks=[] if x == "ViT-S" else slow) for x in LIMITS]
)
def test_a_step_moves_no_more_than_it_did(label):
    gigabytes, launches, tiny = LIMITS[label]
    step = memory.compile_step(memory.MODELS[label], memory.gpus(1)[:1], memory.BATCHES[label])
    kinds = _hlo.by_kind(_hlo.operations(step.text))
    rest = [found for kind, found in kinds.items() if kind not in ("products", "attention")]
    total = {name: sum(found[name] for found in rest) for name in rest[0]}
    assert total["bytes"] <= gigabytes * 1e9
    assert total["launches"] <= launches
    assert total["tiny"] <= tiny
    # Norms, clipping, both moments, decay and the average, of some 150 parameters.
    assert kinds["optimizer"]["launches"] <= 60
