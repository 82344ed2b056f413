"""Schemes under test, and the stage on which they are compared with NumPy."""

import itertools

import jax
import numpy as np
from flax import nnx

from rope_jax.positions import Stage, create_position

DEPTH, HEADS, HEAD_DIM, CHANNELS, GRID = 3, 3, 16, 48, (3, 5)
SINGLE = np.dtype(np.float32)
GRIDS = [GRID, (5, 2), (1, 1)]
# float64 on both sides; angles reach 150 radians.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def stage(**changes):
    settings = {"depth": DEPTH, "heads": HEADS, "head_dim": HEAD_DIM, "grid": GRID} | changes
    channels = settings["heads"] * settings["head_dim"]
    return Stage(**{"channels": channels, "dtype": np.dtype(float)} | settings)


def scheme(text, **changes):
    """A scheme for `stage(**changes)`."""
    return create_position(text, stage(**changes), rngs=nnx.Rngs(0))


def compiled(function, position, *arguments):
    """Computes function(position, *arguments) in one program instead of one per operation."""
    graph, state = nnx.split(position)
    run = jax.jit(lambda state, *arguments: function(nnx.merge(graph, state), *arguments))
    return run(state, *arguments)


def compiled_terms(position, grid):
    return compiled(lambda position: position.terms(grid), position)


def params(position):
    """The parameters of a scheme, by name."""
    return {path[-1]: param for path, param in nnx.to_flat_state(nnx.state(position, nnx.Param))}


def trained_scheme(text, *, std=1.0, **changes):
    """A scheme whose parameters are normal draws."""
    position, rng = scheme(text, **changes), np.random.default_rng(0)
    for _, param in nnx.to_flat_state(nnx.state(position, nnx.Param)):
        param.set_value(
            jax.device_put((std * rng.standard_normal(param.shape)).astype(param.dtype))
        )
    return position


def tokens(grid):
    """(row, column) of each token in reading order."""
    return list(itertools.product(*map(range, grid)))


def normal(*shape):
    return np.random.default_rng(1).standard_normal(shape)


def rotate_by_definition(x, rotation):
    """Rotates vectors [B, L, N, D] by coordinates times frequencies, by definition."""
    if rotation is None:
        return x
    theta = np.einsum("la,nar->lnr", np.asarray(rotation.coords), np.asarray(rotation.freqs))
    channels, out = np.arange(2 * theta.shape[-1]), np.array(x)
    half = rotation.pairing == "half"
    first, second = channels.reshape(2, -1) if half else channels.reshape(-1, 2).T
    out[..., first] = x[..., first] * np.cos(theta) - x[..., second] * np.sin(theta)
    out[..., second] = x[..., second] * np.cos(theta) + x[..., first] * np.sin(theta)
    return out


DEFAULTS = [
    "alibi2d",
    "ape",
    "as2drope",
    "axial_rope",
    "axial_rope_v1",
    "cape",
    "cat_rope",
    "comrope",
    "cpb(hidden=8)",
    "decomposed",
    "dinov3",
    "eva02",
    "gpe",
    "irpe",
    "lape(ape)",
    "liere",
    "lpe",
    "none",
    "peg",
    "rope1d",
    "rope2d",
    "rope3d",
    "rope_mixed",
    "rpb",
    "sincos1d",
    "sincos2d",
    "spherical_rope",
    "string",
]
VARIANTS = [
    "axial_rope(coords=endpoints,pairing=interleaved)",
    "axial_rope(coords=absolute,generator=exponential,shared=True,k_rope=1)",
    "axial_rope(aspect=separate)",
    "cape(global_shift=0,local_shift=0,global_scale=1)",
    "cat_rope(coords=half_open)",
    "cat_rope(mode=released)",
    "comrope(variant=ap,perturbation=0)",
    "cpb(hidden=8,normalise=current)",
    "dinov3(rescale=1)",
    "lape(ape,join=shared_norm)",
    "lape(ape,join=unshare)",
    "lape(gpe)",
    "lape(sincos2d,join=share)",
    "liere(per_layer=False,per_head=False)",
    "rope2d(k_rope=2,shared=False)",
    "rope2d(order=alternate)",
    "rpb(key_norm=True)",
    "rpb(prefix=True)",
    "spherical_rope(learnable=True)",
    "string(variant=circulant)",
]
SUMS = ["gpe+lpe", "irpe+ape", "rope2d+rpb", "rope_mixed+ape"]
ALL = [*DEFAULTS, *VARIANTS, *SUMS]
