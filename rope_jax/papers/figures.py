"""Figures of runs and of definitions: the words of the papers' declarations."""

import dataclasses
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Array

from rope_jax.analysis import plots
from rope_jax.analysis.analyses import image_batches
from rope_jax.analysis.attention import attention_statistics
from rope_jax.analysis.correlation import position_correlation, stage_positions
from rope_jax.analysis.joining import measure_batches, position_measures, trend
from rope_jax.analysis.rotation import fourier_reconstruction, frequencies
from rope_jax.evaluate.results import main_score
from rope_jax.papers.claims import Verdict, judge
from rope_jax.papers.kinds import (
    Artifact,
    Cell,
    Key,
    explain,
    given_dataset,
    given_runs,
    given_sides,
    key_names,
    lab_words,
    make_cell,
)
from rope_jax.papers.lab import Lab, Measured
from rope_jax.papers.published import find_published
from rope_jax.papers.runs import Run
from rope_jax.positions.grids import Grid
from rope_jax.runs.loading import LoadedModel

_RUN = ("model", "position", "options")  # what cells name a run by
Tokens = Sequence[tuple[float, float]]  # places (y, x) on a map, as fractions of its sides


@dataclasses.dataclass(frozen=True)
class Lines(Artifact):
    """A figure of runs, by default of those that the paper trains.

    Attributes:
        lines: the runs.
    """

    lines: Sequence[Run] = ()

    def runs(self, lab: Lab) -> list[Run]:
        if lab.given is not None:
            return given_runs(lab)
        own = [run.with_position(scheme) for scheme in lab.schemes for run in self.lines]
        return [run for run in dict.fromkeys([*self.lines, *own]) if lab.wants(run.names)]

    def draw_layers(
        self,
        lab: Lab,
        cells: Sequence[Cell],
        path: pathlib.Path,
        *,
        panel: Callable[[Key], str],
        y: str,
    ) -> list[pathlib.Path]:
        """Draws numbers over layers: a panel for each text of `panel`, a line for each scheme."""
        panels = by_panel(cells, "ours", lambda key: (panel(key), key["layer"]), panel)
        title = f"{self.title}\n{lab_words(lab)}"
        plots.curves_by_panel(panels, {}, path, title=title, x="layer", y=y)
        return [path]


def run_key(run: Run) -> Key:
    """What the keys of a run's cells name it by."""
    return {name: value for name in _RUN if (value := getattr(run, name))}


def line_labels(keys: Sequence[Key]) -> Callable[[Key], str]:
    """Names the lines of runs by position, and by model and options where several have it."""
    names = {tuple(map(key.get, _RUN)) for key in keys}
    models = {model for model, _, _ in names}
    schemes = [(model, position) for model, position, _ in names]

    def label(key: Key) -> str:
        several = schemes.count((key["model"], key["position"])) > 1
        parts = (len(models) > 1 and key["model"], key["position"], several and key.get("options"))
        return ", ".join(filter(None, parts))

    return label


@dataclasses.dataclass(frozen=True)
class Curves(Lines):
    """Accuracy over test resolution: a panel for each model, a line for each scheme.

    Published numbers, those of Heo et al.'s code, are drawn dashed.

    Attributes:
        at: test sides in pixels.
    """

    at: Sequence[int] = ()

    quantity, label, zero = "top1", "top-1 accuracy (%)", False

    def sides(self) -> dict[str, set[int]]:
        return {run.sized: set(self.at) for run in self.lines}

    def cells(self, lab: Lab) -> list[Cell]:
        made = []
        if lab.given is not None and main_score(lab.given[0].rows[0]) != "top1":
            return []  # of segmentation or detection
        for run in self.runs(lab):
            data = {"dataset": run.data if lab.given is None else given_dataset(lab)}
            name = {"model": run.model, "position": run.position, "options": run.options}
            for side in self.at if lab.given is None else given_sides(lab, run):
                key = data | {"resolution": [side, side], "quantity": "top1"}
                printed = find_published(**name, **key)
                ours = lab.measured(lab.scores(run, side))
                key = run_key(run) | key | {"quantity": self.quantity}
                mine = lambda cell: cell.artifact.startswith(f"{self.paper}/")
                printed.sort(key=mine, reverse=True)
                shown = [c.value for c in printed if lab.given or c.artifact == "heo/code"]
                note = explain(lab, run, side, None, ours)
                made.append(make_cell(key, next(iter(shown), None), ours, note))
        return made

    def draw(self, lab: Lab, cells: Sequence[Cell], path: pathlib.Path) -> list[pathlib.Path]:
        if not cells:
            return []
        model = lambda key: key["model"]
        printed_at = lambda key: (key["model"], key["resolution"][0])

        def tested_at(key: Key) -> tuple[str, int]:
            run = Run(key["model"], key["position"])
            return lab.model_name(run), lab.test_size(run, key["resolution"][0])

        ours = by_panel(cells, "ours", tested_at, model)
        printed = by_panel(cells, "published", printed_at, model)
        if lab.small_scale:  # of other images: in panels of their own
            printed = {f"{name}: published, ImageNet-1k": lines for name, lines in printed.items()}
            ours |= {name: {} for name, lines in printed.items() if any(lines.values())}
        plots.curves_by_panel(
            ours,
            printed,
            path,
            title=f"{self.title}\n{lab_words(lab)}",
            x="test resolution (pixels)",
            y=self.label,
            zero=self.zero,
            columns=2 if len(ours) in (2, 4) else 3,
        )
        return [path]


