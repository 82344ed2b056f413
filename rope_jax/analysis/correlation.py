"""Cosine similarity of position embeddings in each layer (LaPE, arXiv 2212.05262)."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from rope_jax.models.blocks import list_blocks
from rope_jax.positions import PerLayer
from rope_jax.positions.grids import Grid


def position_correlation(
    rows: Float[np.ndarray, "layers L C"], grid: Grid, token: int
) -> Float[np.ndarray, "layers H W"]:
    """Cosine similarity of one token's position embedding to all others (LaPE, figures 3 and 4).

    >>> rows = np.array([[[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [3.0, 0.0]]])
    >>> position_correlation(rows, (2, 2), token=0).tolist()
    [[[1.0, 0.0], [-1.0, 1.0]]]

    Args:
        rows: position embeddings of the tokens in row-major order, from `layer_positions`.
        grid: (H, W) of the map, with L = H * W.
        token: index of the token.

    Raises:
        ValueError: if the token is not on the map.
    """
    rows = np.asarray(rows, np.float64)
    if not 0 <= token < rows.shape[1]:
        raise ValueError(
            f"token={token} is not on the map of {grid[0]}x{grid[1]}: use 0 to {rows.shape[1] - 1}"
        )
    unit = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-30)
    return np.einsum("ltc,lc->lt", unit, unit[:, token]).reshape(len(rows), *grid)


def middle_token(grid: Grid) -> int:
    """Index of the token in the middle of a map, rounded down on an even side.

    LaPE's code uses the same token; its maps have 14 x 14.

    >>> middle_token((14, 14))
    90
    """
    return (grid[0] - 1) // 2 * grid[1] + (grid[1] - 1) // 2


def layer_positions(model: nnx.Module, grid: Grid) -> Float[np.ndarray, "layers L C"]:
    """Returns the position embedding that each layer receives, without that of prefix tokens.

    LaPE adds an embedding to the normalised tokens of every layer. An absolute embedding w is added
    once to the tokens, and layer l receives it through its layer norm, as LN_l(w).

    >>> import rope_jax
    >>> model = rope_jax.create_model("vit_digits", position="ape", depth=2, width=16, heads=2)
    >>> layer_positions(model, (4, 4)).shape
    (2, 16, 16)

    Args:
        model: an isotropic model with an absolute embedding or `lape(...)`.
        grid: (H, W) of the map in tokens.

    Raises:
        ValueError: if the model has several stages, or its scheme has no embedding.
    """
    stages = list(model.parts().values())
    if len(stages) > 1:
        raise ValueError(
            f"{type(model).__name__} has {len(stages)} stages with maps of different sizes: "
            "use an isotropic model, for example deit_s16"
        )
    (stage,) = stages
    position, area = stage.position, grid[0] * grid[1]
    shape = position.stage
    add = position.terms(grid).add
    if isinstance(add, PerLayer):
        return np.asarray(add.value[:, -area:])
    if add is not None:
        return np.asarray(jnp.broadcast_to(add, (shape.depth, *add.shape))[:, -area:])
    tokens = jnp.zeros((1, shape.embed_prefix + area, shape.channels))
    embedding = position.embed(tokens, grid)[:, -area:]
    if not jnp.any(embedding):
        raise ValueError(
            f"{type(position).__name__} adds no embedding to the tokens: "
            "use an absolute embedding or lape(...)"
        )
    blocks = list_blocks(stage.blocks, shape.depth)
    return np.stack([np.asarray(block.norm1(embedding)[0]) for block in blocks])
