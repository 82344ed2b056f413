"""Rotary schemes: coordinates, frequencies and nothing else. The rotation itself is `rope_jax_kernels`' business.

A scheme says where the tokens are (`coords`) and how fast each pair of channels turns with each axis (`freqs`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from rope_jax.positions import frequencies, grids
from rope_jax.positions.scheme import Grid, PerLayer, Position, Stage, Terms, check_finite, check_option, scheme, token_coords
from rope_jax_kernels import Rotation


class Rotary(Position):
    """Base of the rotary schemes.

    Options of all of them:
        pairing: "half" turns channels (r, R + r) together, "interleaved" (2r, 2r + 1). Official weights of Heo, EVA-02 and
            VisionLLaMA are interleaved; the converter permutes.
        k_rope: only the first head_dim / k_rope channels of a head are rotated (thesis section 3.3).
    """

    acts = "rotation"
    axes = 2

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, pairing: str = "half", k_rope: int = 1):
        super().__init__(stage, rngs=rngs)
        check_option("pairing", pairing, ("half", "interleaved"))
        if not isinstance(k_rope, int) or k_rope < 1 or stage.head_dim % (2 * self.axes * k_rope):
            fit = [k for k in range(1, stage.head_dim + 1) if stage.head_dim % (2 * self.axes * k) == 0]
            advice = f"use k_rope of {' or '.join(map(str, fit))}, or" if fit else "use"
            raise ValueError(
                f"k_rope={k_rope} does not go with head dimension {stage.head_dim}: the head dimension must be divisible by "
                f"{2 * self.axes} * k_rope; {advice} a model with another width or number of heads"
            )
        self.pairing = pairing
        self.pairs = stage.head_dim // (2 * k_rope)

    def coords(self, grid: Grid) -> np.ndarray:
        """Coordinates [H, W, A] of the tokens of a map."""
        raise NotImplementedError

    def freqs(self) -> np.ndarray | PerLayer:
        """Radians per unit of coordinate, [N or 1, A, R]."""
        raise NotImplementedError

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        freqs = self.freqs()
        if not isinstance(freqs, PerLayer):
            freqs = jnp.asarray(freqs, self.stage.dtype)
        return Terms(rotation=Rotation(token_coords(self.coords(grid), self.stage), freqs, self.pairing))


@scheme("rope1d")
class Rope1D(Rotary):
    """1-D RoPE on the index of the token in reading order (RoFormer, arXiv 2104.09864; thesis equation 3.2). base: 10000."""

    axes = 1

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
    """2-D RoPE on row and column, x first: the thesis' "2D RoPE" (equation 3.4) and Heo's "RoPE-Axial" (equations 9 and 12).

    Options:
        base: 100; Heo's Swin uses 50.
        shared: True; False deals one longer ladder out to the heads.
        freq_span: with k_rope > 1, "reduced" fits the whole ladder into the fewer pairs, "full" keeps its first part.
    """

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: float = 100.0, shared: bool = True, freq_span: str = "reduced", **options):
        super().__init__(stage, rngs=rngs, **options)
        check_option("freq_span", freq_span, ("reduced", "full"))
        self.base = check_finite("base", base)
        self.span = 1.0 if freq_span == "reduced" else 2 * self.pairs / stage.head_dim
        self.heads = 1 if shared else stage.heads

    def coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.coords`."""
        return grids.absolute(grid)

    def freqs(self) -> np.ndarray:
        """See `Rotary.freqs`."""
        rungs = frequencies.deal(self.heads, self.pairs // 2) * self.span
        return frequencies.two_axes(frequencies.decay(rungs, self.base), "xy")


@scheme("rope_mixed")
class RopeMixed(Rotary):
    """RoPE-Mixed: learnable frequencies for both axes in every pair, per head and layer (Heo et al., arXiv 2403.13298, equation 14).

    Starts as a ladder of base `base` (10) and a second one at a right angle, turned by one random angle per head and layer.
    """

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
        generator: the ladder: "hdit" (pi .. 10 pi), "eq35" (1 .. 10), "table31" (1 .. 13.96) or "exponential" (1 .. 1/100).
        coords: "centres" of patches in [-1, 1], "endpoints" (first and last patch on the border), or "absolute" (row, column).
        axis_order: which axis turns the first pairs, "yx" or "xy".
    """

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        k_rope: int = 2,
        shared: bool = False,
        generator: str = "hdit",
        coords: str = "centres",
        axis_order: str = "yx",
        **options,
    ):
        super().__init__(stage, rngs=rngs, k_rope=k_rope, **options)
        check_option("generator", generator, tuple(frequencies.AXIAL_GENERATORS))
        check_option("coords", coords, ("centres", "endpoints", "absolute"))
        check_option("axis_order", axis_order, ("yx", "xy"))
        self.generator, self.coords_name, self.axis_order = generator, coords, axis_order
        self.heads = 1 if shared else stage.heads

    def coords(self, grid: Grid) -> np.ndarray:
        """See `Rotary.coords`."""
        return getattr(grids, self.coords_name)(grid)

    def freqs(self) -> np.ndarray:
        """See `Rotary.freqs`."""
        ladder = frequencies.AXIAL_GENERATORS[self.generator](frequencies.deal(self.heads, self.pairs // 2))
        return frequencies.two_axes(ladder, self.axis_order)
