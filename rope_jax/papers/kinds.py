"""What a table or figure makes of runs: the words of the papers' declarations."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from rope_jax.analysis import plots
from rope_jax.analysis.analyses import image_batches
from rope_jax.analysis.attention import attention_statistics
from rope_jax.analysis.correlation import layer_positions, middle_token, position_correlation
from rope_jax.analysis.rotation import fourier_reconstruction, frequencies
from rope_jax.config import Config, load_recipe, model_overrides, resolve
from rope_jax.evaluate import Evaluator, at_any_resolution
from rope_jax.models.cost import cost
from rope_jax.papers.claims import Claim, Verdict
from rope_jax.papers.lab import SETS, Lab, Measured
from rope_jax.papers.published import Cell as PublishedCell
from rope_jax.papers.published import find_published, published
from rope_jax.papers.runs import Run
from rope_jax.papers.speed import speedup, throughput
from rope_jax.runs.loading import LoadedModel
from rope_jax.system.sharding import make_mesh, replicate
from rope_jax.tasks import find_task
from rope_jax.training.setup import load_split
from rope_jax.weights.create import create_model

Key = Mapping[str, Any]
Cell = dict[str, Any]  # key, published, ours, note
SCORES = ("top1", "miou", "box_ap", "mask_ap")
SPEEDS = ("images_per_second", "percent_over_rpb")
MISSING = "not built yet: {}"


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A table or figure of a paper.

    Attributes:
        name: "table_4.1".
        title: what it shows.
        claims: of the paper, about its runs.
        note: what a reader should know: how ours differs, what the paper leaves open.
    """

    name: str
    title: str
    claims: Sequence[Claim] = dataclasses.field(default=(), kw_only=True)
    note: str = dataclasses.field(default="", kw_only=True)
    paper: str = dataclasses.field(default="", kw_only=True)  # set by `Paper`

    @property
    def id(self) -> str:
        """Its name in commands and results: "thesis/table_4.1"."""
        return f"{self.paper}/{self.name}"

    @property
    def quantity(self) -> str:
        """What its numbers are."""
        return ""

    def runs(self, lab: Lab) -> list[Run]:
        """The runs that it needs."""
        return []

    def sides(self) -> dict[str, set[int]]:
        """The test sides in pixels that it needs, by model."""
        return {}

    def cells(self, lab: Lab) -> list[Cell]:
        """Its numbers, published and ours."""
        return []

    def draw(self, lab: Lab, cells: Sequence[Cell], path: pathlib.Path) -> list[pathlib.Path]:
        """Draws it, if it is a picture, and returns the files."""
        return []

    def wanted(self, lab: Lab) -> bool:
        """Whether it has something of --only."""
        return bool(self.runs(lab))

    def value(self, lab: Lab, run: Run, side: int | None) -> dict[int, float]:
        """The number of a run that claims are about, by seed; None for the training size."""
        scores = lab.scores(run, side)
        return {seed: lab.measured({seed: row})["mean"] for seed, row in scores.items()}

    def verdicts(self, lab: Lab) -> list[Verdict]:
        """The verdicts on its claims; runs that are one at this scale are judged once."""
        late, runs = lab.given is not None, self.runs(lab)
        if not late:
            runs = list({lab.run_folder(run, None): run for run in reversed(runs)}.values())
        options = {"sides": lab.distinct_sides, "name": lab.model_name}
        value = functools.partial(self.value, lab)
        return [v for claim in self.claims for v in claim.judge(runs, value, late, **options)]


def key_names(key: Key) -> set[str]:
    """What --only may call a cell."""
    return {key[name] for name in ("model", "position", "options") if name in key}


def _with_schemes(keys: Iterable[Key], schemes: Sequence[str]) -> list[Key]:
    """Keys, and those of the user's schemes in the same places."""
    keys = list(keys)
    own = [{**key, "position": scheme} for scheme in schemes for key in keys if key.get("position")]
    by_text = {json.dumps(key, sort_keys=True): key for key in [*keys, *own]}
    return list(by_text.values())