def by_panel(
    cells: Sequence[Cell],
    name: str,
    place: Callable[[Key], tuple[str, int]],
    group: Callable[[Key], str],
) -> dict[str, dict[str, dict[int, float]]]:
    """Panel -> line -> place on the x axis -> number of cells.

    Args:
        cells: of runs.
        name: of the number, "ours" or "published".
        place: the panel of a cell, and its place on the x axis.
        group: of a cell; lines are named by what differs between the runs of a group.
    """
    keys: dict[str, list[Key]] = {}
    for each in cells:
        keys.setdefault(group(each["key"]), []).append(each["key"])
    labels = {of: line_labels(alike) for of, alike in keys.items()}
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for each in cells:
        key, number = each["key"], each[name]
        panel, x = place(key)
        line = panels.setdefault(panel, {}).setdefault(labels[group(key)](key), {})
        if number is not None:
            line[x] = number["mean"] if isinstance(number, dict) else number
    return panels


@dataclasses.dataclass(frozen=True)
class Gains(Curves):
    """Improvement in accuracy over each model's first scheme, over test resolution."""

    quantity, label, zero = "top1_gain", "percentage points", True

    def runs(self, lab: Lab) -> list[Run]:
        every = super().runs(dataclasses.replace(lab, only=()))
        first = {run.model: run for run in reversed(every)}  # over which gains are
        wanted = [run for run in every if lab.wants(run.names)]
        bases = {first[run.model] for run in wanted}
        return [run for run in every if run in bases or run in wanted]

    def cells(self, lab: Lab) -> list[Cell]:
        first = {run.model: run_key(run) for run in reversed(self.runs(lab))}
        bases: dict[tuple, Cell] = {}  # model and side -> cell of the first scheme
        made = []
        for each in super().cells(lab):
            key = each["key"]
            place, base_key = (key["model"], *key["resolution"]), first[key["model"]]
            if base_key == {name: key[name] for name in _RUN if name in key}:
                bases[place] = each
            elif place in bases and lab.wants(key_names(key)):
                base = bases[place]
                numbers = [each["published"], base["published"]]
                value = None if None in numbers else round(numbers[0] - numbers[1], 3)
                ours = _difference(each["ours"], base["ours"])
                made.append(each | {"published": value, "ours": ours})
        return made


def _difference(ours: Measured | None, base: Measured | None) -> Measured | None:
    """The difference of two means, without an interval: claims have that of paired seeds."""
    if ours is None or base is None:
        return None
    return ours | {"mean": ours["mean"] - base["mean"], "interval": None}


