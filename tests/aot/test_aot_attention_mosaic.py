"""The Hopper kernel of global attention as machine code: spills, instructions, launches."""

import dataclasses
import functools
import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

from rope_jax_kernels import Global, Rotation, attention, attention_qkv
from rope_jax_kernels.model_shapes import LAYERS

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


def layer_of(name, **changes):
    return dataclasses.replace(LAYERS[name], **changes)


# Layer, dtype, and the registers of a thread that its warpgroups leave.
CASES = {
    "ViT-S": (layer_of("vit_s_class_token"), "bfloat16", 128),
    "ViT-S, all channels": (layer_of("vit_s_rope_mixed"), "float16", 128),
    "ViT-S, no rotation": (layer_of("vit_s_class_token", pairs=0), "bfloat16", 128),
    "ViT at 512 px": (layer_of("vit_s_512px", pairs=32), "bfloat16", 168),
    "heads of 32": (layer_of("vit_s_12_heads", places=(785,), pairs=16), "bfloat16", 128),
    "heads of 128": (layer_of("vit_heads_of_128", places=(1025,)), "bfloat16", 255),
    "one head, few tokens": (layer_of("vit_s", places=(50,), heads=1), "bfloat16", 255),
}


def shapes(name, batch=16):
    """Of qkv, coords, freqs (of one pair where none turn), and the output."""
    layer, dtype, _ = CASES[name]
    of_layer = layer.shapes(batch, dtype)
    return [of_layer[key] for key in ("qkv", "coords", "freqs", "out")]


def forward(name, qkv, coords, freqs):
    rotation = Rotation(coords, freqs) if CASES[name][0].pairs else None
    return attention_qkv(qkv, pattern=Global(), rotation=rotation, implementation="mosaic")


def train(name, qkv, coords, freqs, cotangent):
    """The output and the gradients of qkv and freqs."""
    out, pull_back = jax.vjp(lambda qkv, freqs: forward(name, qkv, coords, freqs), qkv, freqs)
    return out, pull_back(cotangent)


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, compile_for):
    program = compile_for((1, 1), functools.partial(forward, name), *shapes(name)[:3])
    assert program.operations == ["mosaic_gpu_v2"]  # nothing before the kernel and nothing after it
    (kernel,) = program.kernels
    assert kernel.spilled_bytes == 0 == kernel.local_bytes
    assert kernel.registers <= CASES[name][-1]
    assert kernel.ptx.count("wgmma.mma_async") > 0
    # The engine clips tiles to the array, and would not clip a run of bytes.
    assert kernel.tensors_out == max(1, CASES[name][0].head_dim // 64)
    assert kernel.runs_out == 0


def test_separate_arrays_need_no_copy(compile_for):
    *_, x = shapes("ViT-S")
    program = compile_for(
        (1, 1),
        lambda q, k, v: attention(q, k, v, pattern=Global(), implementation="mosaic"),
        x,
        x,
        x,
    )
    assert program.operations == ["mosaic_gpu_v2"]


def test_training_is_one_launch_forward_and_two_of_triton_backward(compile_for):
    program = compile_for((1, 1), functools.partial(train, "ViT-S"), *shapes("ViT-S"))
    kernels = [x for x in program.operations if x in ("mosaic_gpu_v2", "__gpu$xla.gpu.triton")]
    assert kernels == ["mosaic_gpu_v2", *["__gpu$xla.gpu.triton"] * 2]
    assert set(program.operations) - set(kernels) <= {"fusion", "reduce"}, (
        program.operations
    )  # sums of the gradient of freqs


@pytest.mark.parametrize("check_vma", [True, False])
def test_no_collective_when_sharded_over_batch_and_heads(check_vma, compile_for):
    specs = [P("data", None, None, "heads"), P(), P("heads"), P("data", None, "heads")]
    sharded = jax.shard_map(
        functools.partial(forward, "ViT-S"),
        in_specs=tuple(specs[:3]),
        out_specs=specs[3],
        check_vma=check_vma,
    )
    program = compile_for((2, 3), sharded, *shapes("ViT-S")[:3], specs=specs[:3])
    assert program.operations == ["mosaic_gpu_v2"]
    assert not any(
        word in program.text
        for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    )


def test_more_elements_than_32_bits_count(compile_for):
    """The copy engine has its own coordinates; the kernel computes only addresses of lse."""
    many = shapes("ViT-S", batch=2**15)
    assert many[3].size > 2**31
    program = compile_for((1, 1), functools.partial(forward, "ViT-S"), *many[:3])
    assert program.operations == ["mosaic_gpu_v2"]
    # From one example to the next, 6 heads of 256 places: a 64-bit product.
    assert re.search(r"mul\.wide\.[us]32\s+%rd\d+, %r\d+, 1536;", program.kernels[0].ptx)
