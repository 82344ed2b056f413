"""Rotary schemes: coordinates and frequencies; the rotation itself is in `rope_jax_kernels`.

A scheme defines the tokens' coordinates (`coords`) and the frequency of each pair of channels along
each axis (`freqs`): theta[n, l, r] = sum_a coords[l, a] * freqs[n, a, r].
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.positions import frequencies, grids
from rope_jax.positions.extension import Extension, Extent
from rope_jax.positions.grids import Grid, Video
from rope_jax.positions.scheme import (
    PerLayer,
    Position,
    Scale,
    Stage,
    Terms,
    advice_for_heads,
    scheme,
)
from rope_jax_kernels import Global, Rotation, Window, rotate

Pairing = Literal["half", "interleaved"]


class Rotary(Position):
    """Base of the rotary schemes.

    >>> from rope_jax.positions import create_position
    >>> stage = Stage(depth=2, heads=3, head_dim=16, channels=48, grid=(4, 5))
    >>> position = create_position("rope2d(k_rope=2)", stage, rngs=nnx.Rngs(0))
    >>> position.coords((2, 3)).shape, position.freqs().shape  # [H, W, A], [N or 1, A, R]
    ((2, 3, 2), (1, 2, 4))

    Options of every rotary scheme:
        pairing: "half" turns channels (r, R + r) together, "interleaved" (2r, 2r + 1). Official
            weights of Heo et al., EVA-02 and VisionLLaMA are interleaved; the converter permutes.
        k_rope: only the first head_dim / k_rope channels of a head are rotated (thesis section
            3.3).
        extend: the rule for grids of a different size than in training: "none" (the scheme's own),
            "extrapolate", "interpolate", "ntk" or "yarn", see `rope_jax.positions.extension`.
        log_scale: False; True scales logits by ln L / ln L_trained, for L tokens in attention, in
            place of yarn's temperature.
        alpha: yarn interpolates pairs that turn less often than this over the training grid; 1
            by default.
        beta: yarn extrapolates pairs that turn more often than this over the training grid; 32
            by default.
    """

    acts = "rotation"
    resolution = "extrapolate"
    extension = Extension()
    of_training = ("trained",)
    multiple: ClassVar[int] = 2  # divides the number of pairs, so that all axes have as many

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, pairing: Pairing = "half", k_rope: int = 1):
        super().__init__(stage, rngs=rngs)
        self.trained = stage
        self.pairing = pairing
        channels, head_dim = 2 * self.multiple, stage.head_dim
        if k_rope < 1 or head_dim % (channels * k_rope):
            fit = [k for k in range(1, head_dim + 1) if head_dim % (channels * k) == 0]
            raise ValueError(
                f"k_rope={k_rope} does not fit head dimension {head_dim}: the head dimension "
                f"must be divisible by {channels} * k_rope; {advice_for_heads('k_rope', fit)}"
            )
        self.pairs = head_dim // (2 * k_rope)

    @property
    def on_map(self) -> bool:
        """True if q and k are rotated on the whole map, as no window represents the others."""
        own_box = self.stage.window_box == "own"
        return isinstance(self.stage.pattern, Window) and not self.relative and not own_box

    @property
    def wraps_attention(self) -> bool:
        return self.on_map or super().wraps_attention

    def coords(self, grid: Grid) -> Float[np.ndarray, "H W A"]:
        """Returns the coordinates of the tokens of a map; row and column unless overridden."""
        return grids.absolute(grid)

    def prefix_coords(self, grid: Grid | Video) -> Float[np.ndarray, "P A"] | None:
        """Returns the coordinates of prefix tokens, or None for the origin (no rotation)."""
        return None

    @abc.abstractmethod
    def freqs(self) -> Float[np.ndarray, "N A R"] | PerLayer:
        """Returns radians per unit of coordinate [N, A, R]; N is the number of heads, or 1."""
        raise NotImplementedError

    def extend(self, **options: str | bool | float) -> None:
        """Sets fields of the extension; the others do not change.

        Raises:
            ValueError: an impossible value, or a scheme for which no extension is defined.
        """
        if self.extension is None:
            raise ValueError(
                f"{', '.join(options)} are for rotations by coordinates times frequencies, which "
                "this position is not with these options: leave them out"
            )
        self.extension = dataclasses.replace(self.extension, **options)

    @property
    def stage_in_training(self) -> Stage:
        """The stage in training, with the kind of attention of this scheme's layers."""
        if type(self.trained.pattern) is type(self.stage.pattern):
            return self.trained
        return dataclasses.replace(self.trained, pattern=self.stage.pattern)  # see `with_pattern`

    def extents(self, grid: Grid | Video) -> tuple[Extent, Extent]:
        """The extents that a query attends to in training and on another grid."""
        trained = self.stage_in_training
        stages = ((trained, trained.grid), (self.stage, grid))
        before, now = (
            Extent.from_coords(self.coords(self._box(stage, on)), stage.region(on))
            for stage, on in stages
        )
        return before, now

    @property
    def extends(self) -> bool:
        """True if a query's extent on the current map differs from that in training."""
        on_map = [self.with_pattern(Global())] if self.stage.global_layers else []
        pairs = (scheme.extents(self.stage.grid) for scheme in [self, *on_map])
        return not all(all(map(np.array_equal, *pair)) for pair in pairs)

    def _box(self, stage: Stage, grid: Grid | Video) -> Grid | Video:
        """The map of the coordinates: the window, where each one has its own box."""
        own_box = isinstance(stage.pattern, Window) and self.stage.window_box == "own"
        return stage.region(grid) if own_box else grid

    def terms(self, grid: Grid | Video, key: Array | None = None) -> Terms:
        freqs, logit_scale = self.freqs(), 1.0
        if self.extension is not None and self.extension != Extension():
            extents = self.extents(grid)
            prefix = self.stage.prefix if isinstance(self.stage.pattern, Global) else 0
            logit_scale = self.extension.logit_scale(*extents, prefix)
            is_stacked = isinstance(freqs, PerLayer)
            freqs = self.extension.freqs(freqs.value if is_stacked else freqs, *extents)
            freqs = PerLayer(freqs.astype(self.stage.dtype)) if is_stacked else freqs
        if not isinstance(freqs, PerLayer):
            freqs = jnp.asarray(freqs, self.stage.dtype)
        if self.on_map:
            coords = whole_map(self.coords(grid), self.stage)
            rotation = Rotation(coords, freqs, self.pairing)
            return Terms(transform=RotateMap(rotation), logit_scale=logit_scale)
        grid = self._box(self.stage, grid)
        coords = token_coords(self.coords(grid), self.stage, self.prefix_coords(grid))
        return Terms(rotation=Rotation(coords, freqs, self.pairing), logit_scale=logit_scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotateMap:
    """A `Terms.transform` that rotates q and k by the coordinates of the whole map.

    Attributes:
        rotation: of all tokens of the map, [H*W, A].
    """

    rotation: Rotation

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        in_order = lambda x: x.reshape(x.shape[0], -1, *x.shape[-2:])
        turned_q, turned_k = rotate(in_order(q), in_order(k), self.rotation)
        return attend(turned_q.reshape(q.shape), turned_k.reshape(k.shape), v)


def token_coords(
    coords: Float[np.ndarray, "*map A"],
    stage: Stage,
    prefix: Float[np.ndarray, "P A"] | None = None,
) -> Float[Array, "L A"]:
    """Coordinates of a map as attention expects them for the stage's pattern.

    For relative schemes, whose scores depend on differences of coordinates only: one window
    represents all of them, shifted or not. Its coordinates are the map's first ones, with the map's
    spacing.

    Args:
        coords: of a map [H, W, A] or a video [T, H, W, A].
        stage: its prefix tokens come first (global attention only).
        prefix: their coordinates; None for the origin.

    Raises:
        ValueError: for windows, coordinates that are not evenly spaced.
    """
    if isinstance(stage.pattern, Window):
        height, width = stage.region(coords.shape[:2])
        steps = [np.diff(coords, axis=axis) for axis in (0, 1)]
        even = all(np.allclose(step, step[:1, :1]) for step in steps)
        if (height, width) != coords.shape[:2] and not even:
            raise ValueError(
                "the coordinates of a rotary scheme are not evenly spaced, so that no window "
                "represents the others: declare `relative = False` in its class"
            )
        # A window that is padded may be larger than the map: the coordinates continue as they are.
        beyond = [(0, max(n - m, 0)) for n, m in zip((height, width), coords.shape, strict=False)]
        coords = np.pad(coords, [*beyond, (0, 0)], "reflect", reflect_type="odd")[:height, :width]
    if not isinstance(stage.pattern, Global):
        prefix = np.zeros((0, coords.shape[-1]))
    return whole_map(coords, stage, prefix)


def whole_map(
    coords: Float[np.ndarray, "*map A"],
    stage: Stage,
    prefix: Float[np.ndarray, "P A"] | None = None,
) -> Float[Array, "L A"]:
    """Coordinates of all tokens for any pattern, as a `Terms.transform` needs them."""
    axes = coords.shape[-1]
    prefix = np.zeros((stage.prefix, axes)) if prefix is None else prefix
    return jnp.asarray(np.concatenate([prefix, coords.reshape(-1, axes)]), stage.dtype)


@scheme("rope1d")
class Rope1D(Rotary):
    """1-D RoPE on the token's index in reading order (RoFormer; thesis equation 3.2).

    Options:
        base: of the frequencies base**(-r / R), 10000.
    """

    paper = "thesis, eq. 3.2; Su et al., arXiv 2104.09864"
    equation = "theta = l f, f = 10000^(-2r/D)"
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
        self.base = base

    def coords(self, grid: Grid) -> Float[np.ndarray, "H W A"]:
        return grids.raster(grid)

    def freqs(self) -> Float[np.ndarray, "N A R"]:
        return frequencies.ladder(self.pairs, self.base)[:, None]


@scheme("rope2d")
class Rope2D(Rotary):
    """2-D RoPE on row and column, x first (thesis equation 3.4).

    The thesis' "2D RoPE" and Heo et al.'s "RoPE-Axial" (equations 12 and 13).

    Options:
        base: of the frequencies base**(-i / (R/2)), 100; Heo et al.'s Swin uses 50.
        shared: True; False distributes one longer ladder over the heads.
        freq_span: with k_rope > 1, "reduced" fits the whole ladder into the fewer pairs, "full"
            keeps its first part.
        order: of the pairs, "blocks" (x turns the first half: the thesis, and Heo et al.'s code) or
            "alternate" (x and y in turn: Heo et al.'s equation 12 as printed).
    """

    paper = "thesis, eq. 3.4; Heo et al., arXiv 2403.13298, eq. 12, 13"
    equation = "theta = x f or y f, f = 100^(-4r/D)"

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        base: Scale = 100.0,
        shared: bool = True,
        freq_span: Literal["reduced", "full"] = "reduced",
        order: Literal["blocks", "alternate"] = "blocks",
        pairing: Pairing = "half",
        k_rope: int = 1,
    ):
        super().__init__(stage, rngs=rngs, pairing=pairing, k_rope=k_rope)
        self.order = order
        self.base = base
        self.span = 1.0 if freq_span == "reduced" else 2 * self.pairs / stage.head_dim
        self.heads, self.per_head = (1, False) if shared else (stage.heads, True)

    def freqs(self) -> Float[np.ndarray, "N A R"]:
        rungs = frequencies.deal(self.heads, self.pairs // 2) * self.span
        ladder = frequencies.decay(rungs, self.base)
        return frequencies.two_axes(ladder, "xy", alternate=self.order == "alternate")


@scheme("rope_mixed")
class RopeMixed(Rotary):
    """RoPE-Mixed: both axes rotate every pair, with learned frequencies (Heo et al., equation 14).

    Each head of each layer starts as a ladder and a second one at a right angle to it, turned by a
    random angle (arXiv 2403.13298).

    Options:
        base: of the initial frequencies base**(-i / (R/2)), 10.
    """

    paper = "Heo et al., arXiv 2403.13298, eq. 14"
    equation = "theta = x f_x + y f_y, f learned"
    per_head = per_layer = learnable = True

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        base: Scale = 10.0,
        pairing: Pairing = "half",
        k_rope: int = 1,
    ):
        super().__init__(stage, rngs=rngs, pairing=pairing, k_rope=k_rope)
        ladder = frequencies.ladder(self.pairs // 2, base)[0]
        shape = (stage.depth, stage.heads, 1)
        angle = jax.random.uniform(rngs.params(), shape, stage.dtype, 0, 2 * np.pi)
        right = angle + np.pi / 2
        y = jnp.concatenate([ladder * jnp.sin(angle), ladder * jnp.sin(right)], axis=-1)
        x = jnp.concatenate([ladder * jnp.cos(angle), ladder * jnp.cos(right)], axis=-1)
        freqs = jnp.stack([y, x], axis=2).astype(stage.dtype)
        self.mixed = nnx.Param(freqs, decay=False)  # [depth, N, (y, x), R]

    def freqs(self) -> PerLayer:
        return PerLayer(self.mixed[...])


@scheme("axial_rope")
class AxialRope(Rotary):
    """Axial RoPE: rotates part of the channels, with frequencies per head, on box coordinates.

    (Thesis section 3.3; HDiT.)

    Options:
        k_rope: rotates the first head_dim / k_rope channels, 2.
        shared: False; True gives all heads the same frequencies.
        generator: the ladder: "hdit" (pi .. 10 pi), "eq35" (1 .. 10), "table31" (1 .. 13.96),
            "exponential" (1 .. 1/100), "pixel" (pi .. 5 pi in equal steps; lucidrains'
            rotary-embedding-torch), or "nyquist" (as "hdit", but trained on maps of n < 20 patches
            pi .. n pi / 2, which do not alias there), in radians per unit of coordinate.
        coords: "centres" of patches in [-1, 1], "endpoints" (first and last patch on the border),
            or "absolute" (row, column).
        aspect: of the box, "isotropic" (its long side is [-1, 1], patches are square) or "separate"
            (each side is [-1, 1]).
        axis_order: the axis that turns the first pairs, "yx" or "xy".
        window_coords: of a window, "global_spacing" (patches are spaced as on the map) or
            "local_unit" (the window is the box).
    """

    paper = "thesis, section 3.3; Crowson et al., arXiv 2401.11605"
    equation = "theta = y f or x f, f = pi .. 10 pi, (x, y) in [-1, 1]"
    resolution = "interpolate"
    per_head = True

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        k_rope: int = 2,
        shared: bool = False,
        generator: Literal[*frequencies.AXIAL_GENERATORS, "nyquist"] = "hdit",
        coords: Literal["centres", "endpoints", "absolute"] = "centres",
        aspect: Literal["isotropic", "separate"] = "isotropic",
        axis_order: Literal["yx", "xy"] = "yx",
        window_coords: Literal["global_spacing", "local_unit"] = "global_spacing",
        pairing: Pairing = "half",
    ):
        super().__init__(stage, rngs=rngs, pairing=pairing, k_rope=k_rope)
        self.generator = generator
        self.coords_name = coords
        self.aspect = aspect
        self.axis_order = axis_order
        if coords == "absolute" and aspect != "isotropic":
            raise ValueError(
                f"aspect={aspect} is the form of a box, which coords=absolute does not have: leave "
                "it out, or use other coords"
            )
        if coords == "absolute" and generator == "nyquist":
            raise ValueError(
                "generator=nyquist is for coordinates in a box, which coords=absolute does not "
                "have: use generator=exponential, or other coords"
            )
        if window_coords == "local_unit":
            self.stage = dataclasses.replace(stage, window_box="own")
        self.resolution = "extrapolate" if coords == "absolute" else "interpolate"
        self.heads, self.per_head = (1, False) if shared else (stage.heads, True)

    def coords(self, grid: Grid) -> Float[np.ndarray, "H W A"]:
        coords = getattr(grids, self.coords_name)(grid)
        return coords if self.aspect == "isotropic" else coords * max(grid) / grid

    def freqs(self) -> Float[np.ndarray, "N A R"]:
        rungs = frequencies.deal(self.heads, self.pairs // 2)
        if self.generator == "nyquist":
            trained = self.stage_in_training
            coords = self.coords(self._box(trained, trained.grid))
            steps = [np.diff(coords, axis=axis).max(initial=0.0) for axis in (0, 1)]
            freqs = frequencies.nyquist(rungs, max(steps))
        else:
            freqs = frequencies.AXIAL_GENERATORS[self.generator](rungs)
        return frequencies.two_axes(freqs, self.axis_order)


@scheme("axial_rope_v1")
class AxialRopeV1(Rotary):
    """HDiT's first Axial RoPE: learned frequencies per axis, head and layer.

    On centres of patches in a box; rows turn the first pairs. The parameters are logarithms of
    frequencies; in every head they start as pi .. 5 pi, both included, in equal ratios
    (k-diffusion, `axial_rope.py`).
    """

    paper = "Crowson et al., arXiv 2401.11605"
    equation = "theta = y f or x f, f learned from pi .. 5 pi, (x, y) in [-1, 1]"
    resolution = "interpolate"
    per_head = per_layer = learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, pairing: Pairing = "half", k_rope: int = 1):
        super().__init__(stage, rngs=rngs, pairing=pairing, k_rope=k_rope)
        ladder = np.linspace(np.log(np.pi), np.log(5 * np.pi), self.pairs // 2)
        start = jnp.tile(jnp.asarray(ladder, stage.dtype), (stage.depth, stage.heads, 2, 1))
        self.log_freqs = nnx.Param(start, decay=False)  # [depth, N, (y, x), R / 2]

    def coords(self, grid: Grid) -> Float[np.ndarray, "H W A"]:
        return grids.centres(grid)

    def freqs(self) -> PerLayer:
        rows, columns = jnp.moveaxis(jnp.exp(self.log_freqs[...]), 2, 0)
        zeros = jnp.zeros_like(rows)
        y = jnp.concatenate([rows, zeros], axis=-1)
        x = jnp.concatenate([zeros, columns], axis=-1)
        return PerLayer(jnp.stack([y, x], axis=2))
