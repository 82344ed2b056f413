"""DINOv2 and DINOv3 against their definition, by the official names, and their files.

Tolerance: float64 and logits of size 1 leave 1e-13 of rounding; another epsilon of LayerNorm
moves them by 1e-6 and more.
"""

import math
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.positions.resample import dinov2_matrix
from rope_jax.weights import export_state_dict
from tests.models.definition import build_layers, places, vit
from tests.models.small import pictures, run, some_slow
from tests.parity.official import assert_equal, draw
from tests.parity.test_convert import assert_same

WIDTH, HEADS, DEPTH, CLASSES, PATCH = 24, 3, 2, 5, 4
SMALL = {
    "width": WIDTH,
    "heads": HEADS,
    "depth": DEPTH,
    "num_classes": CLASSES,
    "patch_size": PATCH,
}
LAYERS = [f"blocks.{i}" for i in range(DEPTH)]
# mlp_ratio 2: 48 hidden channels, of which SwiGLU takes 32.
SWIGLU = 32


def small(name, *, dtype=jnp.float32, size=(12, 12), **options):
    """A model of 3 x 3 patches."""
    return rope_jax.create_model(
        name, image_size=size, dtype=dtype, **{"mlp_ratio": 2.0} | SMALL | options
    )


# Weights by the official names


REGISTERS = {"register_tokens": (1, 4, WIDTH)}
STORAGE = {"storage_tokens": (1, 4, WIDTH)}
TABLE = {"pos_embed": (1, 1 + 9, WIDTH)}
# Source, tokens and tables, and the inputs of SwiGLU's layers.
CASES = {
    "dinov2_s14": ("dinov2", TABLE, {}),
    "dinov2_s14_reg": ("dinov2", TABLE | REGISTERS, {}),
    "dinov2_g14_reg": ("dinov2", TABLE | REGISTERS, {"w12": 2 * SWIGLU}),
    "dinov3_s16": ("dinov3", STORAGE, {}),
    "dinov3_s16_plus": ("dinov3", STORAGE, {"w1": SWIGLU, "w2": SWIGLU}),
}


def weights_for(name):
    """The source of a model and a state dict of noise."""
    source, tokens, gates = CASES[name]
    block = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
    if gates:
        block |= {f"mlp.{key}": (hidden, WIDTH) for key, hidden in gates.items()}
        block |= {"mlp.w3": (WIDTH, SWIGLU)}
    else:
        block |= {"mlp.fc1": (2 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 2 * WIDTH)}
    block |= {"norm1": (WIDTH,), "norm2": (WIDTH,)}
    layers = {f"{i}.{key}": shape for i in LAYERS for key, shape in block.items()}
    layers |= {"patch_embed.proj": (WIDTH, 3, PATCH, PATCH), "norm": (WIDTH,)}
    layers |= {"head": (CLASSES, 2 * WIDTH)}
    scales = {f"{i}.ls{branch}.gamma": (WIDTH,) for i in LAYERS for branch in (1, 2)}
    return source, draw(layers, tokens | scales | {"cls_token": (1, 1, WIDTH)})


# The definition


