"""The papers' figures that follow from definitions alone: their numbers, and how they are drawn."""

import contextlib
import pathlib
from collections.abc import Sequence

import numpy as np
from flax import nnx

from rope_jax.analysis import plots
from rope_jax.analysis.rotation import READINGS, rotation_angles
from rope_jax.papers.kinds import make_cell
from rope_jax.papers.lab import single
from rope_jax.positions import PerLayer, Stage, create_position
from rope_jax.positions.frequencies import ladder
from rope_jax_kernels import Rotation

HEAD_DIM, WIDTHS, HEADS = 32, (256, 512), 8
PARTS = ("stays", "x, real", "x, imaginary", "y, real", "y, imaginary")


def _rotation(position: str, heads: int, head_dim: int) -> Rotation | None:
    """The rotation of one layer by a scheme, if it has one."""
    sizes = {"heads": heads, "head_dim": head_dim, "channels": heads * head_dim}
    stage = Stage(depth=1, grid=(4, 4), **sizes)
    return create_position(position, stage, rngs=nnx.Rngs(0)).terms((4, 4)).rotation


def _frequencies(rotation: Rotation) -> np.ndarray:
    """Frequencies [heads, axes, pairs] of one layer."""
    freqs = rotation.freqs
    return np.asarray(freqs.value[0] if isinstance(freqs, PerLayer) else freqs)


def _ladders(schemes: Sequence[str], width: int) -> dict[str, np.ndarray]:
    """The frequencies of each rotary scheme that are not zero, of all heads, the stronger axis."""
    ladders = {}
    for name in schemes:
        with contextlib.suppress(ValueError):  # heads of this width cannot have it
            if (rotation := _rotation(name, HEADS, width // HEADS)) is not None:
                ladders[name] = np.abs(_frequencies(rotation)).max(1).ravel()
    return {name: ladder[ladder > 0] for name, ladder in ladders.items()}


def channel_parts(position: str, head_dim: int = HEAD_DIM) -> list[str]:
    """The part that each channel of a head plays in a rotary scheme, an entry of PARTS.

    >>> channel_parts("axial_rope", 8)[:5]
    ['y, real', 'x, real', 'y, imaginary', 'x, imaginary', 'stays']
    """
    rotation = _rotation(position, 1, head_dim)
    if rotation is None:
        raise ValueError(f"{position} turns no channels: name a rotary scheme")
    freqs = _frequencies(rotation)
    axes = "yx" if freqs.shape[1] == 2 else "x"  # coordinates are (y, x)
    pairs, parts = freqs.shape[-1], ["stays"] * head_dim
    for pair, strengths in enumerate(np.abs(freqs[0]).T):
        axis = axes[int(strengths.argmax())]
        half = rotation.pairing == "half"
        real, imaginary = (pair, pairs + pair) if half else (2 * pair, 2 * pair + 1)
        parts[real], parts[imaginary] = f"{axis}, real", f"{axis}, imaginary"
    return parts


def channels(schemes: Sequence[str]):
    """Thesis, figure 3.1: the channels of one head by axis and part, with k_rope = 2."""
    parts = {name: channel_parts(name) for name in ("axial_rope", "rope2d(k_rope=2)")}
    for name in schemes:
        with contextlib.suppress(ValueError):  # it turns no channels
            parts[name] = channel_parts(name)
    cells = [
        make_cell({"position": name, "channel": channel, "quantity": "part"}, None, part)
        for name, row in parts.items()
        for channel, part in enumerate(row)
    ]
    title = f"Channels of a head of {HEAD_DIM} (mixed frequencies: the stronger axis)"
    return cells, lambda path: plots.categories(parts, PARTS, path, title=title, x="channel")


def angles(schemes: Sequence[str]):
    """Thesis, figure C.1: the angle of each dimension at coordinate 1."""
    panels, cells = {}, []
    for width in WIDTHS:
        curves = {name: rotation_angles(name, width, heads=HEADS) for name in READINGS}
        panels[f"d = {width}"] = {
            READINGS[name][1]: dict(enumerate(curve)) for name, curve in curves.items()
        }
        for name, steps in _ladders(schemes, width).items():
            places = np.linspace(0, width, len(steps), endpoint=False)
            panels[f"d = {width}"][name] = dict(zip(places, steps, strict=True))
            curves[name] = np.interp(np.arange(width), places, steps)
        for name, curve in curves.items():
            for dimension in (0, width // 4, width // 2, 3 * width // 4, width - 1):
                key = {"reading": name, "width": width, "dimension": dimension, "quantity": "angle"}
                cells.append(make_cell(key, None, single(float(curve[dimension]))))

    def draw(path: pathlib.Path) -> None:
        plots.curves_by_panel(
            panels,
            {},
            path,
            title="Angles of rotation",
            x="dimension",
            y="angle at coordinate 1 (radians)",
            yscale="log",
        )

    return cells, draw


def decay(schemes: Sequence[str]):
    """CAT, unnumbered figure of section 2.2: frequencies over the feature dimension."""
    pairs = 1000
    ours = np.asarray(ladder(pairs, 10_000.0), np.float64).ravel()
    depth = np.arange(pairs) / pairs
    note = "published: the printed formula 10000^(-2i/d); ours: the ladder of cat_rope(mode=paper)"
    cells = []
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        key = {"depth": tick, "quantity": "frequency"}
        mine = single(float(ours[round(tick * pairs)])) if tick < 1 else None
        words = note if tick < 1 else "not on the ladder"
        cells.append(make_cell(key, 10_000.0**-tick, mine, words))

    def draw(path: pathlib.Path) -> None:
        curves = {
            "cat_rope": dict(zip(depth, ours, strict=True)),
            "as printed: 10000^(-x)": {x: 10_000.0**-x for x in np.linspace(0, 1, 11)},
        }
        for name, steps in _ladders(schemes, WIDTHS[0]).items():
            places = np.linspace(0, 1, len(steps), endpoint=False)
            curves[name] = dict(zip(places, np.sort(steps)[::-1], strict=True))
        plots.curves_by_panel(
            {"": curves},
            {},
            path,
            title="Decay curve",
            x="feature dimension, relative",
            y="frequency (radians per unit)",
        )

    return cells, draw