@dataclasses.dataclass(frozen=True)
class Table(Artifact):
    """A table of numbers: its cells are those that the paper prints.

    Attributes:
        run: the run of a cell's key; None for one that no run gives.
        source: whose published cells it has, if not its own: "lape/main_text"; "" for none.
        more: keys of cells without a published number; "missing" is what they need.
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
            is_given = lambda run: run is not None and lab.rows(run)
            cells = [(key, value) for key, value in cells if is_given(self.run(key))]
        by_text = {json.dumps(key, sort_keys=True): (key, value) for key, value in cells}
        for key in [*self.more, *_with_schemes([key for key, _ in cells], lab.schemes)]:
            by_text.setdefault(json.dumps(dict(key), sort_keys=True), (key, None))
        names = {*lab.only}
        wants = lambda key: not names or not names.isdisjoint(key_names(key))
        return {text: cell for text, cell in by_text.items() if wants(cell[0])}

    def wanted(self, lab: Lab) -> bool:
        return bool(self.keys(lab))

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
        made = []
        for key, value in self.keys(lab).values():
            ours, note = self.measure(lab, key)
            shown = {name: word for name, word in key.items() if name != "missing"}
            made.append({"key": shown, "published": value, "ours": ours, "note": note})
        return made

    def measure(self, lab: Lab, key: Key) -> tuple[Measured | None, str]:
        """Our number of a cell, and a note."""
        quantity, run = key["quantity"], self.run(key)
        if quantity in SPEEDS:
            return throughput(lab, key)
        if "precision" in key:
            return speedup(lab, key)
        if quantity.startswith("operations"):
            return count_operations(key)
        if run is None or (not run.recipe and lab.scale != "released"):
            return None, MISSING.format(key.get("missing", "its training"))
        if quantity == "train_top1":
            return lab.measured(lab.analyse(run, "train", train_accuracy)), ""
        side = key.get("resolution", [None])[0] if run.task == "classify" else None
        dataset = key.get("dataset") if run.task == "classify" else None
        views = "multi-scale" if "multi-scale" in key.get("task", "") else ""
        ours = lab.measured(lab.scores(run, side, dataset=dataset, views=views))
        return ours, _explain(lab, run, side, dataset, ours)

    @property
    def quantity(self) -> str:
        keys = [*(cell.key for cell in self.printed), *self.more]
        return ", ".join(dict.fromkeys(key["quantity"] for key in keys))


def _explain(lab: Lab, run: Run, side: int | None, dataset: str | None, ours: Any) -> str:
    """What a reader should know about a cell: what stands in, or why it is empty."""
    if ours is None and dataset in SETS:
        if lab.small_scale:
            return "needs ImageNet: --scale=released or full"
        return f"rope_jax evaluate WORKDIR --dataset={SETS[dataset]} --images=FOLDER adds it"
    if ours is None:
        if lab.scale != "released":
            return "not trained yet"
        named = run.data in lab.data
        return "no weights were published" if named else f"needs --data={run.data}=FOLDER"
    if not lab.small_scale or lab.given is not None:
        return ""
    if run.task != "classify":
        return f"{lab.model_name(run)} with a small head, on scenes"
    size = "" if side is None else f" at {lab.test_size(run, side)} px"
    return f"{lab.model_name(run)}, tested on {lab.images}{size}"


def train_accuracy(loaded: LoadedModel) -> float:
    """Top-1 accuracy of a run's model on its training images, in percent."""
    config, mesh = loaded.config, make_mesh()
    graph, *weights = nnx.split(loaded.model)
    evaluator = Evaluator(
        at_any_resolution(graph, mesh),
        jax.device_put(weights, replicate(mesh)),
        find_task(loaded.model),
        mean=config.data.mean,
        std=config.data.std,
        batch_size=config.eval.batch_size,
        mesh=mesh,
        config=config,
    )
    (row,) = evaluator.score(load_split(config, "train"))
    return 100 * row["top1"]


