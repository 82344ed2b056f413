"""Frequencies of rotary schemes, the maps that they reconstruct, and the decay of scores."""

import jax
import numpy as np
from jaxtyping import Float

from rope_jax.positions import PerLayer, Position
from rope_jax.positions.frequencies import AXIAL_GENERATORS, deal
from rope_jax.positions.grids import Grid

# Frequency ladders of the thesis' figure C.1, 2-D RoPE's and the three readings of Axial RoPE's,
# and the formulas of their legends: the angle at coordinate 1 of rung t, from 0 up to 1.
READINGS = {
    "rope2d": (AXIAL_GENERATORS["exponential"], r"2-D RoPE: $100^{-t}$"),
    "hdit": (AXIAL_GENERATORS["hdit"], r"HDiT's code: $\pi \cdot 10^t$"),
    "eq35": (AXIAL_GENERATORS["eq35"], r"thesis, equation 3.5: $10^t$"),
    "table31": (AXIAL_GENERATORS["table31"], r"thesis, table 3.1: $\pi^{t \ln 10}$"),
}


def frequencies(position: Position, grid: Grid) -> Float[np.ndarray, "layers N A R"]:
    """Rotation from one token to the next, for each pair of channels and axis.

    >>> import rope_jax
    >>> model = rope_jax.create_model("vit_digits", depth=1, width=16, heads=2)
    >>> frequencies(model.position, (4, 4)).shape
    (1, 2, 2, 2)

    Args:
        position: the scheme of one stage: `model.position`, or that of an entry of `model.stages`.
        grid: (H, W) of the map, on which the spacing of tokens may depend.

    Returns:
        Radians per token in float64. The axis of layers or of heads is 1 if all share their
        frequencies. Axes are (y, x); a scheme in raster order has one. Along a side of one token
        they are 0.

    Raises:
        ValueError: the scheme has no rotation by coordinates.
    """
    rotation = position.terms(grid).rotation
    if rotation is None:
        raise ValueError(
            f"{type(position).__name__} rotates nothing by coordinates: "
            "use a rotary scheme, for example axial_rope"
        )
    # The coordinates are those of a whole map, or of one window on it.
    pattern = position.stage.pattern
    rows, columns = pattern.fit(grid).size if hasattr(pattern, "fit") else grid
    coords = np.asarray(jax.device_get(rotation.coords), np.float64)
    length = rows * columns
    coords = coords[-length:].reshape(length, -1)
    right, down = (coords[step % length] - coords[0] for step in (1, columns))
    spacing = [down[0], right[1]] if coords.shape[-1] == 2 else [right[0]]
    freqs = rotation.freqs
    freqs = freqs.value if isinstance(freqs, PerLayer) else freqs[None]
    return np.asarray(freqs, np.float64) * np.array(spacing)[:, None]


def fourier_reconstruction(
    freqs: Float[np.ndarray, "... A R"], grid: Grid, *, centre: tuple[int, int] | None = None
) -> Float[np.ndarray, "H W"]:
    """Reconstructs a point from the frequencies of a rotation (Heo et al., figure 1).

    Returns the mean over frequencies F of cos(F . (p - centre)) at each token p. This is the
    inverse Fourier transform of a single point, restricted to the frequencies of the scheme: the
    sharper the peak, the better the scheme separates one position from the others.

    >>> wave = np.array([[0.0], [np.pi / 2]])  # along x, with a period of 4 tokens
    >>> fourier_reconstruction(wave, (1, 4)).round(6).tolist()
    [[-1.0, 0.0, 1.0, 0.0]]

    Args:
        freqs: radians per token on two axes, from `frequencies`; of any layers and heads.
        grid: (H, W) in tokens.
        centre: (row, column) of the point; None for (H // 2, W // 2).

    Returns:
        Values in [-1, 1], with 1 at the centre.

    Raises:
        ValueError: the frequencies have one axis.
    """
    place = np.array(grid) // 2 if centre is None else centre
    offsets = np.stack(np.indices(grid), axis=-1) - np.array(place)
    return np.mean([np.cos(offsets @ wave) for wave in _waves(freqs)], axis=0)


