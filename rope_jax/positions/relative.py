"""Relative position bias: a learned table of offsets, added to the scaled logits of attention."""

import jax
from flax import nnx
from jaxtyping import Array

from rope_jax.positions.resample import bicubic, crop_or_pad
from rope_jax.positions.scheme import Grid, PerLayer, Position, Stage, Terms, check_option, scheme
from rope_jax_kernels import Neighborhood, Window


@scheme("rpb")
class RelativeBias(Position):
    """Relative position bias per head and layer, in the form of the stage's attention.

    Windows: Swin's table (query minus key). Neighbourhoods: NATTEN's (key minus query, in steps of the dilation). Global attention:
    that of NAT's isotropic ViT (key minus query over the whole map); prefix tokens get no bias.

    Options:
        grow: what happens to the table on a larger map or window, "bicubic" or "pad" (zeros for unseen offsets).
        shrink: on a smaller one, "bicubic" or "crop" (the central offsets).
    A neighbourhood keeps its size on every map, so its table stays.
    """

    acts = "logits"

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, grow: str = "bicubic", shrink: str = "bicubic"):
        super().__init__(stage, rngs=rngs)
        check_option("grow", grow, ("bicubic", "pad"))
        check_option("shrink", shrink, ("bicubic", "crop"))
        self.grow, self.shrink = grow, shrink
        rows, columns = _side(stage, stage.grid)
        shape = (stage.depth, stage.heads, 2 * rows - 1, 2 * columns - 1)
        self.offsets = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape, stage.dtype), decay=False)

    def _resized(self, grid: Grid) -> Array:
        table = self.offsets[...]
        for axis, side in zip((2, 3), _side(self.stage, grid), strict=True):
            size = [*table.shape[2:]]
            larger = 2 * side - 1 > size[axis - 2]
            size[axis - 2] = 2 * side - 1
            table = (bicubic if (self.grow if larger else self.shrink) == "bicubic" else crop_or_pad)(table, tuple(size))
        return table

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        table = self._resized(grid)
        if isinstance(self.stage.pattern, Neighborhood):
            return Terms(bias=PerLayer(table))
        if not isinstance(self.stage.pattern, Window):
            table = jax.lax.rev(table, (2, 3))  # key minus query to query minus key
        return Terms(bias=PerLayer(table.reshape(*table.shape[:2], -1)))

    def resize(self, grid: Grid) -> None:
        """See `Position.resize`."""
        self.offsets.set_value(self._resized(grid))
        super().resize(grid)


def _side(stage: Stage, grid: Grid) -> Grid:
    """Rows and columns within which one query's keys lie."""
    if isinstance(stage.pattern, Window):
        return stage.pattern.fit(grid).size
    return stage.pattern.size if isinstance(stage.pattern, Neighborhood) else grid
