"""DINOv2 and DINOv3: their official names are those of timm, whose logits are in tests/parity."""

import functools

import numpy as np
import pytest

import rope_jax
from rope_jax.positions.resample import MATRICES
from rope_jax.weights import export_state_dict
from tests.models.small import pictures, run
from tests.parity.official import assert_equal, draw
from tests.parity.test_convert import assert_same
from tests.slow import some_slow

WIDTH, HEADS, DEPTH, CLASSES, PATCH = 24, 3, 2, 5, 4
LAYERS = [f"blocks.{i}" for i in range(DEPTH)]
SMALL = {"width": WIDTH, "heads": HEADS, "depth": DEPTH, "num_classes": CLASSES}
SMALL |= {"patch_size": PATCH, "mlp_ratio": 2.0, "image_size": (12, 12)}
small = functools.partial(rope_jax.create_model, **SMALL)  # of 3 x 3 patches
# mlp_ratio 2: 48 hidden channels, of which SwiGLU takes 32.
SWIGLU = 32


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
    np.testing.assert_allclose(MATRICES["dinov2"](4, 6), want, rtol=0, atol=1e-14)


# Parameters


# Files


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
    masked = [f"{block}.attn.qkv.bias" for block in LAYERS] if source == "dinov3" else []
    for key in masked:  # the bias of keys is not read
        weights[key][WIDTH : 2 * WIDTH] = np.nan
    rope_jax.convert_state_dict(model, weights, source=source)
    for key in masked:
        weights[key][WIDTH : 2 * WIDTH] = 0
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
                parts = dict(zip("qkv", np.split(value, 3), strict=True))
                renamed |= {key.replace("qkv.bias", f"{x}_bias"): parts[x] for x in "qv"}
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