def count_operations(key: Key) -> tuple[Measured, str]:
    """Multiply-adds of a model at the paper's size, and for each parameter."""
    size, options = tuple(key["resolution"]), model_overrides(key.get("options", ""))
    model = nnx.eval_shape(
        lambda: create_model(key["model"], position=key["position"], image_size=size, **options)
    )
    modules = cost(model, size)
    count = sum(module.multiply_adds for module in modules)
    parameters = sum(module.parameters for module in modules)
    number = count if key["quantity"] == "operations" else count / parameters
    note = (
        "counted with the products of attention and all parameters; the paper's counter (thop) "
        "leaves out both the products and what is no linear layer, convolution or norm"
    )
    return {"mean": float(number), "interval": None, "seeds": [], "runs": []}, note


@dataclasses.dataclass(frozen=True)
class Curves(Artifact):
    """Accuracy over test resolution: a panel for each model, a line for each scheme.

    Attributes:
        lines: the runs.
        at: test sides in pixels.
        source: table of published numbers, drawn dashed.
    """

    lines: Sequence[Run] = ()
    at: Sequence[int] = ()
    source: str = "heo/code"

    quantity, label, zero = "top1", "top-1 accuracy (%)", False

    def runs(self, lab: Lab) -> list[Run]:
        if lab.given is not None:
            return given_runs(lab)
        own = [run.with_position(scheme) for scheme in lab.schemes for run in self.lines]
        return [run for run in dict.fromkeys([*self.lines, *own]) if lab.wants(run)]

    def sides(self) -> dict[str, set[int]]:
        return {run.sized: set(self.at) for run in self.lines}

    def cells(self, lab: Lab) -> list[Cell]:
        made = []
        for run in self.runs(lab):
            data = {"dataset": run.data if lab.given is None else given_dataset(lab)}
            name = {"model": run.model, "position": run.position, "options": run.options}
            for side in self.at if lab.given is None else given_sides(lab, run):
                key = data | {"resolution": [side, side], "quantity": "top1"}
                printed = find_published(**name, **key)
                ours = lab.measured(lab.scores(run, side))
                key = {k: v for k, v in name.items() if v} | key | {"quantity": self.quantity}
                shown = [c.value for c in printed if lab.given or c.artifact == self.source]
                note = _explain(lab, run, side, None, ours)
                made.append(
                    {"key": key, "published": next(iter(shown), None), "ours": ours, "note": note}
                )
        return made

    def draw(self, lab: Lab, cells: Sequence[Cell], path: pathlib.Path) -> list[pathlib.Path]:
        ours, printed = by_panel(lab, cells, "ours"), by_panel(lab, cells, "published")
        if lab.small_scale:  # of other images: in panels of their own
            printed = {f"{name}: published, ImageNet-1k": lines for name, lines in printed.items()}
            ours |= {name: {} for name, lines in printed.items() if any(lines.values())}
        columns = 2 if len(ours) in (2, 4) else 3
        x, title = "test resolution (pixels)", f"{self.title}\n{lab_words(lab)}"
        words = {"title": title, "x": x, "y": self.label, "zero": self.zero}
        plots.curves_by_panel(ours, printed, path, columns=columns, **words)
        return [path]


def lab_words(lab: Lab) -> str:
    """The scale and the images of a lab, in words."""
    if lab.given is not None:
        return "the runs of --runs"
    return f"scale {lab.scale}" + (f": {lab.images}" if lab.small_scale else "")


