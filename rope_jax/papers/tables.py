"""Tables of numbers and of settings: the words of the papers' declarations."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from rope_jax.config import Config, load_recipe, model_overrides, resolve
from rope_jax.evaluate.accuracy import model_evaluator
from rope_jax.models.cost import cost
from rope_jax.papers.kinds import (
    Artifact,
    Cell,
    Key,
    explain,
    given_dataset,
    key_names,
    make_cell,
)
from rope_jax.papers.lab import IMAGENET_SETS, Lab, Measured, single
from rope_jax.papers.published import Cell as PublishedCell
from rope_jax.papers.published import published
from rope_jax.papers.runs import Run
from rope_jax.papers.speed import speedup, throughput
from rope_jax.runs.loading import LoadedModel
from rope_jax.training.setup import load_split
from rope_jax.weights.create import create_model

SPEEDS = ("images_per_second", "percent_over_rpb")


@dataclasses.dataclass(frozen=True)
class Table(Artifact):
    """A table of numbers: its cells are those that the paper prints.

    Attributes:
        run: the run of a cell's key; None for one that no run gives.
        source: whose published cells it has, if not its own: "lape/main_text"; "" for none.
        more: keys of cells without a published number.
        columns: the entry of the keys that its columns differ in.
    """

    run: Callable[[Key], Run | None] = lambda key: None
    source: str | None = None
    more: Sequence[Key] = ()
    columns: str = "position"

    @property
    def printed(self) -> Sequence[PublishedCell]:
        """Its published cells."""
        source = self.id if self.source is None else self.source
        return published(source) if source else ()

    def keys(self, lab: Lab) -> dict[str, tuple[Key, Any]]:
        """The keys of its cells with their published numbers, by their text."""
        cells = [(dict(c.key), c.value) for c in self.printed]
        if lab.given is not None:
            data = given_dataset(lab)
            of_set = (data, *(IMAGENET_SETS if data == "imagenet" else ()))
            cells = [
                (key, value)
                for key, value in cells
                if key.get("dataset") in of_set
                and (run := self.run(key)) is not None
                and lab.rows(run)
            ]
        by_text = {json.dumps(key, sort_keys=True): (key, value) for key, value in cells}
        added = [
            key | {"position": scheme}
            for scheme in lab.schemes
            for key, _ in cells
            if key.get("position")
        ]
        for key in [*self.more, *added]:
            by_text.setdefault(json.dumps(dict(key), sort_keys=True), (key, None))
        return {text: cell for text, cell in by_text.items() if lab.wants(key_names(cell[0]))}

    def row_names(self, lab: Lab) -> set[str]:
        return {name for key, _ in self.keys(lab).values() for name in key_names(key)}

    def runs(self, lab: Lab) -> list[Run]:
        found = (self.run(key) for key, _ in self.keys(lab).values())
        return [run for run in dict.fromkeys(found) if run is not None]

    def sides(self) -> dict[str, set[int]]:
        sides: dict[str, set[int]] = {}
        for cell in self.printed:
            if "resolution" in cell.key and (run := self.run(cell.key)):
                sides.setdefault(run.sized, set()).add(cell.key["resolution"][0])
        return sides

    def cells(self, lab: Lab) -> list[Cell]:
        cells = self.keys(lab).values()
        return [make_cell(key, value, *self.measure(lab, key)) for key, value in cells]

    def measure(self, lab: Lab, key: Key) -> tuple[Measured | None, str]:
        """Our number of a cell, and a note."""
        quantity, run = key["quantity"], self.run(key)
        if quantity in SPEEDS:
            return throughput(lab, key)
        if "precision" in key:
            return speedup(lab, key)
        if quantity.startswith("operations"):
            return count_operations(key)
        if quantity == "train_top1":
            return lab.measured(lab.analyse(run, "train", train_accuracy)), ""
        side = key.get("resolution", [None])[0] if run.task == "classify" else None
        dataset = key.get("dataset") if run.task == "classify" else None
        views = "multi-scale" if "multi-scale" in key.get("task", "") else ""
        score = "mask_ap" if quantity == "mask_ap" else None
        ours = lab.measured(lab.scores(run, side, dataset=dataset, views=views), score)
        return ours, explain(lab, run, side, dataset, ours)

    @property
    def quantity(self) -> str:
        keys = [*(cell.key for cell in self.printed), *self.more]
        return ", ".join(dict.fromkeys(key["quantity"] for key in keys))


def train_accuracy(loaded: LoadedModel) -> float:
    """Top-1 accuracy of a run's model on its training images, in percent."""
    evaluator = model_evaluator(loaded.model, loaded.config)
    (row,) = evaluator.score(load_split(loaded.config, "train"))
    return 100 * row["top1"]


