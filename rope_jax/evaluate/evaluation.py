"""Evaluation of a loaded model at one size, as `python -m rope_jax.evaluate` asks for it."""

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
from rope_jax.system.processes import decided_by_first
from rope_jax.system.sharding import replicated, share
from rope_jax.tasks import Task, task_of
from rope_jax.tasks.evaluator import Evaluator
from rope_jax.training.setup import load_split
from rope_jax.weights import Preprocessing


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation of a model at one size.

    Attributes:
        asked: the command's arguments by name, without those of the model.
        model: from `create_model` or a run.
        config: of the run that trained it, or None.
        size: (height, width) in pixels.
        preprocessing: of the images.
        mesh: the devices.
        folder: for pictures.
    """

    asked: Mapping[str, Any]
    model: nnx.Module
    config: Config | None
    size: tuple[int, int]
    preprocessing: Preprocessing
    mesh: Mesh
    folder: pathlib.Path

    @property
    def task(self) -> Task:
        """The model's task."""
        return task_of(self.model)

    @property
    def own(self) -> dict[str, Any]:
        """The arguments of the model's task alone."""
        given = vars(self.preprocessing) if self.asked["dataset"] else {}
        return {name: given.get(name, self.asked[name]) for name in self.task.flags}

    @functools.cached_property
    def images(self) -> data.Images | data.Streamed:
        """The images of --dataset, or of the run's test split."""
        dataset, folder = self.asked["dataset"], self.asked["images"]
        if dataset is None:
            images = load_split(self.config, "test", self.size)
        else:
            crop = self.preprocessing.crop_notation
            images = self.task.open(dataset, folder, self.size, crop)
        size = None if self.asked["resolutions"] is None else self.size
        frame = self.config and self.config.eval.frame
        return images if images.one_size else self.task.framed(images, size, frame)

    def recorded(self, about: Mapping[str, Any], out: pathlib.Path) -> Row:
        """The row of this evaluation: from a file of rows, or evaluated and added to it.

        Args:
            about: what identifies it beside the size and what the task adds; rows with equal
                settings are not evaluated again.
            out: an `evaluations.json`.
        """
        identity = about | {"resolution": list(self.size)} | self.identity()
        images = self.images.fingerprint()
        # Earlier versions did not store the fingerprint of the images.
        stored = lambda: [
            row
            for row in usable_evaluations(out)
            if row.get("asked") == identity and row.get("data", images) == images
        ]
        row = next(iter(decided_by_first(stored)), None)
        if row is None:
            packages = ("rope_jax", "jax", "flax", "numpy", "pillow")
            versions = {name: importlib.metadata.version(name) for name in packages}
            row = self.row() | {"asked": identity, "data": images, "versions": versions}
            if share()[0] == 0:
                add_evaluation(out, row)
        return row

    def identity(self) -> dict[str, Any]:
        """The identity of the row beyond the settings of all tasks."""
        folder = self.asked["images"]
        return self.task.identity(self.images, folder, self.model, self.preprocessing, self.own)

    def row(self) -> Row:
        """The scores, with a picture of the first images for tasks that have one.

        Raises:
            SaveFailed: the folder was exchanged in the meantime.
        """
        asked, images, task = self.asked, self.images, self.task
        before = self.folder.stat()
        row, found = task.evaluate(
            self._evaluator(), self.model, images, asked["pictures"], self.own
        )
        if not os.path.samestat(before, self.folder.stat()):
            raise SaveFailed(
                f"{self.folder} was moved or exchanged during the evaluation: nothing is written"
            )
        if share()[0] == 0:
            print(file=sys.stderr)
            if found:
                path = self.folder / f"predictions_{'x'.join(map(str, images.size))}.png"
                task.draw(found, images.class_names, images.classes, path)
                print(f"picture: {path}")
        windows = self.model.window_rule(scaled=asked["scale_windows"])
        rule = rotation_rule(EvalConfig(extend=asked["extend"], log_scale=asked["log_scale"]))
        how = (row["protocol"], windows, rule, row.pop("note", None))
        return row | {"protocol": "; ".join(filter(None, how))}

    def _evaluator(self) -> Evaluator:
        """The model on images of any size."""
        graph, *weights = nnx.split(self.model)
        options = {name: self.asked[name] for name in (*rules(EvalConfig()), "rpb_shrink")}
        return Evaluator(
            at_any_resolution(graph, self.mesh, **options),
            jax.device_put(weights, replicated(self.mesh)),
            self.task,
            mean=self.preprocessing.mean,
            std=self.preprocessing.std,
            batch_size=self.asked["batch_size"] or self.task.batch_size,
            mesh=self.mesh,
            config=self.config or Config(),
            poll=self._progress,
        )

    def _progress(self, images: int) -> None:
        """Shows how many images have been evaluated."""
        if share()[0] == 0:
            told = f"\r{images:,} of {len(self.images.labels):,} images"
            print(told, end="", file=sys.stderr, flush=True)
