"""The analyses of a model and of schemes: each draws its pictures, and returns its figures.

Functions in OF_MODEL take a loaded model and the path of their pictures, functions in OF_SCHEMES a
folder. Those in TOGETHER draw the figures of several models in one picture. Keyword-only parameters
are the options of `python -m rope_jax.analysis`.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from rope_jax import data
from rope_jax.analysis import plots
from rope_jax.analysis.attention import attention_maps, attention_statistics
from rope_jax.analysis.correlation import middle_token, position_correlation, stage_positions
from rope_jax.analysis.costs import scheme_costs
from rope_jax.analysis.joining import (
    LAMBDAS,
    PARTS,
    SHARES,
    TERMS,
    NotDescribed,
    check_described,
    measure_batches,
    position_measures,
)
from rope_jax.analysis.rotation import (
    READINGS,
    fourier_mask_reconstruction,
    fourier_reconstruction,
    frequencies,
    rotation_angles,
    score_decay,
)
from rope_jax.config import ConfigError
from rope_jax.data.images.device import normalise
from rope_jax.data.sources.folder import Files, image_files
from rope_jax.names.options import Count, CountOrZero, Probability
from rope_jax.names.text import format_table, image_pair
from rope_jax.positions.grids import Grid
from rope_jax.runs.loading import LoadedModel
from rope_jax.system.files import write_file
from rope_jax.training.setup import load_split

Results = dict[str, Any]
ByLabel = Mapping[str, Results]  # of one analysis of several models or sizes
SCHEMES = ["none", "ape", "rope2d", "rope_mixed", "axial_rope"]
_ATTENTION = {
    "distance": "attention distance (tokens)",
    "entropy": "entropy of attention (nats)",
}


def attention(
    loaded: LoadedModel,
    stem: pathlib.Path,
    *,
    images: str | None = None,
    resolution: str | None = None,
    count: Count = 256,
    batch_size: Count = 32,
) -> Results:
    """Attention distance (tokens) and entropy (nats) of each layer.

    Args:
        loaded: the model.
        stem: path of its pictures, without suffix.
        images: file or folder; default: the test split of the WORKDIR's data
        resolution: pixels: 224, 224x320, or several as in 160,224; default: that of training
        count: number of images
        batch_size: images in a step
    """
    batches = image_batches(loaded, images, resolution, count, batch_size)
    model = loaded.at(image_pair(resolution or loaded.image_size))
    statistics = attention_statistics(model, (batch for _, batch in batches))
    for name, label in _ATTENTION.items():
        plots.values_by_layer(
            getattr(statistics, name), _png(stem, name), label=label, title=loaded.title
        )
    return dataclasses.asdict(statistics)


def attention_together(results: ByLabel, stem: pathlib.Path, title: str) -> None:
    """Draws the mean over heads in each layer, a line for each label."""
    lines = {
        panel: {
            label: {layer: np.mean(heads) for layer, heads in enumerate(figures[name], 1)}
            for label, figures in results.items()
        }
        for name, panel in _ATTENTION.items()
    }
    plots.curves_by_panel(lines, {}, _png(stem), title=title, x="layer", y="mean of the heads")


def maps(
    loaded: LoadedModel,
    stem: pathlib.Path,
    *,
    images: str | None = None,
    resolution: str | None = None,
    query: tuple[Probability, Probability] | None = None,
) -> Results:
    """Attention map of one token on the first image, in each layer (mean over heads).

    Args:
        loaded: the model.
        stem: path of its pictures, without suffix.
        images: file or folder; default: the test split of the WORKDIR's data
        resolution: pixels: 224, 224x320, or several as in 160,224; default: that of training
        query: y,x of the query; default: the class token, or the centre
    """
    pixels, batch = next(image_batches(loaded, images, resolution, 1, 1))
    layers = attention_maps(loaded.at(batch.shape[1:3]), batch[:1], query=query)
    shown = _by_layer(heads[0].mean(0) for heads in layers)
    (position, _), *_ = loaded.model.positions(loaded.image_size)
    of_class_token = query is None and position.stage.prefix > 0
    plots.overlays(
        pixels[0],
        shown,
        _png(stem),
        title=f"{loaded.title}: attention of the {'class' if of_class_token else 'marked'} token",
        place=None if of_class_token else query or (0.5, 0.5),
    )
    return {"query": query, "maps": shown}


def fourier(loaded: LoadedModel, stem: pathlib.Path) -> Results:
    """Reconstruction of a point from the frequencies of a rotary scheme (Heo et al., figure 1)."""
    stages = loaded.model.positions(loaded.image_size)
    shown = {}
    for number, (position, grid) in enumerate(stages, 1):
        stage = f"stage {number}, " if len(stages) > 1 else ""
        freqs = frequencies(position, grid)
        parts = {"all layers": freqs} | (_by_layer(freqs) if len(freqs) > 1 else {})
        for name, part in parts.items():
            shown[f"{stage}{name}"] = fourier_reconstruction(part, grid)
        shown[f"{stage}nearest bins"] = fourier_mask_reconstruction(freqs, grid)
    plots.panels(
        shown,
        _png(stem),
        title=f"{loaded.title}: the marked token, reconstructed",
        label="relative to the marked token",
    )
    return {"maps": shown}


def correlation(
    loaded: LoadedModel, stem: pathlib.Path, *, token: CountOrZero | None = None
) -> Results:
    """Cosine similarity of one token's position to all others, in each layer (LaPE, figure 3).

    Args:
        loaded: the model.
        stem: path of its pictures, without suffix.
        token: its index; default: the centre (on an even map, the upper left of the middle four)
    """
    results = _correlation_maps(stage_positions(loaded.model, loaded.image_size), token)
    correlation_together({"": results}, stem, loaded.title)
    return results


def correlation_together(results: ByLabel, stem: pathlib.Path, title: str) -> None:
    """Draws the maps of all labels, a row for each if they have as many layers."""
    shown = {
        f"{label}\n{layer}".strip(): values
        for label, figures in results.items()
        for layer, values in figures["maps"].items()
    }
    depths = {len(figures["maps"]) for figures in results.values()}
    plots.panels(
        shown,
        _png(stem),
        title=f"{title}: position of the marked token and of the others",
        label="cosine similarity",
        mark=[mark for figures in results.values() for mark in figures["marked"]],
        columns=min(depths) if len(results) > 1 and len(depths) == 1 else 6,
    )


def _correlation_maps(
    stages: Sequence[tuple[Grid, Float[np.ndarray, "layers L C"]]], token: int | None = None
) -> Results:
    """The maps by layer, and on each the (row, column) of the token; None for the middle."""
    shown, marks = {}, []
    for number, (grid, rows) in enumerate(stages, 1):
        stage = f"stage {number}, " if len(stages) > 1 else ""
        middle = middle_token(grid) if token is None else token
        layers = _by_layer(position_correlation(rows, grid, middle))
        shown |= {f"{stage}{name}": layer for name, layer in layers.items()}
        marks += [divmod(middle, grid[1])] * len(layers)
    return {"maps": shown, "marked": marks}


def joining(
    loaded: LoadedModel,
    stem: pathlib.Path,
    *,
    images: str | None = None,
    resolution: str | None = None,
    count: Count = 64,
    batch_size: Count = 16,
) -> Results:
    """Tokens and absolute positions in each layer (LaPE, equations 1 to 3), and their reach.

    See `rope_jax.analysis.joining`. Models that the equations do not describe, as those of several
    stages, have the reach alone.

    Args:
        loaded: the model.
        stem: path of its pictures, without suffix.
        images: file or folder; default: the test split of the WORKDIR's data
        resolution: pixels: 224, 224x320, or several as in 160,224; default: that of training
        count: number of images
        batch_size: images in a step
    """
    size = image_pair(resolution or loaded.image_size)
    model = loaded.at(size)
    stages = stage_positions(model, size)
    results: Results = {}
    for grid, rows in stages:
        for name, values in position_measures(rows, grid).items():
            results.setdefault(name, []).extend(values)
    try:
        check_described(model, size)
    except NotDescribed as error:
        print(f"the reach alone: {error}", file=sys.stderr)
    else:
        batches = image_batches(loaded, images, resolution, count, batch_size)
        results |= measure_batches(model, (batch for _, batch in batches))
    curves = _joining_curves(results)
    lines: dict[str, Any] = {}
    for name, (values, panel) in curves.items():
        lines.setdefault(panel, {})[name] = values
    plots.curves_by_panel(lines, {}, _png(stem), title=loaded.title, x="layer", y="")
    cell = lambda values, layer: f"{values[layer]:.3f}" if layer in values else "-"
    layers = range(1, len(results["reach"]) + 1)
    table = [(str(n), *(cell(values, n) for values, _ in curves.values())) for n in layers]
    print(format_table(("layer", *curves), table))
    results |= _correlation_maps(stages)
    correlation_together({"": results}, stem.with_name(f"{stem.name}_maps"), loaded.title)
    return results


def joining_together(results: ByLabel, stem: pathlib.Path, title: str) -> None:
    """Draws a panel for each number of `joining` with a line for each label, and their maps."""
    lines: dict[str, Any] = {}
    for label, figures in results.items():
        for name, (values, _) in _joining_curves(figures).items():
            lines.setdefault(name, {})[label] = values
    plots.curves_by_panel(lines, {}, _png(stem), title=title, x="layer", y="", columns=4)
    correlation_together(results, stem.with_name(f"{stem.name}_maps"), title)


def _joining_curves(results: Results) -> dict[str, tuple[dict[int, float], str]]:
    """Numbers of `joining` by layer, where they are defined, and the panel that shows them."""
    groups = {
        "shares of the norm": LAMBDAS,
        "root mean square": PARTS,
        "terms of the logits": TERMS,
        "shares of these terms": SHARES,
        "position correlation": ("reach", "two_dimensional", "raster", "change"),
    }
    return {
        name: ({layer: x for layer, x in enumerate(results[name], 1) if x is not None}, panel)
        for panel, names in groups.items()
        for name in names
        if name in results
    }


def decay(loaded: LoadedModel, stem: pathlib.Path) -> Results:
    """Decay of attention scores with the distance between query and key."""
    position, grid = loaded.model.positions(loaded.image_size)[0]
    distances = np.arange(2 * max(grid) + 1, dtype=float)
    score, bound = score_decay(frequencies(position, grid), distances)
    plots.lines(
        {"query and key of ones": (distances, score), "RoFormer's bound on it": (distances, bound)},
        _png(stem),
        x="distance (tokens)",
        y="relative to the score at distance 0",
        title=f"{loaded.title}, {grid[0]}x{grid[1]} tokens",
    )
    return {"distances": distances, "score": score, "bound": bound}


def learned_frequencies(loaded: LoadedModel, stem: pathlib.Path, *, stage: Count = 1) -> Results:
    """Learned frequencies before and after training, in radians per token.

    Args:
        loaded: the model.
        stem: path of its pictures, without suffix.
        stage: stage of a hierarchical backbone
    """
    stages = loaded.model.positions(loaded.image_size)
    if stage > len(stages):
        raise ConfigError(f"--stage={stage} must be from 1 to {len(stages)}, the model's stages")
    trained, grid = stages[stage - 1]
    if not any(x.learnable and x.acts == "rotation" for x in trained.schemes()):
        raise ConfigError(
            f"{loaded.position} has no learned frequencies: use rope_mixed or axial_rope_v1"
        )
    initial, _ = loaded.create().positions(loaded.image_size)[stage - 1]
    before, after = frequencies(initial, grid), frequencies(trained, grid)
    plots.frequencies_before_and_after(
        before, after, _png(stem), title=f"{loaded.title}: frequencies before and after training"
    )
    return {"before": before, "after": after}


def angles(
    out: pathlib.Path, *, widths: tuple[Count, ...] = (256, 512), heads: Count = 8
) -> Results:
    """Rotation angle per dimension, for each reading of the thesis' formula (figure C.1).

    Args:
        out: folder to write to.
        widths: head dimensions
        heads: heads of Axial RoPE
    """
    all_curves = {}
    for width in widths:
        curves = {name: rotation_angles(name, width, heads=heads) for name in READINGS}
        all_curves |= {f"{name}, d={width}": curve for name, curve in curves.items()}
        plots.lines(
            {READINGS[name][1]: (np.arange(width), curve) for name, curve in curves.items()},
            out / f"angles_{width}.png",
            x="dimension (on each ladder t goes from 0 to 1)",
            y="angle at coordinate 1 (radians)",
            title=f"2-D RoPE and the readings of Axial RoPE ({heads} heads), {width} dimensions",
            yscale="log",
        )
    return all_curves


def costs(
    out: pathlib.Path, *, model: str, positions: list[str] = SCHEMES, image_size: str = "224"
) -> Results:
    """Number of parameters and operations that each scheme adds to a model.

    Args:
        out: folder to write to.
        model: one of rope_jax.list_models()
        positions: schemes to compare
        image_size: pixels: 224 or 224x320
    """
    size = image_pair(image_size)
    rows = scheme_costs(model, positions, size)
    header = ("position", "parameters", "model's parameters", "multiply-adds", "operations")
    cells = [
        (position, *("-" if n is None else f"{n:,}" for n in numbers))
        for position, *numbers in map(dataclasses.astuple, rows)
    ]
    print(format_table(header, cells))
    plots.costs(
        {row.position: (row.parameters, row.operations) for row in rows},
        out / "costs.png",
        title=f"{model} at {size[0]}x{size[1]} pixels",
    )
    return {"model": model, "image_size": size, "rows": list(map(dataclasses.asdict, rows))}


OF_MODEL = {
    "attention": attention,
    "maps": maps,
    "fourier": fourier,
    "correlation": correlation,
    "joining": joining,
    "decay": decay,
    "learned": learned_frequencies,
}
OF_SCHEMES = {"angles": angles, "costs": costs}
TOGETHER = {
    "attention": attention_together,
    "correlation": correlation_together,
    "joining": joining_together,
}


def keep(name: str, stem: pathlib.Path, results: Results) -> None:
    """Writes the figures of an analysis to STEM.json, and prints where they are."""
    text = json.dumps(results, default=np.ndarray.tolist)
    write_file(stem.with_name(f"{stem.name}.json"), text + "\n")
    print(f"{name}: results are in {stem.parent}")


def analyse_model(name: str, loaded: LoadedModel, stem: pathlib.Path, **options: Any) -> Results:
    """Runs the analysis with this name in OF_MODEL, and writes its figures.

    Raises:
        ValueError: it is not defined for this model or its scheme.
    """
    results = OF_MODEL[name](loaded, stem, **options)
    keep(name, stem, {"model": loaded.title, "weights": loaded.weights} | results)
    return results


def labels(cases: Sequence[tuple[LoadedModel, str | None]]) -> list[str]:
    """Shortest labels that distinguish models and sizes, of model, scheme, size and weights.

    Raises:
        ConfigError: two are the same.
    """
    facts = [(x.name, x.position, f"{size} px", x.weights) for x, size in cases]
    shown: list[tuple[str, ...]] = [()] * len(cases)
    for values in zip(*facts, strict=True):
        if len(set(shown)) < len(cases) and len(set(values)) > 1:
            shown = [(*label, value) for label, value in zip(shown, values, strict=True)]
    if len(set(shown)) < len(cases):
        raise ConfigError("the same model is named twice: name different ones")
    return [", ".join(label) for label in shown]


def _png(stem: pathlib.Path, name: str = "") -> pathlib.Path:
    return stem.with_name(f"{stem.name}{name and f'_{name}'}.png")


def _by_layer(values: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"layer {number}": value for number, value in enumerate(values, 1)}


def image_batches(
    loaded: LoadedModel,
    images: str | None,
    resolution: str | None,
    count: int,
    batch_size: int,
) -> Iterator[tuple[UInt8[np.ndarray, "B H W 3"], Float[Array, "B H W 3"]]]:
    """Batches of `images` or of the run's test split, `count` images in total.

    Yields:
        The images, before and after normalisation.
    """
    size = image_pair(resolution) if resolution else loaded.image_size
    if images is not None:
        source = _images_of_files(pathlib.Path(images), loaded, size)
    elif loaded.config is not None:
        source = load_split(loaded.config, "test", size)
    else:
        raise ConfigError(
            "--images is missing: pass a file or a folder (only a WORKDIR has a test split)"
        )
    remaining, preprocessing = count, loaded.preprocessing
    with data.evaluation_batches(source, batch_size=batch_size) as batches:
        for batch in batches:
            pixels = batch["image"][batch["mask"]][:remaining]
            yield pixels, normalise(jnp.asarray(pixels), preprocessing.mean, preprocessing.std)
            remaining -= len(pixels)
            print(f"{count - remaining:,} images", file=sys.stderr)
            if remaining <= 0:
                return


def _images_of_files(
    path: pathlib.Path, loaded: LoadedModel, size: tuple[int, int]
) -> data.Streamed:
    """One image file or all in a folder, cropped as the weights expect."""
    root, names = (path.parent, [path.name]) if path.is_file() else (path, image_files(path))
    if not names:
        raise ConfigError(f"--images={path} contains no image files: pass a file or another folder")
    files = Files(root, names, [0] * len(names), ["any"], name=path.name, split="files")
    return data.Streamed(files, size, loaded.preprocessing.crop_notation)
