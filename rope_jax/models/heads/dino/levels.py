"""The tokens of maps of several sizes, their padding and their sine positions.

Images of a batch may be padded at the bottom and right: their extents are their own rows and
columns. Coordinates are 0 to 1 within the extent.

Source: Zhu et al., arXiv 2010.04159, section 4.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rope_jax.models.heads.queries import sines
from rope_jax.positions.grids import Grid


def padding_mask(extent: Int[Array, "B 2"], image_size: Grid, size: Grid) -> Bool[Array, "B h w"]:
    """Mask of the tokens of a map in padding: those whose upper left pixel is padding.

    >>> padding_mask(jnp.array([[8, 10]]), (8, 16), (1, 4))[0].tolist()
    [[False, False, False, True]]

    Args:
        extent: rows and columns of each image before padding, in pixels.
        image_size: (height, width) with padding.
        size: (rows, columns) of the map.
    """
    rows, columns = (
        np.arange(count) * pixels < extent[:, axis, None] * count
        for axis, (count, pixels) in enumerate(zip(size, image_size, strict=True))
    )
    return ~(rows[:, :, None] & columns[:, None, :])


def map_positions(padding: Bool[Array, "B h w"], width: int) -> Float[Array, "B h w C"]:
    """Sines of the row and then of the column of each token, from 0 to 1 without padding.

    In float32, as in detrex's code. Source: Carion et al., arXiv 2005.12872, appendix A.4.

    Args:
        padding: True for tokens in padding.
        width: C channels, a multiple of 4.
    """
    rows, columns = (jnp.cumsum(~padding, axis=axis, dtype=jnp.float32) for axis in (1, 2))
    rows = (rows - 0.5) / (rows[:, -1:] + 1e-6)
    columns = (columns - 0.5) / (columns[:, :, -1:] + 1e-6)
    return sines(jnp.stack([rows, columns], axis=-1), width // 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Levels:
    """The tokens of maps of several sizes, one map after the other in reading order.

    Attributes:
        padding: True for tokens in padding.
        counts: columns and rows of each map that are not padding.
        sizes: (rows, columns) of each map.
    """

    padding: Bool[Array, "B S"]
    counts: Float[Array, "B levels 2"]
    sizes: tuple[Grid, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_padding(cls, paddings: Sequence[Bool[Array, "B _h _w"]]) -> "Levels":
        """Describes the maps whose tokens are padding where these arrays are True."""
        counts = [jnp.stack([(~x[:, 0]).sum(1), (~x[:, :, 0]).sum(1)], axis=-1) for x in paddings]
        padding = jnp.concatenate([x.reshape(x.shape[0], -1) for x in paddings], axis=1)
        sizes = tuple((x.shape[1], x.shape[2]) for x in paddings)
        return cls(padding, jnp.stack(counts, axis=1).astype(jnp.float32), sizes)

    @property
    def fractions(self) -> Float[Array, "B levels 2"]:
        """Fractions of the columns and rows of each map that are not padding; 1 for the whole."""
        return self.counts / np.array(self.sizes, np.float32)[:, ::-1]

    @property
    def numbers(self) -> np.ndarray:
        """The level of every token."""
        return np.repeat(np.arange(len(self.sizes)), [h * w for h, w in self.sizes])

    def centres(self) -> Float[Array, "B S 2"]:
        """x and y of every token, 0 to 1 within the extent."""
        cells = [np.indices(size)[::-1].reshape(2, -1).T + 0.5 for size in self.sizes]
        return np.concatenate(cells).astype(np.float32) / self.counts[:, self.numbers]

    def places(self) -> Float[Array, "B S levels 2"]:
        """Positions x and y of every token on every map; each has another fraction of padding."""
        return self.centres()[:, :, None] * self.fractions[:, None]
