"""Mosaic GPU's kernels of attention for Hopper as machine code: spills, instructions, launches."""

import functools
import re

import jax
import pytest

from benchmarks._gpus import B200, absent_gpus
from rope_jax_kernels import Global, Neighborhood, Window, attention
from rope_jax_kernels.attention.window_boxes import make_boxes
from tests.aot.layers import attend, make_layer, train
from tests.aot.program import TARGETS, budget, compile_program, run_alone

# Layer, dtype, and the registers per thread that its warpgroups allow.
CASES = {
    "ViT-S": (make_layer("vit_s_class_token"), "bfloat16", 128),
    "ViT-S, all channels": (make_layer("vit_s_rope_mixed"), "float16", 128),
    "ViT-S, no rotation": (make_layer("vit_s_class_token", pairs=0), "bfloat16", 128),
    "ViT at 512 px": (make_layer("vit_s_512px", pairs=32), "bfloat16", 168),
    "heads of 32": (make_layer("vit_s_12_heads", places=(785,), pairs=16), "bfloat16", 128),
    "heads of 128": (make_layer("vit_heads_of_128", places=(1025,)), "bfloat16", 255),
    "one head, few tokens": (make_layer("vit_s", places=(50,), heads=1), "bfloat16", 255),
    "few heads of 128": (make_layer("vit_heads_of_128", places=(100,), pairs=32), "bfloat16", 255),
    "few heads of 32": (make_layer("vit_s_12_heads"), "float16", 128),
}
# Cases with Mosaic GPU's backward kernel, and the bytes that it spills outside its inner loop.
BACKWARD = {
    "ViT-S": 0,
    "ViT-S, all channels": 64,
    "ViT-S, no rotation": 0,
    "one head, few tokens": 0,
    "few heads of 128": 32,
    "few heads of 32": 0,
}


MOSAIC = TARGETS["mosaic"]


def shapes(name, batch=16):
    """Shapes of qkv, coords, freqs (of one pair if none turn), bias (none) and the output."""
    layer, dtype, _ = CASES[name]
    return list(layer.shapes(batch, dtype).values())


def forward(name):
    return functools.partial(attend, CASES[name][0], "mosaic")


