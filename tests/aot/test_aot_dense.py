"""Training steps of dense prediction compiled for an H200."""

import re

import pytest

from benchmarks import memory, memory_dense

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


def test_vit_b_with_upernet_at_512_pixels_fits():
    """16 images on one GPU, with AdamW's moments, the average of the weights, and gradients."""
    step = memory.compile_step(
        "deit3_b16",
        memory.gpus(1)[:1],
        16,
        size=512,
        image_size=512,
        position="rope_mixed",
        head="upernet",
        num_classes=150,
        drop_path=0.15,
        scan_layers=True,
    )
    assert step.state < 3e9
    assert step.rest < 20e9  # 18.4 GB when this was written; an H200 has 141


@pytest.mark.parametrize(
    ("model", "limit"),
    [("DINO, ViTDet-B", 11e9), ("Mask2Former, Swin-S", 3e9)],  # 9.8 and 2.6 when this was written
)
def test_recipes_with_queries_fit(model, limit):
    """Two images on one GPU, with matching, denoising and gradients."""
    row = memory_dense.row_of(model)
    assert row["state_bytes"] < 2e9
    assert row["rest_bytes"] < limit


def test_windows_of_vitdet_run_in_the_kernels():
    """No scores of windows and no copies of padded maps with heads apart, forwards or backwards."""
    settings = {"attention": "window", "window_size": 14, "global_blocks": (1,)}
    step = memory.compile_step(
        "deit_b16",
        memory.gpus(1)[:1],
        4,
        size=1024,
        image_size=1024,
        position="rope_mixed",
        head="linear",
        num_classes=2,
        depth=2,
        class_token=False,
        window_padding="tokens",
        **settings,
    )
    assert "__gpu$xla.gpu.triton" in step.text
    assert re.findall(r"\w+\[\d+(?:,\d+)*,196,196\]", step.text) == []
    assert re.findall(r"\w+\[\d+(?:,\d+)*,4096,4096\]", step.text) == []
