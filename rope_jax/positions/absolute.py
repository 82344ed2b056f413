"""Absolute position embeddings: a table, one row per token, added after the patch embedding."""

import abc
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.positions import grids
from rope_jax.positions.batch import add
from rope_jax.positions.initializers import normal_init
from rope_jax.positions.resample import resample
from rope_jax.positions.scheme import (
    Grid,
    Position,
    Scale,
    Spread,
    Stage,
    Stretch,
    Tokens,
    scheme,
)


class Absolute(Position):
    """Base of the absolute embeddings: schemes with a `table`.

    >>> from rope_jax.positions import create_position
    >>> stage = Stage(depth=2, heads=3, head_dim=16, channels=48, grid=(4, 5))
    >>> create_position("sincos2d", stage, rngs=nnx.Rngs(0)).table((2, 3)).shape
    (6, 48)
    """

    acts = "tokens"
    relative = keeps_norms = False
    resolution = "extrapolate"

    @abc.abstractmethod
    def table(self, grid: Grid) -> Float[Array, "T C"]:
        """Returns the embedding of each token on a map of `grid`; T = embed_prefix + H*W."""

    def embed(self, tokens: Tokens, grid: Grid, key: Array | None = None) -> Tokens:
        return add(tokens, self.table(grid))


@scheme("ape")
class Learned(Absolute):
    """A learned table, one row per token (ViT, arXiv 2010.11929; DeiT).

    Options:
        std: standard deviation of the initial table, 0.02; 0.2 in the ViT-Lite family.
        resize: resampling to a new grid: "bicubic" without antialiasing (DeiT, Heo et al., Swin),
            "antialias" (timm), "dinov2" (bicubic on a slightly stretched grid), "bilinear" (CCT),
            or "pad" (the table is padded with zeros on all sides).
    """

    paper = "Dosovitskiy et al., arXiv 2010.11929"
    equation = "tokens + E, E learned"
    resolution = "resample"
    learnable = True

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        std: Spread = 0.02,
        resize: Literal["bicubic", "antialias", "dinov2", "bilinear", "pad"] = "bicubic",
    ):
        super().__init__(stage, rngs=rngs)
        self.resampler = resize
        self.std = std
        rows = stage.embed_prefix + stage.grid[0] * stage.grid[1]
        start = normal_init(self.std)(rngs.params(), (rows, stage.channels), stage.dtype)
        self.embedding = nnx.Param(start, decay=False, layers=False)

    def another(self, rngs: nnx.Rngs) -> "Learned":
        """Returns another table with the same options."""
        return type(self)(self.stage, rngs=rngs, std=self.std, resize=self.resampler)

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        prefix, height, width = self.stage.embed_prefix, *self.stage.grid
        rows = self.embedding[...]
        if grid == self.stage.grid:
            return rows
        maps = resample(rows[prefix:].T.reshape(-1, height, width), grid, self.resampler)
        return jnp.concatenate([rows[:prefix], maps.reshape(maps.shape[0], -1).T])

    def resize(self, grid: Grid) -> None:
        self.embedding.set_value(self.table(grid))
        super().resize(grid)


@scheme("sincos1d")
class SinCos1D(Absolute):
    """Sines and cosines of the token's index, prefix tokens first (Vaswani et al., section 3.5).

    Used by T2T-ViT and CCT.

    Options:
        base: of the frequencies base**(-2i / C), 10000.
    """

    paper = "Vaswani et al., arXiv 1706.03762"
    equation = "tokens + sin, cos of l 10000^(-2i/C)"

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: Scale = 10000.0):
        super().__init__(stage, rngs=rngs)
        check_channels(stage, 2)
        self.base = base

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        index = np.arange(self.stage.embed_prefix + grid[0] * grid[1], dtype=np.float64)
        waves = interleaved_waves(index, self.stage.channels // 2, self.base)
        return jnp.asarray(waves, self.stage.dtype)


@scheme("sincos2d")
class SinCos2D(Absolute):
    """Sines and cosines of row and column, in patches from 0; prefix tokens get zeros.

    Options:
        order: of the channels, with frequencies base**(-i / (C/4)): "heo" (sin x, cos x, sin y,
            cos y, repeated; Heo et al., equation 2), "lape" (first half x, second half y, sines and
            cosines in turn), "moco" (blocks sin x, cos x, sin y, cos y, with last frequency exactly
            1 / base; MoCo v3, big_vision), "timm" (blocks sin y, sin x, cos y, cos x).
        base: of the frequencies, 10000.
    """

    paper = "Heo et al., arXiv 2403.13298, eq. 2; Chen et al., arXiv 2104.02057"
    equation = "tokens + sin, cos of x 10000^(-4i/C) and y 10000^(-4i/C)"

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        order: Literal["heo", "lape", "moco", "timm"] = "heo",
        base: Scale = 10000.0,
    ):
        super().__init__(stage, rngs=rngs)
        self.order = order
        check_channels(stage, 4)
        self.base = base

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        quarter = self.stage.channels // 4
        y, x = grids.absolute(grid).reshape(-1, 2).T
        if self.order == "lape":
            halves = [interleaved_waves(place, quarter, self.base) for place in (x, y)]
            rows = np.concatenate(halves, axis=1)
        else:
            steps = max(quarter - 1, 1) if self.order == "moco" else quarter
            freqs = self.base ** -(np.arange(quarter) / steps)
            x, y = x[:, None] * freqs, y[:, None] * freqs
            waves = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
            if self.order == "timm":
                waves = [waves[i] for i in (2, 0, 3, 1)]
            repeated = self.order == "heo"
            rows = np.stack(waves, axis=2 if repeated else 1).reshape(len(x), -1)
        prefix = np.zeros((self.stage.embed_prefix, self.stage.channels))
        return jnp.asarray(np.concatenate([prefix, rows]), self.stage.dtype)