def check(kernel, tensors_out, registers=255, spilled=0, elsewhere=256, product="wgmma.mma_async"):
    """Checks a kernel's limits, and that it writes `tensors_out` tiles and no runs of bytes.

    The copy engine clips tiles to the array, and would not clip a run of bytes.
    """
    assert kernel.spilled_bytes <= budget(spilled, elsewhere=elsewhere)
    assert kernel.registers <= registers
    assert product in kernel.ptx
    assert (kernel.tensors_out, kernel.runs_out) == (tensors_out, 0)


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, compile_for):
    layer, _, registers = CASES[name]
    program = compile_for((1, 1), forward(name), *shapes(name)[:3])
    # Nothing but the kernel and its table of cosines and sines.
    assert program.operations == ["fusion"] * bool(layer.pairs) + [MOSAIC]
    (kernel,) = program.kernels
    assert kernel.local_bytes <= budget(0)
    check(kernel, max(1, layer.head_dim // 64), registers)


def test_separate_arrays_and_gradients_need_no_copy(compile_for):
    *_, x = shapes("ViT-S")
    attend = functools.partial(attention, pattern=Global(), implementation="mosaic")
    gradients = lambda q, k, v, dout: jax.vjp(attend, q, k, v)[1](dout)
    assert compile_for((1, 1), attend, x, x, x).operations == [MOSAIC]
    assert compile_for((1, 1), gradients, x, x, x, x).operations == [MOSAIC] * 2


@pytest.mark.parametrize("name", BACKWARD)
def test_machine_code_backward(name, compile_for):
    layer, _, registers = CASES[name]
    step = functools.partial(train, layer, "mosaic")
    program = compile_for((1, 1), step, *shapes(name, 256))
    assert program.operations.count(MOSAIC) == program.launches() == 2
    # Tables of cosines and sines, and sums of the gradient of freqs; zeros where nothing turns.
    assert set(program.operations) - {MOSAIC} <= {"fusion", "reduce", "broadcast"}
    (kernel,) = (x for x in program.kernels if "attention_mosaic_backward" in x.ptx)
    check(kernel, 3 * layer.head_dim // 32, registers, BACKWARD[name])


# Layer with a bias, and the bytes that its backward kernel spills, outside its inner loop.
WINDOWS = {
    "Swin": (make_layer("swin_t_1"), 0),
    "Swin, heads of 64, all channels": (make_layer("swin_t_1", head_dim=64, pairs=32), 0),
    "Swin at 384 px": (make_layer("swin_384px"), 192),
    "windows of 10 with heads of 64": (
        make_layer("swin_t_1", head_dim=64, pattern=Window((10, 10), (5, 5)), pairs=32),
        320,
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_machine_code_of_windows(name, compile_for):
    layer, spilled = WINDOWS[name]
    step = functools.partial(train, layer, "mosaic")
    program = compile_for((1, 1), step, *layer.shapes(64).values())
    assert program.operations.count(MOSAIC) == program.launches() == 2
    boxes = len(make_boxes(layer.pattern, layer.places, layer.head_dim).boxes())
    backward, forward = sorted(program.kernels, key=lambda x: "backward" not in x.name)
    check(forward, boxes, elsewhere=512)
    check(backward, 3 * boxes, spilled=spilled, elsewhere=512)


# Layer, dtype, and the registers per thread of the kernels: forward, of queries, of keys.
NEIGHBORHOODS = {
    "NAT": (make_layer("nat_mini_1"), "bfloat16", (200, 128, 128)),
    "NAT, no bias": (make_layer("nat_mini_1", bias=False), "bfloat16", (168, 128, 128)),
    "DiNAT": (make_layer("dinat_mini_1", bias=True), "float16", (200, 128, 136)),
    "heads of 64": (
        make_layer("nat_mini_1", head_dim=64, pairs=32, pattern=Neighborhood((13, 13))),
        "bfloat16",
        (255, 255, 255),
    ),
    "heads of 64, small map": (
        make_layer("nat_mini_4", head_dim=64, pairs=32, pattern=Neighborhood((3, 3))),
        "bfloat16",
        (255, 255, 255),
    ),
}


@pytest.mark.parametrize("name", NEIGHBORHOODS)
def test_machine_code_of_neighborhoods(name, compile_for):
    layer, dtype, registers = NEIGHBORHOODS[name]
    step = functools.partial(train, layer, "mosaic")
    program = compile_for((1, 1), step, *layer.shapes(64, dtype).values())
    assert program.operations.count(MOSAIC) == 3
    kernels = {x.name.removesuffix("_mosaic_gpu_kernel"): x for x in program.kernels}
    names = [f"attention_neighborhood{part}" for part in ("", "_queries", "_keys")]
    assert kernels.keys() == set(names)
    for most, kernel in zip(registers, map(kernels.get, names), strict=True):
        check(kernel, 2, budget(most), product="mma.sync")


def check_blackwell(folder):
    """The default on a B200, with gradients, has these kernels, and no register spills."""
    layer, dtype, _ = NEIGHBORHOODS["NAT"]
    shapes, step = layer.shapes(64, dtype).values(), functools.partial(train, layer, None)
    program = compile_program(absent_gpus(kind=B200), (1, 1), folder, step, list(shapes))
    assert program.operations.count(MOSAIC) == len(program.kernels) == 3
    assert max(x.spilled_bytes for x in program.kernels) <= budget(0, elsewhere=256)


def test_blackwell(tmp_path):
    run_alone(check_blackwell, tmp_path)


def test_more_elements_than_32_bits_can_index(compile_for):
    """The copy engine has its own coordinates; the kernel computes only addresses of lse."""
    many = shapes("ViT-S", batch=2**15)
    assert many[4].size > 2**31
    program = compile_for((1, 1), forward("ViT-S"), *many[:3])
    assert program.operations == ["fusion", MOSAIC]
    # From one example to the next, 6 heads of 256 places: a 64-bit product.
    assert re.search(r"mul\.wide\.[us]32\s+%rd\d+, %r\d+, 1536;", program.kernels[0].ptx)
