"""Rotary schemes of particular models: EVA-02, VisionLLaMA, CogVideoX, DINOv3 and CAT."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.positions import frequencies, grids
from rope_jax.positions.grids import Grid, Video
from rope_jax.positions.rotary import Pairing, Rotary, whole_map
from rope_jax.positions.scheme import (
    PerLayer,
    Scale,
    Spread,
    Stage,
    Stretch,
    Terms,
    scheme,
)
from rope_jax_kernels import Global, Rotation, rotate_by_angles


@scheme("eva02")
class Eva02(Rotary):
    """EVA-02's RoPE: row and column rescaled to the map of pre-training (arXiv 2303.11331).

    Rows turn the first pairs.

    Options:
        base: of the frequencies base**(-i / (R/2)) of each axis, 10000.
        reference: side of the map of pre-training in patches, 16; the coordinates of every map run
            from 0 to just below it.
    """

    paper = "Fang et al., arXiv 2303.11331"
    equation = "theta = 16 y/H f or 16 x/W f, f = 10000^(-4r/D)"
    resolution = "interpolate"

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        base: Scale = 10000.0,
        reference: Scale = 16.0,
        pairing: Pairing = "half",
        k_rope: int = 1,
    ):
        super().__init__(stage, rngs=rngs, pairing=pairing, k_rope=k_rope)
        self.base, self.reference = base, reference

    def coords(self, grid: Grid) -> Float[np.ndarray, "H W A"]:
        return grids.absolute(grid) / grid * self.reference

    def freqs(self) -> Float[np.ndarray, "N A R"]:
        return frequencies.two_axes(frequencies.ladder(self.pairs // 2, self.base), "yx")


@scheme("as2drope")
class AS2DRope(Rotary):
    """VisionLLaMA's auto-scaled 2-D RoPE: alternating column and row, rescaled (arXiv 2403.00522).

    Class and register tokens are rotated too: in reading order they come before the first patch,
    the last of them at -1. So a class token alone is in the last column of a row above the map.

    Options:
        base: of the frequencies base**(-i / (R/2)) of each axis, 10000.
        anchor: side of the training grid in patches, 14; the coordinates of every map run from 0
            to just below it.
    """

    paper = "Chu et al., arXiv 2403.00522"
    equation = "theta = 14 x/W f or 14 y/H f, f = 10000^(-4r/D)"
    resolution = "interpolate"

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        base: Scale = 10000.0,
        anchor: Scale = 14.0,
        pairing: Pairing = "half",
        k_rope: int = 1,
    ):
        super().__init__(stage, rngs=rngs, pairing=pairing, k_rope=k_rope)
        self.base, self.anchor = base, anchor

    def coords(self, grid: Grid) -> Float[np.ndarray, "H W A"]:
        return grids.absolute(grid) / grid * self.anchor

    def prefix_coords(self, grid: Grid) -> Float[np.ndarray, "P A"]:
        places = np.divmod(np.arange(-self.stage.prefix, 0), grid[1])
        return np.stack(places, axis=1) / grid * self.anchor

    def freqs(self) -> Float[np.ndarray, "N A R"]:
        ladder = frequencies.ladder(self.pairs // 2, self.base)
        return frequencies.two_axes(ladder, "xy", alternate=True)


@scheme("rope3d")
class Rope3D(Rotary):
    """3-D RoPE for video: frame, row and column turn pairs of their own (CogVideoX).

    Rows and columns get three eighths of the pairs each, rounded down, and frames the remaining
    quarter; frames come first (arXiv 2408.06072).

    `terms((T, H, W))` is for a video whose T * H * W tokens are ordered by frame, row and column;
    `attention` takes its rotation with the pattern `Global()`. A map (H, W) is a video of one
    frame, so the scheme works in every image backbone.

    Options:
        base: of the frequencies base**(-i / M) of an axis with M pairs, 10000.
    """

    paper = "Yang et al., arXiv 2408.06072"
    equation = "theta = t f, y f or x f, f = 10000^(-r/M)"
    multiple = 1

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        base: Scale = 10000.0,
        pairing: Pairing = "half",
        k_rope: int = 1,
    ):
        super().__init__(stage, rngs=rngs, pairing=pairing, k_rope=k_rope)
        if self.pairs < 3:
            raise ValueError(
                f"three axes need three pairs of channels, but {self.pairs} turn: use a smaller "
                "k_rope or wider heads"
            )
        self.base = base

    def coords(self, grid: Grid | Video) -> Float[np.ndarray, "... 3"]:
        return grids.absolute(grid) if len(grid) == 3 else grids.absolute((1, *grid))[0]

    def freqs(self) -> Float[np.ndarray, "N A R"]:
        side = 3 * self.pairs // 8
        freqs, first = np.zeros((1, 3, self.pairs)), 0
        for axis, count in enumerate((self.pairs - 2 * side, side, side)):
            freqs[:, axis, first : first + count] = frequencies.ladder(count, self.base)
            first += count
        return freqs

    def terms(self, grid: Grid | Video, key: Array | None = None) -> Terms:
        if len(grid) == 3 and not isinstance(self.stage.pattern, Global):
            raise ValueError(
                f"grid={grid} is a video, but windows and neighbourhoods are those of a map: use "
                "global attention"
            )
        return super().terms(grid, key)


@scheme("dinov3")
class DinoV3(Rotary):
    """DINOv3's RoPE on patch centres in a box (arXiv 2508.10104).

    Rows turn the first pairs, columns the others. In training (given a key) the box is shifted,
    stretched along each axis and scaled, independently in each layer.

    Options:
        base: of the periods base**(i / (R/2)), 100. A pair turns by 2 pi coordinate / period.
        min_period: shortest period, in coordinates; with `max_period`, instead of `base`.
        max_period: longest period; periods are spaced geometrically.
        normalize_coords: the side of the map that is [-1, 1]: each side separately ("separate"),
            the longer one ("max") or the shorter one ("min").
        shift: along each axis, uniform in +-shift, 0.
        jitter: a factor along each axis, 1/jitter .. jitter, log-uniform, 1.
        rescale: a factor for both axes, 1/rescale .. rescale, log-uniform; 2, and the only
            augmentation of the released models.
    """

    paper = "Simeoni et al., arXiv 2508.10104"
    equation = (
        "theta = 2 pi y f or 2 pi x f, f = 100^(-4r/D), (x, y) in [-1, 1], stretched in training"
    )
    resolution = "interpolate"
    augments = True

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        base: Scale = 100.0,
        min_period: Spread = 0.0,
        max_period: Spread = 0.0,
        normalize_coords: Literal["separate", "max", "min"] = "separate",
        shift: Spread = 0.0,
        jitter: Stretch = 1.0,
        rescale: Stretch = 2.0,
        pairing: Pairing = "half",
        k_rope: int = 1,
    ):
        super().__init__(stage, rngs=rngs, pairing=pairing, k_rope=k_rope)
        self.normalize_coords = normalize_coords
        self.base, self.periods = base, None
        if min_period or max_period:
            if not 0 < min_period <= max_period:
                raise ValueError(
                    f"min_period={min_period} and max_period={max_period} must satisfy "
                    "0 < min_period <= max_period"
                )
            self.periods = (min_period, max_period)
        self.shift = shift
        self.jitter = jitter
        self.rescale = rescale
        self.augments = self.shift > 0 or self.jitter > 1 or self.rescale > 1

    def coords(self, grid: Grid) -> Float[np.ndarray, "H W A"]:
        sides = {"separate": np.array(grid), "max": max(grid), "min": min(grid)}
        return (2 * grids.absolute(grid) + 1) / sides[self.normalize_coords] - 1

    def freqs(self) -> Float[np.ndarray, "N A R"]:
        count = self.pairs // 2
        if self.periods is None:
            periods = 1 / frequencies.ladder(count, self.base)
        else:
            periods = np.geomspace(*self.periods, count)[None]
        return frequencies.two_axes(2 * np.pi / periods, "yx")

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        terms = super().terms(grid)
        if key is None:
            return terms
        still = terms.rotation.coords

        def draw(key: Array, axes: int, limit: float) -> Float[Array, "layers 1 axes"]:
            shape = (self.stage.depth, 1, axes)
            return jax.random.uniform(key, shape, still.dtype, -limit, limit)

        shift_key, jitter_key, rescale_key = jax.random.split(key, 3)
        moved = still + draw(shift_key, 2, self.shift)
        jitter = draw(jitter_key, 2, np.log(self.jitter))
        moved = moved * jnp.exp(jitter + draw(rescale_key, 1, np.log(self.rescale)))
        # Class and register tokens do not move.
        prefix = self.stage.prefix if isinstance(self.stage.pattern, Global) else 0
        coords = PerLayer(moved.at[:, :prefix].set(still[:prefix]))
        rotation = dataclasses.replace(terms.rotation, coords=coords)
        return dataclasses.replace(terms, rotation=rotation)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gain:
    """A `Terms.transform` that multiplies q and k, channel by channel, in its own precision.

    Attributes:
        factor: [1, L, N or 1, D].
    """

    factor: Array

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        return attend(self._scale(q), self._scale(k), v)

    def _scale(self, x: Array) -> Array:
        scaled = x.reshape(x.shape[0], -1, *x.shape[-2:]) * self.factor
        return scaled.astype(x.dtype).reshape(x.shape)


@scheme("cat_rope")
class CatRope(Rotary):
    """The cross-axis transformer's RoPE ("3D" RoPE; CAT, section 2.2), on -pi .. pi.

    Columns turn even pairs and rows odd ones. The shorter side keeps the aspect ratio, and rows
    count upwards.

    Options:
        mode: "paper"; "paper_unit", the same with all frequencies 1, which is the result of the
            released code's formula; or "released", bit-compatible with that code, in which q and k
            are not rotated but multiplied, channel by channel, by a rotated vector of ones. This is
            neither relative nor norm-preserving.
        base: of the paper's frequencies base**(-2i / D), 10000.
        coords: "endpoints": the first and last patch of the longer side are at -+pi (the released
            code); or "half_open": patch i of n is at pi (2i - n) / n, which excludes pi (the
            formula in the paper).
    """

    paper = "Erickson, arXiv 2311.07184, section 2.2"
    equation = "theta = x f or y f, f = 10000^(-2r/D), (x, y) in [-pi, pi]"
    resolution = "interpolate"

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        mode: Literal["paper", "paper_unit", "released"] = "paper",
        base: Scale = 10000.0,
        coords: Literal["endpoints", "half_open"] = "endpoints",
        pairing: Pairing = "half",
        k_rope: int = 1,
    ):
        super().__init__(stage, rngs=rngs, pairing=pairing, k_rope=k_rope)
        self.mode = mode
        self.base, self.half_open = base, coords == "half_open"
        if mode == "released":
            self.acts, self.relative, self.keeps_norms = "transform", False, False
            self.extension = None

    def coords(self, grid: Grid) -> Float[np.ndarray, "H W A"]:
        if self.half_open:
            coords = (2 * grids.absolute(grid) - grid) / max(grid)
        else:
            coords = grids.endpoints(grid)
        return coords * (-np.pi, np.pi)

    def freqs(self) -> Float[np.ndarray, "N A R"]:
        rungs = frequencies.deal(1, self.pairs // 2) / 2
        paper = self.mode == "paper"
        ladder = frequencies.decay(rungs, self.base) if paper else np.ones_like(rungs)
        return frequencies.two_axes(ladder, "xy", alternate=True)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        if self.mode != "released":
            return super().terms(grid, key)
        coords = whole_map(self.coords(grid), self.stage)
        theta = Rotation(coords, jnp.asarray(self.freqs(), coords.dtype)).angles()
        ones = jnp.ones((1, coords.shape[0], 1, self.stage.head_dim), coords.dtype)
        gain = rotate_by_angles(ones, theta, pairing=self.pairing, implementation="xla")
        return Terms(transform=Gain(gain))
