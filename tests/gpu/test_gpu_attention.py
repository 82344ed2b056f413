"""The attention kernels on a GPU: the cases that the CPU interprets, and layers of models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._model_shapes import LAYERS
from rope_jax_kernels import Global, Neighborhood, Window, attention, explain
from tests.gpu.programs import at
from tests.kernels import test_attention_triton as interpreted

pytestmark = pytest.mark.gpu

# Cases of "mosaic" for `Global`: without a bias, R a multiple of 8.
MOSAIC = {
    "ViT-S": ((197,), {"heads": 6, "head_dim": 64, "pairs": 32, "batch": 64}),
    "separate arrays": ((196,), {"heads": 6, "head_dim": 64, "pairs": 16, "packed": False}),
    "no rotation": ((197,), {"heads": 6, "head_dim": 64, "pairs": 0}),
    "no rotation, many tokens": ((785,), {"heads": 2, "head_dim": 64, "pairs": 0}),
    "ViT at 512 px": ((1025,), {"heads": 2, "head_dim": 64, "pairs": 16}),
    "one head, shared frequencies": (
        (70,),
        {"heads": 1, "head_dim": 64, "pairs": 24, "shared": True, "batch": 300},
    ),
    "head dimension 32": ((197,), {"heads": 12, "head_dim": 32, "pairs": 8, "batch": 64}),
    "head dimension 128": ((196,), {"head_dim": 128, "pairs": 64}),
    "head dimension 128, many tokens": ((577,), {"head_dim": 128, "pairs": 40}),
}


def layer_case(name, **options):
    """A model's layer with a bias, unless the options have none."""
    layer = LAYERS[name]
    sizes = {"heads": layer.heads, "head_dim": layer.head_dim, "pairs": layer.pairs}
    return layer.pattern, layer.places, sizes | options


MODELS = {
    "ViT-S": layer_case("vit_s_class_token", pairs=32),
    "ViT at 512 px": layer_case("vit_s_512px", heads=2, bias=False),
    "Swin": layer_case("swin_t_2", heads=3),
    "Swin at 384 px": layer_case("swin_384px", pairs=8, batch=1),
    "NAT": layer_case("nat_mini_1"),
    "DiNAT": layer_case("dinat_mini_1", pairs=8),
    "head dimension 128": layer_case("vit_heads_of_128", heads=2, bias=False),
}


MOSAIC_WINDOWS = {
    "Swin": MODELS["Swin"],
    "Swin at 384 px": MODELS["Swin at 384 px"],
    "heads of 64, separate arrays": layer_case("swin_t_2", head_dim=64, pairs=32, packed=False),
    "windows of two tiles": (Window((9, 9), (4, 4)), (20, 31), {"head_dim": 64, "batch": 40}),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", [*interpreted.CASES, *MODELS])
def test_outputs_and_gradients(name, dtype):
    pattern, places, options = (interpreted.CASES | MODELS)[name]
    with jax.default_matmul_precision("highest"):
        interpreted.check(pattern, places, dtype=dtype, **options)


PATTERNS = {
    "global": (Global(), (53,)),
    "window": (Window((4, 4), (2, 1)), (7, 9)),
    "neighborhood": (Neighborhood((5, 5)), (9, 10)),
}


@pytest.mark.parametrize("head_dim", [16, 24, 96, 128])
@pytest.mark.parametrize("name", at(PATTERNS, ["global"]))
def test_head_dimensions(name, head_dim):
    pattern, places = PATTERNS[name]
    with jax.default_matmul_precision("highest"):
        interpreted.check(
            pattern, places, dtype=jnp.bfloat16, head_dim=head_dim, pairs=head_dim // 4
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", MOSAIC)
def test_mosaic(name, dtype):
    places, options = MOSAIC[name]
    with jax.default_matmul_precision("highest"):
        interpreted.check(
            Global(), places, dtype=dtype, implementation="mosaic", bias=False, **options
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", MOSAIC_WINDOWS)
def test_mosaic_windows(name, dtype):
    pattern, places, options = MOSAIC_WINDOWS[name]
    with jax.default_matmul_precision("highest"):
        interpreted.check(pattern, places, dtype=dtype, implementation="mosaic", **options)


@pytest.mark.parametrize("name", ["ViT-S", "ViT at 512 px"])
def test_cudnn_agrees(name):
    pattern, places, options = MODELS[name]
    qkv, *_ = interpreted.operands(
        pattern, places, dtype=jnp.bfloat16, **options | {"bias": False, "pairs": 0}
    )
    q, k, v = (jnp.asarray(qkv[..., i, :, :]) for i in range(3))
    assert explain(attention, q, k, v, pattern=pattern)["cudnn"] == "ok"
    cudnn_result, triton_result = (
        np.asarray(attention(q, k, v, pattern=pattern, implementation=name), np.float32)
        for name in ("cudnn", "triton")
    )
    np.testing.assert_allclose(
        cudnn_result, triton_result, rtol=0, atol=2 * 2**-8 * np.abs(triton_result).max()
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tokens", [196, 197, 1025])
def test_cudnn_in_training(tokens, dtype):
    """Odd numbers of tokens are padded."""
    sizes = {"heads": 6, "head_dim": 64, "pairs": 32, "bias": False}
    with jax.default_matmul_precision("highest"):
        interpreted.check(Global(), (tokens,), dtype=dtype, implementation="cudnn", **sizes)


@pytest.mark.parametrize("pattern", [Global(), Neighborhood((3, 3))], ids=["ViT", "NAT"])
def test_arrays_on_the_cpu(pattern):
    """They are computed there by default, with and without jit."""
    places = (17,) if pattern == Global() else (6, 6)
    arrays = interpreted.operands(pattern, places, dtype=jnp.bfloat16, bias=False)
    arrays = jax.device_put(arrays, jax.devices("cpu")[0])
    run = lambda name: interpreted.outputs(
        *arrays, pattern=pattern, pairing="half", implementation=name
    )
    result, expected = run(None), run("xla")
    for name in ("out", "qkv", "freqs"):
        assert result[name].devices() == {jax.devices("cpu")[0]}
        np.testing.assert_allclose(
            np.float32(result[name]), np.float32(expected[name]), rtol=0.02, atol=0.02
        )
    eager = attention(*jnp.unstack(arrays[0], axis=-3), pattern=pattern)
    assert eager.devices() == {jax.devices("cpu")[0]}


def test_two_runs_are_bit_equal():
    pattern, places, options = MODELS["NAT"]
    arrays = interpreted.operands(pattern, places, dtype=jnp.bfloat16, **options)
    first, second = (
        interpreted.outputs(*arrays, pattern=pattern, pairing="half", implementation="triton")
        for _ in range(2)
    )
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
