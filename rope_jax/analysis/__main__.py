"""What a model does with position, as pictures and numbers: one command for each.

    python -m rope_jax.analysis attention runs/digits
    python -m rope_jax.analysis maps --model=deit_s16 --weights=deit_s.safetensors --images=cat.jpg
    python -m rope_jax.analysis fourier --model=deit3_s16 --position=rope_mixed
    python -m rope_jax.analysis costs --model=swin_t --positions none rpb axial_rope rope_mixed

Each writes NAME.png and NAME.json into --out: a folder, by default the workdir.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax import data, subject
from rope_jax.analysis import plots
from rope_jax.analysis.attention import attention_maps, attention_statistics
from rope_jax.analysis.correlation import layer_positions, position_correlation
from rope_jax.analysis.costs import scheme_costs
from rope_jax.analysis.rotation import (
    READINGS,
    fourier_mask_reconstruction,
    fourier_reconstruction,
    frequencies,
    rotation_angles,
    score_decay,
)
from rope_jax.config import ConfigError, model_overrides
from rope_jax.data import variants
from rope_jax.evaluate import load_images
from rope_jax.metrics import format_table, write_file
from rope_jax.models.registry import create_model
from rope_jax.subject import Subject


def _images(asked: argparse.Namespace, about: Subject) -> Iterator[np.ndarray]:
    """Batches of uint8 images: --images, or the test split of the run."""
    size = subject.parse_size(asked.resolution) if asked.resolution else about.image_size
    for name in ("count", "batch_size"):
        if getattr(asked, name) < 1:
            raise ConfigError(f"--{name}={getattr(asked, name)} must be at least 1")
    if asked.images is None:
        if about.config is None:
            raise ConfigError("name --images, a file or a folder: only a WORKDIR has a test split of its own")
        left = asked.count
        for batch in data.evaluation_batches(load_images(about.config, "test", size), batch_size=asked.batch_size):
            images = batch["image"][batch["mask"]][:left]
            yield images
            left -= len(images)
            if left <= 0:
                return
    files = variants.image_files(asked.images) if asked.images else []
    if asked.images and not files:
        raise ConfigError(f"--images={asked.images} holds no images")
    for chunk in itertools.batched(files[: asked.count], asked.batch_size):
        how = {"crop": about.preprocessing.crop, "interpolation": about.preprocessing.interpolation}
        yield np.stack([variants.read(file, size, **how) for file in chunk])


def _normalise(images: np.ndarray, about: Subject) -> jnp.ndarray:
    mean, std = (np.asarray(x, np.float32) for x in (about.preprocessing.mean, about.preprocessing.std))
    return jnp.asarray((images.astype(np.float32) / 255 - mean) / std)


def _stages(model: nnx.Module, size: tuple[int, int]) -> list[tuple[Any, tuple[int, int]]]:
    """Each stage's scheme with its map."""
    positions = [stage.position for stage in model.stages] if hasattr(model, "stages") else [model.position]
    return list(zip(positions, model.grids(size), strict=False))


def attention(asked: argparse.Namespace, out: pathlib.Path) -> dict[str, Any]:
    """How far (in tokens) and how evenly (in nats) each layer attends."""
    about = subject.load(asked)
    progress = lambda images: print(f"\r{images:,} images", end="", file=sys.stderr, flush=True)
    found = attention_statistics(about.model, (_normalise(batch, about) for batch in _images(asked, about)), progress=progress)
    print(file=sys.stderr)
    names = {"distance": "attention distance (tokens)", "entropy": "entropy of attention (nats)"}
    for name, label in names.items():
        plots.values_by_layer({about.title: getattr(found, name)}, out / f"attention_{name}.png", label=label, title=about.title)
    return dataclasses.asdict(found) | {"model": about.title, "weights": about.weights}


def _query(text: str) -> tuple[float, float]:
    try:
        y, x = map(float, text.split(","))
    except ValueError as error:
        raise ConfigError(f"--query={text} must be two numbers y,x from 0 to 1, for example 0.5,0.25") from error
    return y, x


