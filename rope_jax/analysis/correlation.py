"""Cosine similarity of position embeddings in each layer (LaPE, arXiv 2212.05262)."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from rope_jax.models.blocks import list_blocks
from rope_jax.positions import PerLayer, Position
from rope_jax.positions.grids import Grid

Rows = Float[np.ndarray, "L C"]


def position_correlation(
    rows: Float[np.ndarray, "layers L C"], grid: Grid, token: int
) -> Float[np.ndarray, "layers H W"]:
    """Cosine similarity of one token's position embedding to all others (LaPE, figures 3 and 4).

    >>> rows = np.array([[[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [3.0, 0.0]]])
    >>> position_correlation(rows, (2, 2), token=0).tolist()
    [[[1.0, 0.0], [-1.0, 1.0]]]

    Args:
        rows: position embeddings of the tokens in row-major order, from `stage_positions`.
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


def layer_norm(
    x: Rows, scale: np.ndarray | float, bias: np.ndarray | float, epsilon: float
) -> Rows:
    """The layer norm over channels."""
    return scale * (x - x.mean(-1, keepdims=True)) / spread(x, epsilon)[:, None] + bias


def spread(x: Rows, epsilon: float) -> Float[np.ndarray, " L"]:
    """The root of each token's variance over channels and epsilon."""
    return np.sqrt(x.var(-1) + epsilon)


def norm_arguments(norm: nnx.LayerNorm) -> tuple[np.ndarray, np.ndarray | float, float]:
    """Scale, bias and epsilon of a layer norm, for `layer_norm`."""
    bias = 0.0 if norm.bias is None else np.asarray(norm.bias[...], np.float64)
    return np.asarray(norm.scale[...], np.float64), bias, norm.epsilon


def embeddings(
    position: Position, grid: Grid
) -> tuple[Rows | None, Float[np.ndarray, "layers L C"] | None]:
    """The embedding that is added once, and those that each layer adds to its normalised tokens.

    Rows of prefix tokens without an embedding are 0. At most one of the two is not None; both are
    for a scheme without absolute embedding.

    Raises:
        ValueError: the scheme has embeddings of both kinds.
    """
    stage = position.stage
    add = position.terms(grid).add
    area = grid[0] * grid[1]
    zeros = jnp.zeros((1, stage.embed_prefix + area, stage.channels))
    rows = np.asarray(position.embed(zeros, grid)[0], np.float64)
    if add is not None and rows.any():
        raise ValueError(
            "the position adds an embedding once and another one in each layer: use one of them"
        )
    if add is not None:
        add = add.value if isinstance(add, PerLayer) else add
        return None, np.broadcast_to(np.asarray(add, np.float64), (stage.depth, *add.shape[-2:]))
    if not rows.any():
        return None, None
    without = np.zeros((stage.prefix - stage.embed_prefix, stage.channels))
    return np.concatenate([rows[: stage.embed_prefix], without, rows[stage.embed_prefix :]]), None


def stage_positions(
    model: nnx.Module, image_size: Grid
) -> list[tuple[Grid, Float[np.ndarray, "layers L C"]]]:
    """The map of each stage, and the position embedding that its layers receive.

    LaPE adds an embedding to the normalised tokens of every layer. An absolute embedding w is added
    once to the tokens of a stage, and layer l receives it through its layer norm, as LN_l(w), or
    with `post_norm` as w itself. Where a scheme changes the tokens between layers, such as
    `lape(ape,join=unshare)`, later layers receive w as the scheme has changed it.
    Embeddings of prefix tokens are left out, and so are stages without an embedding.

    >>> import rope_jax
    >>> model = rope_jax.create_model("vit_digits", position="ape", depth=2, width=16, heads=2)
    >>> [(grid, rows.shape) for grid, rows in stage_positions(model, (8, 8))]
    [((4, 4), (2, 16, 16))]

    Args:
        model: with an absolute embedding or `lape(...)`.
        image_size: (height, width) in pixels.

    Raises:
        ValueError: its scheme has no embedding.
    """
    stages = []
    for part, grid in zip(model.parts().values(), model.grids(image_size), strict=True):
        once, added = embeddings(part.position, grid)
        if once is not None:
            depth, rows = part.position.stage.depth, []
            mixed = part.position.mix_after(depth)
            for layer, block in enumerate(list_blocks(part.blocks, depth)):
                if layer - 1 in mixed:
                    tokens = part.position.mix(jnp.asarray(once[None]), grid, layer - 1)
                    once = np.asarray(tokens[0], np.float64)
                post_norm = getattr(block, "post_norm", False)
                rows.append(once if post_norm else layer_norm(once, *norm_arguments(block.norm1)))
            added = np.stack(rows)
        if added is not None:
            stages.append((grid, added[:, -grid[0] * grid[1] :]))
    if not stages:
        raise ValueError(
            f"{type(part.position).__name__} adds no embedding to the tokens: "
            "use an absolute embedding or lape(...)"
        )
    return stages
