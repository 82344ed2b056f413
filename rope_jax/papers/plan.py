"""What a command of a plan costs, estimated from its config."""

import dataclasses
import functools

from flax import nnx

from rope_jax.config import Config, load_recipe, read_settings, resolve
from rope_jax.config.settings import DataConfig, ModelConfig
from rope_jax.models.cost import cost
from rope_jax.names.text import image_pair
from rope_jax.papers.lab import Job
from rope_jax.training.setup import create

Size = tuple[int, int]
GPUS, PEAK = 8, 312e12  # A100s, and the multiplications and additions of each in a second
# Training images and classes, by source.
SETS = {
    "folder": (1_281_167, 1000),
    "npz": (50_000, 10),
    "coco": (118_287, 80),
    "ade20k": (20_210, 150),
}
# Share of the peak that training reaches: an estimate, not measured.
_SHARES = (("nat", 0.2), ("dinat", 0.2), ("swin", 0.2), ("ceit", 0.2), ("t2t", 0.2), ("", 0.4))
# Of a run on two cores: of smoke measured, of the others estimated.
_SECONDS = {"smoke": 8, "small": 100, "released": 600}


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


def estimate(job: Job, scale: str) -> Estimate:
    """The cost of a command at a scale."""
    if scale != "full" or job.words[0] != "train":
        return Estimate(_SECONDS.get(scale, 600) / 3600)
    flags = dict(word.removeprefix("--").split("=", 1) for word in job.words[1:])
    settings = [f"--{k}={v}" for k, v in flags.items() if k.startswith("config.")]
    config = resolve(load_recipe(flags["config"], read_settings(settings)))
    images, classes = SETS[config.data.source]
    images = config.steps * config.batch_size if config.steps else config.epochs * images
    created = image_pair(config.data.image_size)
    size, *_ = [*config.data.canvas_sizes, created]
    model = dataclasses.replace(config.model, position=None, num_classes=classes)
    operations, parameters = _cost(model, created, size)  # the scheme adds next to nothing
    share = next(share for name, share in _SHARES if config.model.name.startswith(name))
    hours = 6 * operations * images / (GPUS * PEAK * share) / 3600
    arrays = 5 if config.ema_decay else 4  # weights, gradients, two moments
    return Estimate(hours, 4 * arrays * parameters / 2**30)


@functools.cache
def _cost(model: ModelConfig, created: Size, size: Size) -> tuple[int, int]:
    """Multiply-adds for an image of a size, and parameters, of a model created for another."""
    config = Config(model=model, data=DataConfig(image_size=created))
    modules = cost(nnx.eval_shape(lambda: create(config)), size)
    return sum(m.multiply_adds for m in modules), sum(m.parameters for m in modules)