def by_panel(lab: Lab, cells: Sequence[Cell], name: str) -> dict[str, dict[str, dict[int, float]]]:
    """Model, or what stands in for it -> scheme -> side -> number of cells."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    apart = lab.small_scale and lab.given is None and name == "ours"
    models = {(c["key"]["model"], c["key"]["position"], c["key"].get("options")) for c in cells}
    schemes = [(model, position) for model, position, _ in models]
    for cell in cells:
        key, number = cell["key"], cell[name]
        number = number["mean"] if isinstance(number, dict) else number
        several = schemes.count((key["model"], key["position"])) > 1
        label = ", ".join(filter(None, (key["position"], several and key.get("options"))))
        run, side = Run(key["model"], key["position"]), key["resolution"][0]
        panel, side = (
            (lab.model_name(run), lab.test_size(run, side)) if apart else (run.model, side)
        )
        line = panels.setdefault(panel, {}).setdefault(label, {})
        if number is not None:
            line[side] = number
    return panels


@dataclasses.dataclass(frozen=True)
class Gains(Curves):
    """Improvement in accuracy over a model's own scheme, over test resolution.

    Attributes:
        base: scheme of each model -> the one that its lines are compared with.
    """

    base: Mapping[str, str] = dataclasses.field(default_factory=dict)
    quantity, label, zero = "top1_gain", "percentage points", True

    def cells(self, lab: Lab) -> list[Cell]:
        cells = Curves.cells(self, lab)
        place = lambda cell, position: (cell["key"]["model"], position, *cell["key"]["resolution"])
        found = {place(cell, cell["key"]["position"]): cell for cell in cells}
        made = []
        for cell in cells:
            key = cell["key"]
            base = found.get(place(cell, self._base(cells, key["model"])))
            if base is None or base is cell:
                continue
            numbers = [cell["published"], base["published"]]
            value = None if None in numbers else round(numbers[0] - numbers[1], 3)
            ours = _difference(lab, cell["ours"], base["ours"])
            made.append({**cell, "published": value, "ours": ours})
        return made

    def _base(self, cells: Sequence[Cell], model: str) -> str:
        first = next(c["key"]["position"] for c in cells if c["key"]["model"] == model)
        return self.base.get(model, first)


def _difference(lab: Lab, ours: Measured | None, base: Measured | None) -> Measured | None:
    """The difference of two means, without an interval: claims have that of paired seeds."""
    if ours is None or base is None:
        return None
    return ours | {"mean": ours["mean"] - base["mean"], "interval": None}


@dataclasses.dataclass(frozen=True)
class Attention(Artifact):
    """Attention distance or entropy by layer: a panel for each test size, a line for each scheme.

    Attributes:
        lines: the runs.
        at: test sides in pixels.
        statistic: "distance" (tokens) or "entropy" (nats).
    """

    lines: Sequence[Run] = ()
    at: Sequence[int] = ()
    statistic: str = "distance"

    @property
    def quantity(self) -> str:
        return f"attention {self.statistic}"

    runs = Curves.runs

    def sides(self) -> dict[str, set[int]]:
        return {}

    def layers(self, lab: Lab, run: Run, side: int | None) -> dict[int, tuple[str, list[float]]]:
        """The statistic of each layer, the mean of its heads, by seed."""
        size = lab.test_size(run, 224 if side is None else side)
        count = lab.count or (32 if lab.scale == "smoke" else 256)

        def measure(loaded: LoadedModel) -> dict[str, list[float]]:
            images = lab.data.get("imagenet") if lab.scale == "released" else None
            batches = image_batches(loaded, images, str(size), count, 32)
            statistics = attention_statistics(loaded.model, (batch for _, batch in batches))
            return {
                name: [float(np.mean(heads)) for heads in getattr(statistics, name)]
                for name in ("distance", "entropy")
            }

        values = lab.analyse(run, f"attention_{size}_{count}", measure)
        return {seed: (folder, value[self.statistic]) for seed, (folder, value) in values.items()}

    def cells(self, lab: Lab) -> list[Cell]:
        made = []
        for run in self.runs(lab):
            for side in self.at:
                by_seed = self.layers(lab, run, side)
                depth = min((len(layers) for _, layers in by_seed.values()), default=12)
                for layer in range(depth):
                    values = {s: (folder, x[layer]) for s, (folder, x) in by_seed.items()}
                    key = {"model": run.model, "position": run.position, "layer": layer + 1}
                    key |= {"resolution": [side, side], "quantity": self.quantity}
                    ours = lab.measured(values)
                    note = _explain(lab, run, side, None, ours)
                    made.append({"key": key, "published": None, "ours": ours, "note": note})
        return made

    def value(self, lab: Lab, run: Run, side: int | None) -> dict[int, float]:
        """The mean over the middle third of the layers."""
        middle = lambda x: float(np.mean(x[len(x) // 3 : -(-2 * len(x) // 3)]))
        return {seed: middle(x) for seed, (_, x) in self.layers(lab, run, side).items()}

    def draw(self, lab: Lab, cells: Sequence[Cell], path: pathlib.Path) -> list[pathlib.Path]:
        panels: dict[str, dict[str, dict[int, float]]] = {}
        for cell in cells:
            key, ours = cell["key"], cell["ours"]
            line = panels.setdefault(f"{key['resolution'][0]} px", {})
            points = line.setdefault(key["position"], {})
            if ours is not None:
                points[key["layer"]] = ours["mean"]
        unit = {"distance": "tokens", "entropy": "nats"}[self.statistic]
        plots.curves_by_panel(
            panels,
            {},
            path,
            title=f"{self.title}\n{lab_words(lab)}",
            x="layer",
            y=f"{self.quantity} ({unit})",
        )
        return [path]


def given_runs(lab: Lab) -> list[Run]:
    """The user's runs as runs of a paper."""
    models = [result.config.model for result in lab.given]
    runs = [Run(m.name, m.position, "given", m.options) for m in models]
    return list(dict.fromkeys(runs))


