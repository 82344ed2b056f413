"""Segmenter with either decoder, and its sliding inference, against rstrudel/segmenter."""

import math

import jax
import numpy as np
from flax import nnx

import rope_jax
from rope_jax.models.dense import create_dense
from tests.parity.dense import images

PATCH = 16


def model_of(golden, dtype):
    """The model with the golden's weights. The encoder's layer norms have epsilon 1e-5, too."""
    case = golden.case
    heads = {"segmenter_mask": f"segmenter(depth={case.get('decoder_layers')})"}

    def make():
        return create_dense(
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
    return {
        "logits": logits_of(model, same)[:, :, ::4, ::4],
        "logits_other_size": logits_of(model, other.astype(dtype))[:, :, ::6, ::8],
    }
