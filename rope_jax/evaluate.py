"""Accuracy of a model at any list of resolutions, and the files and pictures that show it."""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from rope_jax import data
from rope_jax.config import Config, Size, blame
from rope_jax.metrics import format_table, write_file
from rope_jax.models.registry import image_pair
from rope_jax.sharding import put_batch, replicated

Row = dict[str, Any]
# Whether images come from a folder -> what happens to them on the way to the resolution.
_PROTOCOLS = {
    False: "whole image, resized where it is stored at another size (bicubic with antialiasing)",
    True: "short side resized, centre cropped (bicubic with antialiasing)",
}


def normalise(images: Array, config: Config) -> Array:
    """uint8 images to what models take: (x / 255 - mean) / std, float32."""
    mean, std = (jnp.asarray(x, jnp.float32) for x in (config.data.mean, config.data.std))
    return (images.astype(jnp.float32) / 255 - mean) / std


def load_images(config: Config, split: str, size: Size | None) -> data.Images:
    """A split of the config's data at a resolution, or as it is stored."""
    with blame("--config.data"):
        return data.load(config.data.source, config.data.path, split, None if size is None else image_pair(size))


def resolutions(config: Config, native: tuple[int, int]) -> list[tuple[int, int]]:
    """The resolutions at which a run is evaluated: that of training first, then the config's, each once."""
    return list(dict.fromkeys([native, *map(image_pair, config.eval.resolutions)]))


def evaluate(apply: Callable[[Any, Array], Array], weights: Any, config: Config, mesh: Mesh, *, poll: Callable[[], None]) -> list[Row]:
    """Evaluates a model at the config's resolutions.

    Args:
        apply: (weights, normalised images [B, H, W, 3]) -> logits [B, classes].
        weights: a tree of arrays, whatever `apply` takes.
        config: of the run.
        mesh: where to evaluate.
        poll: called after each step; may raise to stop.

    Returns:
        One row per resolution, as they stand in `results.json`.
    """

    def count(weights: Any, batch: dict[str, Array]) -> tuple[Array, Array]:
        logits = apply(weights, normalise(batch["image"], config)).astype(jnp.float32)
        _, best = jax.lax.top_k(logits, min(5, logits.shape[-1]))
        hits = (best == batch["label"][:, None]) & batch["mask"][:, None]
        return hits[:, 0].sum(), hits.sum()

    count = jax.jit(count, out_shardings=replicated(mesh))
    origin = "weights of the last step" if config.ema_decay is None else "averaged weights (EMA)"
    batch_size = -(-config.eval.batch_size // mesh.size) * mesh.size  # the last batch is filled up anyway
    rows = []
    for size in resolutions(config, image_pair(config.data.image_size)):
        images = load_images(config, "test", size)
        totals = np.zeros(2, np.int64)
        for batch in data.evaluation_batches(images, batch_size=batch_size):
            totals += np.asarray(count(weights, put_batch(batch, mesh)))
            poll()
        number = len(images.labels)
        rows.append(
            {
                "dataset": images.name,
                "split": images.split,
                "resolution": list(size),
                "top1": int(totals[0]) / number,
                "top5": int(totals[1]) / number,
                "count": number,
                "protocol": f"{_PROTOCOLS[config.data.source == 'folder']}; {origin}",
            }
        )
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
    return format_table(("resolution", "top-1", "top-5", "images"), cells)
