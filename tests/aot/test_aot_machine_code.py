"""The table of machine code in kernels/README.md, and registers that spill on older GPUs."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks._gpus import A100, L4
from rope_jax_kernels import rotate_by_angles
from tests.aot.layers import make_layer, train
from tests.aot.program import budget, tool

pytestmark = pytest.mark.skipif(
    tool("nvdisasm") is None,
    reason="there is no nvdisasm in the nvidia wheels or on PATH: run `make test-aot`",
)
README = pathlib.Path(__file__).parents[2] / "kernels" / "README.md"
COPIED = 4.3e6  # bytes in a microsecond: an assumption of what a copy reaches on an H200


# Layer of the table -> the layer, images, implementation.
CASES = {
    "ViT, 6 heads of 64": (make_layer("vit_s_class_token", bias=False), 256, "triton"),
    "ViT, 6 heads of 64, mosaic": (make_layer("vit_s_class_token", bias=False), 256, "mosaic"),
    "ViT, 12 heads of 32": (make_layer("vit_s_12_heads", bias=False), 256, "triton"),
    "ViT, 12 heads of 32, mosaic": (make_layer("vit_s_12_heads", bias=False), 256, "mosaic"),
    "Swin, stage 1": (make_layer("swin_t_1", bias=False), 128, "triton"),
    "Swin, stage 1, bias": (make_layer("swin_t_1", bias=True), 128, "triton"),
    "Swin, stage 1, mosaic": (make_layer("swin_t_1", bias=False), 128, "mosaic"),
    "Swin, stage 1, bias, mosaic": (make_layer("swin_t_1", bias=True), 128, "mosaic"),
    "NAT, stage 1": (make_layer("nat_mini_1", bias=False), 64, "triton"),
    "NAT, stage 1, bias": (make_layer("nat_mini_1", bias=True), 64, "triton"),
    "NAT, stage 1, mosaic": (make_layer("nat_mini_1", bias=False), 64, "mosaic"),
    "NAT, stage 1, bias, mosaic": (make_layer("nat_mini_1", bias=True), 64, "mosaic"),
}
# Kernels of the forward pass; those of the backward pass also move gradients.
FORWARD = ("attention_forward_kernel", "attention_mosaic", "attention_mosaic_window")
FORWARD += ("attention_neighborhood",)
# Corners of the sizes of Kane's thesis: images, rows and channels.
ROTATIONS = {
    "rotation, 7 x 7 rows of 32": (1, 7 * 7, 32),
    "rotation, 8 x 7 x 7 rows of 128": (1, 8 * 7 * 7, 128),
    "rotation, 6 x 14 x 14 rows of 64": (16, 6 * 14 * 14, 64),
    "rotation, 8 x 56 x 56 rows of 128": (128, 8 * 56 * 56, 128),
}


def recorded_rows(label):
    """Kernel -> instructions, registers, bytes spilled and the floor, as the table has them."""
    rows = re.findall(rf"^\| {re.escape(label)} \| `(\w+)` \| (.*) \|$", README.read_text(), re.M)
    return {name: [float(x) for x in cells.split(" | ")] for name, cells in rows}


def check(program, label, floors):
    """Compares with the table; with other releases of jax, spills may only be small.

    `floors` are microseconds by kernel. The code that Mosaic GPU makes varies slightly between
    processes.
    """
    measured = {}
    for kernel in program.kernels:
        name = kernel.name.removesuffix("_mosaic_gpu_kernel")
        instructions = pytest.approx(len(kernel.instructions()), rel=0.01)
        floor = pytest.approx(floors(name), rel=0.02)
        registers = pytest.approx(kernel.registers, abs=4 if "mosaic" in kernel.name else 0)
        measured[name] = [instructions, registers, kernel.spilled_bytes, floor]
        assert kernel.spilled_bytes <= budget(0, elsewhere=256)
    rows = recorded_rows(label)
    assert measured.keys() == rows.keys()
    if budget(0) == 0:
        assert rows == measured


@pytest.mark.parametrize("label", CASES)
def test_attention(label, compile_for):
    layer, batch, implementation = CASES[label]
    shapes = layer.shapes(batch)
    program = compile_for((1, 1), functools.partial(train, layer, implementation), *shapes.values())
    once = shapes["out"].size * 2 / COPIED  # q in bfloat16
    check(program, label, lambda name: (4 if name in FORWARD else 8) * once)
    assert sum(map(sines, program.kernels)) == 0  # they read tables


def sines(kernel):
    """Sines and cosines: each begins with the quarter turns of its angle."""
    return sum("0.636619" in x for x in kernel.instructions())


@pytest.mark.parametrize("label", ROTATIONS)
def test_rotation(label, compile_for):
    batch, rows, channels = ROTATIONS[label]
    x = jax.ShapeDtypeStruct((batch, 1, rows, channels), jnp.bfloat16)
    theta = jax.ShapeDtypeStruct((1, rows, channels // 4), jnp.float32)
    f = functools.partial(rotate_by_angles, layout="BNLD", implementation="triton")
    program = compile_for((1, 1), f, x, theta, donate=(0,))
    # Half of the channels, read and written, and the angles.
    check(program, label, lambda name: (2 * x.size + 4 * theta.size) / COPIED)
    assert sines(*program.kernels) in (2, 8)  # both of a pair at once: 2 or 8 pairs per thread


@pytest.mark.parametrize("kind", [A100, L4])
@pytest.mark.parametrize("label", ["ViT, 6 heads of 64", "NAT, stage 1, bias", "Swin, stage 1"])
def test_registers_suffice_on_older_gpus(label, kind, gpu_of, compile_for):
    layer, batch, implementation = CASES[label]
    f = functools.partial(train, layer, implementation)
    program = compile_for((1, 1), f, *layer.shapes(batch).values(), on=[gpu_of(kind)])
    for kernel in program.kernels:
        # The kernel that has all gradients of a window spills.
        spilled = 128 if kernel.name == "attention_closed_kernel" else 0
        assert kernel.spilled_bytes <= budget(spilled, elsewhere=256)