def definition(image, weights, options, *, table=None, angles=None):
    """Logits of one image.

    table(rows, height, width) gives the positions of class token and patches, angles(height, width)
    the rotation of patches [H * W, D / 2].
    """
    names = {"cls_token": "class_token", "register_tokens": "registers"}
    names["storage_tokens"] = "registers"
    layers = build_layers({names.get(key, key): array.copy() for key, array in weights.items()})
    height, width = (side // PATCH for side in image.shape[:2])
    for block in layers.blocks:
        block.scale1, block.scale2 = block.ls1, block.ls2
        if angles is not None:
            block.attn.qkv.bias[WIDTH : 2 * WIDTH] = 0  # DINOv3 masks the bias of k
        if hasattr(block.mlp, "w12"):
            block.mlp.fc1, block.mlp.fc2 = block.mlp.w12, block.mlp.w3
        elif hasattr(block.mlp, "w1"):
            gate, hidden = block.mlp.w1, block.mlp.w2
            kernel = np.concatenate([gate.kernel, hidden.kernel], axis=1)
            bias = np.concatenate([gate.bias, hidden.bias])
            block.mlp.fc1, block.mlp.fc2 = (
                types.SimpleNamespace(kernel=kernel, bias=bias),
                block.mlp.w3,
            )
    if angles is None:
        tokens = table(weights["pos_embed"][0].astype(np.float64), height, width)
        return vit(layers, options, image, tokens=tokens)
    theta = np.pad(angles(height, width), [(1 + options.registers, 0), (0, 0)])
    return vit(layers, options, image, theta=lambda layer: lambda head: theta)


def dinov3_angles(height, width):
    """2 pi times coordinate over period, rows first, with periods 100 ** (i / 2), i = 0, 1.

    Coordinates are the centres of patches in [-1, 1] along each axis.
    """
    periods = 100 ** (2 * np.arange(WIDTH // HEADS // 4) / (WIDTH // HEADS / 2))
    centres = (places((height, width)) + 0.5) / (height, width) * 2 - 1
    return (2 * np.pi * centres[:, :, None] / periods).reshape(len(centres), -1)


def keep_table(table, height, width):
    assert len(table) == 1 + height * width
    return table


def resample(matrix):
    """The rule of DINOv2 for another map: `matrix(before, after)` along each axis.

    The row of the class token stays as it is.
    """

    def rule(table, height, width):
        maps = table[1:].reshape(3, 3, WIDTH)
        maps = np.einsum("yh,hwc,xw->yxc", matrix(3, height), maps, matrix(3, width))
        return np.concatenate([table[:1], maps.reshape(-1, WIDTH)])

    return rule


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "size"),
    some_slow(
        [(name, size) for name in CASES for size in ((12, 12), (8, 20))],
        [("dinov2_s14", (12, 12)), *((name, (8, 20)) for name in CASES)],
    ),
)
def test_models_match_their_definition(name, size):
    source, weights = weights_for(name)
    model = nnx.eval_shape(lambda: small(name, dtype=jnp.float64, mlp_ratio=2.0))
    assert model.options.norm_epsilon == (1e-6 if source == "dinov2" else 1e-5)
    rope_jax.convert_state_dict(model, weights, source=source)
    rule = (
        keep_table
        if size == (12, 12)
        else resample(antialias_matrix if "reg" in name else stretch_matrix)
    )
    positions = {"table": rule} if source == "dinov2" else {"angles": dinov3_angles}
    images = np.asarray(pictures(*size), np.float64)
    want = [definition(image, weights, model.options, **positions) for image in images]
    np.testing.assert_allclose(run(model, jnp.asarray(images))[0], want, rtol=0, atol=1e-12)


def cubic(t, a):
    t = abs(t)
    return (
        (a + 2) * t**3 - (a + 3) * t**2 + 1
        if t <= 1
        else a * (t**3 - 5 * t**2 + 8 * t - 4)
        if t < 2
        else 0.0
    )


def stretch_matrix(before, after):
    """Bicubic with a = -0.75 at (i + 0.5) * before / (after + 0.1) - 0.5, edges repeated."""
    matrix = np.zeros((after, before))
    for i in range(after):
        place = (i + 0.5) * before / (after + 0.1) - 0.5
        for j in range(math.floor(place) - 1, math.floor(place) + 3):
            matrix[i, min(max(j, 0), before - 1)] += cubic(place - j, -0.75)
    return matrix


def antialias_matrix(before, after):
    """Bicubic with a = -0.5, as wide as the ratio where that is above 1, without edges."""
    scale = max(before / after, 1.0)
    rows = [
        [cubic((j - (i + 0.5) * before / after + 0.5) / scale, -0.5) for j in range(before)]
        for i in range(after)
    ]
    return np.array([np.array(row) / sum(row) for row in rows])


def test_the_table_of_dinov2_is_resized_as_by_torch():
    # torch 2.13: interpolate(eye(4)[None, None], scale_factor=(6.1 / 4, 1), mode="bicubic"),
    # float64.
    want = [
        [1.0884797350879585, -0.08847973508795892, 0, 0],
        [0.5184404201232705, 0.5721383342658638, -0.09057875438913365, 0],
        [-0.07741217877267248, 0.959694175944242, 0.13025140320114892, -0.012533400372718884],
        [-0.02503995378467838, 0.20591963093827192, 0.9162753435309566, -0.0971550206845504],
        [0, -0.10197508271617428, 0.6572434752247984, 0.44473160749137564],
        [0, 0, -0.06379374815513161, 1.0637937481551312],
    ]
    np.testing.assert_allclose(dinov2_matrix(4, 6), want, rtol=0, atol=1e-14)


# Parameters


def test_initial_tokens_match_the_official_code():
    for name, spread in (("dinov2_s14_reg", 1e-6), ("dinov3_s16", 0.02)):
        model = small(name, width=240)
        for token, length in ((model.class_token[...], 1), (model.registers[...], 4)):
            assert token.shape == (1, length, 240)
            assert (
                0.8 * spread < float(token.std()) < 1.2 * spread
            )  # 240 draws: within 5 standard deviations


# Files


def test_known_extras_of_official_files_are_ignored():
    _, weights = weights_for("dinov3_s16")
    plain, other = small("dinov3_s16"), small("dinov3_s16", seed=1)
    rope_jax.convert_state_dict(plain, weights, source="dinov3")
    weights["mask_token"] = np.zeros((1, WIDTH), np.float32)
    weights["rope_embed.periods"] = np.float32([1, 10])
    for block in LAYERS:
        weights[f"{block}.attn.qkv.bias_mask"] = np.repeat(np.float32([1, np.nan, 1]), WIDTH)
        weights[f"{block}.attn.qkv.bias"][WIDTH : 2 * WIDTH] = np.nan  # never read
    rope_jax.convert_state_dict(other, weights, source="dinov3")
    assert_same(other, plain)
    _, weights = weights_for("dinov2_g14_reg")
    weights["mask_token"] = np.zeros((1, WIDTH), np.float32)
    rope_jax.convert_state_dict(small("dinov2_g14_reg"), weights, source="dinov2")


@pytest.mark.parametrize(
    ("name", "scan"),
    some_slow(
        [(name, scan) for name in CASES for scan in (False, True)],
        [("dinov2_g14_reg", False), ("dinov3_s16_plus", True)],
    ),
)
def test_official_weights_round_trip(name, scan):
    source, weights = weights_for(name)
    model = small(name, scan_layers=scan)
    rope_jax.convert_state_dict(model, weights, source=source)
    for block in LAYERS if source == "dinov3" else []:
        weights[f"{block}.attn.qkv.bias"][WIDTH : 2 * WIDTH] = 0  # masked
    assert_equal(export_state_dict(model, source=source), weights)


def to_timm(weights):
    """timm's renaming: registers, LayerScale, halves of SwiGLU in DINOv3, biases of q and v."""
    renamed = {}
    for key, value in weights.items():
        key = key.replace("register_tokens", "reg_token").replace("storage_tokens", "reg_token")
        if "reg_token" in weights or "storage_tokens" in weights:
            key = key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")
            key = key.replace("mlp.w1.", "mlp.fc1_g.").replace("mlp.w2.", "mlp.fc1_x.")
            if key.endswith("qkv.bias"):
                (
                    renamed[key.replace("qkv.bias", "q_bias")],
                    _,
                    renamed[key.replace("qkv.bias", "v_bias")],
                ) = np.split(value, 3)
                continue
        renamed[key.replace("mlp.w12.", "mlp.fc1.").replace("mlp.w3.", "mlp.fc2.")] = value
    return renamed


@pytest.mark.parametrize("name", some_slow(CASES, ["dinov2_g14_reg", "dinov3_s16_plus"]))
def test_timm_and_official_names_give_equal_models(name):
    source, weights = weights_for(name)
    official, from_timm = small(name), small(name, seed=1)
    rope_jax.convert_state_dict(official, weights, source=source)
    rope_jax.convert_state_dict(from_timm, to_timm(weights), source="timm")
    assert_same(official, from_timm)


def test_another_pairing_permutes_channels_and_the_bias_of_q():
    _, weights = weights_for("dinov3_s16")
    logits = {}
    for pairing in ("half", "interleaved"):
        model = small("dinov3_s16", position=f"dinov3(pairing={pairing})")
        rope_jax.convert_state_dict(model, weights, source="dinov3")
        logits[pairing] = run(model, pictures(8, 20))[0]
        exported = export_state_dict(model, source="timm")
        np.testing.assert_array_equal(
            exported["blocks.1.attn.q_bias"], weights["blocks.1.attn.qkv.bias"][:WIDTH]
        )
    np.testing.assert_allclose(logits["half"], logits["interleaved"], rtol=0, atol=1e-5)


def test_timm_files_without_q_and_v_bias_fit_a_model_without():
    model = small("dinov3_s16", qkv_bias=False)
    weights = export_state_dict(model, source="timm")
    assert not [key for key in weights if "q_bias" in key or "qkv.bias" in key]
    rope_jax.convert_state_dict(model, weights, source="timm")
