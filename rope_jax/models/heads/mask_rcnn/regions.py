"""Features of regions: RoIAlign, as two matrix products for each region.

A region is divided into S x S bins, whose values are means of bilinear samples: as many along each
axis as a bin has cells, rounded up. Rows and columns are independent, so that a region of any shape
needs the product of its map with two matrices of weights, of static shapes.

Source: He et al., arXiv 1703.06870, section 3, with the half-cell offset of detectron2 (`aligned`).
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

TARGET = 28
"""Rows and columns of masks."""
_TOGETHER = 64  # regions of an image whose products are in memory at once


def bin_weights(
    start: Float[Array, "*R"], length: Float[Array, "*R"], bins: int, cells: int
) -> Float[Array, "*R bins cells"]:
    """Weights of the cells of an axis in the means of the bins of regions.

    >>> bin_weights(jnp.array([1.0]), jnp.array([2.0]), 2, 4)[0].tolist()
    [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]

    Args:
        start, length: of each region, in cells; the first cell is from 0 to 1. A region without
            length has no weights.
        bins: number of bins.
        cells: number of cells; samples beyond half a cell outside are 0.
    """
    count, size = jnp.ceil(length / bins), length / bins
    most = jnp.maximum(count, 1)
    starts = start[..., None] - 0.5 + jnp.arange(bins) * size[..., None]

    def add(number: Int[Array, ""], total: Float[Array, "*R bins cells"]) -> Array:
        place = starts + ((number + 0.5) * size / most)[..., None]
        used = (place >= -1) & (place <= cells) & (number < count)[..., None]
        away = jnp.abs(jnp.clip(place, 0, cells - 1)[..., None] - jnp.arange(cells))
        return total + jnp.where(used[..., None], jnp.maximum(1 - away, 0), 0)

    zeros = jnp.zeros((*starts.shape, cells), starts.dtype)
    total = jax.lax.fori_loop(0, count.max(initial=0).astype(jnp.int32), add, zeros)
    return total / most[..., None, None]


def _region_weights(
    boxes: Float[Array, "*R 4"], bins: int, size: tuple[int, int]
) -> tuple[Float[Array, "*R bins rows"], Float[Array, "*R bins columns"]]:
    """`bin_weights` of rows and of columns, for boxes in cells of a map of `size`."""
    left, top, right, bottom = jnp.moveaxis(boxes, -1, 0)
    rows, columns = size
    return bin_weights(top, bottom - top, bins, rows), bin_weights(
        left, right - left, bins, columns
    )


def find_levels(boxes: Float[Array, "*R 4"], stride: int) -> Int[Array, "*R"]:
    """The map of each region, from 0, the finest, to 3; small regions have fine maps.

    >>> find_levels(jnp.array([[0.0, 0, 111, 111], [0, 0, 112, 112], [0, 0, 900, 900]]), 4).tolist()
    [0, 1, 3]

    Args:
        boxes: corners in pixels.
        stride: pixels of a cell of the finest map; each further one has twice as many.
    """
    width, height = jnp.moveaxis(boxes[..., 2:] - boxes[..., :2], -1, 0)
    ratio = jnp.sqrt(width * height) / (14 * stride)
    return jnp.clip(jnp.floor(jnp.log2(ratio + 1e-6)), 0, 3).astype(jnp.int32)


def align(
    maps: Sequence[Float[Array, "B _h _w C"]], boxes: Float[Array, "B R 4"], stride: int, bins: int
) -> Float[Array, "B R bins bins C"]:
    """The features of regions, each from the map of its level. Boxes have no gradients.

    Args:
        maps: four, the finest first.
        boxes: corners in pixels; a box without area may have features of 0.
        stride: see `find_levels`.
        bins: S, rows and columns of the features.
    """
    boxes = jnp.moveaxis(jax.lax.stop_gradient(boxes), 1, 0)
    levels, weights = find_levels(boxes, stride)[..., None], []
    for level, x in enumerate(maps):
        cells = jnp.where(levels == level, boxes, 0) / (stride * 2**level)
        weights.append(_region_weights(cells, bins, x.shape[1:3]))

    @jax.checkpoint  # the product with rows alone is the largest array
    def multiply(weights: list[tuple[Array, Array]]) -> Float[Array, "B bins bins C"]:
        einsum = functools.partial(jnp.einsum, "bph,bhwc,bqw->bpqc", precision="highest")
        pairs = zip(weights, maps, strict=True)
        return sum(einsum(rows, x, columns) for (rows, columns), x in pairs)

    features = jax.lax.map(multiply, weights, batch_size=min(_TOGETHER, len(boxes)))
    return jnp.moveaxis(features, 0, 1).astype(maps[0].dtype)


def cut_masks(
    masks: UInt8[Array, "M H W8"], owners: Int[Array, " R"], boxes: Float[Array, "R 4"]
) -> Bool[Array, "R S S"]:
    """The targets of masks: the parts of objects' masks inside boxes, at 28 x 28 cells.

    Args:
        masks: the pixels of each object, eight to a byte along rows.
        owners: the object of each box.
        boxes: corners in pixels.
    """
    _, height, width = masks.shape
    rows, columns = _region_weights(boxes, TARGET, (height, 8 * width))

    def cut(region: tuple[Array, Array, Array]) -> Bool[Array, "S S"]:
        owner, rows, columns = region
        pixels = jnp.unpackbits(masks[owner], axis=-1).astype(rows.dtype)
        return jnp.einsum("ph,hw,qw->pq", rows, pixels, columns, precision="highest") >= 0.5

    return jax.lax.map(cut, (owners, rows, columns))
