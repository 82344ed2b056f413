"""The default of attention, and its alternatives, compiled and trained at the layers of models.

A kernel that explains itself as "ok" and then does not compile would end a training.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks._gpus import A100, H200, L4, T4
from benchmarks._model_shapes import LAYERS
from rope_jax_kernels import Global
from tests.aot.layers import attend, train
from tests.aot.program import collectives, compile_ahead
from tests.slow import some_slow

KINDS = (H200, A100, L4, T4)
SOME = ("vit_s_class_token", "vit_heads_of_128", "swin_t_1", "nat_mini_3")


def compile_layer(layer, implementation, gpu, dtype="bfloat16", function=train):
    shapes = list(layer.shapes(4, dtype).values())
    return compile_ahead(functools.partial(function, layer, implementation), shapes, gpu)


def attention_kernels(program):
    """Kernels of attention in a program: "cudnn", "triton", "mosaic"."""
    targets = set(re.findall(r'custom_call_target="([^"]*)"', program.as_text()))
    names = {"__cudnn$fmha": "cudnn", "triton": "triton", "mosaic": "mosaic"}
    return {name for part, name in names.items() if any(part in target for target in targets)}


def holds_weights(layer, program):
    """True if a program holds an array of logits or weights of `Global`."""
    sizes = (layer.tokens, layer.tokens + layer.tokens % 2)
    return any(f",{n},{n}]" in program.as_text() for n in sizes)


@pytest.mark.parametrize("function", [attend, train])
@pytest.mark.parametrize(
    ("kind", "name"),
    some_slow(
        [(kind, name) for kind in KINDS for name in LAYERS],
        [(H200, name) for name in LAYERS] + [(kind, name) for kind in KINDS for name in SOME],
    ),
)
def test_the_default(kind, name, function, gpu_of):
    """Forward, and with gradients."""
    layer = LAYERS[name]
    program = compile_layer(layer, None, gpu_of(kind), function=function)
    if isinstance(layer.pattern, Global):
        # A kernel that unpacks and rotates runs before cuDNN.
        expected = set() if kind == T4 else {"cudnn", "triton"}
        assert holds_weights(layer, program) == (kind == T4)
    else:
        expected = {"mosaic"} if kind == H200 else set()
    assert attention_kernels(program) == expected


GLOBAL = [name for name, layer in LAYERS.items() if isinstance(layer.pattern, Global)]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("name", GLOBAL)
@pytest.mark.parametrize("kind", some_slow([H200, A100, L4], [H200]))
def test_cudnn_trains_with_the_token_counts_of_models(kind, name, biased, gpu_of):
    layer = dataclasses.replace(LAYERS[name], bias=biased)
    program = compile_layer(layer, "cudnn", gpu_of(kind))
    assert attention_kernels(program) == {"cudnn", "triton"}
    assert "fmha" + ("ScaleBias" if biased else "") + "Softmax" in program.as_text()
    assert biased or not holds_weights(layer, program)


def layers(layer, implementation, depth, x, w, freqs, coords):
    """The gradient of `depth` layers in a scan, each a projection and attention."""

    def block(x, w):
        qkv = (x @ w).reshape(*x.shape[:-1], 3, layer.heads, layer.head_dim)
        return attend(layer, implementation, qkv, coords, freqs, None).reshape(x.shape), None

    def loss(w, freqs):
        return jnp.sum(jax.lax.scan(block, x, w, length=depth)[0].astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1))(w, freqs)


@pytest.mark.parametrize(
    ("name", "by"), [("vit_s_class_token", "cudnn"), ("dinat_mini_1", "mosaic")]
)
def test_the_default_costs_a_gpu_no_memory(name, by, gpus):
    """The program of a scan of layers is that of the named kernel, with its memory."""
    layer, depth = LAYERS[name], 4
    channels = layer.heads * layer.head_dim
    layer_shapes = layer.shapes(16)
    shapes = [
        jax.ShapeDtypeStruct((16, *layer.places, channels), jnp.bfloat16),
        jax.ShapeDtypeStruct((depth, channels, 3 * channels), jnp.bfloat16),
        layer_shapes["freqs"],
        layer_shapes["coords"],
    ]
    default, named = (
        compile_ahead(functools.partial(layers, layer, name, depth), shapes, gpus[0])
        for name in (None, by)
    )
    memory = [x.memory_analysis().temp_size_in_bytes for x in (default, named)]
    assert memory[0] == memory[1] > 0
    count = lambda program: len(re.findall("custom_call_target", program.as_text()))
    assert count(default) == count(named) > 0
    assert not holds_weights(layer, default)


def test_cudnn_is_partitioned_without_communication(compile_for):
    """By jax, over batch and heads; inside `jax.shard_map`, see `test_aot_attention`."""
    layer = LAYERS["vit_s_class_token"]
    specs = P("data", None, None, "heads"), P(), P("heads"), P(), P("data", None, "heads")

    def step(qkv, coords, freqs, _, cotangent):
        out, pull_back = jax.vjp(lambda qkv: attend(layer, None, qkv, coords, freqs), qkv)
        return out, pull_back(cotangent)

    program = compile_for((2, 3), step, *layer.shapes(8).values(), specs=specs)
    assert any("fmha" in x and "Backward" in x for x in program.operations)
    assert program.launches() == 0
    assert collectives(program.text) == []
    assert "bf16[4,2,198,64]" in program.text  # a GPU's part of the batch and of the heads
