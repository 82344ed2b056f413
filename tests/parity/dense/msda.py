"""Deformable attention with points and boxes as references, against ViT-Adapter."""

import jax
import numpy as np
from flax import nnx

from rope_jax.models.deformable import DeformableAttention
from rope_jax.models.layers import layer_dtypes
from tests.parity.dense import noise

NAMES = {
    "offset": "sampling_offsets",
    "weight": "attention_weights",
    "value": "value_proj",
    "out": "output_proj",
}


def outputs(golden, dtype):
    case, seeds, weights = golden.case, golden.case["seeds"], golden.weights
    shape = {"levels": len(case["maps"]), "heads": case["heads"], "points": case["points"]}
    layer = DeformableAttention(
        case["channels"], **shape, rngs=nnx.Rngs(0), dtypes=layer_dtypes(np.dtype(dtype))
    )
    for name, official_name in NAMES.items():
        linear = getattr(layer, name)
        linear.kernel.set_value(weights[f"{official_name}.weight"].T.astype(dtype))
        linear.bias.set_value(weights[f"{official_name}.bias"].astype(dtype))
    sizes = [tuple(size) for size in case["maps"]]
    batch, queries, _ = golden.metadata["arrays"]["points"]["shape"]
    tokens = sum(h * w for h, w in sizes)
    query = noise(batch, queries, case["channels"], seed=seeds["query"]).astype(dtype)
    values = noise(batch, tokens, case["channels"], seed=seeds["values"]).astype(dtype)
    places = (batch, queries, len(sizes), 2)
    points = (noise(*places, seed=seeds["references"]) * np.float32(0.5) + np.float32(0.5)).astype(
        dtype
    )
    extents = np.abs(noise(*places, seed=seeds["sizes"])).astype(dtype) * 0.3
    boxes = np.concatenate([points, extents.astype(dtype)], axis=-1)
    masked = np.broadcast_to(np.arange(tokens) % case["masked_every"] == 0, (batch, tokens))

    @jax.jit
    def run(query, references, values, masked=None):
        return layer(query, references, values, sizes, masked)

    return {
        "points": run(query, points, values),
        "boxes_masked": run(query, boxes, values, masked),
    }
