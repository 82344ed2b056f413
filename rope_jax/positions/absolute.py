"""Absolute position embeddings: a table, one row per token, added to the tokens after the patch embedding."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import normal_init
from rope_jax.positions import grids
from rope_jax.positions.resample import RESAMPLERS
from rope_jax.positions.scheme import Grid, Position, Stage, check_finite, check_option, scheme


class Absolute(Position):
    """Base of the absolute embeddings: a scheme that has a `table`."""

    acts = "tokens"
    relative = keeps_norms = False
    resolution = "extrapolate"

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        """The embedding of each token on a map of `grid`: [embed_prefix + H*W, C]."""
        raise NotImplementedError

    def embed(self, tokens: Array, grid: Grid, key: Array | None = None) -> Array:
        """See `Position.embed`."""
        return tokens + self.table(grid).astype(tokens.dtype)


@scheme("ape")
class Learned(Absolute):
    """Learned table, one row per token (ViT, arXiv 2010.11929; DeiT).

    Options:
        std: of its start, 0.02; 0.2 in the ViT-Lite family.
        resize: how it comes to a new grid: "bicubic" without antialiasing (DeiT, Heo et al., Swin), "antialias" (timm), "dinov2" (bicubic
            on a grid a little too large), "bilinear" (CCT), or "pad" (kept as it is around the centre, zeros where it knows nothing).
    """

    paper = "Dosovitskiy et al., arXiv 2010.11929"
    equation = "tokens + E, E learned"
    resolution = "resample"
    learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, std: float = 0.02, resize: str = "bicubic"):
        super().__init__(stage, rngs=rngs)
        check_option("resize", resize, ("bicubic", "antialias", "dinov2", "bilinear", "pad"))
        self.std, self.resampler = check_finite("std", std, zero=True), resize
        rows = stage.embed_prefix + stage.grid[0] * stage.grid[1]
        start = normal_init(self.std)
        self.embedding = nnx.Param(start(rngs.params(), (rows, stage.channels), stage.dtype), decay=False, layers=False)

    def another(self, rngs: nnx.Rngs) -> "Learned":
        """A second table with the same options."""
        return type(self)(self.stage, rngs=rngs, std=self.std, resize=self.resampler)

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        """See `Absolute.table`."""
        prefix, height, width = self.stage.embed_prefix, *self.stage.grid
        rows = self.embedding[...]
        if grid == self.stage.grid:
            return rows
        maps = rows[prefix:].T.reshape(-1, height, width)
        maps = RESAMPLERS[self.resampler](maps, grid)
        return jnp.concatenate([rows[:prefix], maps.reshape(maps.shape[0], -1).T])

    def resize(self, grid: Grid) -> None:
        """See `Position.resize`."""
        self.embedding.set_value(self.table(grid))
        super().resize(grid)


@scheme("sincos1d")
class SinCos1D(Absolute):
    """Sine and cosine of the token's index, prefix tokens first (Vaswani et al., section 3.5; T2T-ViT, CCT). base: 10000."""

    paper = "Vaswani et al., arXiv 1706.03762"
    equation = "tokens + sin, cos of l 10000^(-2i/C)"

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: float = 10000.0):
        super().__init__(stage, rngs=rngs)
        check_channels(stage, 2)
        self.base = check_finite("base", base)

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        """See `Absolute.table`."""
        place = np.arange(self.stage.embed_prefix + grid[0] * grid[1])
        return jnp.asarray(interleaved(place, self.stage.channels // 2, self.base), self.stage.dtype)


@scheme("sincos2d")
class SinCos2D(Absolute):
    """Sine and cosine of row and column, in patches from 0; prefix tokens get zeros.

    Options:
        order: of the channels, each quarter or pair with frequencies base**(-i / (C/4)): "heo" (sin x, cos x, sin y, cos y, repeated;
            Heo et al., equation 2), "lape" (first half x, second half y, sine and cosine in turn), "moco" (blocks sin x, cos x, sin y,
            cos y, the last frequency being exactly 1 / base; MoCo v3, big_vision), "timm" (blocks sin y, sin x, cos y, cos x).
        base: 10000.
    """

    paper = "Heo et al., arXiv 2403.13298, eq. 2; Chen et al., arXiv 2104.02057"
    equation = "tokens + sin, cos of x 10000^(-4i/C) and y 10000^(-4i/C)"

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, order: str = "heo", base: float = 10000.0):
        super().__init__(stage, rngs=rngs)
        check_option("order", order, ("heo", "lape", "moco", "timm"))
        check_channels(stage, 4)
        self.order, self.base = order, check_finite("base", base)

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        """See `Absolute.table`."""
        quarter = self.stage.channels // 4
        y, x = grids.absolute(grid).reshape(-1, 2).T
        if self.order == "lape":
            rows = np.concatenate([interleaved(x, quarter, self.base), interleaved(y, quarter, self.base)], axis=1)
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


@scheme("cape")
class Cape(Absolute):
    """CAPE: waves of many directions on a map of [-1, 1], which training shifts and stretches (arXiv 2106.03143).

    Channels i and C/2 + i are the cosine and the sine of pi (w_x x + w_y y), w = rho (cos i, sin i), with rho from 1 to 10 in equal ratios.
    The first and the last token of an axis are at -1 and 1, tokens are multiplied by sqrt(C) before the embedding joins them, and prefix
    tokens stay as they are. In training (where there is a key), each example has coordinates of its own.

    Options:
        global_shift: of an example along each axis, uniform in +-global_shift, 0.5.
        local_shift: of each token along each axis, uniform in +-local_shift of the distance between tokens, 0.5.
        global_scale: then a factor for both axes, 1/global_scale .. global_scale, log-uniform, 1.4.
    """

    paper = "Likhomanenko et al., arXiv 2106.03143"
    equation = "sqrt(C) tokens + cos, sin of pi (w_x x + w_y y), (x, y) in [-1, 1], moved in training"
    resolution = "interpolate"
    augments = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, global_shift: float = 0.5, local_shift: float = 0.5, global_scale: float = 1.4):
        super().__init__(stage, rngs=rngs)
        check_channels(stage, 2)
        self.global_shift = check_finite("global_shift", global_shift, zero=True)
        self.local_shift = check_finite("local_shift", local_shift, zero=True)
        self.global_scale = check_finite("global_scale", global_scale)
        if global_scale < 1:
            raise ValueError(f"global_scale={global_scale} is not allowed; it is the largest factor: use 1 (off) or more")
        self.augments = self.global_shift > 0 or self.local_shift > 0 or self.global_scale > 1

    def _waves(self, coords: Float[Array, "... 2"]) -> Float[Array, "... C"]:
        count = self.stage.channels // 2
        turn, rho = np.arange(count), 10 ** np.linspace(0, 1, count)
        waves = jnp.asarray(np.pi * rho * np.stack([np.sin(turn), np.cos(turn)]), coords.dtype)  # y first, as coordinates are
        phase = jnp.einsum("...a,ac->...c", coords, waves, precision="highest")
        return jnp.concatenate([jnp.cos(phase), jnp.sin(phase)], axis=-1)

    def _coords(self, grid: Grid) -> Float[Array, "L 2"]:
        axes = np.meshgrid(*(np.linspace(-1, 1, n) for n in grid), indexing="ij")
        return jnp.asarray(np.stack(axes, axis=-1).reshape(-1, 2), self.stage.dtype)

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        """See `Absolute.table`."""
        return jnp.pad(self._waves(self._coords(grid)), [(self.stage.embed_prefix, 0), (0, 0)])

    def embed(self, tokens: Array, grid: Grid, key: Array | None = None) -> Array:
        """See `Position.embed`."""
        coords = self._coords(grid)
        if key is not None:
            draw = lambda key, count, axes, most: jax.random.uniform(key, (tokens.shape[0], count, axes), coords.dtype, -most, most)
            shift, wobble, scale = jax.random.split(key, 3)
            apart = np.array([2 / max(n - 1, 1) for n in grid])
            coords = coords + draw(shift, 1, 2, self.global_shift) + draw(wobble, coords.shape[0], 2, self.local_shift) * apart
            coords = coords * jnp.exp(draw(scale, 1, 1, np.log(self.global_scale)))
        prefix = self.stage.embed_prefix
        added = tokens[:, prefix:] * np.sqrt(self.stage.channels) + self._waves(coords).astype(tokens.dtype)
        return jnp.concatenate([tokens[:, :prefix], added.astype(tokens.dtype)], axis=1)


def interleaved(place: np.ndarray, count: int, base: float) -> np.ndarray:
    """sin, cos, sin, cos, ... of place * base**(-i / count): [len(place), 2 * count]."""
    angles = place[:, None] * base ** -(np.arange(count) / count)
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(len(place), -1)


def check_channels(stage: Stage, divisor: int) -> None:
    """Refuses a width that `divisor` does not divide."""
    if stage.channels % divisor:
        raise ValueError(
            f"sine and cosine tables need a width divisible by {divisor}, but the model is {stage.channels} wide: change its width"
        )
