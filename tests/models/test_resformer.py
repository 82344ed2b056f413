"""ResFormer against its definition in NumPy, float64, by the official names of weights.

The official code divides rows and columns by their number plus 1e-6, which moves nothing here beyond that.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.pretrained import export_state_dict
from tests.models.small import pictures
from tests.models.test_dino import linear, norm
from tests.parity.official import tensor

pytestmark = pytest.mark.usefixtures("quick_compiles")

WIDTH, HEADS, DEPTH, CLASSES, PATCH = 24, 3, 2, 5, 4
SIDE = WIDTH // HEADS


def small(dtype=jnp.float32):
    sizes = {"width": WIDTH, "heads": HEADS, "depth": DEPTH, "mlp_ratio": 2.0, "num_classes": CLASSES, "patch_size": PATCH}
    return rope_jax.create_model("resformer_s16", image_size=12, dtype=dtype, **sizes)


def official_weights():
    shapes = {"cls_token": (1, 1, WIDTH), "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH), "patch_embed.proj.bias": (WIDTH,)}
    shapes |= {"pos_embed.embed_layer.weight": (WIDTH, 1, 3, 3), "pos_embed.embed_layer.bias": (WIDTH,)}
    layers = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH), "mlp.fc1": (2 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 2 * WIDTH)}
    layers |= {"attn.get_v": (SIDE, 1, 3, 3), "norm1": (WIDTH,), "norm2": (WIDTH,)}
    layers = {f"blocks.{i}.{key}": shape for i in range(DEPTH) for key, shape in layers.items()}
    layers |= {"norm": (WIDTH,), "head": (CLASSES, WIDTH)}
    shapes |= {f"{key}.weight": shape for key, shape in layers.items()} | {f"{key}.bias": shape[:1] for key, shape in layers.items()}

    def kind(key):
        return "table" if key == "cls_token" else "bias" if key.endswith("bias") else "norm_weight" if "norm" in key else "linear"

    return {key: tensor(key, shape, kind(key)) for key, shape in shapes.items()}


def convolved(maps, w, name):
    """Each channel of maps [H, W, C] with its own 3 x 3 kernel, zeros beyond the border."""
    kernel, out = w[f"{name}.weight"][:, 0], np.zeros(maps.shape)
    height, width, _ = maps.shape
    for y in range(height):
        for x in range(width):
            for i in range(3):
                for j in range(3):
                    if 0 <= y + i - 1 < height and 0 <= x + j - 1 < width:
                        out[y, x] += kernel[:, i, j] * maps[y + i - 1, x + j - 1]
    return out + w[f"{name}.bias"]


def sinusoids(height, width):
    """Rows in the first half of the channels, columns in the second; sine and cosine of (i + 1) / n * 2 pi / 10000 ** (2 t / (C / 2))."""
    maps, half = np.zeros((height, width, WIDTH)), WIDTH // 2
    for y in range(height):
        for x in range(width):
            for channel in range(half):
                wave = np.sin if channel % 2 == 0 else np.cos
                divisor = 10000 ** (2 * (channel // 2) / half)
                maps[y, x, channel] = wave((y + 1) / height * 2 * np.pi / divisor)
                maps[y, x, half + channel] = wave((x + 1) / width * 2 * np.pi / divisor)
    return maps


def definition(image, weights):
    """Logits of one image [H, W, 3]."""
    w = {key: value.astype(np.float64) for key, value in weights.items()}
    height, width = (side // PATCH for side in image.shape[:2])
    patches = image.reshape(height, PATCH, width, PATCH, 3).transpose(0, 2, 4, 1, 3).reshape(height * width, -1)
    x = patches @ w["patch_embed.proj.weight"].reshape(WIDTH, -1).T + w["patch_embed.proj.bias"]
    x = x + convolved(sinusoids(height, width), w, "pos_embed.embed_layer").reshape(height * width, WIDTH)
    x = np.concatenate([w["cls_token"][0], x])
    for block in (f"blocks.{i}" for i in range(DEPTH)):
        qkv, out = linear(norm(x, w, f"{block}.norm1", 1e-6), w, f"{block}.attn.qkv"), []
        for head in range(HEADS):
            q, k, v = (qkv[:, i * WIDTH + head * SIDE :][:, :SIDE] for i in range(3))
            weight = np.exp(q @ k.T / math.sqrt(SIDE))
            attended = weight / weight.sum(axis=1, keepdims=True) @ v
            attended[1:] += convolved(v[1:].reshape(height, width, SIDE), w, f"{block}.attn.get_v").reshape(-1, SIDE)
            out.append(attended)
        x = x + linear(np.concatenate(out, axis=1), w, f"{block}.attn.proj")
        hidden = linear(norm(x, w, f"{block}.norm2", 1e-6), w, f"{block}.mlp.fc1")
        x = x + linear(hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))), w, f"{block}.mlp.fc2")
    return linear(norm(x, w, "norm", 1e-6)[0], w, "head")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("size", [(12, 12), (8, 20)])
def test_the_model_is_what_its_definition_says(size):
    weights, images = official_weights(), np.asarray(pictures(*size), np.float64)
    model = nnx.eval_shape(lambda: small(jnp.float64))
    rope_jax.convert_state_dict(model, weights, source="resformer")
    graph, state = nnx.split(model)
    got = jax.jit(lambda state, images: nnx.merge(graph, state)(images))(state, jnp.asarray(images))
    np.testing.assert_allclose(got, [definition(image, weights) for image in images], rtol=0, atol=1e-7)


def test_official_weights_go_out_as_they_came_in():
    weights, model = official_weights(), small()
    rope_jax.convert_state_dict(model, weights, source="resformer")
    exported = export_state_dict(model, source="resformer")
    assert exported.keys() == weights.keys()
    for key, array in weights.items():
        np.testing.assert_array_equal(exported[key], array, err_msg=key, strict=True)


def test_parameters_are_those_of_deit_but_for_positions():
    """Of DeiT-S, 22,050,664, less the table of 197 rows; a 3 x 3 kernel and a bias for each of 384 channels, and in 12 layers of 64."""
    model = nnx.eval_shape(lambda: rope_jax.create_model("resformer_s16"))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count == 22_050_664 - 197 * 384 + 384 * 10 + 12 * 64 * 10
