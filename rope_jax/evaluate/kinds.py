"""How the command evaluates a model at one size, by what the labels of its task are of."""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from rope_jax import data
from rope_jax.config import Config, ConfigError, blame
from rope_jax.config.settings import EvalConfig
from rope_jax.data.images.augment import parse_crop
from rope_jax.evaluate.accuracy import (
    Apply,
    at_resolution,
    counted,
    description,
    evaluate_files,
    evaluate_split,
    on_all_devices,
    protocol,
    rotation_rule,
)
from rope_jax.evaluate.box_pictures import detected_in, draw_detections
from rope_jax.evaluate.pictures import draw_pictures
from rope_jax.evaluate.results import Row
from rope_jax.evaluate.segments import Views, segment_split, side_multiple
from rope_jax.names.text import image_pair
from rope_jax.runs.loading import LoadedModel
from rope_jax.system.sharding import replicated, share, use_mesh
from rope_jax.tasks import detection
from rope_jax.tasks.average_precision import require_pycocotools
from rope_jax.training.setup import first_difference, load_split
from rope_jax.weights import Preprocessing

Split = data.Images | data.Streamed


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation of a model at one size.

    Each kind has `row()`, the row of its scores, and `identity()`, what else than the settings of
    all kinds identifies it.

    Attributes:
        asked: the arguments of the command.
        about: the model.
        size: (height, width) in pixels.
        preprocessing: of the images.
        mesh: the devices.
        folder: for pictures.
        does: what models of this kind do, for messages.
        sets: names for --dataset.
        flags: arguments that models of this kind alone have.
    """

    asked: argparse.Namespace
    about: LoadedModel
    size: tuple[int, int]
    preprocessing: Preprocessing
    mesh: Mesh
    folder: pathlib.Path

    does: ClassVar[str] = ""
    sets: ClassVar[tuple[str, ...]]
    flags: ClassVar[tuple[str, ...]] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Of `at_resolution`."""
        names = ("scale_windows", "rpb_shrink", "extend", "log_scale")
        return {name: getattr(self.asked, name) for name in names}

    @functools.cached_property
    def images(self) -> Split:
        """The images of --dataset, or of the run's test split."""
        if self.asked.dataset is None:
            return load_split(self.about.config, "test", self.size)
        return data.load(self.asked.dataset, self.asked.images, "test", self.size)

    def dense_identity(self) -> dict[str, Any]:
        """What identifies a row of a model with a head."""
        blocks = self.about.model.blocks and list(self.about.model.blocks)
        about = {"head": self.about.model.head_notation, "blocks": blocks}
        return about | {"images": self.asked.images}

    def applied(self) -> tuple[Apply, Any]:
        """A function (weights, images) -> outputs, for images of any size, and the weights."""
        graph, weights = nnx.split(self.about.model)

        def apply(weights: Any, images: Array, **given: Array) -> Any:
            with use_mesh(self.mesh):
                model = nnx.merge(graph, weights)
                return at_resolution(model, images.shape[1:3], **self.options)(images, **given)

        return apply, jax.device_put(weights, replicated(self.mesh))

    def with_rules(self, how: str, windows: str | None) -> str:
        """A protocol with the rules of a model's windows and rotations."""
        rule = EvalConfig(extend=self.asked.extend, log_scale=self.asked.log_scale)
        return "; ".join(filter(None, (how, windows, rotation_rule(rule))))

    def dense_row(self, row: Row, how: str) -> Row:
        """A row of a model with a head, with its protocol."""
        windows = self.about.model.window_rule(scaled=self.asked.scale_windows)
        return row | {"protocol": self.with_rules(how, windows)}

    def draw(self, draw: Callable[..., None], found: Sequence[Any]) -> None:
        """Writes a picture of what is found in the first images."""
        if share()[0] != 0:
            return
        print(file=sys.stderr)
        if found:
            path = self.folder / f"predictions_{'x'.join(map(str, self.images.size))}.png"
            draw(found, self.images.class_names, self.images.classes, path)
            print(f"picture: {path}")

    def progress(self, images: int) -> None:
        """Shows how many images have been evaluated."""
        if share()[0] == 0:
            told = f"\r{images:,} of {len(self.images.labels):,} images"
            print(told, end="", file=sys.stderr, flush=True)


class OfImages(Evaluation):
    """Of models that classify images."""

    does = "classify images"
    sets = tuple(data.EVALUATION_SETS)
    flags = ("crop", "interpolation")

    @functools.cached_property
    def images(self) -> Split | data.EvaluationSet:
        """The run's test split, or image files with one class each."""
        if self.asked.dataset is None:
            return super().images
        return data.EvaluationSet(self.asked.dataset, self.asked.images)

    def identity(self) -> dict[str, Any]:
        if self.asked.dataset is None:
            return {}
        how = json.loads(json.dumps(dataclasses.asdict(self.preprocessing)))
        return {"images": self.asked.images} | how

    def row(self) -> Row:
        model = at_resolution(self.about.model, self.size, **self.options)
        batch_size = self.asked.batch_size or 128
        if self.asked.dataset is None:
            return self._own_split(model, batch_size)
        row = evaluate_files(
            model,
            self.images,
            self.size,
            self.preprocessing,
            self.mesh,
            batch_size=batch_size,
            windows=self.with_rules("", model.window_rule()),
            poll=self.progress,
        )
        print(file=sys.stderr)
        return row

    def _own_split(self, model: nnx.Module, batch_size: int) -> Row:
        """The row of the run's own test split."""
        config, asked = self.about.config, self.asked
        options = {"batch_size": batch_size, "extend": asked.extend, "log_scale": asked.log_scale}
        config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, **options))
        apply, weights = on_all_devices(model, self.mesh)
        how = protocol(self.images, config, model.window_rule())
        (row,) = evaluate_split(apply, weights, config, self.images, self.mesh, how)
        return row