def count_operations(key: Key) -> tuple[Measured, str]:
    """Operations of a model at the paper's size, and for each parameter.

    As the paper's counter (thop 0.1.1) counts them, or, if `counted` of the key is "all", all
    multiply-adds and parameters.
    """
    size, options = tuple(key["resolution"]), model_overrides(key.get("options", ""))
    everything = key.get("counted") == "all"
    if key["model"] in ("cat_vit_5", "beit_b16") and not everything:
        options |= {"num_classes": 2}  # implied by ViT's digits, assumed for BEiT
    model = nnx.eval_shape(
        lambda: create_model(key["model"], position=key["position"], image_size=size, **options)
    )
    modules, note = cost(model, size), "all multiply-adds and parameters"
    count = sum(module.multiply_adds for module in modules)
    if not everything:
        note = "of linear layers, convolutions and layer norms alone (4 for each element of a norm)"
        layers = {".".join(map(str, path)): layer for path, layer in nnx.iter_modules(model)}
        ((position, grid),) = model.positions(size)
        norms = {name for name, layer in layers.items() if isinstance(layer, nnx.LayerNorm)}
        counted = norms | {name for name, layer in layers.items() if hasattr(layer, "kernel")}
        modules = [module for module in modules if module.module in counted]
        tokens = position.stage.prefix + math.prod(grid)
        count = sum(module.multiply_adds for module in modules)
        count += 4 * tokens * sum(layers[name].num_features for name in norms)
    if key["quantity"] == "operations_per_parameter":
        count /= sum(module.parameters for module in modules)
    return single(float(count)), note


@dataclasses.dataclass(frozen=True)
class Settings(Table):
    """A table of settings: the printed ones beside those of our recipes, and their results.

    Attributes:
        ours: a cell's key -> our value in words; None if there is no such setting.
        source: of the numbers that were measured with these settings; "" for none.
    """

    ours: Callable[[Key], str | None] = lambda key: None
    source: str | None = ""

    quantity = "settings"

    def cells(self, lab: Lab) -> list[Cell]:
        made = []
        for printed in published(self.id):
            ours = self.ours(printed.key)
            if ours is None:
                note = "no such setting here"
            else:
                note = "" if agrees(printed.value, ours) else "differs"
            made.append(make_cell(printed.key, str(printed.value), ours, note))
        return made + super().cells(lab)


def setting_text(value: Any) -> str:
    """A setting of a config as a table shows it.

    >>> setting_text(310.0), setting_text(1e-06), setting_text("adamw")
    ('310', '1e-06', 'adamw')
    """
    return f"{value:g}" if isinstance(value, float) else str(value)


def agrees(printed: Any, ours: str) -> bool:
    """True if a printed setting equals ours.

    >>> agrees("5e - 2", "0.05"), agrees("Cosine annealing w/ warmup", "cosine")
    (True, True)
    >>> agrees(1024, "512"), agrees("cosine", "step"), agrees("AdamW", "adamw")
    (False, False, True)
    """
    text = str(printed).replace(" ", "")
    try:
        return float(text) == float(ours)
    except ValueError:
        return ours.replace(" ", "").lower() in text.lower()


@functools.cache
def recipe_config(recipe: str) -> Config:
    """The config of a recipe."""
    return resolve(load_recipe(recipe))
