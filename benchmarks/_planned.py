"""Training steps compiled ahead of time for H200s that are not there, and their memory."""

import dataclasses
import functools
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import _hlo
from benchmarks._gpus import absent_gpus
from benchmarks._program import OPTIONS, sizes
from rope_jax import config, data, restore
from rope_jax.models.create import create_model
from rope_jax.sharding import (
    make_mesh,
    on_every_device,
    split_batch,
    state_shardings,
    use_mesh,
    with_shardings,
)
from rope_jax.tasks import task_of
from rope_jax.training import optim
from rope_jax.training.setup import Setup, assemble, initial_state
from rope_jax.training.step import make_step
from rope_jax_kernels import dispatch

SIZE = 224  # pixels
_COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-(?:permute|broadcast)"
COLLECTIVE = re.compile(rf"%\S+ = (\(.*?\)|\S+) ({_COLLECTIVES})(-start)?\(")


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled training step.

    Attributes:
        state: bytes per device of parameters, optimizer state and averages.
        rest: bytes per device of activations, gradients, gathered parameters and the batch.
        collectives: (operation, bytes per device of its largest array) for each collective.
        text: the optimised HLO.
    """

    state: int
    rest: int
    collectives: list[tuple[str, int]]
    text: str


def gpus(hosts: int) -> list:
    """Returns the H200s of `hosts` hosts with eight GPUs each."""
    return absent_gpus(hosts, 8)


def compile_step(
    name: str,
    devices: list,
    batch: int,
    *,
    fsdp: int = 1,
    implementation: str | None = None,
    size: int = SIZE,
    **options: Any,
) -> Step:
    """Compiles the training step of a model.

    Args:
        name: name of the model.
        devices: the devices to compile for.
        batch: images per device.
        fsdp: as in `MeshConfig`.
        implementation: implementation of attention; None for the model's own choice.
        size: side of the images in pixels.
        **options: options of the model, and further arguments of `create_model`: head, num_classes.
    """
    run, state = _run(name, make_mesh(fsdp, devices=devices), options)
    return _compiled(run, state, batch, size, implementation)


def compile_recipe(text: str, devices: list, batch: int, size: int, classes: int) -> Step:
    """Compiles the training step of a recipe of dense prediction.

    Args:
        text: the recipe with its arguments, as in `--config`.
        devices: the devices to compile for.
        batch: images per device.
        size: side of the images in pixels.
        classes: of the images.
    """
    settings = config.resolve(config.load_recipe(text))
    about = dataclasses.replace(settings.model, num_classes=classes)
    count = batch * len(devices)
    settings = dataclasses.replace(settings, model=about, batch_size=count)
    make = functools.partial(restore.create, settings)
    black = np.zeros((count, 8, 8, 3), np.uint8)  # not used by the step
    images = data.Images(black, np.zeros(count, np.int32), "black", "train", classes)
    run = assemble(settings, make_mesh(devices=devices), images, images, nnx.eval_shape(make))
    return _compiled(run, jax.eval_shape(lambda: initial_state(run, make())), batch, size)


def _batch(run: Setup, count: int, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch from the loader."""

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *shape), dtype)

    boxes = run.config.data.max_boxes
    labels = {
        "images": {"label": array()},
        "pixels": {"label": array(size, size, dtype=jnp.uint8), "extent": array(2)},
        "boxes": {
            "label": array(boxes),
            "boxes": array(boxes, 4, dtype=jnp.float32),
            "extent": array(2),
        },
    }
    batch = {"image": array(size, size, 3, dtype=jnp.uint8), "epoch": array(), "index": array()}
    return batch | labels[run.task.LABELS_OF]


def _compiled(
    run: Setup, state: Any, batch: int, size: int, implementation: str | None = None
) -> Step:
    """The compiled step of a run; arguments as in `compile_step`."""
    arrays = _batch(run, batch * run.mesh.size, size)
    names = () if implementation is None else ("attention", "attention_qkv")
    forced = {op: {implementation: range(1000)} for op in names}
    with use_mesh(run.mesh), mock.patch.dict(dispatch.PREFERENCE, forced):
        state = with_shardings(state, state_shardings(state, run.mesh))
        lowered = make_step(run).trace(state, with_shardings(arrays, split_batch(run.mesh))).lower()
    compiled = lowered.compile(compiler_options=OPTIONS)
    memory, text = compiled.memory_analysis(), _hlo.text_of(compiled)
    found = filter(None, map(COLLECTIVE.search, text.splitlines()))
    collectives = [(match[2], max(sizes(match[1]))) for match in found]
    # The state is donated, so the aliased bytes are those of the state.
    state_bytes = memory.alias_size_in_bytes
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - 2 * state_bytes
    return Step(state_bytes, memory.temp_size_in_bytes + arguments, collectives, text)


def _run(name: str, mesh: Any, options: dict[str, Any]) -> tuple[Setup, Any]:
    """Returns a run of this model without data, and the shapes of its state."""
    raw = config.default()
    raw.update({"dtype": "bfloat16", "ema_decay": 0.9999})
    settings = config.resolve(raw)

    def make() -> nnx.Module:
        return create_model(name, dtype=jnp.bfloat16, **options)

    model = nnx.eval_shape(make)
    about = dataclasses.replace(settings.model, num_classes=model.num_classes)
    settings = dataclasses.replace(settings, model=about)
    graph, params, _, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    schedule = optim.learning_rate_schedule(settings.optim, epochs=300.0, steps_per_epoch=1251.0)
    optimizer = optim.make_optimizer(settings.optim, schedule, params, on_every_device(mesh))
    images = data.load("digits", None, "train", (8, 8))  # not used by the step
    parts = (images, images, graph, rest, optimizer, schedule)
    run = Setup(settings, mesh, *parts, total_steps=300 * 1251, windows=None, task=task_of(model))
    return run, jax.eval_shape(lambda: initial_state(run, make()))