def given_dataset(lab: Lab) -> str:
    """The images on which the user's runs were tested."""
    return lab.given[0].rows[0]["dataset"]


def given_sides(lab: Lab, run: Run) -> list[int]:
    """The square test sides of the user's runs, ascending."""
    rows = [row for _, rows in lab.rows(run).values() for row in rows]
    return sorted({r["resolution"][0] for r in rows if len(set(r["resolution"])) == 1})


@dataclasses.dataclass(frozen=True)
class Maps(Artifact):
    """Maps of trained models side by side: one row for each run.

    Attributes:
        lines: the runs.
        maps: of a loaded model: name -> map.
        label: of the colour bar.
    """

    lines: Sequence[Run] = ()
    maps: Callable[[LoadedModel], dict[str, np.ndarray]] = lambda loaded: {}
    label: str = ""
    missing: Sequence[tuple[str, str]] = ()  # quantities of each layer that are not built

    runs = Curves.runs

    @property
    def quantity(self) -> str:
        return self.label

    def cells(self, lab: Lab) -> list[Cell]:
        made = []
        for run in self.runs(lab):
            key = {"model": run.model, "position": run.position, "quantity": "map"}
            values = lab.analyse(run, self.name, lambda loaded: self._maps(loaded))
            ours = {"mean": None, "interval": None, "seeds": sorted(values)}
            ours |= {"runs": [folder for folder, _ in values.values()]}
            made.append(
                {
                    "key": key,
                    "published": None,
                    "ours": ours if values else None,
                    "note": "drawn" if values else "not trained yet",
                }
            )
            for quantity, piece in self.missing:
                made.append(
                    {
                        "key": key | {"quantity": quantity},
                        "published": None,
                        "ours": None,
                        "note": MISSING.format(piece),
                    }
                )
        return made

    def _maps(self, loaded: LoadedModel) -> dict[str, Any]:
        return {name: np.asarray(values).tolist() for name, values in self.maps(loaded).items()}

    def draw(self, lab: Lab, cells: Sequence[Cell], path: pathlib.Path) -> list[pathlib.Path]:
        shown: dict[str, np.ndarray] = {}
        for run in self.runs(lab):
            values = lab.analyse(run, self.name, lambda loaded: self._maps(loaded))
            for _, maps in list(values.values())[:1]:
                shown |= {f"{run.position}\n{name}": np.array(x) for name, x in maps.items()}
        if not shown:
            return []
        columns = len(shown) // max(1, len(self.runs(lab)))
        plots.panels(
            shown,
            path,
            title=f"{self.title}\n{lab_words(lab)}",
            label=self.label,
            mark=None,
            columns=min(columns, 6),
        )
        return [path]


