"""Accuracy of a model at any list of resolutions, and the files and pictures that show it.

    python -m rope_jax.evaluate runs/digits --resolutions=8,12,16
    python -m rope_jax.evaluate --model=deit_s16 --weights=deit_s.safetensors --dataset=real --images=ILSVRC2012_val --resolutions=224,384

writes a row of `evaluations.json` for each resolution as soon as it is known; what is there already is not measured again.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from rope_jax import data, members, subject
from rope_jax.config import Config, ConfigError, Size, blame
from rope_jax.data import variants
from rope_jax.metrics import format_table
from rope_jax.models.pretrained import Preprocessing
from rope_jax.models.registry import image_pair
from rope_jax.models.swin import Swin
from rope_jax.positions.relative import RelativeBias
from rope_jax.sharding import in_force, make_mesh, of_first, put_batch, replicated, share, share_of
from rope_jax.workdir import update_file, write_file

Row = dict[str, Any]


def normalise(images: Array, config: Config) -> Array:
    """uint8 images to what models take: (x / 255 - mean) / std, float32."""
    mean, std = (jnp.asarray(x, jnp.float32) for x in (config.data.mean, config.data.std))
    return (images.astype(jnp.float32) / 255 - mean) / std


def load_images(config: Config, split: str, size: Size | None) -> data.Images | data.Streamed:
    """A split of the config's data at a resolution, or as it is stored."""
    frame = {"frame": config.eval.frame} if split == "test" else {}
    with blame("--config.data"):
        return data.load(config.data.source, config.data.path, split, None if size is None else image_pair(size), **frame)


def protocol(images: data.Images | data.Streamed, config: Config) -> str:
    """What happens to images of this kind on the way to the resolution, beforehand too, and which weights are evaluated."""
    frame = "whole image, resized where it is stored at another size (bicubic with antialiasing)"
    if isinstance(images, data.Streamed):
        frame = f"{config.eval.frame} of each image, with antialiasing"
        if "resized" in (about := images.source.about):
            frame += f"; images packed beforehand: {about['resized']} ({about['interpolation']})"
    return f"{frame}; {'averaged weights (EMA)' if config.averaged else 'weights of the last step'}"


def resolutions(config: Config, native: tuple[int, int]) -> list[tuple[int, int]]:
    """The resolutions at which a run is evaluated: that of training first, then the config's, each once."""
    return list(dict.fromkeys([native, *map(image_pair, config.eval.resolutions)]))