@dataclasses.dataclass(frozen=True)
class Attention(Lines):
    """Attention distance or entropy by layer: a panel for each test size, a line for each scheme.

    Attributes:
        at: test sides in pixels.
        statistic: "distance" (tokens) or "entropy" (nats).
    """

    at: Sequence[int] = ()
    statistic: str = "distance"

    @property
    def quantity(self) -> str:
        return f"attention {self.statistic}"

    def layers(self, lab: Lab, run: Run, side: int | None) -> dict[int, tuple[str, list[float]]]:
        """The statistic of each layer, the mean of its heads, by seed."""
        size = lab.test_size(run, 224 if side is None else side)
        count = lab.count or (32 if lab.scale == "smoke" else 256)

        def measure(loaded: LoadedModel) -> dict[str, list[float]]:
            images = _batches(lab, loaded, str(size), count, 32)
            statistics = attention_statistics(loaded.at((size, size)), images)
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
                    key = run_key(run) | {"layer": layer + 1, "resolution": [side, side]}
                    key |= {"quantity": self.quantity}
                    ours = lab.measured(values)
                    note = explain(lab, run, side, None, ours)
                    made.append(make_cell(key, None, ours, note))
        return made

    def value(self, lab: Lab, run: Run, side: int | None) -> dict[int, float]:
        """The mean over the middle layers, 4 to 8 of 12."""
        middle = lambda x: float(np.mean(x[len(x) // 4 : -(-2 * len(x) // 3)]))
        return {seed: middle(x) for seed, (_, x) in self.layers(lab, run, side).items()}

    def draw(self, lab: Lab, cells: Sequence[Cell], path: pathlib.Path) -> list[pathlib.Path]:
        unit = {"distance": "tokens", "entropy": "nats"}[self.statistic]
        panel = lambda key: f"{key['resolution'][0]} px"
        return self.draw_layers(lab, cells, path, panel=panel, y=f"{self.quantity} ({unit})")


@dataclasses.dataclass(frozen=True)
class Maps(Lines):
    """Maps of trained models side by side: one row for each run.

    Attributes:
        maps: of a loaded model and tokens: name -> map.
        tokens: unless --token names others.
        label: of the colour bar.
        layers: of a loaded model: the `reach` of each layer; with LaPE it is claimed to grow with
            the depth, and to be larger in the last layer than in the first.
    """

    maps: Callable[[LoadedModel, Tokens], dict[str, np.ndarray]] | None = None
    tokens: Tokens = ((0.5, 0.5),)
    label: str = ""
    layers: Callable[[LoadedModel], dict[str, Sequence[float | None]]] | None = None

    @property
    def quantity(self) -> str:
        return self.label

    def cells(self, lab: Lab) -> list[Cell]:
        made = []
        for run in self.runs(lab):
            values, ours = self._values(lab, run), None
            if values:
                folders = [folder for folder, _ in values.values()]
                ours = {"mean": None, "interval": None, "seeds": sorted(values), "runs": folders}
            note = "drawn" if values else "not trained yet"
            made.append(make_cell(run_key(run) | {"quantity": "map"}, None, ours, note))
            made += layer_cells(lab, run, self._layers(lab, run))
        return made

    def _values(self, lab: Lab, run: Run) -> dict[int, tuple[str, dict[str, list[list[float]]]]]:
        tokens = lab.tokens or self.tokens
        name = f"{self.name}_{zlib.crc32(str(tokens).encode()):08x}"
        return lab.analyse(run, name, lambda loaded: self.maps(loaded, tokens))

    def _layers(
        self, lab: Lab, run: Run
    ) -> dict[int, tuple[str, dict[str, Sequence[float | None]]]]:
        return lab.analyse(run, f"{self.name}_reach", self.layers) if self.layers else {}

    def verdicts(self, lab: Lab) -> list[Verdict]:
        made = []
        runs = self.runs(lab) if self.layers else []
        for run in (run for run in runs if run.position.startswith("lape")):
            layers = {s: values["reach"] for s, (_, values) in self._layers(lab, run).items()}
            layers = {s: x for s, x in layers.items() if None not in x}
            last, first = ({s: x[k] for s, x in layers.items()} for k in (-1, 0))
            growth = {s: trend(x) for s, x in layers.items()}
            for words, verdict in (
                ("reach grows with the depth", judge(growth, dict.fromkeys(growth, 0.0))),
                ("reach of the last layer above that of the first", judge(last, first)),
            ):
                made.append(
                    {
                        "claim": f"{words}, {run.position}, {lab.model_name(run)}",
                        **verdict,
                        "after_the_fact": lab.given is not None,
                    }
                )
        return made

    def draw(self, lab: Lab, cells: Sequence[Cell], path: pathlib.Path) -> list[pathlib.Path]:
        shown: dict[str, np.ndarray] = {}
        rows, runs = 0, self.runs(lab)
        label = line_labels([*map(run_key, runs)])
        for run in runs:
            for _, maps in [*self._values(lab, run).values()][:1]:
                title = label(run_key(run))
                shown |= {f"{title}\n{name}": np.array(x) for name, x in maps.items()}
                rows += 1
        if not shown:
            return []
        plots.panels(
            shown,
            path,
            title=f"{self.title}\n{lab_words(lab)}",
            label=self.label,
            mark=None,
            columns=min(len(shown) // rows, 6),
        )
        return [path]


def fourier_maps(loaded: LoadedModel, tokens: Tokens) -> dict[str, np.ndarray]:
    """The points at tokens, reconstructed from a scheme's frequencies."""
    position, grid = loaded.model.positions(loaded.image_size)[0]
    freqs = frequencies(position, grid)
    points = [_token(place, grid) for place in tokens]
    return {f"token {at}": fourier_reconstruction(freqs, grid, centre=at) for at in points}


def correlation_maps(loaded: LoadedModel, tokens: Tokens) -> dict[str, np.ndarray]:
    """Cosine similarity of the first token's position with all others, in each layer."""
    (grid, rows), *_ = stage_positions(loaded.model, loaded.image_size)
    row, column = _token(tokens[0], grid)
    layers = position_correlation(rows, grid, row * grid[1] + column)
    return {f"layer {number}": layer for number, layer in enumerate(layers, 1)}


def reach(loaded: LoadedModel) -> dict[str, Sequence[float | None]]:
    """The locality of the positions of each layer: `rope_jax.analysis.joining.reach`."""
    (grid, rows), *_ = stage_positions(loaded.model, loaded.image_size)
    return {"reach": position_measures(rows, grid)["reach"]}


def layer_cells(
    lab: Lab, run: Run, by_seed: dict[int, tuple[str, dict[str, Sequence[float | None]]]]
) -> list[Cell]:
    """The cells of numbers of each layer, by seed and name."""
    key, made = run_key(run), []
    names = next((values for _, values in by_seed.values()), {})
    for name, first in names.items():
        for layer in range(len(first)):
            values = {s: (folder, x[name][layer]) for s, (folder, x) in by_seed.items()}
            ours = lab.measured({s: pair for s, pair in values.items() if pair[1] is not None})
            named = key | {"layer": layer + 1, "quantity": name}
            made.append(make_cell(named, None, ours, explain(lab, run, None, None, ours)))
    return made


@dataclasses.dataclass(frozen=True)
class Layers(Lines):
    """Numbers of each layer of trained models: a panel for each number, a line for each scheme.

    Attributes:
        names: of those that `measure_batches` returns, as far as a model has them.
    """

    names: Sequence[str] = ()

    def _values(self, lab: Lab, run: Run) -> dict[int, tuple[str, dict[str, Sequence[float]]]]:
        count = lab.count or (8 if lab.scale == "smoke" else 64)

        def measure(loaded: LoadedModel) -> dict[str, np.ndarray]:
            values = measure_batches(loaded.model, _batches(lab, loaded, None, count, 16))
            return {name: values[name] for name in self.names if name in values}

        return lab.analyse(run, f"{self.name}_{count}", measure)

    def cells(self, lab: Lab) -> list[Cell]:
        return [x for run in self.runs(lab) for x in layer_cells(lab, run, self._values(lab, run))]

    def draw(self, lab: Lab, cells: Sequence[Cell], path: pathlib.Path) -> list[pathlib.Path]:
        if not cells:  # no run is trained yet
            return []
        panel = lambda key: f"{key['model']}: {key['quantity']}"
        return self.draw_layers(lab, cells, path, panel=panel, y="")


def _batches(
    lab: Lab, loaded: LoadedModel, resolution: str | None, count: int, batch_size: int
) -> Iterator[Array]:
    """Normalised images of a run's test split, or at the scale released of --data."""
    images = lab.data.get("imagenet") if lab.scale == "released" else None
    batches = image_batches(loaded, images, resolution, count, batch_size)
    return (batch for _, batch in batches)


def _token(place: tuple[float, float], grid: Grid) -> Grid:
    """The token at a place; (0.5, 0.5) is the middle one, rounded down as in LaPE's code."""
    return tuple(int(share * (side - 1)) for share, side in zip(place, grid, strict=True))


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