def fourier_mask_reconstruction(
    freqs: Float[np.ndarray, "... A R"], grid: Grid
) -> Float[np.ndarray, "H W"]:
    """Reconstructs a point from the bins of its discrete Fourier transform near the frequencies.

    For each frequency the nearest bin and its opposite are kept. Scaled to 1 at the centre.

    >>> wave = np.array([[0.0], [np.pi / 2]])
    >>> fourier_mask_reconstruction(wave, (1, 4)).tolist()
    [[-1.0, 0.0, 1.0, 0.0]]

    Args:
        freqs, grid: as for `fourier_reconstruction`.
    """
    point, mask = np.zeros(grid), np.zeros(grid)
    point[grid[0] // 2, grid[1] // 2] = 1
    bins = np.rint(_waves(freqs) * grid / (2 * np.pi)).astype(int)
    for sign in (1, -1):
        mask[(sign * bins[:, 0]) % grid[0], (sign * bins[:, 1]) % grid[1]] = 1
    return np.fft.ifft2(np.fft.fft2(point) * mask).real * point.size / mask.sum()


def _waves(freqs: np.ndarray) -> Float[np.ndarray, "waves 2"]:
    if freqs.shape[-2] != 2:
        raise ValueError(
            f"frequencies of {freqs.shape[-2]} axes have no picture on a map: "
            "use a scheme of two axes"
        )
    return np.moveaxis(freqs, -2, -1).reshape(-1, 2)


def rotation_angles(reading: str, width: int, *, heads: int = 1) -> Float[np.ndarray, " width"]:
    """Angle of each dimension at coordinate 1, heads side by side (thesis, figure C.1).

    >>> rotation_angles("eq35", 4).round(2).tolist()
    [1.0, 1.78, 3.16, 5.62]

    Args:
        reading: "rope2d", whose heads share one ladder of `width` steps; or a reading of Axial RoPE
            ("hdit", "eq35", "table31"), whose ladder is dealt out to the heads.
        width: number of dimensions, divisible by `heads`.
        heads: of Axial RoPE.

    Returns:
        Radians.

    Raises:
        ValueError: the heads do not divide the width.
    """
    if width % heads:
        raise ValueError(f"width={width} is not divisible by heads={heads}: change one of them")
    heads = 1 if reading == "rope2d" else heads
    ladder, _ = READINGS[reading]
    return ladder(deal(heads, width // heads)).ravel()


def score_decay(
    freqs: Float[np.ndarray, "... A R"], distances: Float[np.ndarray, " n"], *, directions: int = 16
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Decay of attention scores with the distance of query and key, for any content.

    >>> score, bound = score_decay(np.array([[[np.pi]]]), np.array([0.0, 1.0, 2.0]))
    >>> score.tolist()
    [1.0, -1.0, 1.0]

    Args:
        freqs: radians per token, from `frequencies`.
        distances: in tokens.
        directions: number of directions of the offset, equally spaced over half a turn, over which
            the results are averaged; a scheme of one axis has one direction.

    Returns:
        score: of a query and key of ones, relative to distance 0: the mean cosine.
        bound: RoFormer's bound on that score, the mean over i of the absolute sum of
            exp(i F . offset) over the first i pairs (arXiv 2104.09864, section 3.4.3). It is also
            relative to the score at distance 0, where it is (R + 1) / 2, the mean of 1 to R.

        Both are averaged over layers, heads and directions; no score exceeds its bound.
    """
    axes = freqs.shape[-2]
    turns = np.arange(directions) * np.pi / directions if axes == 2 else np.zeros(1)
    unit = np.stack([np.sin(turns), np.cos(turns)])[-axes:]  # [A, directions]
    angles = np.einsum("...ar,ad,n->n...dr", freqs, unit, np.asarray(distances, np.float64))
    waves = np.exp(1j * angles)
    reduced = tuple(range(1, waves.ndim))
    bound = np.abs(np.cumsum(waves, axis=-1)).mean(axis=reduced)
    return waves.real.mean(axis=reduced), bound
