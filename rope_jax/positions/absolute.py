"""Absolute position embeddings: a table, one row per token, added to the tokens after the patch embedding."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.positions import grids
from rope_jax.positions.resample import bicubic
from rope_jax.positions.scheme import Grid, Position, Stage, check_finite, check_option, scheme


class Absolute(Position):
    """Base of the absolute embeddings: a scheme that has a `table`."""

    acts = "tokens"

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        """The embedding of each token on a map of `grid`: [embed_prefix + H*W, C]."""
        raise NotImplementedError

    def embed(self, tokens: Array, grid: Grid, key: Array | None = None) -> Array:
        """See `Position.embed`."""
        return tokens + self.table(grid).astype(tokens.dtype)


@scheme("ape")
class Learned(Absolute):
    """Learned table, bicubic to a new grid without antialiasing (ViT, DeiT; Heo's and Swin's rule). std: of its start, 0.02."""

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, std: float = 0.02):
        super().__init__(stage, rngs=rngs)
        rows = stage.embed_prefix + stage.grid[0] * stage.grid[1]
        std = check_finite("std", std, zero=True)
        self.embedding = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (rows, stage.channels), stage.dtype), decay=False)

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        """See `Absolute.table`."""
        prefix, height, width = self.stage.embed_prefix, *self.stage.grid
        rows = self.embedding[...]
        if grid == self.stage.grid:
            return rows
        maps = rows[prefix:].T.reshape(-1, height, width)
        return jnp.concatenate([rows[:prefix], bicubic(maps, grid).reshape(maps.shape[0], -1).T])

    def resize(self, grid: Grid) -> None:
        """See `Position.resize`."""
        self.embedding.set_value(self.table(grid))
        super().resize(grid)


@scheme("sincos1d")
class SinCos1D(Absolute):
    """Sine and cosine of the token's index, prefix tokens first (Vaswani et al., section 3.5; T2T-ViT, CCT). base: 10000."""

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: float = 10000.0):
        super().__init__(stage, rngs=rngs)
        _check_channels(stage, 2)
        self.base = check_finite("base", base)

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        """See `Absolute.table`."""
        place = np.arange(self.stage.embed_prefix + grid[0] * grid[1])
        return jnp.asarray(_interleaved(place, self.stage.channels // 2, self.base), self.stage.dtype)


@scheme("sincos2d")
class SinCos2D(Absolute):
    """Sine and cosine of row and column, in patches from 0; prefix tokens get zeros.

    Options:
        order: of the channels, each quarter or pair with frequencies base**(-i / (C/4)): "heo" (sin x, cos x, sin y, cos y, repeated;
            Heo et al., equation 2), "lape" (first half x, second half y, sine and cosine in turn), "moco" (blocks sin x, cos x, sin y,
            cos y, the last frequency being exactly 1 / base; MoCo v3, big_vision), "timm" (blocks sin y, sin x, cos y, cos x).
        base: 10000.
    """

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, order: str = "heo", base: float = 10000.0):
        super().__init__(stage, rngs=rngs)
        check_option("order", order, ("heo", "lape", "moco", "timm"))
        _check_channels(stage, 4)
        self.order, self.base = order, check_finite("base", base)

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        """See `Absolute.table`."""
        quarter = self.stage.channels // 4
        y, x = grids.absolute(grid).reshape(-1, 2).T
        if self.order == "lape":
            rows = np.concatenate([_interleaved(x, quarter, self.base), _interleaved(y, quarter, self.base)], axis=1)
        else:
            steps = max(quarter - 1, 1) if self.order == "moco" else quarter
            freqs = self.base ** -(np.arange(quarter) / steps)
            sin_x, cos_x, sin_y, cos_y = (f(p[:, None] * freqs) for p in (x, y) for f in (np.sin, np.cos))
            if self.order == "heo":
                rows = np.stack([sin_x, cos_x, sin_y, cos_y], axis=2).reshape(len(x), -1)
            else:
                blocks = [sin_x, cos_x, sin_y, cos_y] if self.order == "moco" else [sin_y, sin_x, cos_y, cos_x]
                rows = np.concatenate(blocks, axis=1)
        prefix = np.zeros((self.stage.embed_prefix, self.stage.channels))
        return jnp.asarray(np.concatenate([prefix, rows]), self.stage.dtype)


def _interleaved(place: np.ndarray, count: int, base: float) -> np.ndarray:
    """sin, cos, sin, cos, ... of place * base**(-i / count): [len(place), 2 * count]."""
    angles = place[:, None] * base ** -(np.arange(count) / count)
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(len(place), -1)


def _check_channels(stage: Stage, divisor: int) -> None:
    if stage.channels % divisor:
        raise ValueError(
            f"sine and cosine tables need a width divisible by {divisor}, but the model is {stage.channels} wide: change its width"
        )