@scheme("cape")
class Cape(Absolute):
    """CAPE: waves in many directions on a map of [-1, 1], augmented in training (arXiv 2106.03143).

    Channels i and C/2 + i are the cosine and sine of pi (w_x x + w_y y), w = rho (cos i, sin i),
    with rho from 1 to 10 in equal ratios. The first and last token of an axis are at -1 and 1.
    Tokens are multiplied by sqrt(C) before the embedding is added; prefix tokens do not change.
    In training (given a key), each example has its own coordinates.

    Options:
        global_shift: of an example along each axis, uniform in +-global_shift, 0.5.
        local_shift: of each token along each axis, uniform in +-local_shift of the distance between
            tokens, 0.5.
        global_scale: then a factor for both axes, 1/global_scale .. global_scale, log-uniform, 1.4.
        axis_order: "xy": x is the column, as in the paper; "yx": the formula's x is the row, the
            first axis of the map, as in the authors' code.
    """

    paper = "Likhomanenko et al., arXiv 2106.03143"
    equation = (
        "sqrt(C) tokens + cos, sin of pi (w_x x + w_y y), (x, y) in [-1, 1], moved in training"
    )
    resolution = "interpolate"
    augments = True

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        global_shift: Spread = 0.5,
        local_shift: Spread = 0.5,
        global_scale: Stretch = 1.4,
        axis_order: Literal["xy", "yx"] = "xy",
    ):
        super().__init__(stage, rngs=rngs)
        check_channels(stage, 2)
        self.axis_order = axis_order
        self.global_shift = global_shift
        self.local_shift = local_shift
        self.global_scale = global_scale
        self.augments = self.global_shift > 0 or self.local_shift > 0 or self.global_scale > 1

    def _waves(self, coords: Float[Array, "... 2"]) -> Float[Array, "... C"]:
        count = self.stage.channels // 2
        turn, rho = np.arange(count), 10 ** np.linspace(0, 1, count)
        components = {"x": np.cos(turn), "y": np.sin(turn)}
        # Coordinates are (row, column).
        directions = np.stack([components[axis] for axis in reversed(self.axis_order)])
        waves = jnp.asarray(np.pi * rho * directions, coords.dtype)
        phase = jnp.einsum("...a,ac->...c", coords, waves, precision="highest")
        return jnp.concatenate([jnp.cos(phase), jnp.sin(phase)], axis=-1)

    def _coords(self, grid: Grid) -> Float[Array, "L 2"]:
        axes = np.meshgrid(*(np.linspace(-1, 1, n) for n in grid), indexing="ij")
        return jnp.asarray(np.stack(axes, axis=-1).reshape(-1, 2), self.stage.dtype)

    def _augment(
        self, coords: Float[Array, "L 2"], grid: Grid, batch: int, key: Array
    ) -> Float[Array, "B L 2"]:
        def draw(key: Array, count: int, axes: int, limit: float) -> Array:
            shape = (batch, count, axes)
            return jax.random.uniform(key, shape, coords.dtype, -limit, limit)

        global_key, local_key, scale_key = jax.random.split(key, 3)
        spacing = np.array([2 / max(n - 1, 1) for n in grid])
        local = draw(local_key, coords.shape[0], 2, self.local_shift) * spacing
        coords = coords + draw(global_key, 1, 2, self.global_shift) + local
        return coords * jnp.exp(draw(scale_key, 1, 1, np.log(self.global_scale)))

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        return jnp.pad(self._waves(self._coords(grid)), [(self.stage.embed_prefix, 0), (0, 0)])

    def embed(self, tokens: Tokens, grid: Grid, key: Array | None = None) -> Tokens:
        coords, prefix = self._coords(grid), self.stage.embed_prefix
        if key is not None:
            coords = self._augment(coords, grid, tokens.shape[0], key)
        waves = self._waves(coords).astype(tokens.dtype)
        added = tokens[:, prefix:] * np.sqrt(self.stage.channels) + waves
        return jnp.concatenate([tokens[:, :prefix], added.astype(tokens.dtype)], axis=1)


def interleaved_waves(
    place: Float[np.ndarray, " L"], count: int, base: float
) -> Float[np.ndarray, "L C"]:
    """Waves sin, cos, sin, cos, ... of place * base**(-i / count), C = 2 * count."""
    angles = place[:, None] * base ** -(np.arange(count) / count)
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(len(place), -1)


def check_channels(stage: Stage, divisor: int) -> None:
    """Raises ValueError unless `divisor` divides the width."""
    if stage.channels % divisor:
        raise ValueError(
            f"sine and cosine tables need a width divisible by {divisor}, but the model is "
            f"{stage.channels} wide: change its width"
        )
