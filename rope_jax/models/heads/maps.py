"""Operations on feature maps [B, H, W, C] that heads share."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.layers import BatchNorm, Linear, conv
from rope_jax.positions.grids import Grid
from rope_jax.positions.initializers import normal_init
from rope_jax.positions.resample import bilinear_matrix


def resize_maps(maps: Float[Array, "B h w C"], size: Grid) -> Float[Array, "B H W C"]:
    """Bilinear resizing without antialiasing, as torch's with align_corners=False.

    It is two matrix products, whose gradients add in a fixed order on every device.

    >>> resize_maps(jnp.array([0.0, 1.0]).reshape(1, 1, 2, 1), (1, 4)).ravel().tolist()
    [0.0, 0.25, 0.75, 1.0]

    Args:
        maps: of any size.
        size: (H, W).
    """
    rows, columns = (
        None if before == after else bilinear_matrix(before, after)
        for before, after in zip(maps.shape[1:3], size, strict=True)
    )
    return _multiply(maps, rows, columns)


def repeat_cells(maps: Float[Array, "B h w C"], size: Grid) -> Float[Array, "B H W C"]:
    """Resizing by the nearest cell to the upper left, as torch's: each is repeated.

    >>> repeat_cells(jnp.array([1.0, 2.0]).reshape(1, 1, 2, 1), (1, 5)).ravel().tolist()
    [1.0, 1.0, 1.0, 2.0, 2.0]

    Args:
        maps: of any size.
        size: (H, W).
    """
    pairs = zip(maps.shape[1:3], size, strict=True)
    return _multiply(maps, *(np.eye(n)[np.arange(m) * n // m] for n, m in pairs))


@functools.cache
def _bin_matrix(before: int, after: int) -> np.ndarray:
    """Averages of bins along one axis; bin i is floor(i n / m) to ceil((i + 1) n / m) of n to m."""
    matrix = np.zeros((after, before))
    for i in range(after):
        start, stop = i * before // after, -(-(i + 1) * before // after)
        matrix[i, start:stop] = 1 / (stop - start)
    return matrix


def average_bins(maps: Float[Array, "B h w C"], bins: int) -> Float[Array, "B bins bins C"]:
    """Averages of bins x bins parts of each map, as torch's adaptive average pooling.

    Bins overlap where their number does not divide the side of the map.

    >>> average_bins(jnp.array([1.0, 2.0, 6.0]).reshape(1, 1, 3, 1), 2)[0, 0, :, 0].tolist()
    [1.5, 4.0]

    Args:
        maps: of any size, also smaller than the bins.
        bins: rows and columns of the result.
    """
    return _multiply(maps, *(_bin_matrix(side, bins) for side in maps.shape[1:3]))


def _multiply(
    maps: Float[Array, "B h w C"], rows: np.ndarray | None, columns: np.ndarray | None
) -> Float[Array, "B H W C"]:
    """The products of both axes of maps with matrices [after, before]; None leaves an axis."""
    # Full precision: a GPU's default would round float32 maps to ten bits.
    multiply = functools.partial(jnp.einsum, precision="highest")
    if rows is not None:
        maps = multiply("yh,bhwc->bywc", rows.astype(maps.dtype), maps)
    return maps if columns is None else multiply("xw,bhwc->bhxc", columns.astype(maps.dtype), maps)


def flatten(maps: Sequence[Float[Array, "B _h _w C"]]) -> Float[Array, "B S C"]:
    """The tokens of all maps, one map after the other in reading order."""
    return jnp.concatenate([x.reshape(x.shape[0], -1, x.shape[-1]) for x in maps], axis=1)


def unflatten(
    tokens: Float[Array, "B S C"], sizes: Sequence[Grid]
) -> list[Float[Array, "B _h _w C"]]:
    """Inverse of `flatten` for maps of these sizes."""
    ends = np.cumsum([height * width for height, width in sizes])
    parts = jnp.split(tokens, ends[:-1], axis=1)
    return [x.reshape(x.shape[0], *size, -1) for x, size in zip(parts, sizes, strict=True)]


def centres(sizes: Sequence[Grid]) -> Float[np.ndarray, "L 2"]:
    """Centres of all tokens of maps, as x and y from 0 to 1.

    >>> centres([(1, 2)]).tolist()
    [[0.25, 0.5], [0.75, 0.5]]
    """
    parts = []
    for height, width in sizes:
        y, x = np.indices((height, width)) + 0.5
        parts.append(np.stack([x / width, y / height], axis=-1).reshape(-1, 2))
    return np.concatenate(parts)


def group_norm(width: int, groups: int, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.GroupNorm:
    """Normalisation of groups of channels over a whole map, as torch's."""
    return nnx.GroupNorm(
        width, num_groups=groups, epsilon=1e-5, use_fast_variance=False, rngs=rngs, **dtypes
    )


class ConvNorm(nnx.Module):
    """A convolution without bias, batch normalisation and ReLU: mmcv's ConvModule.

    Weights are drawn as there: normal, with the variance 2 / (outputs x kernel area).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        *,
        stride: int = 1,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        init = normal_init((2 / (outputs * kernel**2)) ** 0.5)
        if kernel == 1:
            self.conv = Linear(
                inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs, **dtypes
            )
        else:
            settings = {"stride": stride, "padding": kernel // 2, "kernel_init": init}
            self.conv = conv(inputs, outputs, kernel, rngs=rngs, dtypes=dtypes, **settings)
        self.bn = BatchNorm(outputs, dtypes=dtypes)

    def __call__(self, maps: Float[Array, "B H W I"], train: bool) -> Float[Array, "B h w O"]:
        return jax.nn.relu(self.bn(self.conv(maps), train))
