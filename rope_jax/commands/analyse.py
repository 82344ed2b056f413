"""Analyses of how a model uses position: attention, frequencies, correlation, costs.

    python -m rope_jax.analysis attention runs/digits
    python -m rope_jax.analysis maps --model=deit_s16 --weights=deit_s.safetensors --images=cat.jpg
    python -m rope_jax.analysis fourier --model=deit3_s16 --position=rope_mixed
    python -m rope_jax.analysis costs --model=swin_t --positions none rpb axial_rope rope_mixed

Each command writes its figures to NAME.json and its plots to .png files in the folder --out, by
default the workdir.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from rope_jax import data
from rope_jax.analysis import plots
from rope_jax.analysis.attention import attention_maps, attention_statistics
from rope_jax.analysis.correlation import (
    layer_positions,
    middle_token,
    position_correlation,
)
from rope_jax.analysis.costs import scheme_costs
from rope_jax.analysis.rotation import (
    READINGS,
    fourier_mask_reconstruction,
    fourier_reconstruction,
    frequencies,
    rotation_angles,
    score_decay,
)
from rope_jax.commands.arguments import Argument, CommandParser, add_model_arguments, command_parser
from rope_jax.config import ConfigError
from rope_jax.data.images.device import normalise
from rope_jax.data.sources.folder import Files, image_files
from rope_jax.names.options import Count, CountOrZero, Probability
from rope_jax.names.text import format_table, image_pair
from rope_jax.runs.loading import LoadedModel, load_model
from rope_jax.system.files import write_file
from rope_jax.system.sharding import start_devices
from rope_jax.training.kernels import kernels_of_run
from rope_jax.training.setup import load_split

Results = dict[str, Any]


def attention(loaded: LoadedModel, arguments: argparse.Namespace, out: pathlib.Path) -> Results:
    """Attention distance (tokens) and entropy (nats) of each layer."""
    batches = (images for _, images in _image_batches(loaded, arguments))
    found = attention_statistics(loaded.model, batches)
    labels = {"distance": "attention distance (tokens)", "entropy": "entropy of attention (nats)"}
    for name, label in labels.items():
        path = out / f"attention_{name}.png"
        plots.values_by_layer(getattr(found, name), path, label=label, title=loaded.title)
    return dataclasses.asdict(found)


def maps(loaded: LoadedModel, arguments: argparse.Namespace, out: pathlib.Path) -> Results:
    """Attention map of one token on the first image, in each layer (mean over heads)."""
    pixels, images = next(_image_batches(loaded, arguments))
    layers = attention_maps(loaded.model, images[:1], query=arguments.query)
    shown = _by_layer(heads[0].mean(0) for heads in layers)
    (position, _), *_ = loaded.model.positions(loaded.image_size)
    of_class_token = arguments.query is None and position.stage.prefix > 0
    plots.overlays(
        pixels[0],
        shown,
        out / "maps.png",
        title=f"{loaded.title}: attention of the {'class' if of_class_token else 'marked'} token",
        place=None if of_class_token else arguments.query or (0.5, 0.5),
    )
    return {"query": arguments.query, "maps": shown}


def fourier(loaded: LoadedModel, arguments: argparse.Namespace, out: pathlib.Path) -> Results:
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
        out / "fourier.png",
        title=f"{loaded.title}: the marked token, reconstructed",
        label="relative to the marked token",
    )
    return {"maps": shown}


def correlation(loaded: LoadedModel, arguments: argparse.Namespace, out: pathlib.Path) -> Results:
    """Cosine similarity of one token's position to all others, in each layer (LaPE, figure 3)."""
    grid = loaded.model.grids(loaded.image_size)[0]
    token = middle_token(grid) if arguments.token is None else arguments.token
    shown = _by_layer(position_correlation(layer_positions(loaded.model, grid), grid, token))
    plots.panels(
        shown,
        out / "correlation.png",
        title=f"{loaded.title}: position of the marked token and of the others",
        label="cosine similarity",
        mark=divmod(token, grid[1]),
    )
    return {"maps": shown}


