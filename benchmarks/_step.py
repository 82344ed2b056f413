"""The training steps of a recipe in a process of its own, timed on request; see `benchmarks.cpu`.

    python -m benchmarks._step '{"recipe": "digits", "settings": {}, "loader": false}'

It prints a line of JSON when it is ready, reads numbers of steps from its standard input, takes as
many, and prints the seconds of each.
"""

import itertools
import json
import math
import sys
import time

import jax

from rope_jax.config import Config, load_recipe, resolve
from rope_jax.models.vit import ViT
from rope_jax.restore import create
from rope_jax.sharding import put_batch, start_devices
from rope_jax.training.setup import initial_state, prepare, training_batches
from rope_jax.training.step import make_step

BATCHES = 16  # batches that are drawn before the time is taken, unless the loader is part of it


def config_of(recipe: str, settings: dict[str, object]) -> Config:
    """The config of a recipe with settings changed, by their names in config.json."""
    raw = load_recipe(recipe).to_dict()
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        (raw[section] if section else raw)[key] = value
    raw["eval"]["resolutions"] = ()  # nothing is evaluated, so any image size will do
    return resolve(raw)


def peer_of(config: Config) -> dict[str, object]:
    """The arguments of `_torch_vit.py`, for the same model and optimizer.

    Raises:
        SystemExit: that script has no such model.
    """
    model = create(config)
    options = getattr(model, "options", None)
    plain = type(model) is ViT and not (options.class_token or options.registers)
    position = config.model.position
    if not plain or options.drop_path or position not in ("none", "rope_mixed"):
        raise SystemExit(
            "--torch has ViTs without class token, registers and drop path, with rope_mixed or none"
        )
    names = ("patch_size", "width", "depth", "heads", "mlp_ratio", "norm_epsilon", "patch_norm")
    image_size = model.position.stage.grid[0] * options.patch_size
    return {name: getattr(options, name) for name in names} | {
        "position": position,
        "image_size": image_size,
        "batch": config.batch_size,
        "label_smoothing": config.label_smoothing,
        "learning_rate": config.optim.learning_rate,
        "weight_decay": config.optim.weight_decay,
        "clip_norm": config.optim.clip_norm,
    }


def main(asked: dict) -> None:
    start_devices()
    config = config_of(asked["recipe"], asked["settings"])
    setup, model = prepare(config)
    state, step = initial_state(setup, model), make_step(setup)
    stream, resident = training_batches(setup, 0)
    if not asked["loader"]:
        stream = itertools.cycle([next(stream) for _ in range(BATCHES)])
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(state["params"]))

    def take(steps: int) -> float:
        nonlocal state
        before = None
        start = time.perf_counter()
        for _ in range(steps):  # as in a run: metrics are fetched while the next step runs
            state, metrics = step(state, put_batch(next(stream), setup.mesh) | resident)
            if before is not None:
                jax.device_get(before)
            before = metrics
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    take(2)
    about = {"devices": setup.mesh.size, "parameters": parameters, "version": jax.__version__}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps(take(int(line))), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
