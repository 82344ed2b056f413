"""What rotations do with position: their frequencies, the waves that these add up to, and how scores fall with distance."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Complex, Float

from rope_jax.positions import PerLayer, Position
from rope_jax.positions.frequencies import AXIAL_GENERATORS, deal, decay
from rope_jax.positions.grids import Grid

# The ladders of the thesis' figure C.1: 2-D RoPE's, and the readings of Axial RoPE's.
READINGS = {"rope2d": lambda rungs: decay(rungs, 100.0)} | {name: AXIAL_GENERATORS[name] for name in ("hdit", "eq35", "table31")}


def frequencies(position: Position, grid: Grid) -> Float[np.ndarray, "layers N A R"]:
    """Radians by which a scheme turns each pair of channels from one token to the next along each axis.

    Args:
        position: a scheme with a rotation, of one stage: `model.position`, or that of an entry of `model.stages`.
        grid: (H, W) of the map, on which the distance of tokens may depend.

    Returns:
        float64; layers or heads that share their frequencies are one (layers = 1, N = 1). Axes are y, x (for raster order, one alone).

    Raises:
        ValueError: the scheme has no rotation by coordinates.
    """
    rotation = position.terms(grid).rotation
    if rotation is None:
        raise ValueError(f"{type(position).__name__} turns nothing by coordinates: use a rotary scheme, for example axial_rope")
    freqs = rotation.freqs
    freqs = np.asarray(freqs.value if isinstance(freqs, PerLayer) else freqs[None], np.float64)
    coords = _map_coords(position, grid)
    steps = [coords[1, 0] - coords[0, 0], coords[0, 1] - coords[0, 0]][-coords.shape[-1] :]
    return freqs * np.stack([step[axis] for axis, step in enumerate(steps)])[:, None]


def _map_coords(position: Position, grid: Grid) -> np.ndarray:
    """Coordinates of the first 2 x 2 tokens of a map at least: a window has those of its own part."""
    coords = np.asarray(jax.device_get(position.terms(grid).rotation.coords), np.float64)
    pattern = position.stage.pattern
    rows, columns = pattern.fit(grid).size if hasattr(pattern, "fit") else grid
    if min(rows, columns) < 2:
        raise ValueError(f"a map of {grid[0]}x{grid[1]} tokens is too small to tell its spacing: use at least 2 rows and 2 columns")
    return coords[-rows * columns :].reshape(rows, columns, -1)


def fourier_reconstruction(
    freqs: Float[np.ndarray, "... A R"], grid: Grid, centre: Sequence[int] | None = None
) -> Float[np.ndarray, "H W"]:
    """What a rotation can tell of the place `centre`: the mean of its waves there, cos(F . (p - centre)) (Heo et al., figure 1).

    That is the inverse Fourier transform of a single point, cut down to the frequencies of the scheme. The sharper the peak, the better
    the scheme tells one place from another.

    Args:
        freqs: radians per token, from `frequencies`: of one layer or of all, one head or all.
        grid: (H, W) in tokens.
        centre: (y, x) in tokens; None for (H // 2, W // 2).

    Returns:
        In [-1, 1], and 1 at the centre.
    """
    waves = _as_vectors(freqs)
    offsets = _offsets(grid, centre)
    return np.mean([np.cos(offsets @ wave) for wave in waves], axis=0)


def fourier_mask_reconstruction(
    freqs: Float[np.ndarray, "... A R"], grid: Grid, centre: Sequence[int] | None = None
) -> Float[np.ndarray, "H W"]:
    """The same through the discrete Fourier transform: of a point at `centre`, the bins nearest to the frequencies are kept.

    Each frequency keeps its bin and that of its opposite. Scaled to 1 at the centre; arguments as in `fourier_reconstruction`.
    """
    point = np.zeros(grid)
    place = (grid[0] // 2, grid[1] // 2) if centre is None else tuple(centre)
    point[place] = 1
    bins = np.rint(_as_vectors(freqs) * grid / (2 * np.pi)).astype(int)
    mask = np.zeros(grid)
    for sign in (1, -1):
        mask[(sign * bins[:, 0]) % grid[0], (sign * bins[:, 1]) % grid[1]] = 1
    return np.fft.ifft2(np.fft.fft2(point) * mask).real * point.size / mask.sum()


def _as_vectors(freqs: np.ndarray) -> Float[np.ndarray, "waves A"]:
    if freqs.shape[-2] != 2:
        raise ValueError(f"frequencies of {freqs.shape[-2]} axes have no picture on a map: use a scheme of two axes")
    return np.moveaxis(freqs, -2, -1).reshape(-1, 2)


def _offsets(grid: Grid, centre: Sequence[int] | None) -> Float[np.ndarray, "H W 2"]:
    middle = (grid[0] // 2, grid[1] // 2) if centre is None else centre
    return np.stack(np.meshgrid(*[np.arange(n) - c for n, c in zip(grid, middle, strict=True)], indexing="ij"), axis=-1).astype(np.float64)


def rotation_angles(reading: str, width: int, *, heads: int = 1) -> Float[np.ndarray, " width"]:
    """Angle in radians of each dimension at coordinate 1, heads side by side (thesis, figure C.1).

    Args:
        reading: a key of `READINGS`: "rope2d", whose heads share one ladder of `width` rungs, or one of Axial RoPE, whose ladder is dealt
            out to the heads, so that each spans the band: the figure's repeated chunks.
        width: d, divisible by the heads.
        heads: chunks of Axial RoPE.
    """
    if reading not in READINGS:
        raise ValueError(f"reading={reading!r} is unknown; use one of {', '.join(READINGS)}")
    if width % heads:
        raise ValueError(f"width={width} is not divisible by heads={heads}: change one of them")
    heads = 1 if reading == "rope2d" else heads
    return READINGS[reading](deal(heads, width // heads)).ravel()


def score_decay(
    freqs: Float[np.ndarray, "... A R"], distances: Float[np.ndarray, " n"], *, directions: int = 16
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """How scores fall with the distance of query and key, whatever these contain.

    Args:
        freqs: radians per token, from `frequencies`.
        distances: in tokens.
        directions: of the offset, equally spaced over half a turn, over which is averaged; with one axis there is one.

    Returns:
        The score of a query and key of ones in every pair, divided by that at distance 0: the mean cosine. And RoFormer's bound on the
        change of scores, the mean over i of |sum of the first i pairs' exp(i F . offset)| divided by that at distance 0
        (arXiv 2104.09864, section 3.4.3). Both averaged over layers, heads and directions.
    """
    axes = freqs.shape[-2]
    turns = np.arange(directions) * np.pi / directions if axes == 2 else np.zeros(1)
    unit = np.stack([np.sin(turns), np.cos(turns)])[-axes:]  # [A, directions]
    angles = np.einsum("...ar,ad,n->n...dr", freqs, unit, np.asarray(distances, np.float64))
    waves: Complex[np.ndarray, "n ... r"] = np.exp(1j * angles)
    rest = tuple(range(1, waves.ndim))
    pairs = freqs.shape[-1]
    bound = np.abs(np.cumsum(waves, axis=-1)).mean(axis=rest) / ((pairs + 1) / 2)
    return waves.real.mean(axis=rest), bound