def decay(loaded: LoadedModel, arguments: argparse.Namespace, out: pathlib.Path) -> Results:
    """Decay of attention scores with the distance between query and key."""
    position, grid = loaded.model.positions(loaded.image_size)[0]
    distances = np.arange(2 * max(grid) + 1, dtype=float)
    score, bound = score_decay(frequencies(position, grid), distances)
    plots.lines(
        {"query and key of ones": (distances, score), "RoFormer's bound on it": (distances, bound)},
        out / "decay.png",
        x="distance (tokens)",
        y="relative to the score at distance 0",
        title=f"{loaded.title}, {grid[0]}x{grid[1]} tokens",
    )
    return {"distances": distances, "score": score, "bound": bound}


def learned(loaded: LoadedModel, arguments: argparse.Namespace, out: pathlib.Path) -> Results:
    """Learned frequencies before and after training, in radians per token."""
    stages = loaded.model.positions(loaded.image_size)
    if not 1 <= arguments.stage <= len(stages):
        raise ConfigError(
            f"--stage={arguments.stage} must be from 1 to {len(stages)}, the model's stages"
        )
    trained, grid = stages[arguments.stage - 1]
    if not trained.learnable:
        raise ConfigError(
            f"{loaded.position} has no learned frequencies: use rope_mixed or axial_rope_v1"
        )
    initial, _ = loaded.create().positions(loaded.image_size)[arguments.stage - 1]
    before, after = frequencies(initial, grid), frequencies(trained, grid)
    title = f"{loaded.title}: frequencies before and after training"
    plots.frequencies_before_and_after(before, after, out / "learned.png", title=title)
    return {"before": before, "after": after}


def angles(arguments: argparse.Namespace, out: pathlib.Path) -> Results:
    """Rotation angle per dimension, for each reading of the thesis' formula (figure C.1)."""
    heads, found = arguments.heads, {}
    for width in arguments.widths:
        curves = {name: rotation_angles(name, width, heads=heads) for name in READINGS}
        found |= {f"{name}, d={width}": curve for name, curve in curves.items()}
        plots.lines(
            {READINGS[name][1]: (np.arange(width), curve) for name, curve in curves.items()},
            out / f"angles_{width}.png",
            x="dimension (on each ladder t goes from 0 to 1)",
            y="angle at coordinate 1 (radians)",
            title=f"2-D RoPE and the readings of Axial RoPE ({heads} heads), {width} dimensions",
            yscale="log",
        )
    return found


def costs(arguments: argparse.Namespace, out: pathlib.Path) -> Results:
    """Number of parameters and operations that each scheme adds to a model."""
    size = image_pair(arguments.image_size)
    rows = scheme_costs(arguments.model, arguments.positions, size)
    header = ("position", "parameters", "model's parameters", "multiply-adds", "operations")
    cells = [
        (position, *("-" if n is None else f"{n:,}" for n in numbers))
        for position, *numbers in map(dataclasses.astuple, rows)
    ]
    print(format_table(header, cells))
    added = {row.position: (row.parameters, row.operations) for row in rows}
    title = f"{arguments.model} at {size[0]}x{size[1]} pixels"
    plots.costs(added, out / "costs.png", title=title)
    rows = list(map(dataclasses.asdict, rows))
    return {"model": arguments.model, "image_size": size, "rows": rows}


def _by_layer(values: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"layer {number}": value for number, value in enumerate(values, 1)}


def _image_batches(
    loaded: LoadedModel, arguments: argparse.Namespace
) -> Iterator[tuple[UInt8[np.ndarray, "B H W 3"], Float[Array, "B H W 3"]]]:
    """Batches of --images or of the run's test split, --count images in total.

    Yields:
        The images, and the normalised ones.
    """
    size = image_pair(arguments.resolution) if arguments.resolution else loaded.image_size
    if arguments.images is not None:
        images = _images_of_files(pathlib.Path(arguments.images), loaded, size)
    elif loaded.config is not None:
        images = load_split(loaded.config, "test", size)
    else:
        raise ConfigError(
            "--images is missing: pass a file or a folder (only a WORKDIR has a test split)"
        )
    left, preprocessing = arguments.count, loaded.preprocessing
    with data.evaluation_batches(images, batch_size=arguments.batch_size) as batches:
        for batch in batches:
            pixels = batch["image"][batch["mask"]][:left]
            yield pixels, normalise(jnp.asarray(pixels), preprocessing.mean, preprocessing.std)
            left -= len(pixels)
            print(f"{arguments.count - left:,} images", file=sys.stderr)
            if left <= 0:
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


