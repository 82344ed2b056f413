"""Rotary schemes of other models: EVA-02, VisionLLaMA, video, DINOv3 and CAT. `rotary` has their base and those of the papers."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from rope_jax.positions import frequencies, grids
from rope_jax.positions.grids import Grid, Video
from rope_jax.positions.rotary import Rotary, token_coords, whole_map
from rope_jax.positions.scheme import PerLayer, Stage, Terms, check_finite, check_option, scheme
from rope_jax_kernels import Global, Rotation, rotate_by_angles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gain:
    """A transform that multiplies q and k, channel by channel, with `factor` [1, L, N or 1, D], in its precision."""

    factor: Array

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        """See `Terms.transform`."""
        scale = lambda x: (x.reshape(x.shape[0], -1, *x.shape[-2:]) * self.factor).astype(x.dtype).reshape(x.shape)
        return attend(scale(q), scale(k), v)


@scheme("eva02")
class Eva02(Rotary):
    """EVA-02's RoPE: row and column, rescaled to the map of pre-training; rows turn the first pairs (arXiv 2303.11331).

    Options:
        base: 10000; each axis has its frequencies base**(-i / (R/2)).
        reference: side of the map of pre-training in patches, 16: every map reaches from 0 to just below it.
    """

    paper = "Fang et al., arXiv 2303.11331"
    equation = "theta = 16 y/H f or 16 x/W f, f = 10000^(-4r/D)"
    resolution = "interpolate"

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: float = 10000.0, reference: float = 16.0, **options):
        super().__init__(stage, rngs=rngs, **options)
        self.base, self.reference = check_finite("base", base), check_finite("reference", reference)

    def coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.coords`."""
        return grids.absolute(grid) / grid * self.reference

    def freqs(self) -> np.ndarray:
        """See `Rotary.freqs`."""
        return frequencies.two_axes(frequencies.decay(frequencies.deal(1, self.pairs // 2), self.base), "yx")


@scheme("as2drope")
class AS2DRope(Rotary):
    """VisionLLaMA's auto-scaled 2-D RoPE: column and row in turn, rescaled to the map of training (arXiv 2403.00522).

    Class and register tokens turn too: they count backwards from the first patch in reading order, -1, -2, ..., so that the class token
    lies in the last column of a row above the map.

    Options:
        base: 10000; each axis has its frequencies base**(-i / (R/2)).
        anchor: side of the map of training in patches, 14: every map reaches from 0 to just below it.
    """

    paper = "Chu et al., arXiv 2403.00522"
    equation = "theta = 14 x/W f or 14 y/H f, f = 10000^(-4r/D)"
    resolution = "interpolate"

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: float = 10000.0, anchor: float = 14.0, **options):
        super().__init__(stage, rngs=rngs, **options)
        self.base, self.anchor = check_finite("base", base), check_finite("anchor", anchor)

    def coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.coords`."""
        return grids.absolute(grid) / grid * self.anchor

    def prefix_coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.prefix_coords`."""
        return np.stack(np.divmod(np.arange(-self.stage.prefix, 0), grid[1]), axis=1) / grid * self.anchor

    def freqs(self) -> np.ndarray:
        """See `Rotary.freqs`."""
        return frequencies.two_axes(frequencies.decay(frequencies.deal(1, self.pairs // 2), self.base), "xy", alternate=True)


@scheme("rope3d")
class Rope3D(Rotary):
    """3-D RoPE for video: frame, row and column turn pairs of their own, in this order (CogVideoX, arXiv 2408.06072).

    Rows and columns get three eighths of the pairs each, rounded down, and frames the others, a quarter.

    `terms((T, H, W))` is for a video whose T * H * W tokens stand in the order of frames, then rows, then columns; `attention` takes its
    rotation with the pattern `Global()`. A map (H, W) is a video of one frame, so every backbone for images has this scheme too.

    Options:
        base: 10000; an axis of M pairs has the frequencies base**(-i / M).
    """

    paper = "Yang et al., arXiv 2408.06072"
    equation = "theta = t f, y f or x f, f = 10000^(-r/M)"

    multiple = 1

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: float = 10000.0, **options):
        super().__init__(stage, rngs=rngs, **options)
        if self.pairs < 3:
            raise ValueError(f"three axes need three pairs of channels, but {self.pairs} turn: use a smaller k_rope or wider heads")
        self.base = check_finite("base", base)

    def coords(self, grid: Grid | Video) -> np.ndarray:
        """See `Rotary.coords`."""
        return grids.absolute(grid) if len(grid) == 3 else grids.absolute((1, *grid))[0]

    def freqs(self) -> np.ndarray:
        """See `Rotary.freqs`."""
        side = 3 * self.pairs // 8
        freqs, first = np.zeros((1, 3, self.pairs)), 0
        for axis, count in enumerate((self.pairs - 2 * side, side, side)):
            freqs[0, axis, first : first + count] = frequencies.decay(frequencies.deal(1, count)[0], self.base)
            first += count
        return freqs

    def terms(self, grid: Grid | Video, key: Array | None = None) -> Terms:
        """See `Position.terms`; ValueError for a video in windows or neighbourhoods, which are those of maps."""
        if len(grid) == 3 and not isinstance(self.stage.pattern, Global):
            raise ValueError(f"grid={grid} is a video, but windows and neighbourhoods are those of a map: use global attention")
        coords = token_coords(self.coords(grid), self.stage)
        return Terms(rotation=Rotation(coords, jnp.asarray(self.freqs(), self.stage.dtype), self.pairing))


@scheme("dinov3")
class DinoV3(Rotary):
    """DINOv3's RoPE: rows turn the first pairs and columns the others, on centres of patches in a box (arXiv 2508.10104).

    In training (where there is a key) the box is shifted, stretched along each axis and scaled, anew in each layer.

    Options:
        base: of the periods base**(i / (R/2)), 100. A pair turns by 2 pi coordinate / period.
        min_period, max_period: instead of base, the shortest and the longest period, with equal ratios between.
        normalize_coords: which side of the map is [-1, 1]: both, each for itself ("separate"), the longer ("max") or the shorter ("min").
        shift: along each axis uniform in +-shift, 0.
        jitter: along each axis a factor of 1/jitter .. jitter, log-uniform, 1.
        rescale: one factor for both axes, 1/rescale .. rescale, log-uniform; 2, the only one in the released models.
    """

    paper = "Simeoni et al., arXiv 2508.10104"
    equation = "theta = 2 pi y f or 2 pi x f, f = 100^(-4r/D), (x, y) in [-1, 1], stretched in training"
    resolution = "interpolate"
    augments = True

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        base: float = 100.0,
        min_period: float = 0.0,
        max_period: float = 0.0,
        normalize_coords: str = "separate",
        shift: float = 0.0,
        jitter: float = 1.0,
        rescale: float = 2.0,
        **options,
    ):
        super().__init__(stage, rngs=rngs, **options)
        check_option("normalize_coords", normalize_coords, ("separate", "max", "min"))
        self.normalize_coords = normalize_coords
        self.base, self.periods = check_finite("base", base), None
        if min_period or max_period:
            self.periods = check_finite("min_period", min_period), check_finite("max_period", max_period)
            if min_period > max_period:
                raise ValueError(f"min_period={min_period} is longer than max_period={max_period}: swap them")
        self.shift = check_finite("shift", shift, zero=True)
        for name, factor in (("jitter", jitter), ("rescale", rescale)):
            if check_finite(name, factor) < 1:
                raise ValueError(f"{name}={factor} is not allowed; it is the largest factor: use 1 (off) or more")
        self.jitter, self.rescale = float(jitter), float(rescale)
        self.augments = self.shift > 0 or self.jitter > 1 or self.rescale > 1

    def coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.coords`."""
        sides = {"separate": np.array(grid), "max": max(grid), "min": min(grid)}[self.normalize_coords]
        return (2 * grids.absolute(grid) + 1) / sides - 1

    def freqs(self) -> np.ndarray:
        """See `Rotary.freqs`."""
        count = self.pairs // 2
        if self.periods is None:
            periods = 1 / frequencies.decay(frequencies.deal(1, count), self.base)
        else:
            periods = np.geomspace(*self.periods, count)[None]
        return frequencies.two_axes(2 * np.pi / periods, "yx")

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        terms = super().terms(grid)
        if key is None:
            return terms
        rotation, depth, dtype = terms.rotation, self.stage.depth, self.stage.dtype
        draw = lambda key, axes, most: jax.random.uniform(key, (depth, 1, axes), dtype, -most, most)
        shift, jitter, rescale = jax.random.split(key, 3)
        coords = rotation.coords + draw(shift, 2, self.shift)
        coords = coords * jnp.exp(draw(jitter, 2, np.log(self.jitter)) + draw(rescale, 1, np.log(self.rescale)))
        prefix = self.stage.prefix if isinstance(self.stage.pattern, Global) else 0
        coords = coords.at[:, :prefix].set(rotation.coords[:prefix])  # class and register tokens stay where they are
        return Terms(rotation=dataclasses.replace(rotation, coords=PerLayer(coords)))


@scheme("cat_rope")
class CatRope(Rotary):
    """The cross-axis transformer's RoPE: columns turn even pairs and rows odd ones, on -pi .. pi (its "3D" RoPE; CAT, section 2.2).

    The shorter side keeps the aspect ratio, and rows count upwards.

    Options:
        coords: "endpoints", where the first and the last patch of the longer side lie at -+pi (the released code); or "half_open", where
            patch i of n lies at pi (2 i - n) / n, so that pi itself is left out (the formula in the paper).
        mode: "paper"; "paper_unit", the same with all frequencies 1, which is what the released code's formula gives; or "released",
            bit-compatible with that code, where q and k are no rotated vectors but multiplied, channel by channel, by a rotated vector
            of ones. That is neither relative nor does it keep norms.
        base: of the paper's frequencies, base**(-2 i / D), 10000.
    """

    paper = "CAT, section 2.2"
    equation = "theta = x f or y f, f = 10000^(-2r/D), (x, y) in [-pi, pi]"
    resolution = "interpolate"

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, mode: str = "paper", base: float = 10000.0, coords: str = "endpoints", **options):
        super().__init__(stage, rngs=rngs, **options)
        check_option("mode", mode, ("paper", "paper_unit", "released"))
        check_option("coords", coords, ("endpoints", "half_open"))
        self.mode, self.base, self.half_open = mode, check_finite("base", base), coords == "half_open"
        if mode == "released":
            self.acts, self.relative, self.keeps_norms = "transform", False, False

    def coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.coords`."""
        coords = (2 * grids.absolute(grid) - grid) / max(grid) if self.half_open else grids.endpoints(grid)
        return coords * (-np.pi, np.pi)

    def freqs(self) -> np.ndarray:
        """See `Rotary.freqs`."""
        rungs = frequencies.deal(1, self.pairs // 2) / 2
        ladder = frequencies.decay(rungs, self.base) if self.mode == "paper" else np.ones_like(rungs)
        return frequencies.two_axes(ladder, "xy", alternate=True)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        if self.mode != "released":
            return super().terms(grid, key)
        coords = whole_map(self.coords(grid), self.stage)
        theta = Rotation(coords, jnp.asarray(self.freqs(), coords.dtype)).angles()
        ones = jnp.ones((1, coords.shape[0], 1, self.stage.head_dim), coords.dtype)
        return Terms(transform=Gain(rotate_by_angles(ones, theta, pairing=self.pairing, implementation="xla")))
