"""DINO's encoder, choice of queries and decoder on fixed maps with padding, against detrex."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.models.heads.dino.levels import map_positions, padding_mask
from rope_jax.models.heads.dino.options import DinoOptions
from rope_jax.models.heads.dino.transformer import Transformer
from rope_jax.models.layers import layer_dtypes
from tests.models.small import compile_call
from tests.parity.dense import load, noise

LIMITS = {"float64": 2e-5}  # the official code makes positions in float32


def make_model(case, weights, dtype):
    """The transformer of a case, without its weights."""
    options = DinoOptions(
        width=case["channels"],
        levels=len(case["maps"]),
        queries=case["queries"],
        encoder_depth=case["encoder"],
        decoder_depth=case["decoder"],
        heads=case["heads"],
        hidden=case["hidden"],
    )
    dtypes = layer_dtypes(jnp.dtype(dtype))
    return Transformer(options, case["classes"], rngs=nnx.Rngs(0), dtypes=dtypes)


def make_inputs(case, dtype):
    """Maps, and padding of the last quarter of the columns of the second image."""
    maps = [
        noise(2, case["channels"], *size, seed=case["seed"] + i).transpose(0, 2, 3, 1)
        for i, size in enumerate(case["maps"])
    ]
    # The image is eight times as large as its first map.
    height, width = (8 * side for side in case["maps"][0])
    extent = jnp.array([[height, width], [height, width - width // 4]])
    padding = [padding_mask(extent, (height, width), tuple(size)) for size in case["maps"]]
    return [jnp.asarray(x, dtype) for x in maps], padding


def outputs(golden, dtype):
    case, model = golden.case, load(golden, dtype, "detrex")
    maps, padding = make_inputs(case, dtype)
    results = compile_call(model)(maps, padding)
    last = map_positions(padding[-1], case["channels"])
    return {
        "states": results.states[..., ::16],
        "init_reference": results.initial,
        "references": results.references,
        "enc_state": results.chosen[..., ::16],
        "enc_reference": results.proposals,
        f"positions{len(padding) - 1}": np.asarray(last, dtype).transpose(0, 3, 1, 2)[:, ::16],
    }