class OfPixels(Evaluation):
    """Of models that segment images."""

    does = "segment images"
    sets = ("ade20k", "masks")
    flags = ("scales", "flip", "window", "stride")

    def identity(self) -> dict[str, Any]:
        return self.dense_identity() | {"views": str(self.views)}

    @functools.cached_property
    def views(self) -> Views:
        """The views that were asked for; by default windows of the size of evaluation, or the whole
        images of a set in memory."""
        asked, images = self.asked, self.images
        scales = asked.scales or (1.0,)
        window = asked.window or ("whole" if images.in_memory else None)
        if window == "whole":
            if asked.stride is not None:
                raise ConfigError(
                    "--stride is from window to window: name a --window, or leave it out"
                )
            return Views(scales, asked.flip)
        with blame("--window"):
            size = images.size if window is None else image_pair(window)
        if asked.stride is not None and asked.stride > min(size):
            raise ConfigError(
                f"--stride={asked.stride} leaves out pixels between windows of "
                f"{size[0]}x{size[1]}: use at most {min(size)}"
            )
        return Views(scales, asked.flip, size, asked.stride or max(1, 2 * min(size) // 3))

    def row(self) -> Row:
        images, views = self.images, self.views
        check_classes(self.about.model, images)
        if views.window is not None:
            with blame("--window"):
                self.about.model.grids(views.window)
        config = self.about.config or Config()
        row, pictures = segment_split(
            *self.applied(),
            images,
            views,
            mean=self.preprocessing.mean,
            std=self.preprocessing.std,
            batch_size=self.asked.batch_size or 16,
            multiple=side_multiple(self.about.model.grids),
            mesh=self.mesh,
            probabilities=self.about.model.head.probabilities,
            pictures=self.asked.pictures,
            bad_images=config.data.bad_images,
            poll=self.progress,
        )
        self.draw(draw_pictures, pictures)
        return self.dense_row(row, row["protocol"])


class OfBoxes(Evaluation):
    """Of models that detect objects."""

    sets = ("coco",)

    def identity(self) -> dict[str, Any]:
        return self.dense_identity() | {"frame": self.images.protocol}

    @property
    def _own_frame(self) -> str | None:
        """The frame of the run's own evaluation, for which its canvases are; None for another."""
        config = self.about.config
        if config is None or self.asked.resolutions is not None:
            return None
        frame = config.eval.frame  # of a run on images of one size it is for other labels
        return frame if parse_crop(frame).entry.joint == detection.LABELS_OF else None

    @functools.cached_property
    def images(self) -> Split:
        """The images, fit into the size that is asked for, into the frame of the run's own
        evaluation, or into that of the set."""
        images = super().images
        if images.one_size:
            return images
        if self.asked.resolutions is not None:
            frame = f"fit(short={min(self.size)},long={max(self.size)})"
            return dataclasses.replace(images, crop=frame)
        if self._own_frame is not None:
            return dataclasses.replace(images, crop=self._own_frame)
        return dataclasses.replace(images, size=_sides(images.crop))

    def _config(self) -> Config:
        """The settings of batches: canvases that hold the images, upright, lying or both."""
        config = self.about.config or Config()
        if self.images.one_size or self._own_frame is not None:
            return config
        multiple = side_multiple(self.about.model.grids)
        short, long = (-(-side // multiple) * multiple for side in _sides(self.images.crop))
        canvases = ((short, long), (long, short), (long, long))
        return dataclasses.replace(config, data=dataclasses.replace(config.data, canvases=canvases))

    def row(self) -> Row:
        images, config = self.images, self._config()
        require_pycocotools()
        check_classes(self.about.model, images)
        data.check_objects(images)
        (parts,), used = counted(
            *self.applied(),
            images,
            mean=self.preprocessing.mean,
            std=self.preprocessing.std,
            batch_size=self.asked.batch_size or 16,
            mesh=self.mesh,
            task=detection,
            config=config,
            poll=self.progress,
        )
        scores = detection.scores(parts, images)
        self.draw(draw_detections, detected_in(parts, images, self.asked.pictures))
        row = description(images) | {"count": used} | scores
        return self.dense_row(row, images.protocol)


def _sides(frame: str) -> tuple[int, int]:
    """The shorter and the longer side, in pixels, that images of a frame fit into."""
    crop = parse_crop(frame)
    return crop.option("short"), crop.option("long")


KINDS: dict[str, type[Evaluation]] = {"images": OfImages, "pixels": OfPixels, "boxes": OfBoxes}


def check_classes(model: nnx.Module, images: Split) -> None:
    """Rejects images of other classes than the model's, by their names where both are known."""
    if model.num_classes != images.classes:
        raise ConfigError(
            f"the model has {model.num_classes} classes, and {images.name} has {images.classes}: "
            "use images of the same classes, or weights for as many"
        )
    if (difference := first_difference(model.class_names, images.class_names)) is not None:
        label, own, there = difference
        raise ConfigError(
            f"the model has other classes than {images.name}: label {label} is {own!r} for the "
            f"model and {there!r} in the images: use images of the same classes"
        )
