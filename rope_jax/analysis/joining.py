"""How absolute positions join the tokens of each layer: LaPE's equations 1 to 3 (arXiv 2212.05262).

With an embedding w that is added once, the input of layer l is x_l, of which w is a part, and its
norm is exactly

    LN(x_l) = lambda_1 LN(x_l - w) + lambda_2 LN(w) + lambda_3 beta                  (equation 2)

with lambda_1 = sigma(x_l - w) / sigma(x_l), lambda_2 = sigma(w) / sigma(x_l), and
lambda_3 = 1 - lambda_1 - lambda_2; sigma is the root of a token's variance over channels and the
norm's epsilon. LaPE adds a norm of w to that of the tokens, and has no lambdas. In both, the logits
are the sum of four terms: queries of tokens or positions times keys of either (equation 3), scaled
and rotated as in the layer. A bias on the logits is no part of them.

Layers run in the model's dtype; all that is computed from their inputs is float64, but for the
rotation. Tokens L are prefix tokens, then patches.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.analysis.correlation import (
    Rows,
    embeddings,
    layer_norm,
    norm_arguments,
    spread,
)
from rope_jax.models.blocks import list_blocks
from rope_jax.models.cct import CCT
from rope_jax.models.vit import ViT
from rope_jax.positions import Terms
from rope_jax.positions.grids import Grid
from rope_jax_kernels import Global, Rotation, rotate

LAMBDAS = ("lambda_1", "lambda_2", "lambda_3")
PARTS = ("tokens", "positions")
TERMS = ("token-token", "token-position", "position-token", "position-position")
SHARES = tuple(f"fraction of {term}" for term in TERMS)


class NotDescribed(ValueError):
    """Equations 2 and 3 do not describe a model."""


def lambdas(x: Rows, embedding: Rows, epsilon: float) -> Float[np.ndarray, "3 L"]:
    """lambda_1, lambda_2 and lambda_3 of each token (equation 2).

    Args:
        x: the input of a layer's norm, with the embedding.
        embedding: as added, 0 for tokens without one.
        epsilon: of the norm.
    """
    whole = spread(x, epsilon)
    first, second = spread(x - embedding, epsilon) / whole, spread(embedding, epsilon) / whole
    return np.stack([first, second, 1 - first - second])


def logit_terms(
    tokens: Rows,
    positions: Rows,
    kernel: Float[np.ndarray, "C 2*C"],
    bias: Float[np.ndarray, " 2*C"] | float,
    heads: int,
    rotation: Rotation | None = None,
) -> Float[np.ndarray, "4 N L L"]:
    """The products of queries and keys in the four TERMS, which add up to them (equation 3).

    Args:
        tokens, positions: the two parts of the input of queries and keys.
        kernel, bias: of the projection to queries and keys; the bias goes with the tokens.
        heads: N.
        rotation: of the queries and keys of both parts, or None.
    """
    parts = np.stack([tokens @ kernel + bias, positions @ kernel])
    q, k = np.moveaxis(parts.reshape(*parts.shape[:2], 2, heads, -1), 2, 0)  # [parts, L, N, D]
    if rotation is not None:
        q, k = rotate(jnp.asarray(q), jnp.asarray(k), rotation)
    q, k = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k))
    return np.stack([a @ b.swapaxes(-1, -2) for a, b in itertools.product(q, k)])


def term_sizes(terms: Float[np.ndarray, "4 N L L"]) -> tuple[np.ndarray, np.ndarray]:
    """Root mean square of each term of each head, and its fraction of the variance of the logits.

    Both without the mean over keys, which a softmax ignores. Fractions add up to 1.
    """
    centred = terms - terms.mean(-1, keepdims=True)
    logits = centred.sum(0)
    fractions = (centred * logits).mean((2, 3)) / (logits**2).mean((1, 2))
    return np.sqrt((centred**2).mean((2, 3))), fractions


def correlations(rows: Rows) -> Float[np.ndarray, "L L"]:
    """Cosine similarity of the embeddings of all pairs of patches."""
    unit = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-30)
    return unit @ unit.T


def _excess(correlation: Float[np.ndarray, "L L"]) -> Float[np.ndarray, "L L"]:
    """Correlations above the least one of each row, 0 on the diagonal."""
    return (correlation - correlation.min(-1, keepdims=True)) * (1 - np.eye(len(correlation)))


def reach(correlation: Float[np.ndarray, "L L"], grid: Grid) -> float | None:
    """Mean distance weighted by similarity, relative to the mean distance; None if undefined.

    It is 1 if similarity does not depend on distance, and less if positions are local. Weights are
    the correlations above the least one of each row; a map of one or two tokens has none. This
    measure is this library's: LaPE's figures show maps without numbers.
    """
    places = np.stack(np.divmod(np.arange(len(correlation)), grid[1]), -1)
    distance = np.linalg.norm(places[:, None] - places, axis=-1)
    weight = _excess(correlation)
    if not weight.any():
        return None
    pairs = len(correlation) * (len(correlation) - 1)
    return float((weight * distance).sum() / weight.sum() / (distance.sum() / pairs))


def shape_of_pattern(
    correlation: Float[np.ndarray, "L L"], grid: Grid
) -> tuple[float, float] | tuple[None, None]:
    """Similarity of vertical neighbours, and of row ends with the next row, to that in rows.

    The first is 1 for embeddings that treat both axes alike; the second is near 1 for embeddings of
    the index in reading order (1-D), and small for 2-D ones. None on maps of one row or column.
    """
    if min(grid) < 2:
        return None, None
    weight = _excess(correlation)
    weight = (weight + weight.T).reshape(*grid, *grid)
    y, x = np.indices(grid)
    pair = lambda a, b: weight[a[0], a[1], b[0], b[1]].mean()
    across = pair((y[:, 1:], x[:, 1:]), (y[:, 1:], x[:, :-1]))
    down = pair((y[1:], x[1:]), (y[:-1], x[1:]))
    wrapped = pair((y[1:, 0], x[1:, 0]), (y[:-1, -1], x[:-1, -1]))
    return float(down / across), float(wrapped / across)


def change(first: Float[np.ndarray, "L L"], second: Float[np.ndarray, "L L"]) -> float | None:
    """1 - Pearson's correlation of two layers' correlations of different tokens: 0 if alike.

    None on a map of one or two tokens.
    """
    if len(first) < 3:
        return None
    pairs = ~np.eye(len(first), dtype=bool)
    return float(1 - np.corrcoef(first[pairs], second[pairs])[0, 1])


def trend(values: Sequence[float]) -> float:
    """Spearman's rank correlation with the layer's number: 1 if values grow with the depth.

    Positions go from local to global if it is above 0 for their `reach`, and the last layer's is
    above the first one's. It is 0 if all values are equal.
    """
    column = np.asarray(values)[:, None]
    ranks = ((column > values).sum(1) + (column >= values).sum(1)) / 2  # equal values share one
    if len({*ranks}) < 2:
        return 0.0
    return float(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1])


def position_measures(
    rows: Float[np.ndarray, "layers L C"], grid: Grid
) -> dict[str, list[float | None]]:
    """The numbers of each layer's position correlation, from rows of patches: see `reach`.

    `change` is that from the layer before, None for the first; small maps have further Nones.
    """
    maps = [correlations(np.asarray(layer, np.float64)) for layer in rows]
    shapes = [shape_of_pattern(x, grid) for x in maps]
    return {
        "reach": [reach(x, grid) for x in maps],
        "two_dimensional": [shape[0] for shape in shapes],
        "raster": [shape[1] for shape in shapes],
        "change": [None, *(change(a, b) for a, b in itertools.pairwise(maps))],
    }


def measure_joining(
    model: nnx.Module, images: Float[Array, "B H W 3"]
) -> dict[str, Float[np.ndarray, " layers"]]:
    """Equations 2 and 3 on images: means over images, patches and heads.

    Returns:
        A number for each layer by name: LAMBDAS (not for LaPE; also "... of the class token", if
        that has an embedding), the root mean squares of the two PARTS of the attention's input and
        of the four TERMS of the logits, and the SHARES of these.

    Raises:
        NotDescribed: the equations do not describe the model's layers or scheme.
    """
    terms, once, by_layer = check_described(model, images.shape[1:3])
    blocks = list_blocks(model.blocks, model.options.depth)
    results = []
    for layer, (block, stream) in enumerate(zip(blocks, _streams(model, images), strict=True)):
        measure = functools.partial(
            _measure_image,
            block=block,
            terms=terms.layer(layer),
            embedding=once,
            added=None if by_layer is None else by_layer[layer],
            prefix=model.position.stage.prefix,
        )
        by_image = [measure(np.asarray(x, np.float64)) for x in stream]
        results.append({name: np.mean([x[name] for x in by_image], 0) for name in by_image[0]})
    return {name: np.stack([result[name] for result in results]) for name in results[0]}


def measure_batches(
    model: nnx.Module, batches: Iterable[Float[Array, "_ _ _ 3"]]
) -> dict[str, Float[np.ndarray, " layers"]]:
    """Averages the results of `measure_joining` over all images of several batches."""
    values, counts = [], []
    for images in batches:
        values.append(measure_joining(model, images))
        counts.append(len(images))
    average = lambda name: np.average([x[name] for x in values], axis=0, weights=counts)
    return {name: average(name) for name in values[0]}


def check_described(
    model: nnx.Module, size: Grid
) -> tuple[Terms, Rows | None, Float[np.ndarray, "..."] | None]:
    """The terms of a model's layers and its `embeddings`.

    Raises:
        NotDescribed: the equations do not describe the model's layers or scheme.
    """
    problems = {"is not isotropic": not isinstance(model, ViT)}
    if isinstance(model, ViT):
        (grid,), position, options = model.grids(size), model.position, model.options
        terms, patterns = position.terms(grid), model.patterns(0, grid)
        once, by_layer = embeddings(position, grid)
        problems |= {
            "has no softmax": not model.softmax,
            "has windows or neighbourhoods": {*map(type, patterns)} != {Global},
            "has post_norm or cosine": options.post_norm or options.cosine,
            "normalises its tokens between layers": isinstance(model, CCT),
            "adds positions between layers": position.mix_after(options.depth),
            "has a position that wraps attention": terms.transform is not None,
            "adds no embedding to the tokens": once is None and by_layer is None,
        }
    if problem := next((words for words, holds in problems.items() if holds), None):
        raise NotDescribed(
            f"equations 2 and 3 do not describe {model.name} with {model.notation}, which "
            f"{problem}: use a model like deit_s16 with ape or lape(ape)"
        )
    return terms, once, by_layer


@nnx.jit
def _streams(model: ViT, images: Float[Array, "B H W 3"]) -> list[Float[Array, "B L C"]]:
    """The tokens before each block, compiled once for each kind of model."""
    first, _ = model.start(images, False, None)
    return [first, *model.run(images, False, None, range(model.options.depth - 1))]


def _measure_image(
    x: Rows,
    *,
    block: nnx.Module,
    terms: Terms,
    embedding: Rows | None,
    added: Rows | None,
    prefix: int,
) -> dict[str, float]:
    """One layer and image; `embedding` is part of x, or `added` to its norm."""
    norm = norm_arguments(block.norm1)
    normalised, values = layer_norm(x, *norm), {}
    tokens = normalised
    if embedding is not None:
        first, second, _ = by_token = lambdas(x, embedding, norm[-1])
        tokens = first[:, None] * layer_norm(x - embedding, *norm)
        added = second[:, None] * layer_norm(embedding, *norm)
        normalised = normalised - added
        values = dict(zip(LAMBDAS, by_token[:, prefix:].mean(-1), strict=True))
        if prefix and embedding[0].any():
            names = [f"{name} of the class token" for name in LAMBDAS]
            values |= dict(zip(names, by_token[:, 0], strict=True))
    both, attention = 2 * x.shape[-1], block.attn
    kernel, bias = np.asarray(attention.qkv.kernel[...], np.float64), attention._bias()
    bias = 0.0 if bias is None else np.asarray(bias, np.float64)[:both]
    scale = attention.scale or (x.shape[-1] // attention.heads) ** -0.5
    products = logit_terms(
        normalised, added, kernel[:, :both], bias, attention.heads, terms.rotation
    )
    sizes, fractions = term_sizes(scale * terms.logit_scale * products)
    size = lambda part: np.mean(part[prefix:] ** 2) ** 0.5
    values |= dict(zip(PARTS, (size(tokens), size(added)), strict=True))
    values |= dict(zip(TERMS, sizes.mean(-1), strict=True))
    return values | dict(zip(SHARES, fractions.mean(-1), strict=True))
