"""Rotary schemes: coordinates, frequencies and nothing else. The rotation itself is `rope_jax_kernels`' business.

A scheme says where the tokens are (`coords`) and how fast each pair of channels turns with each axis (`freqs`).
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from rope_jax.positions import frequencies, grids
from rope_jax.positions.grids import Grid
from rope_jax.positions.scheme import PerLayer, Position, Stage, Terms, check_finite, check_option, scheme
from rope_jax_kernels import Global, Rotation, Window


class Rotary(Position):
    """Base of the rotary schemes.

    Options of all of them:
        pairing: "half" turns channels (r, R + r) together, "interleaved" (2r, 2r + 1). Official weights of Heo, EVA-02 and
            VisionLLaMA are interleaved; the converter permutes.
        k_rope: only the first head_dim / k_rope channels of a head are rotated (thesis section 3.3).
    """

    acts = "rotation"
    resolution = "extrapolate"
    multiple: ClassVar[int] = 2  # of the number of pairs: as many for each axis

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, pairing: str = "half", k_rope: int = 1):
        super().__init__(stage, rngs=rngs)
        check_option("pairing", pairing, ("half", "interleaved"))
        if not isinstance(k_rope, int) or k_rope < 1 or stage.head_dim % (2 * self.multiple * k_rope):
            fit = [k for k in range(1, stage.head_dim + 1) if stage.head_dim % (2 * self.multiple * k) == 0]
            advice = f"use k_rope of {' or '.join(map(str, fit))}, or" if fit else "use"
            raise ValueError(
                f"k_rope={k_rope} does not go with head dimension {stage.head_dim}: the head dimension must be divisible by "
                f"{2 * self.multiple} * k_rope; {advice} a model with another width or number of heads"
            )
        self.pairing = pairing
        self.pairs = stage.head_dim // (2 * k_rope)

    def coords(self, grid: Grid) -> np.ndarray:
        """Coordinates [H, W, A] of the tokens of a map."""
        raise NotImplementedError

    def prefix_coords(self, grid: Grid) -> np.ndarray | None:
        """Coordinates [P, A] of class and register tokens; None for the origin, where no rotation happens."""
        return None

    def freqs(self) -> np.ndarray | PerLayer:
        """Radians per unit of coordinate, [N or 1, A, R]."""
        raise NotImplementedError

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        coords = token_coords(self.coords(grid), self.stage, self.prefix_coords(grid))
        freqs = self.freqs()
        if not isinstance(freqs, PerLayer):
            freqs = jnp.asarray(freqs, self.stage.dtype)
        return Terms(rotation=Rotation(coords, freqs, self.pairing))


def token_coords(coords: np.ndarray, stage: Stage, prefix: np.ndarray | None = None) -> Array:
    """Coordinates [H, W, A] of a map (of a video [T, H, W, A]), as attention takes them for the stage's pattern: [L, A].

    Scores depend on differences of coordinates only, so one window stands for all of them, shifted or not: its coordinates are the
    map's first ones, which keeps the map's spacing. Prefix tokens get coordinates `prefix` [P, A], or the origin.
    """
    if isinstance(stage.pattern, Window):
        height, width = stage.pattern.fit(coords.shape[:2]).size
        coords = coords[:height, :width]
    return whole_map(coords, stage, prefix if isinstance(stage.pattern, Global) else np.zeros((0, coords.shape[-1])))


def whole_map(coords: np.ndarray, stage: Stage, prefix: np.ndarray | None = None) -> Array:
    """The same of all tokens, whatever the pattern: as a `Terms.transform` needs them."""
    axes = coords.shape[-1]
    prefix = np.zeros((stage.prefix, axes)) if prefix is None else prefix
    return jnp.asarray(np.concatenate([prefix, coords.reshape(-1, axes)]), stage.dtype)


@scheme("rope1d")
class Rope1D(Rotary):
    """1-D RoPE on the index of the token in reading order (RoFormer, arXiv 2104.09864; thesis equation 3.2). base: 10000."""

    paper = "thesis, eq. 3.2; Su et al., arXiv 2104.09864"
    equation = "theta = l f, f = 10000^(-2r/D)"

    multiple = 1

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: float = 10000.0, **options):
        super().__init__(stage, rngs=rngs, **options)
        self.base = check_finite("base", base)

    def coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.coords`."""
        return grids.raster(grid)

    def freqs(self) -> np.ndarray:
        """See `Rotary.freqs`."""
        return frequencies.decay(frequencies.deal(1, self.pairs), self.base)[:, None]


