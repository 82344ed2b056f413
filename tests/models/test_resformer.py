"""ResFormer against its definition, by the official names of weights.

The official code divides rows and columns by their number plus 1e-6, which moves nothing here
beyond that.
"""

import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.weights import export_state_dict
from tests.models.definition import build_layers, convolve, vit
from tests.models.small import pictures, run
from tests.parity.official import assert_equal, draw

WIDTH, HEADS, DEPTH, CLASSES, PATCH = 24, 3, 2, 5, 4
SIDE = WIDTH // HEADS
SIZES = {"width": WIDTH, "heads": HEADS, "depth": DEPTH, "mlp_ratio": 2.0, "patch_size": PATCH}


def small(dtype=jnp.float32):
    def make():
        return rope_jax.create_model(
            "resformer_s16", image_size=12, num_classes=CLASSES, dtype=dtype, **SIZES
        )

    return nnx.eval_shape(make)


def official_weights():
    layers = {
        "attn.qkv": (3 * WIDTH, WIDTH),
        "attn.proj": (WIDTH, WIDTH),
        "mlp.fc1": (2 * WIDTH, WIDTH),
        "mlp.fc2": (WIDTH, 2 * WIDTH),
        "attn.get_v": (SIDE, 1, 3, 3),
        "norm1": (WIDTH,),
        "norm2": (WIDTH,),
    }
    layers = {f"blocks.{i}.{key}": shape for i in range(DEPTH) for key, shape in layers.items()}
    layers |= {"norm": (WIDTH,), "head": (CLASSES, WIDTH)}
    layers |= {"patch_embed.proj": (WIDTH, 3, PATCH, PATCH)}
    layers |= {"pos_embed.embed_layer": (WIDTH, 1, 3, 3)}
    return draw(layers, {"cls_token": (1, 1, WIDTH)})


def convolve_channels(maps, layer):
    """Convolves each channel of a map [H, W, C] with its 3 x 3 kernel; zeros beyond the border."""
    channels = []
    for c in range(maps.shape[2]):
        channel_layer = types.SimpleNamespace(
            kernel=layer.kernel[..., c : c + 1], bias=layer.bias[c]
        )
        channels.append(convolve(maps[..., c : c + 1], channel_layer, 1, padding=1))
    return np.concatenate(channels, axis=2)


def sinusoids(height, width):
    """Rows in the first half of the channels, columns in the second.

    Sine and cosine of (i + 1) / n * 2 pi / 10000 ** (2 t / (C / 2)).
    """
    maps, half = np.zeros((height, width, WIDTH)), WIDTH // 2
    for y in range(height):
        for x in range(width):
            for channel in range(half):
                wave = np.sin if channel % 2 == 0 else np.cos
                divisor = 10000 ** (2 * (channel // 2) / half)
                maps[y, x, channel] = wave((y + 1) / height * 2 * np.pi / divisor)
                maps[y, x, half + channel] = wave((x + 1) / width * 2 * np.pi / divisor)
    return maps


def definition(image, weights, options):
    """Logits of one image [H, W, 3]."""
    layers = build_layers(weights)
    layers.class_token = layers.cls_token
    height, width = (side // PATCH for side in image.shape[:2])
    table = convolve_channels(sinusoids(height, width), layers.pos_embed.embed_layer).reshape(
        -1, WIDTH
    )

    def local(v, layer):
        out = convolve_channels(v[1:].reshape(height, width, SIDE), layer).reshape(-1, SIDE)
        return np.concatenate([np.zeros((1, SIDE)), out])

    for block in layers.blocks:
        block.attn.local = functools.partial(local, layer=block.attn.get_v)
    tokens = np.concatenate([np.zeros((1, WIDTH)), table])
    return vit(layers, options, image, tokens=tokens)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("size", [(12, 12), (8, 20)])
def test_the_model_matches_its_definition(size):
    weights, images = official_weights(), np.asarray(pictures(*size), np.float64)
    model = small(jnp.float64)
    rope_jax.convert_state_dict(model, weights, source="resformer")
    want = [definition(image, weights, model.options) for image in images]
    np.testing.assert_allclose(run(model, jnp.asarray(images))[0], want, rtol=0, atol=1e-7)


def test_official_weights_round_trip():
    weights, model = official_weights(), small()
    rope_jax.convert_state_dict(model, weights, source="resformer")
    assert_equal(export_state_dict(model, source="resformer"), weights)