def fourier_maps(loaded: LoadedModel) -> dict[str, np.ndarray]:
    """A point in the middle and one near a corner, reconstructed from a scheme's frequencies."""
    position, grid = loaded.model.positions(loaded.image_size)[0]
    freqs = frequencies(position, grid)
    corner = (grid[0] // 4, grid[1] // 4)
    return {
        "middle": fourier_reconstruction(freqs, grid),
        "near a corner": fourier_reconstruction(freqs, grid, centre=corner),
    }


def correlation_maps(loaded: LoadedModel) -> dict[str, np.ndarray]:
    """Cosine similarity of the middle token's position with all others, in each layer."""
    grid = loaded.model.grids(loaded.image_size)[0]
    layers = position_correlation(layer_positions(loaded.model, grid), grid, middle_token(grid))
    return {f"layer {number}": layer for number, layer in enumerate(layers, 1)}


Content = tuple[list[Cell], Callable[[pathlib.Path], None]]


@dataclasses.dataclass(frozen=True)
class Drawing(Artifact):
    """A figure that follows from definitions: no run is needed.

    Attributes:
        content: of the user's schemes: its cells, and a function that draws it.
    """

    content: Callable[[Sequence[str]], Content] | None = None

    def cells(self, lab: Lab) -> list[Cell]:
        return self.content(lab.schemes)[0]

    def draw(self, lab: Lab, cells: Sequence[Cell], path: pathlib.Path) -> list[pathlib.Path]:
        self.content(lab.schemes)[1](path)
        return [path]


@dataclasses.dataclass(frozen=True)
class Settings(Artifact):
    """A table of settings: the printed ones beside those of our recipes.

    Attributes:
        ours: a cell's key -> our value in words; None if there is no such setting.
        scores: what was measured with these settings.
    """

    ours: Callable[[Key], str | None] = lambda key: None
    scores: Table | None = None

    quantity = "settings"

    @property
    def _scores(self) -> list[Table]:
        return [dataclasses.replace(self.scores, paper=self.paper)] if self.scores else []

    def runs(self, lab: Lab) -> list[Run]:
        return [run for table in self._scores for run in table.runs(lab)]

    def sides(self) -> dict[str, set[int]]:
        return {name: at for table in self._scores for name, at in table.sides().items()}

    def cells(self, lab: Lab) -> list[Cell]:
        made = []
        for cell in published(self.id):
            ours = self.ours(cell.key)
            note = "no such setting here" if ours is None else "differs"
            if ours is not None and agrees(cell.value, ours):
                note = ""
            value = str(cell.value)
            made.append({"key": dict(cell.key), "published": value, "ours": ours, "note": note})
        return made + [cell for table in self._scores for cell in table.cells(lab)]

    def verdicts(self, lab: Lab) -> list[Verdict]:
        return [verdict for table in self._scores for verdict in table.verdicts(lab)]


def setting_text(value: Any) -> str:
    """A setting of a config as a table shows it.

    >>> setting_text(310.0), setting_text(1e-06), setting_text("adamw")
    ('310', '1e-06', 'adamw')
    """
    return f"{value:g}" if isinstance(value, float) else str(value)


def agrees(printed: Any, ours: str) -> bool:
    """Whether a printed setting is ours.

    >>> agrees("5e - 2", "0.05"), agrees("Cosine annealing w/ warmup", "cosine")
    (True, True)
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
