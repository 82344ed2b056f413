"""The attention kernels on a GPU: the cases that the CPU interprets, and layers of models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._model_shapes import LAYERS
from rope_jax_kernels import Global, Neighborhood, Window, attention
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
MOSAIC = {name: (Global(), n, {"bias": False} | options) for name, (n, options) in MOSAIC.items()}


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
PATTERNS = {
    "global": (Global(), (53,)),
    "window": (Window((4, 4), (2, 1)), (7, 9)),
    "neighborhood": (Neighborhood((5, 5)), (9, 10)),
}
HEADS = {
    f"{name}, heads of {n}": (*PATTERNS[name], {"head_dim": n, "pairs": n // 4})
    for name in at(PATTERNS, ["global"])
    for n in (16, 24, 96, 128)
}
WITHOUT_BIAS = {"heads": 6, "head_dim": 64, "pairs": 32, "bias": False}
CUDNN = {f"{n} tokens": (Global(), (n,), WITHOUT_BIAS) for n in (196, 197, 1025)}  # odd: padded
INTERPRETED = {x: case for x, case in interpreted.CASES.items() if "dtype" not in case[2]}
CASES = [
    pytest.param(implementation, *case, dtype, id=f"{implementation}-{name}-{dtype}")
    for implementation, cases, dtypes in (
        ("triton", INTERPRETED | MODELS, ("float32", "bfloat16", "float16")),
        ("triton", HEADS, ("bfloat16",)),
        ("mosaic", MOSAIC | MOSAIC_WINDOWS, ("bfloat16", "float16")),
        ("cudnn", CUDNN, ("bfloat16", "float16")),
    )
    for name, case in cases.items()
    for dtype in dtypes
]


@pytest.mark.parametrize(("implementation", "pattern", "places", "options", "dtype"), CASES)
def test_outputs_and_gradients(implementation, pattern, places, options, dtype):
    terms = options | {"implementation": implementation, "dtype": dtype}
    with jax.default_matmul_precision("highest"):
        interpreted.check(pattern, places, **terms)


@pytest.mark.parametrize(
    ("pattern", "places"), [(Global(), (17,)), (Neighborhood((3, 3)), (6, 6))], ids=["ViT", "NAT"]
)
def test_arrays_on_the_cpu(pattern, places):
    """They are computed there by default, with and without jit."""
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
