"""UperNet and its auxiliary head on fixed maps, against mmsegmentation."""

import jax
import numpy as np
from flax import nnx

import rope_jax
from rope_jax.models.heads import create_head
from tests.parity.dense import noise


def outputs(golden, dtype):
    case, auxiliary = golden.case, golden.case["auxiliary"]

    def make():
        return create_head(
            "upernet",
            channels=case["channels"],
            num_classes=case["classes"],
            dtype=np.dtype(dtype),
            rngs=nnx.Rngs(0),
            overrides={
                "width": case["width"],
                "auxiliary_width": auxiliary["width"],
                "auxiliary_map": auxiliary["map"],
            },
        )

    head = nnx.eval_shape(make)
    rope_jax.convert_state_dict(head, golden.weights, source="mmseg")
    maps = [
        noise(1, channels, *size, seed=case["seed"] + i).transpose(0, 2, 3, 1).astype(dtype)
        for i, (channels, size) in enumerate(zip(case["channels"], case["maps"], strict=True))
    ]
    graph, state = nnx.split(head)
    predictions = jax.jit(lambda state, maps: nnx.merge(graph, state)(maps))(state, maps)
    return {
        "logits": nchw(predictions.logits)[:, ::3],
        "aux_logits": nchw(predictions.auxiliary),
    }


def nchw(maps):
    return np.asarray(maps).transpose(0, 3, 1, 2)