_COUNT = Argument(Count)
_COUNTS = Argument(tuple[Count, ...])
_IMAGES = {
    "--images": {"help": "file or folder; default: the test split of the WORKDIR's data"},
    "--resolution": {"help": "pixels, 224 or 224x320; default: that of training"},
    "--count": {"type": _COUNT, "default": 256, "help": "number of images"},
    "--batch_size": {"type": _COUNT, "default": 32, "help": "images in a step"},
}
_PLACE = Argument(tuple[Probability, Probability])
_QUERY = "y,x of the query; default: the class token, or the centre"
_TOKEN = "index of the token; default: the centre (upper left of the middle four on an even map)"
_SCHEMES = ["none", "ape", "rope2d", "rope_mixed", "axial_rope"]
# The analyses, and their arguments: of a model, which have its arguments as well, and of schemes.
OF_MODEL = {"attention": attention, "maps": maps, "fourier": fourier}
OF_MODEL |= {"correlation": correlation, "decay": decay, "learned": learned}
OF_SCHEMES = {"angles": angles, "costs": costs}
ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "attention": _IMAGES,
    "maps": _IMAGES | {"--query": {"type": _PLACE, "metavar": "Y,X", "help": _QUERY}},
    "correlation": {"--token": {"type": Argument(CountOrZero), "help": _TOKEN}},
    "learned": {
        "--stage": {"type": _COUNT, "default": 1, "help": "stage of a hierarchical backbone"}
    },
    "angles": {
        "--widths": {"type": _COUNTS, "default": "256,512", "help": "head dimensions"},
        "--heads": {"type": _COUNT, "default": 8, "help": "heads of Axial RoPE"},
    },
    "costs": {
        "--model": {"required": True, "help": "one of rope_jax.list_models()"},
        "--positions": {"nargs": "+", "default": _SCHEMES, "help": "schemes to compare"},
        "--image_size": {"default": "224", "help": "pixels: 224 or 224x320"},
    },
}


def _parser() -> CommandParser:
    parser = command_parser("rope_jax.analysis", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="NAME")
    out = "folder to write to; default: the WORKDIR, or the current folder"
    for name, analysis in (OF_MODEL | OF_SCHEMES).items():
        about = analysis.__doc__
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("--out", type=pathlib.Path, help=out)
        if name in OF_MODEL:
            add_model_arguments(command)
        for argument, options in ARGUMENTS.get(name, {}).items():
            command.add_argument(argument, **options)
    return parser


def _analyse_model(asked: argparse.Namespace, out: pathlib.Path) -> Results:
    loaded = load_model(asked)
    with kernels_of_run(loaded.config, asked.workdir and pathlib.Path(asked.workdir)):
        results = OF_MODEL[asked.command](loaded, asked, out)
    return {"model": loaded.title, "weights": loaded.weights} | results


def main(arguments: list[str] | None = None) -> None:
    """Runs one analysis from the command line."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    out = asked.out or pathlib.Path(getattr(asked, "workdir", None) or ".")
    with parser.one_line_errors(extra="plot"):
        start_devices()
        if asked.out is not None:
            out.mkdir(parents=True, exist_ok=True)
        results = OF_SCHEMES.get(asked.command, _analyse_model)(asked, out)
        text = json.dumps(results, default=np.ndarray.tolist)
        write_file(out / f"{asked.command}.json", text + "\n")
    print(f"{asked.command}: results are in {out}")


if __name__ == "__main__":
    main()
