"""2-D RoPE on the logarithm of row and column."""

import numpy as np

from rope_jax.positions import frequencies, grids
from rope_jax.positions.rotary import Rotary
from rope_jax.positions.scheme import scheme


@scheme("rope_log")
class LogRope(Rotary):
    """Neighbours near the upper left corner differ most."""

    equation, relative = "theta = log(1 + x) f or log(1 + y) f", False

    def __init__(self, stage, *, rngs, base: float = 100.0):
        super().__init__(stage, rngs=rngs)
        self.base = base

    def coords(self, grid):
        return np.log1p(grids.absolute(grid))

    def freqs(self):
        return frequencies.two_axes(frequencies.ladder(self.pairs // 2, self.base), "xy")