def maps(asked: argparse.Namespace, out: pathlib.Path) -> dict[str, Any]:
    """Where a token looks in the first of the images, layer by layer (mean of the heads)."""
    about = subject.load(asked)
    query = None if asked.query is None else _query(asked.query)
    images = next(_images(asked, about))[:1]
    layers = attention_maps(about.model, _normalise(images, about), query=query)
    shown = {f"layer {number}": heads[0].mean(0) for number, heads in enumerate(layers, 1)}
    ((position, _), *_) = _stages(about.model, about.image_size)
    mark = query if query is not None or position.stage.prefix else (0.5, 0.5)
    who = "the class token" if mark is None else "the marked place"
    plots.overlays(images[0], shown, out / "maps.png", title=f"{about.title}: attention of {who}", mark=mark)
    return {"model": about.title, "weights": about.weights, "query": query, "maps": shown}


def fourier(asked: argparse.Namespace, out: pathlib.Path) -> dict[str, Any]:
    """What the frequencies of a rotary scheme tell of one place (Heo et al., figure 1)."""
    about = subject.load(asked)
    shown = {}
    for number, (position, grid) in enumerate(_stages(about.model, about.image_size), 1):
        freqs = frequencies(position, grid)
        where = f"stage {number}, " if hasattr(about.model, "stages") else ""
        chosen = {"all layers": freqs} | ({f"layer {i}": layer for i, layer in enumerate(freqs, 1)} if len(freqs) > 1 else {})
        for name, values in chosen.items():
            shown[f"{where}{name}"] = fourier_reconstruction(values, grid)
        shown[f"{where}nearest bins"] = fourier_mask_reconstruction(freqs, grid)
    plots.panels(shown, out / "fourier.png", title=f"{about.title}: reconstruction of one place")
    return {"model": about.title, "weights": about.weights, "maps": shown}


def correlation(asked: argparse.Namespace, out: pathlib.Path) -> dict[str, Any]:
    """How alike the position of one token is to that of the others in each layer (LaPE, figures 3 and 4)."""
    about = subject.load(asked)
    grid = about.model.grids(about.image_size)[0]
    found = position_correlation(layer_positions(about.model, grid), grid, asked.token)
    shown = {f"layer {number}": layer for number, layer in enumerate(found, 1)}
    plots.panels(shown, out / "correlation.png", title=f"{about.title}: cosine similarity of positions", signed=True)
    return {"model": about.title, "weights": about.weights, "maps": shown}


def angles(asked: argparse.Namespace, out: pathlib.Path) -> dict[str, Any]:
    """Rotation angle of each dimension, in all readings of the thesis (figure C.1)."""
    widths = [int(width) for width in asked.widths.split(",")]
    found = {f"{name}, d={width}": rotation_angles(name, width, heads=asked.heads) for width in widths for name in READINGS}
    for width in widths:
        curves = {name: (np.arange(width), found[f"{name}, d={width}"]) for name in READINGS}
        title = f"2-D RoPE, and Axial RoPE in its readings ({asked.heads} heads), {width} dimensions"
        plots.lines(curves, out / f"angles_{width}.png", x="dimension", y="angle at coordinate 1 (radians)", title=title, yscale="log")
    return found


def decay(asked: argparse.Namespace, out: pathlib.Path) -> dict[str, Any]:
    """How scores fall with the distance of query and key."""
    about = subject.load(asked)
    position, grid = _stages(about.model, about.image_size)[0]
    distances = np.arange(2 * max(grid) + 1, dtype=float)
    score, bound = score_decay(frequencies(position, grid), distances)
    curves = {"score of equal contents": (distances, score), "RoFormer's bound": (distances, bound)}
    title = f"{about.title}, {grid[0]}x{grid[1]} tokens"
    plots.lines(curves, out / "decay.png", x="distance (tokens)", y="relative to distance 0", title=title)
    return {"model": about.title, "weights": about.weights, "distances": distances, "score": score, "bound": bound}


