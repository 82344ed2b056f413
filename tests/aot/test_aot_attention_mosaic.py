"""Mosaic GPU's kernels of attention for Hopper as machine code: spills, instructions, launches."""

import functools
import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

from rope_jax_kernels import Global, Window, attention
from rope_jax_kernels.attention.window_boxes import make_boxes
from tests.aot.layers import attend, make_layer, train
from tests.aot.program import TARGETS, budget, collectives

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


MOSAIC, TRITON = TARGETS["mosaic"], TARGETS["triton"]


def shapes(name, batch=16):
    """Shapes of qkv, coords, freqs (of one pair if none turn), bias (none) and the output."""
    layer, dtype, _ = CASES[name]
    return list(layer.shapes(batch, dtype).values())


def forward(name):
    return functools.partial(attend, CASES[name][0], "mosaic")


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, compile_for):
    program = compile_for((1, 1), forward(name), *shapes(name)[:3])
    # Nothing but the kernel and its table of cosines and sines.
    assert program.operations == ["fusion"] * bool(CASES[name][0].pairs) + [MOSAIC]
    (kernel,) = program.kernels
    assert kernel.local_bytes <= budget(0)
    assert kernel.registers <= CASES[name][-1]
    assert kernel.ptx.count("wgmma.mma_async") > 0
    # The engine clips tiles to the array, and would not clip a run of bytes.
    assert kernel.tensors_out == max(1, CASES[name][0].head_dim // 64)
    assert kernel.runs_out == 0


def test_separate_arrays_and_gradients_need_no_copy(compile_for):
    *_, x = shapes("ViT-S")
    attend = functools.partial(attention, pattern=Global(), implementation="mosaic")
    gradients = lambda q, k, v, dout: jax.vjp(attend, q, k, v)[1](dout)
    assert compile_for((1, 1), attend, x, x, x).operations == [MOSAIC]
    assert compile_for((1, 1), gradients, x, x, x, x).operations == [MOSAIC] * 2


def list_kernels(program):
    return [x for x in program.operations if x in TARGETS.values()]


@pytest.mark.parametrize("name", BACKWARD)
def test_machine_code_backward(name, compile_for):
    program = compile_for(
        (1, 1), functools.partial(train, CASES[name][0], "mosaic"), *shapes(name, 256)
    )
    layer, _, registers = CASES[name]
    assert list_kernels(program) == [MOSAIC] * 2
    # Tables of cosines and sines, and sums of the gradient of freqs; zeros where nothing turns.
    assert set(program.operations) - {MOSAIC} <= {"fusion", "reduce", "broadcast"}
    (kernel,) = (x for x in program.kernels if "attention_mosaic_backward" in x.ptx)
    assert kernel.spilled_bytes <= budget(BACKWARD[name], elsewhere=256)
    assert kernel.registers <= registers
    assert kernel.ptx.count("wgmma.mma_async") > 0
    assert kernel.tensors_out == 3 * layer.head_dim // 32
    assert kernel.runs_out == 0


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
    program = compile_for(
        (1, 1), functools.partial(train, layer, "mosaic"), *layer.shapes(64).values()
    )
    assert list_kernels(program) == [MOSAIC] * 2
    kernels = {"backward" in x.name: x for x in program.kernels}
    boxes = len(make_boxes(layer.pattern, layer.places, layer.head_dim).boxes())
    for backward, arrays, most in ((False, 1, 0), (True, 3, spilled)):
        kernel = kernels[backward]
        assert kernel.spilled_bytes <= budget(most, elsewhere=512)
        assert kernel.ptx.count("wgmma.mma_async") > 0
        assert (kernel.tensors_out, kernel.runs_out) == (arrays * boxes, 0)


def test_triton_runs_the_backward_pass_of_many_tokens(compile_for):
    name = "ViT at 512 px"
    program = compile_for((1, 1), functools.partial(train, CASES[name][0], "mosaic"), *shapes(name))
    assert list_kernels(program) == [MOSAIC, *[TRITON] * 2]
    assert set(program.operations) - set(list_kernels(program)) <= {"fusion", "reduce"}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layer", [CASES["ViT-S"][0], make_layer("swin_t_1", bias=False)])
def test_no_collective_when_sharded_over_batch_and_heads(layer, check_vma, compile_for):
    """Forward and backward in one program."""
    lead = ["data", *[None] * len(layer.places)]
    specs = [P(*lead, None, "heads"), P(), P("heads"), P(*lead, "heads")]
    options = {"in_specs": tuple(specs[:3]), "out_specs": specs[3], "check_vma": check_vma}
    sharded = jax.shard_map(functools.partial(attend, layer, "mosaic"), **options)

    def step(qkv, coords, freqs, cotangent):
        out, pull_back = jax.vjp(lambda qkv: sharded(qkv, coords, freqs), qkv)
        return out, pull_back(cotangent)

    *operands, _, out = layer.shapes(16).values()
    program = compile_for((2, 3), step, *operands, out, specs=specs)
    assert list_kernels(program) == [MOSAIC] * 2
    assert collectives(program.text) == []


def test_more_elements_than_32_bits_can_index(compile_for):
    """The copy engine has its own coordinates; the kernel computes only addresses of lse."""
    many = shapes("ViT-S", batch=2**15)
    assert many[4].size > 2**31
    program = compile_for((1, 1), forward("ViT-S"), *many[:3])
    assert program.operations == ["fusion", MOSAIC]
    # From one example to the next, 6 heads of 256 places: a 64-bit product.
    assert re.search(r"mul\.wide\.[us]32\s+%rd\d+, %r\d+, 1536;", program.kernels[0].ptx)
