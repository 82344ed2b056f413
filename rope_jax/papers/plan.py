"""What a command of a plan costs, estimated from its config."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

from flax import nnx

from rope_jax.config import Config, load_recipe, read_settings, resolve
from rope_jax.config.settings import DataConfig, ModelConfig
from rope_jax.models.cost import cost
from rope_jax.names.text import image_pair
from rope_jax.papers.lab import Job
from rope_jax.system.npz import open_npz
from rope_jax.training.setup import create

Size = tuple[int, int]
GPUS, PEAK = 8, 312e12  # A100s, and the multiplications and additions of each in a second
# Training images and classes, by source.
SETS = {
    "folder": (1_281_167, 1000),
    "npz": (50_000, 10),
    "coco": (118_287, 80),
    "ade20k": (20_210, 150),
    "digits": (1_437, 10),
    "fashion_mnist": (60_000, 10),
    "scenes": (2_000, 11),
    "scenes_boxes": (2_000, 10),
}
# Images that authors' weights are evaluated on, by --dataset.
EVALUATED = {"imagenet": 50_000, "real": 46_837, "v2": 10_000, "a": 7_500, "r": 30_000,
             "coco": 5_000, "ade20k": 2_000}  # fmt: skip
# Share of the peak that training reaches: an estimate, not measured.
_SHARES = (("nat", 0.2), ("dinat", 0.2), ("swin", 0.2), ("ceit", 0.2), ("t2t", 0.2), ("", 0.4))
# On two cores, each with a run: seconds of a run at the scale smoke; seconds before the first step
# of one at the scale small, and its images in a second by source (measured with a ViT on digits; an
# .npz file has four times as many tokens); multiplications and additions in a second of an
# evaluation.
_SMOKE, _PREPARE, _EVALUATION = 15, 30, 100e9
_SPEED = {"digits": 340, "fashion_mnist": 340, "scenes": 170, "scenes_boxes": 45, "npz": 85}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Hours of a command, and the memory of its state on one GPU in GiB, None if unknown."""

    hours: float
    state: float | None = None

    def __str__(self) -> str:
        if self.state is None:
            return f"about {60 * self.hours:.0f} min on two cores"
        memory = f"state {self.state:.1f} GiB a GPU, and activations"
        return f"about {self.hours:.1f} h on {GPUS} A100s, {memory}"


@functools.cache
def estimate(job: Job, scale: str) -> Estimate:
    """The cost of a command at a scale."""
    flags = dict(word.removeprefix("--").partition("=")[::2] for word in job.words[1:])
    if scale == "released":
        return Estimate(_evaluation(flags) / _EVALUATION / 3600)
    if scale == "smoke" or job.words[0] != "train":
        return Estimate(_SMOKE / 3600)
    settings = [f"--{k}={v}" for k, v in flags.items() if k.startswith("config.")]
    config = resolve(load_recipe(flags["config"], read_settings(settings)))
    images, classes = SETS[config.data.source]
    if scale == "small" and config.data.source == "npz":
        with open_npz(config.data.path) as file:  # packed JPEGs: with those of the test
            (images, *_), _ = file.shapes.get("train_labels") or file.shapes["labels"]
    images = config.steps * config.batch_size if config.steps else config.epochs * images
    if scale == "small":
        return Estimate((_PREPARE + images / _SPEED[config.data.source]) / 3600)
    created = image_pair(config.data.image_size)
    size, *_ = [*config.data.canvas_sizes, created]
    model = dataclasses.replace(config.model, position=None, num_classes=classes)
    operations, parameters = _cost(model, created, size)  # the scheme adds next to nothing
    share = next(share for name, share in _SHARES if config.model.name.startswith(name))
    hours = 6 * operations * images / (GPUS * PEAK * share) / 3600
    arrays = 5 if config.ema_decay else 4  # weights, gradients, two moments
    return Estimate(hours, 4 * arrays * parameters / 2**30)


def _evaluation(flags: Mapping[str, str]) -> float:
    """Multiplications and additions of an evaluation of the authors' weights."""
    images = int(flags.get("limit", EVALUATED[flags["dataset"]]))
    default = {"coco": "1024", "ade20k": "512"}.get(flags["dataset"], "224")
    created, *others = map(image_pair, flags.get("resolutions", default).split(","))
    operations, _ = _cost(ModelConfig(name=flags["model"]), created, created)
    areas = sum(math.prod(size) for size in (created, *others)) / math.prod(created)
    return 2 * images * operations * areas


def total_hours(jobs: Iterable[Job], scale: str) -> float:
    """Hours of commands, which run two at a time at the scales smoke and small."""
    return sum(estimate(job, scale).hours for job in jobs) / (1 + (scale in ("smoke", "small")))


@functools.cache
def _cost(model: ModelConfig, created: Size, size: Size) -> tuple[int, int]:
    """Multiply-adds for an image of a size, and parameters, of a model created for another."""
    config = Config(model=model, data=DataConfig(image_size=created))
    modules = cost(nnx.eval_shape(lambda: create(config)), size)
    return sum(m.multiply_adds for m in modules), sum(m.parameters for m in modules)