def learned(asked: argparse.Namespace, out: pathlib.Path) -> dict[str, Any]:
    """Frequencies of a learnable scheme before and after training, in radians per token."""
    about = subject.load(asked)
    config = about.config
    options = model_overrides(config.model.options if config else asked.options)
    seed = config.seed if config else asked.seed or 0
    classes = about.model.head.out_features
    stages = len(_stages(about.model, about.image_size))
    if not 1 <= asked.stage <= stages:
        raise ConfigError(f"--stage={asked.stage} is not one of 1 to {stages}")
    fresh = create_model(about.name, position=about.position, num_classes=classes, image_size=about.image_size, seed=seed, **options)
    (after, grid), (before, _) = (_stages(model, about.image_size)[asked.stage - 1] for model in (about.model, fresh))
    if not after.learnable:
        raise ConfigError(f"{about.position} does not learn its frequencies: use rope_mixed or axial_rope_v1")
    before, after = (frequencies(position, grid) for position in (before, after))
    title = f"{about.title}: frequencies before and after training"
    plots.frequencies_before_and_after(before, after, out / "learned.png", title=title)
    return {"model": about.title, "weights": about.weights, "before": before, "after": after}


def costs(asked: argparse.Namespace, out: pathlib.Path) -> dict[str, Any]:
    """Parameters and operations of each scheme in a model."""
    size = subject.parse_size(asked.image_size)
    rows = [dataclasses.asdict(row) for row in scheme_costs(asked.model, asked.positions, size)]
    number = lambda value: "-" if value is None else f"{value:,}"
    cells = [(row["position"], *(number(row[key]) for key in ("parameters", "total", "multiply_adds", "operations"))) for row in rows]
    print(format_table(("position", "its parameters", "all parameters", "multiply-adds", "its operations"), cells))
    return {"model": asked.model, "image_size": size, "rows": rows}


COMMANDS = {command.__name__: command for command in (attention, maps, fourier, correlation, angles, decay, learned, costs)}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rope_jax.analysis", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="NAME")
    parsers = {name: commands.add_parser(name, help=command.__doc__, description=command.__doc__) for name, command in COMMANDS.items()}
    for name, own in parsers.items():
        own.add_argument("--out", type=pathlib.Path, help="folder to write to; default: the WORKDIR, or here")
        if name not in ("angles", "costs"):
            subject.add_arguments(own)
    for name in ("attention", "maps"):
        own = parsers[name]
        own.add_argument("--images", help="file or folder; default: the test split of the WORKDIR's data")
        own.add_argument("--resolution", help="pixels, 224 or 224x320; the training resolution is the default")
        own.add_argument("--count", type=int, default=256, help="images to look at")
        own.add_argument("--batch_size", type=int, default=32)
    parsers["maps"].add_argument("--query", help="y,x from 0 to 1: the place that looks; default: the class token, or the middle")
    parsers["correlation"].add_argument("--token", type=int, help="number of the token; default: the one before the middle")
    parsers["learned"].add_argument("--stage", type=int, default=1, help="of a backbone of stages")
    parsers["angles"].add_argument("--widths", default="256,512", help="numbers of dimensions")
    parsers["angles"].add_argument("--heads", type=int, default=8, help="of Axial RoPE")
    parsers["costs"].add_argument("--model", required=True, help="one of rope_jax.list_models()")
    parsers["costs"].add_argument("--positions", nargs="+", default=["none", "ape", "rope2d", "rope_mixed", "axial_rope"], help="schemes")
    parsers["costs"].add_argument("--image_size", default="224", help="pixels: 224 or 224x320")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs one command."""
    asked = _parse(arguments)
    out = asked.out or pathlib.Path(getattr(asked, "workdir", None) or ".")
    try:
        out.mkdir(parents=True, exist_ok=True)
        found = COMMANDS[asked.command](asked, out)
        to_list = lambda value: value.tolist()
        write_file(out / f"{asked.command}.json", json.dumps(found, default=to_list) + "\n")
    except ModuleNotFoundError as error:
        sys.exit(f"rope_jax.analysis: {error.name} is missing; pictures need matplotlib: pip install 'rope_jax[plot]'")
    except (ConfigError, ValueError, OSError) as error:
        sys.exit(f"rope_jax.analysis: {' '.join(str(error).split())}")
    print(f"{asked.command}: {out / asked.command}.json and the pictures beside it")


if __name__ == "__main__":
    main()
