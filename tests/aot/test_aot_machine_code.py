"""The table of machine code in kernels/README.md, and registers that spill on older GPUs."""

import functools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks._gpus import A100, H200, L4
from rope_jax_kernels import rotate_by_angles
from tests.aot.layers import make_layer, train
from tests.aot.program import budget, read_kernel, tool
from tests.ptx.capture import compile_kernels
from tests.ptx.launch import count_issued

pytestmark = pytest.mark.skipif(
    tool("nvdisasm") is None,
    reason="there is no nvdisasm in the nvidia wheels or on PATH: run `make test-aot`",
)
README = pathlib.Path(__file__).parents[2] / "kernels" / "README.md"
COPIED = 4.3e6  # bytes in a microsecond: an assumption of what a copy reaches on an H200
ISSUED = 132 * 4 * 1980  # instructions of warps in a microsecond: 4 each cycle and multiprocessor


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
    """Kernel -> instructions, registers, bytes spilled and the floors, as the table has them."""
    rows = re.findall(rf"^\| {re.escape(label)} \| `(\w+)` \| (.*) \|$", README.read_text(), re.M)
    return {name: [float(x) for x in cells.split(" | ")] for name, cells in rows}


def check(kernels, label, copies, folder):
    """Compares with the table; with other releases of jax, spills may only be small.

    `copies` are microseconds by kernel. The code that Mosaic GPU makes varies slightly between
    processes.
    """
    measured = {}
    for launch, inputs in kernels:
        path = folder / f"{launch.name}.ptx"
        path.write_text(launch.ptx)
        kernel = read_kernel(path)
        code = kernel.instructions()
        times = count_issued(launch, inputs)
        # What is in no line of the PTX begins the kernel.
        per_block = sum(times.get(line, launch.threads / 32) for line, _ in code)
        name = kernel.name.removesuffix("_mosaic_gpu_kernel")
        measured[name] = [
            pytest.approx(len(code), rel=0.01),
            pytest.approx(kernel.registers, abs=4 if "mosaic" in kernel.name else 0),
            kernel.spilled_bytes,
            pytest.approx(copies(name), rel=0.02),
            pytest.approx(math.prod(launch.grid) * per_block / ISSUED, rel=0.02),
        ]
        assert kernel.spilled_bytes <= budget(0, elsewhere=256)
        # Attention kernels read tables; a rotation computes 2 or 8 pairs per thread at once.
        sines = sum("0.636619" in text for _, text in code)  # quarter turns of an angle
        assert sines in ((2, 8) if name == "rotary" else (0,))
    rows = recorded_rows(label)
    assert measured.keys() == rows.keys()
    if budget(0) == 0:
        assert rows == measured


@pytest.mark.parametrize("label", CASES)
def test_attention(label, gpu_of, tmp_path):
    layer, batch, implementation = CASES[label]
    shapes = layer.shapes(batch)
    step = functools.partial(train, layer, implementation)
    kernels = compile_kernels(gpu_of(H200), step, *shapes.values())
    once = shapes["out"].size * 2 / COPIED  # q in bfloat16
    check(kernels, label, lambda name: (4 if name in FORWARD else 8) * once, tmp_path)


@pytest.mark.parametrize("label", ROTATIONS)
def test_rotation(label, gpu_of, tmp_path):
    batch, rows, channels = ROTATIONS[label]
    x = jax.ShapeDtypeStruct((batch, 1, rows, channels), jnp.bfloat16)
    theta = jax.ShapeDtypeStruct((1, rows, channels // 4), jnp.float32)
    f = functools.partial(rotate_by_angles, layout="BNLD", implementation="triton")
    # Half of the channels, read and written, and the angles.
    copied = (2 * x.size + 4 * theta.size) / COPIED
    check(compile_kernels(gpu_of(H200), f, x, theta), label, lambda name: copied, tmp_path)


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
