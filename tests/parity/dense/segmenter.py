"""Segmenter with either decoder, and its sliding inference, against rstrudel/segmenter."""

import math

import numpy as np
from flax import nnx

import rope_jax
from rope_jax.system.sharding import make_mesh
from rope_jax.tasks.windows import Windows, resize_image
from tests.models.small import compile_call
from tests.parity.dense import images, load

PATCH = 16


def make_model(case, weights, dtype):
    """The model of a case, without weights; all layer norms have an epsilon of 1e-5."""
    depth = case.get("decoder_layers")
    return rope_jax.create_model(
        "deit_ti16",
        head=f"segmenter(depth={depth})" if depth else "linear",
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


def compute_logits(model, x):
    """Logits of an image of any size, padded with zeros to full patches."""
    height, width = x.shape[1:3]
    sides = [(0, math.ceil(side / PATCH) * PATCH - side) for side in (height, width)]
    padded = np.pad(x, [(0, 0), *sides, (0, 0)])
    return np.asarray(compile_call(model)(padded))[:, :height, :width].transpose(0, 3, 1, 2)


def outputs(golden, dtype):
    case, model = golden.case, load(golden, dtype, "segmenter")
    usual_size = images(*case["logits"]["image"]).astype(dtype)
    other = images(*case["logits_other_size"]["image"], seed=case["logits_other_size"]["seed"])
    results = {
        "logits": compute_logits(model, usual_size)[:, :, ::4, ::4],
        "logits_other_size": compute_logits(model, other.astype(dtype))[:, :, ::6, ::8],
    }
    if "sliding" in case:
        scores = sliding(model, case["sliding"], dtype)
        results |= {"sliding": scores[:, ::5, ::5], "sliding_classes": scores.argmax(0)}
    return results


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
            enlarge(images(*view["image"], seed=view["seed"])[0].astype(dtype), side),
            view["flipped"],
        )
        for view in case["images"]
    ]
    scores = windows.scores(state, views, (height, width))
    return np.asarray(scores)[:height, :width].transpose(2, 0, 1)


def enlarge(image, side):
    """Enlarges a view to a short side of at least `side` pixels, as in Segmenter's inference."""
    short = min(image.shape[:2])
    if short >= side:
        return image
    return resize_image(image, tuple(int(n / short * side) for n in image.shape[:2]))
