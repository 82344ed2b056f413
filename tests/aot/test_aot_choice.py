"""The default of attention, and all that it could be, compiled and trained at the layers of models.

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
from rope_jax_kernels import Global
from rope_jax_kernels.model_shapes import LAYERS
from tests.aot.layers import attend, train
from tests.aot.program import collectives, compile_ahead
from tests.kernels.covering import covering
from tests.kernels.test_dispatch import abstract_mesh, chosen

KINDS = (H200, A100, L4, T4)
SOME = ("vit_s_class_token", "vit_heads_of_128", "swin_t_1", "nat_mini_3")


def compiled(layer, implementation, gpu, dtype="bfloat16", function=train):
    shapes = list(layer.shapes(4, dtype).values())
    return compile_ahead(functools.partial(function, layer, implementation), shapes, gpu)


def kernels_of(program):
    """Kernels of attention in a program: "cudnn", "triton"."""
    targets = set(re.findall(r'custom_call_target="([^"]*)"', program.as_text()))
    names = {"__cudnn$fmha": "cudnn", "triton": "triton"}
    return {name for part, name in names.items() if any(part in target for target in targets)}


def holds_weights(layer, program):
    """Whether a program holds an array of logits or weights of `Global`."""
    sizes = (layer.tokens, layer.tokens + layer.tokens % 2)
    return any(f",{n},{n}]" in program.as_text() for n in sizes)


@pytest.mark.parametrize("function", [attend, train])
@pytest.mark.parametrize(
    "case",
    covering(
        [(kind, name) for kind in KINDS for name in LAYERS],
        [(H200, name) for name in LAYERS] + [(kind, name) for kind in KINDS for name in SOME],
    ),
    ids=" ".join,
)
def test_the_default(case, function, gpu_of):
    """Forward, and with gradients."""
    kind, name = case
    layer = LAYERS[name]
    program = compiled(layer, None, gpu_of(kind), function=function)
    if isinstance(layer.pattern, Global):
        # Beside cuDNN is the kernel that unpacks and rotates.
        expected = set() if kind == T4 else {"cudnn", "triton"}
        assert holds_weights(layer, program) == (kind == T4)
    else:
        expected = {"triton"} if kind == H200 else set()
    assert kernels_of(program) == expected


GLOBAL = [name for name, layer in LAYERS.items() if isinstance(layer.pattern, Global)]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("name", GLOBAL)
@pytest.mark.parametrize("kind", covering([H200, A100, L4], [H200]))
def test_cudnn_trains_at_the_numbers_of_tokens_of_models(kind, name, biased, gpu_of):
    layer = dataclasses.replace(LAYERS[name], bias=biased)
    program = compiled(layer, "cudnn", gpu_of(kind))
    assert kernels_of(program) == {"cudnn", "triton"}
    assert "fmha" + ("ScaleBias" if biased else "") + "Softmax" in program.as_text()
    assert biased or not holds_weights(layer, program)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_whatever_serves_a_layer_trains(name, gpus):
    """Each by its name, on an H200; the others' defaults are above."""
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        _, reasons = chosen(LAYERS[name], "bfloat16")
    for implementation in (name for name, reason in reasons.items() if reason == "ok"):
        compiled(LAYERS[name], implementation, gpus[0])


def layers(layer, implementation, depth, x, w, freqs, coords):
    """The gradient of `depth` layers in a scan, each a projection and attention."""

    def block(x, w):
        qkv = (x @ w).reshape(*x.shape[:-1], 3, layer.heads, layer.head_dim)
        return attend(layer, implementation, qkv, coords, freqs, None).reshape(x.shape), None

    def loss(w, freqs):
        return jnp.sum(jax.lax.scan(block, x, w, length=depth)[0].astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1))(w, freqs)


@pytest.mark.parametrize(
    ("name", "by"), [("vit_s_class_token", "cudnn"), ("dinat_mini_1", "triton")]
)
def test_what_a_cpu_would_save_costs_a_gpu_nothing(name, by, gpus):
    """The program of a scan of layers is that of the named kernel, with its memory."""
    layer, depth = LAYERS[name], 4
    channels = layer.heads * layer.head_dim
    of = layer.shapes(16)
    shapes = [
        jax.ShapeDtypeStruct((16, *layer.places, channels), jnp.bfloat16),
        jax.ShapeDtypeStruct((depth, channels, 3 * channels), jnp.bfloat16),
        of["freqs"],
        of["coords"],
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


@pytest.mark.parametrize(
    ("form", "biased"), [("jit", False), ("shard_map", False), ("shard_map", True)]
)
def test_several_gpus(form, biased, compile_for):
    """cuDNN's call is partitioned by jax over batch and heads, without communication.

    Only the gradient of a bias that all examples share is summed over the GPUs.
    """
    layer = dataclasses.replace(LAYERS["vit_s_class_token"], bias=biased)
    of_bias = P("heads") if biased else P()
    specs = (P("data", None, None, "heads"), P(), P("heads"), of_bias, P("data", None, "heads"))
    f = functools.partial(attend, layer, None)
    if form == "shard_map":
        f = jax.shard_map(f, in_specs=specs[:4], out_specs=specs[4])

    def step(qkv, coords, freqs, bias, cotangent):
        out, pull_back = jax.vjp(lambda qkv, bias: f(qkv, coords, freqs, bias), qkv, bias)
        return out, pull_back(cotangent)[: 1 + biased]

    program = compile_for((2, 3), step, *layer.shapes(8).values(), specs=specs)
    assert any("fmha" in x and "Backward" in x for x in program.operations)
    assert program.launches() == (1 if form == "shard_map" else 0)
    assert [kind for kind, _ in collectives(program.text)] == ["all-reduce"] * biased
    assert "bf16[4,2,198,64]" in program.text  # a GPU's share of the batch and of the heads