def evaluate(apply: Callable[[Any, Array], Array], weights: Any, config: Config, mesh: Mesh, *, poll: Callable[[], None]) -> list[Row]:
    """Evaluates a model at the config's resolutions.

    Args:
        apply: (weights, normalised images [B, H, W, 3]) -> logits [B, classes].
        weights: a tree of arrays, whatever `apply` takes; of a run with several seeds, arrays of all of them.
        config: of the run.
        mesh: where to evaluate.
        poll: called after each step; may raise to stop.

    Returns:
        One row per resolution, as they stand in `results.json`; of a run with several seeds, one per resolution and seed.
    """

    def count(weights: Any, batch: dict[str, Array]) -> tuple[Array, Array, Array]:
        logits = apply(weights, normalise(batch["image"], config)).astype(jnp.float32)
        _, best = jax.lax.top_k(logits, min(5, logits.shape[-1]))
        hits = (best == batch["label"][:, None]) & batch["mask"][:, None]
        return hits[:, 0].sum(), hits.sum(), batch["mask"].sum()

    if config.seeds > 1:
        count = jax.vmap(count, in_axes=(0, None))
    count = jax.jit(count, out_shardings=replicated(mesh))
    batch_size = -(-config.eval.batch_size // mesh.size) * mesh.size  # the last batch is filled up anyway
    rows = []
    for size in resolutions(config, image_pair(config.data.image_size)):
        images = load_images(config, "test", size)
        totals = np.zeros((3, config.seeds), np.int64)
        loader = {"shard": share(), "workers": config.data.workers, "bad_images": config.data.bad_images}
        for batch in data.evaluation_batches(images, batch_size=batch_size, **loader):
            totals += np.asarray(count(weights, put_batch(batch, mesh))).reshape(totals.shape)
            poll()
        about = {"dataset": images.name, "split": images.split, "resolution": list(size)}
        for name, (top1, top5, number) in zip(members.names(config), totals.T.tolist(), strict=True):
            accuracies = {"top1": top1 / number, "top5": top5 / number, "count": number}
            rows.append(about | accuracies | {"protocol": protocol(images, config)} | name)
    return rows


def write_results(workdir: pathlib.Path, step: int, rows: Sequence[Row]) -> None:
    """Writes `results.json`, whole or not at all."""
    write_file(workdir / "results.json", json.dumps({"step": step, "eval": list(rows)}, indent=2) + "\n")


def read_results(workdir: pathlib.Path) -> dict[str, Any] | None:
    """What `write_results` wrote, or None."""
    path = workdir / "results.json"
    return json.loads(path.read_text()) if path.exists() else None


def results_table(rows: Sequence[Row]) -> str:
    """Accuracies for a person."""
    cells = [(f"{r['resolution'][0]}x{r['resolution'][1]}", f"{r['top1']:.4f}", f"{r['top5']:.4f}", str(r["count"])) for r in rows]
    header = ("resolution", "top-1", "top-5", "images")
    if "seed" in rows[0]:
        header, cells = ("seed", *header), [(str(row["seed"]), *cell) for row, cell in zip(rows, cells, strict=True)]
    return format_table(header, cells)


def evaluate_files(
    model: nnx.Module,
    found: variants.Samples,
    size: tuple[int, int],
    preprocessing: Preprocessing,
    mesh: Mesh,
    *,
    batch_size: int,
    progress: Callable[[int], None] = lambda images: None,
) -> Row:
    """Evaluates a model on files at one resolution.

    Args:
        model: from `create_model`.
        found: the files, and what is right for each.
        size: (h, w) in pixels.
        preprocessing: resizing, cut and normalisation.
        mesh: where to evaluate.
        batch_size: images per step.
        progress: called with the number of images so far.

    Returns:
        A row as in `results.json`, and the numbers behind its protocol.

    Raises:
        ValueError: the model has too few classes, or a file cannot be read.
    """
    mean, std = (jnp.asarray(x, jnp.float32) for x in (preprocessing.mean, preprocessing.std))
    graph, state = _on_all(model, mesh)

    def count(state: Any, batch: dict[str, Array]) -> tuple[Array, Array]:
        with in_force(mesh):
            logits = nnx.merge(graph, state)((batch["image"].astype(jnp.float32) / 255 - mean) / std).astype(jnp.float32)
        if logits.shape[-1] < found.least:
            raise ValueError(f"the model has {logits.shape[-1]} classes, but {found.name} has {found.least}: use weights for as many")
        if found.classes is not None:
            logits = logits[:, jnp.asarray(found.classes)]
        _, best = jax.lax.top_k(logits, min(5, logits.shape[-1]))
        hits = (best[:, :, None] == batch["label"][:, None]).any(-1) & batch["mask"][:, None]
        return hits[:, 0].sum(), hits.any(-1).sum()

    count = jax.jit(count, out_shardings=replicated(mesh))
    batch_size = -(-batch_size // mesh.size) * mesh.size
    totals, seen = np.zeros(2, np.int64), 0
    crop, interpolation = preprocessing.crop, preprocessing.interpolation
    for batch in variants.file_batches(found, size, batch_size=batch_size, crop=crop, interpolation=interpolation):
        totals += np.asarray(count(state, put_batch(share_of(batch), mesh)))
        seen += int(batch["mask"].sum())
        progress(seen)
    resized = [preprocessing.resized(side) for side in size]
    text = f"{resized[0]} pixels" if size[0] == size[1] else f"{resized[0]} x {resized[1]} pixels at least"
    return {
        "dataset": found.name,
        "split": "files",
        "resolution": list(size),
        "top1": int(totals[0]) / seen,
        "top5": int(totals[1]) / seen,
        "count": seen,
        "protocol": f"short side resized to {text} ({interpolation}, antialiased), centre cropped (ratio {crop:g}); {found.note}",
    } | dataclasses.asdict(preprocessing)


def _on_all(model: nnx.Module, mesh: Mesh) -> tuple[nnx.GraphDef, Any]:
    """A model's graph and its arrays, which every device of the mesh holds: they are sent once, not with each batch."""
    graph, state = nnx.split(model)
    return graph, jax.device_put(state, replicated(mesh))


def at_resolution(model: nnx.Module, size: tuple[int, int], *, scale_windows: bool = False, rpb_shrink: str | None = None) -> nnx.Module:
    """A copy of a model for images of another size: position tables are resized by their scheme's rule.

    Args:
        model: stays as it is.
        size: (h, w) in pixels.
        scale_windows: of Swin, make windows a thirty-second of the image instead of keeping them (Heo et al., section 3.3).
        rpb_shrink: what happens to tables of `rpb` on a smaller map, instead of what the model says: "bicubic", "crop", ...
    """
    copy = nnx.clone(model)
    if rpb_shrink is not None:
        biases = [module for _, module in nnx.iter_modules(copy) if isinstance(module, RelativeBias)]
        if not biases:
            raise ConfigError(f"--rpb_shrink={rpb_shrink} is for models with the scheme rpb: leave it out")
        for bias in biases:
            bias.shrink = rpb_shrink
    if scale_windows:
        if not isinstance(copy, Swin):
            raise ConfigError(f"--scale_windows is for models with windows, which {type(copy).__name__} has not: leave it out")
        copy.options = dataclasses.replace(copy.options, window_size=None)
    with blame("--resolutions"):
        copy.resize(size)
    return copy


def read_evaluations(path: pathlib.Path) -> list[Row]:
    """The rows of an `evaluations.json`; none where there is no such file."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def add_evaluation(path: pathlib.Path, row: Row) -> None:
    """Adds a row to an `evaluations.json`, instead of one that was asked for in the same words; also while other processes do so."""
    others = lambda text: [] if text is None else [other for other in json.loads(text)["rows"] if other["asked"] != row["asked"]]
    update_file(path, lambda text: json.dumps({"rows": [*others(text), row]}, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Evaluates, shows and records."""
    parser = argparse.ArgumentParser(
        prog="python -m rope_jax.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subject.add_arguments(parser)
    parser.add_argument("--dataset", choices=variants.VARIANTS, help="what --images holds; default: test split of the WORKDIR's data")
    parser.add_argument("--images", help="folder of the dataset")
    parser.add_argument("--resolutions", help="comma-separated: 224,384,224x320; the training resolution is the default")
    parser.add_argument("--crop", type=float, help="share of the resized image that is kept; default: what the weights expect, or 1")
    parser.add_argument("--interpolation", choices=sorted(variants.INTERPOLATIONS), help="default: what the weights expect")
    parser.add_argument("--scale_windows", action="store_true", help="of Swin: windows of a thirty-second of the image")
    parser.add_argument("--rpb_shrink", choices=("bicubic", "crop"), help="of rpb: what a smaller map makes of its table; default: its own")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file of the rows; default: evaluations.json in the WORKDIR, or here")
    asked = parser.parse_args(arguments)
    try:
        _evaluate_command(asked)
    except (ConfigError, ValueError, OSError) as error:
        sys.exit(f"rope_jax.evaluate: {' '.join(str(error).split())}")


def _evaluate_command(asked: argparse.Namespace) -> None:
    about = subject.load(asked)
    if (asked.dataset is None) != (asked.images is None) or (asked.dataset is None and about.config is None):
        raise ConfigError("name --dataset and the folder of its --images; only a WORKDIR has a test split of its own")
    if asked.dataset is None and (asked.crop or asked.interpolation):
        raise ConfigError("--crop and --interpolation are of --images: the test split of a WORKDIR is prepared as in training")
    if asked.crop is not None and not 0 < asked.crop <= 1:
        raise ConfigError(f"--crop={asked.crop} must be above 0 and at most 1")
    if asked.batch_size < 1:
        raise ConfigError(f"--batch_size={asked.batch_size} must be at least 1")
    changes = {name: getattr(asked, name) for name in ("crop", "interpolation") if getattr(asked, name) is not None}
    preprocessing = dataclasses.replace(about.preprocessing, **changes)
    sizes = [subject.parse_size(text) for text in asked.resolutions.split(",")] if asked.resolutions else [about.image_size]
    out = asked.out or pathlib.Path(asked.workdir or ".") / "evaluations.json"
    found = None if asked.dataset is None else variants.samples(asked.dataset, asked.images)
    mesh, shown, first = make_mesh(), [], share()[0] == 0
    for size in sizes:
        identity = {
            "model": about.name,
            "position": about.position,
            "weights": about.weights,
            "step": about.step,
            "options": about.config.model.options if about.config else asked.options,
            "dtype": about.config.dtype if about.config else asked.dtype or "float32",
            "resolution": list(size),
            "dataset": asked.dataset or about.config.data.source,
            "windows": "scaled" if asked.scale_windows else "kept",
            "rpb_shrink": asked.rpb_shrink,
        }
        identity |= {"sha256": about.sha256} if about.sha256 is not None else {}  # weights may be replaced by others of the same name
        identity |= {"seed": about.config.seed} if about.config is not None else {}
        identity |= {} if found is None else {"images": asked.images} | json.loads(json.dumps(dataclasses.asdict(preprocessing)))
        rows = read_evaluations(out)
        row = next((row for row in rows if row["asked"] == identity), None)
        if of_first(row is None):
            model = at_resolution(about.model, size, scale_windows=asked.scale_windows, rpb_shrink=asked.rpb_shrink)
            if found is None:
                row = _own_split(about.config, model, size, asked.batch_size, mesh)
            else:
                counter = lambda images: print(f"\r{images:,} of {len(found.files):,} images", end="", file=sys.stderr, flush=True)
                told = {"progress": counter} if first else {}
                row = evaluate_files(model, found, size, preprocessing, mesh, batch_size=asked.batch_size, **told)
                print(file=sys.stderr)
            versions = {name: importlib.metadata.version(name) for name in ("rope_jax", "jax", "flax", "numpy", "pillow")}
            row |= {"asked": identity, "versions": versions}
            if first:
                add_evaluation(out, row)
        shown.append(row)
    if first:
        print(f"{about.title}, {about.weights}\n{shown[0]['dataset']}: {shown[0]['protocol']}\n\n{results_table(shown)}\n\nrows: {out}")


def _own_split(config: Config, model: nnx.Module, size: tuple[int, int], batch_size: int, mesh: Mesh) -> Row:
    """A row for the test split of a run's data at one resolution."""
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, image_size=size))
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, resolutions=(), batch_size=batch_size))
    graph, state = _on_all(model, mesh)

    def apply(state: Any, images: Array) -> Array:
        with in_force(mesh):
            return nnx.merge(graph, state)(images)

    (row,) = evaluate(apply, state, config, mesh, poll=lambda: None)
    return row


if __name__ == "__main__":
    main()
