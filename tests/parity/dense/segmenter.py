"""Segmenter with either decoder, and its sliding inference, against rstrudel/segmenter."""

import math

import jax
import numpy as np
from flax import nnx

import rope_jax
from rope_jax.system.sharding import make_mesh
from rope_jax.tasks.windows import Windows, resize_image
from tests.parity.dense import images

PATCH = 16


def model_of(golden, dtype):
    """The model with the golden's weights. The encoder's layer norms have epsilon 1e-5, too."""
    case = golden.case
    heads = {"segmenter_mask": f"segmenter(depth={case.get('decoder_layers')})"}

    def make():
        return rope_jax.create_model(
            "deit_ti16",
            head=heads.get(golden.name, "linear"),
            num_classes=case["classes"],
            position="ape(resize=bilinear)",
            image_size=tuple(case["created_for"]),
            dtype=dtype,
            width=case["embed_dim"],
            depth=case["depth"],
            heads=case["heads"],
            norm_epsilon=1e-5,
            patch_size=PATCH,
        )

    model = nnx.eval_shape(make)
    rope_jax.convert_state_dict(model, golden.weights, source="segmenter")
    return model


def logits_of(model, x):
    """Logits of an image of any size, which the model pads with zeros to whole patches."""
    height, width = x.shape[1:3]
    sides = [(0, math.ceil(side / PATCH) * PATCH - side) for side in (height, width)]
    padded = np.pad(x, [(0, 0), *sides, (0, 0)])
    graph, state = nnx.split(model)
    found = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, padded)
    return np.asarray(found)[:, :height, :width].transpose(0, 3, 1, 2)


def outputs(golden, dtype):
    case, model = golden.case, model_of(golden, dtype)
    same = images(*case["logits"]["image"]).astype(dtype)
    other = images(*case["logits_other_size"]["image"], seed=case["logits_other_size"]["seed"])
    found = {
        "logits": logits_of(model, same)[:, :, ::4, ::4],
        "logits_other_size": logits_of(model, other.astype(dtype))[:, :, ::6, ::8],
    }
    if "sliding" in case:
        scores = sliding(model, case["sliding"], dtype)
        found |= {"sliding": scores[:, ::5, ::5], "sliding_classes": scores.argmax(0)}
    return found


def sliding(model, case, dtype):
    """Mean probabilities of two views, [K, H, W] at the size of the original."""
    graph, state = nnx.split(model)
    side, (height, width) = case["window"], case["original"]
    windows = Windows(
        lambda state, x: nnx.merge(graph, state)(x),
        size=(side, side),
        stride=case["stride"],
        batch=2,
        mesh=make_mesh(),
    )
    views = [
        (
            at_least(images(*view["image"], seed=view["seed"])[0].astype(dtype), side),
            view["flipped"],
        )
        for view in case["images"]
    ]
    scores = windows.scores(state, views, (height, width))
    return np.asarray(scores)[:height, :width].transpose(2, 0, 1)


def at_least(image, side):
    """A view enlarged to a short side of at least `side` pixels, as Segmenter's inference does."""
    short = min(image.shape[:2])
    if short >= side:
        return image
    return resize_image(image, tuple(int(n / short * side) for n in image.shape[:2]))
