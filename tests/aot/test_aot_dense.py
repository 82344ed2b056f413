"""Training steps of dense prediction compiled for an H200."""

import re

import pytest

from benchmarks import memory

pytestmark = pytest.mark.slow


def test_vit_b_with_upernet_at_512_pixels_fits(gpus):
    """16 images on one GPU, with AdamW's moments, the average of the weights, and gradients."""
    options = {"position": "rope_mixed", "head": "upernet", "num_classes": 150}
    options["options"] = "drop_path=0.15,scan_layers=True"
    step = memory.compile_step(memory.classifier("deit3_b16", 512, **options), gpus[:1], 16, 512)
    assert step.state < 3e9
    assert step.other < 20e9  # 18.4 GB when this was written; an H200 has 141


@pytest.mark.parametrize(
    ("title", "limit"),
    [("DINO, ViTDet-B", 11), ("Mask2Former, Swin-S", 3)],  # 9.8 and 2.6 GB when this was written
)
def test_recipes_with_queries_fit(title, limit):
    """Two images on one GPU, with matching, denoising and gradients."""
    (case,) = (x for x in memory.DENSE if x[0] == title)
    *_, state, other = memory.dense_row(*case)
    assert float(state) * 2**30 < 2e9
    assert float(other) * 2**30 < limit * 1e9


def test_windows_of_vitdet_run_in_kernels(gpus):
    """No scores of windows and no copies of padded maps with heads apart, forwards or backwards."""
    options = {"position": "rope_mixed", "head": "linear", "num_classes": 2}
    options["options"] = (
        "attention=window,window_size=14,global_blocks=(1,),depth=2,"
        "class_token=False,window_padding=tokens"
    )
    step = memory.compile_step(memory.classifier("deit_b16", 1024, **options), gpus[:1], 4, 1024)
    assert "__gpu$xla.gpu.triton" in step.text
    assert re.findall(r"\w+\[\d+(?:,\d+)*,196,196\]", step.text) == []
    assert re.findall(r"\w+\[\d+(?:,\d+)*,4096,4096\]", step.text) == []
