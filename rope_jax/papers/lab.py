"""The papers' runs at a scale: their commands, their results, and what is measured on them."""

import dataclasses
import functools
import json
import pathlib
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rope_jax.analysis.intervals import student, wilson
from rope_jax.analysis.runs import RunResults, read_runs
from rope_jax.config import ConfigError, differences, model_overrides
from rope_jax.config.settings import ModelConfig
from rope_jax.evaluate import read_evaluations, read_results
from rope_jax.evaluate.results import FRACTIONS, Row, main_score
from rope_jax.papers.published import same_position
from rope_jax.papers.runs import Run, Scale, StandIn, stand_in
from rope_jax.runs.loading import LoadedModel, load_published, load_run
from rope_jax.runs.restore import run_preprocessing
from rope_jax.system.files import read_json, write_file
from rope_jax.weights import list_weights
from rope_jax.weights.released import ReleasedWeights

Measured = dict[str, Any]  # mean, interval, seeds, runs
# Settings that may differ between the seeds of a run; init_from may name a run of the same seed.
_OF_A_SEED = ("seed", "init_from", "model.position", "model.options")
_EPOCHS = {"classify": {"smoke": 0.5, "small": 20.0}, "segment": {"small": 20.0},
           "detect": {"small": 8.0}, "mask": {"small": 4.0}}  # fmt: skip
