"""Evaluation of a loaded model at one size, for `python -m rope_jax.evaluate`."""

import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from rope_jax import data
from rope_jax.config import Config
from rope_jax.config.settings import EvalConfig
from rope_jax.evaluate.accuracy import at_any_resolution, rotation_rule, rules
from rope_jax.evaluate.results import Row, add_evaluation, usable_evaluations
from rope_jax.system.files import SaveFailed
from rope_jax.system.sharding import replicate
from rope_jax.tasks import Task, find_task
from rope_jax.tasks.evaluator import Evaluator
from rope_jax.training.setup import load_split
from rope_jax.weights import Preprocessing


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation of a model at one size.

    Attributes:
        arguments: the command's arguments by name, without those of the model.
        model: from `create_model` or a run.
        config: of the run that trained it, or None.
        size: (height, width) in pixels.
        preprocessing: of the images.
        mesh: the devices.
        folder: for pictures.
    """

    arguments: Mapping[str, Any]
    model: nnx.Module
    config: Config | None
    size: tuple[int, int]
    preprocessing: Preprocessing
    mesh: Mesh
    folder: pathlib.Path

    @property
    def task(self) -> Task:
        """The model's task."""
        return find_task(self.model)

    @property
    def task_options(self) -> dict[str, Any]:
        """The arguments of the model's task alone."""
        preprocessing = vars(self.preprocessing) if self.arguments["dataset"] else {}
        return {name: preprocessing.get(name, self.arguments[name]) for name in self.task.flags}

    @functools.cached_property
    def images(self) -> data.Images | data.Streamed:
        """The images of --dataset, or of the run's test split."""
        dataset, folder = self.arguments["dataset"], self.arguments["images"]
        if dataset is None:
            images = load_split(self.config, "test", self.size)
        else:
            crop = self.preprocessing.crop_notation
            images = self.task.open(dataset, folder, self.size, crop)
            if limit := self.arguments["limit"]:
                images = dataclasses.replace(images, source=images.source.spread(limit))
        size = None if self.arguments["resolutions"] is None else self.size
        frame = self.config and self.config.eval.frame
        return images if images.one_size else self.task.frame_images(images, size, frame)

    def record(self, common: Mapping[str, Any], out: pathlib.Path) -> Row:
        """Returns the row of this evaluation: from a file of rows, or evaluated and added to it.

        Args:
            common: its identity except for the size and the settings of its task; rows with equal
                settings are not evaluated again.
            out: an `evaluations.json`.
        """
        identity = common | {"resolution": list(self.size)} | self.identity()
        images = self.images.fingerprint()
        for row in usable_evaluations(out):
            # Earlier versions did not store the fingerprint of the images.
            if row.get("asked") == identity and row.get("data", images) == images:
                return row
        packages = ("rope_jax", "jax", "flax", "numpy", "pillow")
        versions = {name: importlib.metadata.version(name) for name in packages}
        row = self.row() | {"asked": identity, "data": images, "versions": versions}
        add_evaluation(out, row)
        return row

    def identity(self) -> dict[str, Any]:
        """The identity of the row beyond the settings of all tasks."""
        folder = self.arguments["images"]
        return self.task.identity(
            self.images, folder, self.model, self.preprocessing, self.task_options
        )

    def row(self) -> Row:
        """The scores, with a picture of the first images for tasks that have one.

        Raises:
            SaveFailed: the folder was replaced in the meantime.
        """
        arguments, images, task = self.arguments, self.images, self.task
        before = self.folder.stat()
        row, predictions = task.evaluate(
            self._evaluator(), self.model, images, arguments["pictures"], self.task_options
        )
        if not os.path.samestat(before, self.folder.stat()):
            raise SaveFailed(
                f"{self.folder} was moved or exchanged during the evaluation: nothing is written"
            )
        print(file=sys.stderr)
        if predictions:
            path = self.folder / f"predictions_{'x'.join(map(str, images.size))}.png"
            task.draw(predictions, images.class_names, images.classes, path)
            print(f"picture: {path}")
        windows = self.model.window_rule(scaled=arguments["scale_windows"])
        rule = rotation_rule(
            EvalConfig(extend=arguments["extend"], log_scale=arguments["log_scale"])
        )
        parts = (row["protocol"], windows, rule, row.pop("note", None))
        return row | {"protocol": "; ".join(filter(None, parts))}

    def _evaluator(self) -> Evaluator:
        """The model on images of any size."""
        graph, *weights = nnx.split(self.model)
        options = {name: self.arguments[name] for name in (*rules(EvalConfig()), "rpb_shrink")}
        devices = self.mesh.size
        all_images = -(-len(self.images.labels) // devices) * devices
        return Evaluator(
            at_any_resolution(graph, self.mesh, **options),
            jax.device_put(weights, replicate(self.mesh)),
            self.task,
            mean=self.preprocessing.mean,
            std=self.preprocessing.std,
            batch_size=self.arguments["batch_size"] or min(self.task.batch_size, all_images),
            mesh=self.mesh,
            config=self.config or Config(),
            poll=self._progress,
        )

    def _progress(self, images: int) -> None:
        """Shows the number of evaluated images."""
        text = f"\r{images:,} of {len(self.images.labels):,} images"
        print(text, end="", file=sys.stderr, flush=True)
