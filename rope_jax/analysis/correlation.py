"""How alike the positions of a layer are: what layer norms make of an embedding (LaPE, arXiv 2212.05262, figures 3 and 4)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from rope_jax.models.pretrained.rows import has_stages
from rope_jax.positions import PerLayer
from rope_jax.positions.grids import Grid


def position_correlation(rows: Float[np.ndarray, "layers L C"], grid: Grid, token: int | None = None) -> Float[np.ndarray, "layers H W"]:
    """Cosine similarity of one token's position to those of all.

    Args:
        rows: of each layer, the positions of the tokens of a map in reading order, from `layer_positions`.
        grid: (H, W), L = H*W.
        token: its number; None for the row and the column that end the first half: 90 of 14 x 14, which the paper's code takes.
    """
    rows = np.asarray(rows, np.float64)
    token = (grid[0] - 1) // 2 * grid[1] + (grid[1] - 1) // 2 if token is None else token
    if not 0 <= token < rows.shape[1]:
        raise ValueError(f"token={token} is not on a map of {grid[0]}x{grid[1]}; use 0 to {rows.shape[1] - 1}")
    unit = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-30)
    return np.einsum("ltc,lc->lt", unit, unit[:, token]).reshape(len(rows), *grid)


def layer_positions(model: nnx.Module, grid: Grid) -> Float[np.ndarray, "layers L C"]:
    """What each layer sees of the position of the tokens of a map, prefix tokens left out.

    With LaPE, what it adds to the layer's normalised tokens. With an absolute embedding w that is added once, what the layer's own norm
    makes of it alone, LN_l(w).

    Raises:
        ValueError: the model has stages, or its scheme has no embedding.
    """
    if has_stages(model):
        raise ValueError("a model of stages has a map for each: use an isotropic one, for example deit_s16")
    position, area = model.position, grid[0] * grid[1]
    add = position.terms(grid).add
    if add is not None:
        rows = add.value if isinstance(add, PerLayer) else jnp.broadcast_to(add, (position.stage.depth, *add.shape))
        return np.asarray(rows[:, -area:])
    tokens = jnp.zeros((1, position.stage.embed_prefix + area, position.stage.channels))
    embedding = position.embed(tokens, grid)[:, -area:]
    if not jnp.any(embedding):
        raise ValueError(f"{type(position).__name__} adds nothing to the tokens: use an absolute embedding or lape(...)")
    blocks = model.blocks
    if not isinstance(blocks, nnx.List):
        graph, state = nnx.split(blocks)
        blocks = [nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state)) for i in range(position.stage.depth)]
    return np.stack([np.asarray(block.norm1(embedding)[0]) for block in blocks])