IMAGENET_SETS = {"imagenet_real": "real", "imagenet_v2": "v2", "imagenet_a": "a", "imagenet_r": "r"}
# Heads of the stand-ins in segmentation of scenes; the cells of a patch have 2 pixels.
_HEADS = {"deit3": "linear(cells=4)", "vit_adapter": "upernet(width=32)"}
_TINY_HEADS = {
    "detect": "dino(width=32,levels=1,groups=4,heads=2,points=1,encoder_depth=1,decoder_depth=1,"
    "hidden=32,queries=12,denoising=0,detections=12)",
    "mask": "mask_rcnn(width=16,hidden=16,anchor_samples=8,box_samples=8,train_candidates=8,"
    "candidates=8,proposals=8,detections=8)",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A command of `rope_jax`.

    Attributes:
        words: of the command, after rope_jax.
        result: the file that it leaves at its end.
        stage: it needs those with smaller numbers.
    """

    words: tuple[str, ...]
    result: pathlib.Path
    stage: int = 0

    @property
    def done(self) -> bool:
        """True if the run has ended."""
        return self.result.exists()


@dataclasses.dataclass(frozen=True)
class Lab:
    """The workplace of `rope_jax reproduce`.

    Attributes:
        scale: see the command.
        workdir: for everything.
        data: paths of the images by name: "imagenet", "coco", ...; at the scale small "images".
        seeds: number of seeds of each run; None for the scale's.
        sizes: test sides in pixels of the papers, by `Run.sized`.
        schemes: the user's, which join every table and figure.
        weights_dir: with files of published weights.
        given: the user's runs, instead of those of the papers.
        count: test images of analyses; None for the scale's.
        epochs: of training at the scale small, instead of the default.
        plugins: of the user.
        tokens: places (y, x) as fractions of the map, instead of those of a figure of maps.
        limit: images of each evaluation at the scale released; None for all.
        only: models, schemes or options of the rows and lines to make; none for all.
    """

    scale: Scale
    workdir: pathlib.Path
    data: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seeds: int | None = None
    sizes: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    schemes: tuple[str, ...] = ()
    weights_dir: str | None = None
    given: tuple[RunResults, ...] | None = None
    count: int | None = None
    epochs: float | None = None
    plugins: tuple[str, ...] = ()
    tokens: tuple[tuple[float, float], ...] = ()
    limit: int | None = None
    only: tuple[str, ...] = ()

    def wants(self, names: Collection[str]) -> bool:
        """True if `only` selects a row or line with these names."""
        return not self.only or not set(names).isdisjoint(self.only)

    @property
    def small_scale(self) -> bool:
        """True if small models stand in for the papers'."""
        return self.given is None and self.scale in ("smoke", "small")

    @property
    def folder(self) -> pathlib.Path:
        """Of the runs of this scale, these images and this length."""
        asked = [*sorted(self.data.items()), *filter(None, (self.epochs, self.limit))]
        name = [self.scale, f"{zlib.crc32(str(asked).encode()):08x}"] if asked else [self.scale]
        return self.workdir / "-".join(name)

    @property
    def images(self) -> str:
        """The images of small scales, in words."""
        return pathlib.Path(self.data.get("images", "digits")).stem

    def model_name(self, run: Run) -> str:
        """The model of a run, or what stands in for its family."""
        if self.small_scale:
            return f"stand-in of {stand_in(run.model).family}"
        return run.model

    def distinct_sides(self, run: Run, at: Sequence[int]) -> list[int]:
        """Test sides that differ at this scale, without those that become the training size."""
        trained = self.test_size(run, 32 if run.data.startswith("cifar") else 224)
        kept = {self.test_size(run, side): side for side in at}
        return [side for size, side in kept.items() if size != trained or 224 in at]

    @property
    def all_seeds(self) -> list[int | None]:
        """The seeds of a run; None for the recipe's own, of a single one at full scale."""
        if self.scale == "full":
            return [None] if self.seeds in (None, 1) else [*range(self.seeds)]
        return [*range(self.seeds or (3 if self.scale == "small" else 1))]

    # Commands.

    def jobs(self, runs: Iterable[Run]) -> list[Job]:
        """The commands that train or evaluate runs, each after those that it starts from."""
        jobs: dict[pathlib.Path, Job] = {}
        for run in runs:
            for seed in self.all_seeds:
                for number, stage in enumerate(self.stages(run)):
                    for job in self._stage_jobs(stage, seed):
                        after = number + (job.words[0] == "evaluate")
                        jobs.setdefault(job.result, dataclasses.replace(job, stage=after))
        return list(jobs.values())

    def stages(self, run: Run) -> list[Run]:
        """The runs before a run at this scale, and itself; none if it cannot be run."""
        if self.given is not None:
            return []
        if self.scale == "released":
            return [run] if self.released(run) else []
        if self.scale == "full" or run.task == "classify":
            return run.stages if self.scale == "full" else [run]
        first = run.stages[0]
        if run.task == "segment":
            return [first, run]
        return [first, dataclasses.replace(run, recipe="upernet"), run]  # as in `make detect`

    def run_folder(self, run: Run, seed: int | None) -> pathlib.Path:
        """The workdir of a run."""
        dense = run.task != "classify"
        if self.scale == "full":
            names = [run.full_name()]
        elif self.scale == "released":
            names = [run.model, run.position, run.recipe_name if dense else ""]
        else:
            small = stand_in(run.model)
            task = run.task if dense else ""
            names = [small.family, task, run.position, _added_options(run, small)]
        return self.folder / "-".join(map(str, filter(None, [*names, seed])))

    def _stage_jobs(self, run: Run, seed: int | None) -> list[Job]:
        folder = self.run_folder(run, seed)
        if self.scale == "released":
            return self._evaluations(run, folder)
        if self.scale == "full":
            before = self.run_folder(run.after, seed) if run.after else ""
            words = run.full_words(self.data, seed, str(before))
            sides = self.sizes.get(run.sized, ())
            if run.task == "classify" and len(sides) > 1:
                words.append(self._resolutions(sides, 224))
        else:
            words = self._stand_in_words(run, seed)
        words += [f"--plugins={name}" for name in self.plugins]
        train = ("train", *words, f"--workdir={folder}")
        jobs = [Job(train, folder / "results.json")]
        if run.recipe.startswith("upernet:") and "adapter" not in run.recipe:
            scales = "0.5,0.75,1.0,1.25,1.5,1.75" if self.scale == "full" else "1.0"
            evaluate = ("evaluate", str(folder), f"--scales={scales}", "--flip", "--pictures=0")
            jobs.append(Job(evaluate, folder / "evaluations.json"))
        return jobs

    def _resolutions(self, sides: Iterable[int], trained: int) -> str:
        others = tuple(side for side in dict.fromkeys(sides) if side != trained)
        return f"--config.eval.resolutions={str(others).replace(' ', '')}"

    def _stand_in(self, model: str) -> StandIn:
        small = stand_in(model)
        if self.scale == "smoke" and small.tile < small.side:  # fewer sizes to compile for
            return dataclasses.replace(small, tile=None)
        return small.on_photographs() if "images" in self.data else small

    def _stand_in_words(self, run: Run, seed: int) -> list[str]:
        small, task = self._stand_in(run.model), run.task
        options = small.tiny if self.scale == "smoke" else small.small
        options = ",".join(filter(None, [options, _added_options(run, small)]))
        epochs = _EPOCHS[task].get(self.scale)
        if task == "classify":
            epochs = self.epochs or epochs
            words = self._classification(run.position, seed, epochs)
            words += [
                f"--config.data.image_size={small.side}",
                f"--config.optim.warmup_epochs={epochs / 10:g}",
            ]
            of_family = lambda name: stand_in(name.split()[-1]) == stand_in(run.model)
            family = [at for name, at in self.sizes.items() if of_family(name)]
            sides = {self.test_size(run, side) for at in family for side in at}
            words.append(self._resolutions(sorted(sides), small.side))
        else:
            recipe = {"segment": "scenes", "detect": "scenes_boxes", "mask": "scenes_masks"}[task]
            words = [
                f"--config={recipe}:position={run.position},seed={seed}",
                f"--config.epochs={epochs}" if epochs else "--config.steps=3",
                f"--config.init_from={self.run_folder(self.stages(run)[-2], seed)}",
                "--config.eval.resolutions=()",
                "--config.optim.warmup_steps=0",
            ]
            if task == "segment":
                words += [f"--config.model.head={_HEADS.get(small.family, 'linear(cells=8)')}"]
            elif self.scale == "smoke":
                words += [f"--config.model.head={_TINY_HEADS[task]}"]
        return [*words, f"--config.model.name={small.model}", f"--config.model.options={options}"]

    def _classification(self, position: str, seed: int, epochs: float) -> list[str]:
        arguments = f"position={position},seed={seed},epochs={epochs}"
        if self.scale == "smoke" or "images" not in self.data:
            return [
                f"--config=digits:{arguments}",
                "--config.data.augment=resized_crop(scale_min=0.8)",
                *(["--config.batch_size=32"] if self.scale == "smoke" else []),
            ]
        path = self.data["images"]
        if not path.endswith(".npz"):
            return [
                f"--config=fashion_mnist:{arguments},augment=resized_crop(scale_min=0.35)",
                f"--config.data.path={path}",
            ]
        return [
            f"--config=own_images:{arguments},source=npz,batch=128",
            f"--config.data.path={path}",
            "--config.data.augment=resized_crop(scale_min=0.35)+flip+color_jitter",
            "--config.mix.mixup=0.0",
            "--config.mix.cutmix=0.0",
            "--config.optim.learning_rate=0.001",
        ]

    def _evaluations(self, run: Run, folder: pathlib.Path) -> list[Job]:
        """The commands that evaluate the authors' weights: on each set that --data names."""
        weights, jobs = self.released(run), []
        for name in (run.data, *(IMAGENET_SETS if run.task == "classify" else ())):
            if name not in self.data:
                continue
            out = folder / f"evaluations_{name}.json"
            words = [
                "evaluate",
                f"--model={run.model}",
                f"--position={weights.position}",
                f"--pretrained={weights.tag}",
                f"--dataset={IMAGENET_SETS.get(name, name)}",
                f"--images={self.data[name]}",
                f"--out={out}",
            ]
            if name == "imagenet":
                trained = weights.image_size or 224
                of_model = (at for name, at in self.sizes.items() if name.endswith(f" {run.model}"))
                sides = dict.fromkeys((trained, *sorted(set().union(*of_model))))
                words.append(f"--resolutions={','.join(map(str, sides))}")
                if run.model.startswith("swin") and len(sides) > 1:
                    words.append("--scale_windows")
            if self.limit and run.task == "classify":
                words.append(f"--limit={self.limit}")
            if self.weights_dir:
                words.append(f"--weights_dir={self.weights_dir}")
            jobs.append(Job(tuple(words), out))
        return jobs

    def released(self, run: Run) -> ReleasedWeights | None:
        """The authors' weights of a run; None if there are none, or no images for them."""
        if run.data.startswith("cifar") or run.data not in self.data or run.options:
            return None
        head = None if run.task == "classify" else run.recipe_name
        for weights in list_weights(run.model):
            if weights.head == head and same_position(weights.position, run.position):
                return weights
        return None

    # Results.

    def rows(self, run: Run) -> dict[int, tuple[pathlib.Path, list[Row]]]:
        """The rows of a run's results by seed, with its folder; none before its end."""
        if self.given is not None:
            given = [x for x in self.given if _same_model(run, x.config.model)]
            by_seed = {result.config.seed: result for result in given}
            if hidden := [result for result in given if result not in by_seed.values()]:
                seed = hidden[0].config.seed
                raise ConfigError(
                    f"--runs: {hidden[0].workdir} and {by_seed[seed].workdir} are two runs of "
                    f"{run.model} with {run.position} and seed {seed}: name one of them"
                )
            for other in given[1:]:
                changed = differences(given[0].config, other.config, _OF_A_SEED)
                if given[0].step != other.step:
                    changed.append(f"step: {given[0].step} -> {other.step}")
                if changed:
                    raise ConfigError(
                        f"--runs: {given[0].workdir} and {other.workdir} are runs of {run.model} "
                        f"with {run.position} that differ in more than their seed ({changed[0]}): "
                        "name those of one setting"
                    )
            return {x: (result.workdir, _rows_by_rules(result)) for x, result in by_seed.items()}
        if not self.stages(run):
            return {}
        found = {}
        for seed in self.all_seeds:
            folder = self.run_folder(run, seed)
            if self.scale == "released":
                files = sorted(folder.glob("evaluations_*.json"))
                rows = [row for file in files for row in read_evaluations(file)]
            elif (folder / "results.json").exists():
                files = (folder / "results.json", folder / "evaluations.json")
                seed, rows = _rows_of(folder, *(x.stat().st_mtime_ns for x in files if x.exists()))
            else:
                rows = []
            if rows:
                found[seed] = (folder, rows)
        return found

    def test_size(self, run: Run, side: int) -> int:
        """The test side in place of a paper's, in pixels."""
        if not self.small_scale:
            return side
        trained = 32 if run.data.startswith("cifar") else 224
        return self._stand_in(run.model).size(side, trained)

    def scores(
        self, run: Run, side: int | None, *, dataset: str | None = None, views: str = ""
    ) -> dict[int, tuple[str, Row]]:
        """The row of each seed at a test side; None for the first row, the training size.

        Args:
            run: of a paper.
            side: of the paper.
            dataset: another set than that of the run: "imagenet_v2".
            views: "multi-scale" for the average over scales and flips.
        """
        chosen = {}
        for seed, (folder, rows) in self.rows(run).items():
            rows = [row for row in rows if _row_fits(row, dataset, views)]
            if side is not None:
                size = [self.test_size(run, side)] * 2
                rows = [row for row in rows if row["resolution"] == size]
            if rows:
                chosen[seed] = (folder.name, rows[0])
        return chosen

    def measured(
        self, values: Mapping[int, tuple[str, Row | float]], score: str | None = None
    ) -> Measured | None:
        """Mean and 95 % interval, in percent for rows; None without any.

        Args:
            values: by seed, with the name of the run's folder.
            score: of rows; None for the main one.
        """
        if not values:
            return None
        numbers, interval = [_number(value, score) for _, value in values.values()], None
        mean, half = student(numbers)
        (_, first), *others = values.values()
        is_fraction = isinstance(first, dict) and main_score(first) in FRACTIONS
        if others:
            interval = [mean - half, mean + half]
            if is_fraction:
                interval = [min(max(bound, 0.0), 100.0) for bound in interval]
        elif is_fraction:
            interval = [100 * bound for bound in wilson(mean / 100, first["count"])]
        return {
            "mean": mean,
            "interval": interval,
            "seeds": sorted(values),
            "runs": [folder for folder, _ in values.values()],
        }

    # What is measured on trained models.

    def analyse(
        self, run: Run, name: str, function: Callable[[LoadedModel], Any]
    ) -> dict[int, tuple[str, Any]]:
        """`function` of a run's model by seed, kept in its folder as reproduce_NAME_SEED.json."""
        values = {}
        for seed, (folder, rows) in self.rows(run).items():
            path = folder / f"reproduce_{name}_{seed}.json"
            step = (read_results(folder) or {}).get("step")
            measured = {"step": step, "protocol": rows[0]["protocol"]}
            stored = read_json(path) if path.exists() else {}
            if not measured.items() <= stored.items():
                try:
                    stored = measured | {"value": function(self.load(run, folder, seed))}
                except ValueError:
                    if self.given is None and run.position not in self.schemes:
                        raise
                    continue  # not defined for a scheme of the user's
                write_file(path, json.dumps(stored, default=np.ndarray.tolist))
                stored = read_json(path)
            values[seed] = (folder.name, stored["value"])
        return values

    def load(self, run: Run, folder: pathlib.Path, seed: int) -> LoadedModel:
        """The trained model of a run in a folder, or the authors'; a user's may have several."""
        if self.given is not None:
            return load_run(str(folder), seed=seed)
        if self.scale != "released":
            return load_run(str(folder))
        return load_published(self.released(run), self.weights_dir)


@functools.lru_cache(maxsize=4096)
def _rows_of(folder: pathlib.Path, *changed: int) -> tuple[int, list[Row]]:
    """A run's seed and the rows of its files, read again only after they have changed."""
    (result,) = read_runs(folder)
    return result.config.seed, _rows_by_rules(result)


def _rows_by_rules(result: RunResults) -> list[Row]:
    """The rows of a run's results, and evaluations of the same step by the rules of its config."""
    options = result.config.eval
    prepared = run_preprocessing(result.config.data, options.frame)
    files = {"crop": prepared.crop, "interpolation": prepared.interpolation}  # of --images
    rules = {
        "step": result.step,
        "windows": "scaled" if options.scale_windows else "kept",
        "extend": options.extend,
        "log_scale": options.log_scale or None,
        "rpb_shrink": None,
        "limit": None,
    }

    def follows(asked: dict[str, Any]) -> bool:
        other_files = "images" in asked and asked["dataset"] == "folder"
        return (
            not other_files
            and {name: asked.get(name) or None for name in rules} == rules
            and {name: asked.get(name, value) for name, value in files.items()} == files
        )

    return [*result.rows, *(row for row in result.others if follows(row.get("asked", {})))]


def _same_model(run: Run, model: ModelConfig) -> bool:
    return (
        run.model == model.name
        and same_position(run.position, model.position)
        and model_overrides(run.options) == model_overrides(model.options)
    )


def _added_options(run: Run, small: StandIn) -> str:
    """The options of a run that do not set the size of its model."""
    own = model_overrides(small.small)
    added = {k: v for k, v in model_overrides(run.options).items() if k not in own}
    return ",".join(f"{name}={value}" for name, value in added.items())


def _row_fits(row: Row, dataset: str | None, views: str) -> bool:
    """Checks if a row is of a data set and of views.

    None and the data set that the run trained on stand for rows of none of `IMAGENET_SETS`.
    """
    asked = row.get("asked", {}).get("dataset")
    further = asked if asked in IMAGENET_SETS.values() else None
    has_views = ("flip" in row["protocol"]) == (views == "multi-scale")
    return further == IMAGENET_SETS.get(dataset) and has_views


def single(number: float) -> Measured:
    """A measurement that no run stands behind."""
    return {"mean": number, "interval": None, "seeds": [], "runs": []}


def _number(value: Row | float, score: str | None) -> float:
    return 100 * value[score or main_score(value)] if isinstance(value, dict) else float(value)