@scheme("rope2d")
class Rope2D(Rotary):
    """2-D RoPE on row and column, x first: the thesis' "2D RoPE" (equation 3.4) and Heo's "RoPE-Axial" (equations 12 and 13).

    Options:
        base: 100; Heo's Swin uses 50.
        shared: True; False deals one longer ladder out to the heads.
        freq_span: with k_rope > 1, "reduced" fits the whole ladder into the fewer pairs, "full" keeps its first part.
        order: of the pairs, "blocks" (x turns the first half: the thesis, and Heo's code) or "alternate" (x and y in turn: Heo's
            equation 12 as it is printed).
    """

    paper = "thesis, eq. 3.4; Heo et al., arXiv 2403.13298, eq. 12, 13"
    equation = "theta = x f or y f, f = 100^(-4r/D)"

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        base: float = 100.0,
        shared: bool = True,
        freq_span: str = "reduced",
        order: str = "blocks",
        **options,
    ):
        super().__init__(stage, rngs=rngs, **options)
        check_option("freq_span", freq_span, ("reduced", "full"))
        check_option("order", order, ("blocks", "alternate"))
        self.base, self.order = check_finite("base", base), order
        self.span = 1.0 if freq_span == "reduced" else 2 * self.pairs / stage.head_dim
        self.heads, self.per_head = (1, False) if shared else (stage.heads, True)

    def coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.coords`."""
        return grids.absolute(grid)

    def freqs(self) -> np.ndarray:
        """See `Rotary.freqs`."""
        rungs = frequencies.deal(self.heads, self.pairs // 2) * self.span
        return frequencies.two_axes(frequencies.decay(rungs, self.base), "xy", alternate=self.order == "alternate")


@scheme("rope_mixed")
class RopeMixed(Rotary):
    """RoPE-Mixed: learnable frequencies for both axes in every pair, per head and layer (Heo et al., arXiv 2403.13298, equation 14).

    Starts as a ladder of base `base` (10) and a second one at a right angle, turned by one random angle per head and layer.
    """

    paper = "Heo et al., arXiv 2403.13298, eq. 14"
    equation = "theta = x f_x + y f_y, f learned"
    per_head = per_layer = learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: float = 10.0, **options):
        super().__init__(stage, rngs=rngs, **options)
        ladder = frequencies.decay(frequencies.deal(1, self.pairs // 2), check_finite("base", base))[0]
        angle = jax.random.uniform(rngs.params(), (stage.depth, stage.heads, 1), stage.dtype, 0, 2 * np.pi)
        along = lambda turn: jnp.concatenate([ladder * turn(angle), ladder * turn(angle + np.pi / 2)], axis=-1)
        self.mixed = nnx.Param(
            jnp.stack([along(jnp.sin), along(jnp.cos)], axis=2).astype(stage.dtype), decay=False
        )  # [depth, N, (y, x), R]

    def coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.coords`."""
        return grids.absolute(grid)

    def freqs(self) -> PerLayer:
        """See `Rotary.freqs`; one set per layer."""
        return PerLayer(self.mixed[...])


@scheme("axial_rope")
class AxialRope(Rotary):
    """Axial RoPE: few channels turn, with frequencies of their own in each head, on coordinates in a box (thesis section 3.3; HDiT).

    Options:
        k_rope: 2.
        shared: False; True gives all heads the same frequencies.
        generator: the ladder: "hdit" (pi .. 10 pi), "eq35" (1 .. 10), "table31" (1 .. 13.96), "exponential" (1 .. 1/100) or "pixel"
            (pi .. 5 pi in equal steps; lucidrains' rotary-embedding-torch).
        coords: "centres" of patches in [-1, 1], "endpoints" (first and last patch on the border), or "absolute" (row, column).
        aspect: of the box, "isotropic" (its long side is [-1, 1], patches are square) or "separate" (either side is).
        axis_order: which axis turns the first pairs, "yx" or "xy".
        window_coords: of a window, "global_spacing" (patches lie as far apart as on the map) or "local_unit" (the window is the box).
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
        generator: str = "hdit",
        coords: str = "centres",
        aspect: str = "isotropic",
        axis_order: str = "yx",
        window_coords: str = "global_spacing",
        **options,
    ):
        super().__init__(stage, rngs=rngs, k_rope=k_rope, **options)
        check_option("generator", generator, tuple(frequencies.AXIAL_GENERATORS))
        check_option("coords", coords, ("centres", "endpoints", "absolute"))
        check_option("aspect", aspect, ("isotropic", "separate"))
        if coords == "absolute" and aspect != "isotropic":
            raise ValueError(
                f"aspect={aspect} is the form of a box, which coords=absolute does not have: leave it out, or use other coords"
            )
        check_option("axis_order", axis_order, ("yx", "xy"))
        check_option("window_coords", window_coords, ("global_spacing", "local_unit"))
        self.local = window_coords == "local_unit" and isinstance(stage.pattern, Window)
        self.generator, self.coords_name, self.aspect, self.axis_order = generator, coords, aspect, axis_order
        self.resolution = "extrapolate" if coords == "absolute" else "interpolate"
        self.heads, self.per_head = (1, False) if shared else (stage.heads, True)

    def coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.coords`."""
        box = self.stage.pattern.fit(grid).size if self.local else grid
        coords = getattr(grids, self.coords_name)(box)
        return coords if self.aspect == "isotropic" else coords * max(box) / box

    def freqs(self) -> np.ndarray:
        """See `Rotary.freqs`."""
        ladder = frequencies.AXIAL_GENERATORS[self.generator](frequencies.deal(self.heads, self.pairs // 2))
        return frequencies.two_axes(ladder, self.axis_order)


@scheme("axial_rope_v1")
class AxialRopeV1(Rotary):
    """HDiT's first Axial RoPE: learnable frequencies per axis, head and layer (k-diffusion, `axial_rope.py`).

    On centres of patches in a box; rows turn the first pairs. The parameters are logarithms of frequencies, and start as pi .. 5 pi,
    both included, with equal ratios, in every head.
    """

    paper = "Crowson et al., arXiv 2401.11605"
    equation = "theta = y f or x f, f learned from pi .. 5 pi, (x, y) in [-1, 1]"
    resolution = "interpolate"
    per_head = per_layer = learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, **options):
        super().__init__(stage, rngs=rngs, **options)
        ladder = np.linspace(np.log(np.pi), np.log(5 * np.pi), self.pairs // 2)
        self.log_freqs = nnx.Param(
            jnp.tile(jnp.asarray(ladder, stage.dtype), (stage.depth, stage.heads, 2, 1)), decay=False
        )  # [depth, N, (y, x), R / 2]

    def coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.coords`."""
        return grids.centres(grid)

    def freqs(self) -> PerLayer:
        """See `Rotary.freqs`; one set per layer."""
        rows, columns = jnp.moveaxis(jnp.exp(self.log_freqs[...]), 2, 0)
        still = jnp.zeros_like(rows)
        turn = lambda *halves: jnp.concatenate(halves, axis=-1)
        return PerLayer(jnp.stack([turn(rows, still), turn(still, columns)], axis=2))
