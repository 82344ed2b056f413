"""Everything that precedes the first step: devices, images, model, optimizer, state.

The state of a run is a pure function of (config, step): data order, augmentation and drop path
follow from the step, so an interrupted run ends in the same state as an uninterrupted one.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from rope_jax import data
from rope_jax.config import Config, ConfigError, blame, model_overrides
from rope_jax.data.device_batches import DeviceBatches, loader_on_device
from rope_jax.data.images.augment import parse_crop
from rope_jax.models.registry import find_model
from rope_jax.models.vit import ViT
from rope_jax.positions.extension import extend_rotations
from rope_jax.system.sharding import (
    make_mesh,
    on_every_device,
    process_shard,
    replicate,
    state_shardings,
    use_mesh,
)
from rope_jax.tasks import Task, find_task, seeds, task_for
from rope_jax.tasks.dense import first_difference
from rope_jax.training import optim
from rope_jax.weights.create import create_model

# step i32[], params, opt; ema if the config has ema_decay, stats if the model has batch norms.
State = dict[str, Any]
Split = data.Images | data.Streamed


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run ready to train, see `prepare`.

    Attributes:
        config: complete, with values that depend on the data and the model filled in.
        mesh: the devices.
        images, held_out: the training split and the test split.
        graph, rest: the model without its parameters and batch statistics; of several seeds
            `rest` is stacked.
        optimizer, schedule: of the parameters, and of the learning rate.
        total_steps: of the whole run.
        windows: the size of windows in evaluation, in words; None for models without windows.
        task: of the model.
    """

    config: Config
    mesh: Mesh
    images: Split
    held_out: Split
    graph: nnx.GraphDef
    rest: nnx.State
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    total_steps: int
    windows: str | None
    task: Task

    def apply(
        self, function: Callable[[nnx.Module], Any], params: Any, stats: Any, rest: Any
    ) -> tuple[Any, Any]:
        """The value of a function of one model, and the model's batch statistics after it."""
        model = nnx.merge(self.graph, params, stats, rest)
        with use_mesh(self.mesh):
            value = function(model)
        return value, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    @functools.cached_property
    def loader(self) -> str:
        """The augmentations of `data.batches`, before those of the step."""
        return data.split_augment(self.config.data.augment).loader

    @functools.cached_property
    def fingerprint(self) -> dict[str, str]:
        """Fingerprints of the data, by split."""
        return {split.split: split.fingerprint() for split in (self.images, self.held_out)}

    def about(self) -> dict[str, Any]:
        """The metadata stored with each checkpoint."""
        names = self.images.class_names
        return {
            "config": dataclasses.asdict(self.config),
            "data": self.fingerprint,
            "class_names": None if names is None else list(names),
        }


def prepare(config: Config) -> tuple[Setup, nnx.Module]:
    """Loads the images, checks that all settings are compatible, and creates the model.

    Returns:
        The setup, and the model with its initial weights (stacked for several seeds).

    Raises:
        ConfigError: an impossible combination; the message names the flag to change.
    """
    with blame("--config.mesh.fsdp"):
        mesh = make_mesh(config.mesh.fsdp)
    check_batch_size(config.batch_size, mesh.size, config.accumulate)
    if config.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise ConfigError(
            "--config.tensorboard=True needs tensorboardX: pip install 'rope_jax[log]', or set it "
            "to False"
        )
    images, held_out = (load_split(config, split) for split in ("train", "test"))
    task_for(config.model.head).check(config, images)
    _check_data(config, images, held_out)
    config = complete(config, images)
    model = create_seeds(config)
    _check_sizes(config, model)
    _check_evaluation(config, images, model)
    setup = assemble(config, mesh, images, held_out, model)
    with blame("--config.data.path"):
        setup.about()  # reads some images: now, and not when a signal asks for a checkpoint
    return setup, model


def create(config: Config) -> nnx.Module:
    """The model of a config, with fresh weights.

    Raises:
        ConfigError: name, position, options and image size are not compatible.
    """
    m = config.model
    with blame("--config.model or --config.data.image_size"):
        return create_model(
            m.name,
            position=m.position,
            num_classes=m.num_classes,
            image_size=config.data.image_size,
            seed=config.seed,
            dtype=jnp.dtype(config.dtype),
            head=m.head,
            **model_overrides(m.options),
        )


def create_seeds(config: Config) -> nnx.Module:
    """The model of a config; for several seeds, one module with stacked variables.

    A stacked module can be split into graph and state, but not called.
    """
    if config.seeds == 1:
        return create(config)
    models = [create(config.single(seed)) for seed in config.all_seeds]
    graph, _ = nnx.split(models[0])
    return nnx.merge(graph, seeds.stack([nnx.state(model) for model in models]))


def check_batch_size(batch_size: int, devices: int, accumulate: int = 1) -> None:
    """Rejects a batch that cannot be divided over devices and parts."""
    parts = devices * accumulate
    if batch_size % parts == 0:
        return
    below = batch_size - batch_size % parts
    fitting = " or ".join(str(size) for size in (below, below + parts) if size)
    times = f", times --config.accumulate={accumulate}" if accumulate > 1 else ""
    raise ConfigError(
        f"--config.batch_size={batch_size} cannot be divided over {devices} devices{times}; "
        f"use {fitting}, or fewer devices"
    )


def load_split(
    config: Config, split: str, size: tuple[int, int] | None = None
) -> data.Images | data.Streamed:
    """A split of the config's data at a resolution, by default the training resolution.

    It has the kind of labels that the task of the config's head needs, if the source has them.
    """
    with blame("--config.model.head"):
        labels_of = task_for(config.model.head).labels.labels_of
    with blame("--config.data"):
        return data.load(
            config.data.source,
            config.data.path,
            split,
            config.data.image_size if size is None else size,
            crop=config.eval.frame if split == "test" else None,
            allow_empty=config.data.allow_empty,
            labels_of=labels_of,
        )


def _check_data(config: Config, images: Split, held_out: Split) -> None:
    """Rejects data settings that do not fit the images."""
    workers = config.data.workers
    if workers and not images.in_memory and importlib.util.find_spec("grain") is None:
        raise ConfigError(
            f"--config.data.workers={workers} needs grain: pip install 'rope_jax[data]', or set it "
            "to 0"
        )
    with blame("--config.data.path"):
        _check_class_names(images, held_out)
        for split in (images, held_out):
            data.check_labels(split, config.data.bad_images)
        data.check_objects(held_out)
    with blame("--config.data.max_boxes"):  # batches of an evaluation have room for all
        data.check_boxes(images, config.data.max_boxes)
    with blame("--config.data.augment"):
        loader = data.split_augment(config.data.augment).loader
    canvases = config.data.canvas_sizes
    with blame("--config.data.canvases"):
        for split, augment in ((images, loader), (held_out, "none")):
            data.check_canvases(split, augment, canvases)
    with blame("--config.eval.frame"):
        parse_crop(config.eval.frame)
    for frame in config.eval.frames:
        with blame("--config.eval.frames"):
            parse_crop(frame)
            if not held_out.in_memory:
                seen = dataclasses.replace(held_out, crop=frame)
                data.check_canvases(seen, "none", canvases)
    with blame("--config.data.augment"):
        for size in (images.size, *config.data.other_sizes):
            data.loader_of(loader, images, size)
    if config.data.on_device:
        with blame("--config.data.on_device"):
            loader_on_device(loader, images)
    with blame("--config.data.repeats"):
        data.epoch_length(len(images.labels), config.data.repeats)
    classes = config.model.num_classes
    if classes is not None and classes < images.classes:
        raise ConfigError(
            f"--config.model.num_classes={classes}, but {images.name} has {images.classes} "
            "classes: use at least that many"
        )


def _check_sizes(config: Config, model: nnx.Module) -> None:
    """Rejects further training sizes, and distillation of features, that the model cannot serve."""
    with blame("--config.data.more_sizes"):
        for size in config.data.other_sizes:
            model.check_size(size)
    reads = config.distill is not None and config.distill_from != "logits"
    if reads and type(model).__call__ is not ViT.__call__:
        raise ConfigError(
            f"--config.distill_from={config.distill_from} is for models whose head reads the "
            f"tokens of the last block of one map, unlike {config.model.name}: use logits"
        )


def _check_evaluation(config: Config, images: Split, model: nnx.Module) -> None:
    """Rejects resolutions, crops and windows that the model or the images do not support."""
    single_size = images.one_size or not config.data.canvases
    with blame(f"--config.data.{'image_size' if single_size else 'canvases'}"):
        for size in data.canvases_of(images, config.data.canvas_sizes):
            model.check_size(size)
    if config.eval.resolutions and not images.one_size:
        raise ConfigError(
            f"--config.eval.resolutions={config.eval.resolutions}, but the images of {images.name} "
            "keep their aspect: name other sizes with "
            "--config.eval.frames='(\"fit(short=480,long=800)\",)'"
        )
    sizes = [images.size, *config.eval.sizes]
    with blame("--config.eval.resolutions"):
        model.grids(sizes[0])  # of canvases it is only the size that the model is made for
        for size in sizes[1:]:
            model.check_size(size)
    with blame(f"--config.eval.{'log_scale' if config.eval.extend is None else 'extend'}"):
        extend_rotations(nnx.clone(model), config.eval.extend, config.eval.log_scale)
    scaled = config.eval.scale_windows
    with blame(f"--config.eval.{'scale_windows' if scaled else 'resolutions'}"):
        evaluated = nnx.clone(model)
        if scaled:
            evaluated.scale_windows()
        for size in sizes:
            evaluated.prepare(size)


def _check_class_names(images: Split, held_out: Split) -> None:
    """Rejects splits with different classes (data sets in memory have no class names)."""
    train_names, test_names = images.class_names, held_out.class_names
    if (difference := first_difference(train_names, test_names)) is not None:
        label, train, test = difference
        raise ValueError(
            f"the splits of {images.name} have other classes: label {label} is {train!r} in "
            f"the training split and {test!r} in the test split ({len(train_names)} and "
            f"{len(test_names)} classes): prepare both with the same list of classes"
        )


def complete(config: Config, images: Split) -> Config:
    """The config, with values that depend on the data and the model filled in."""
    with blame("--config.model.name"):
        position = config.model.position or find_model(config.model.name).position
    classes = config.model.num_classes or images.classes
    model = dataclasses.replace(config.model, position=position, num_classes=classes)
    image_data = dataclasses.replace(config.data, image_size=images.size)
    return dataclasses.replace(config, model=model, data=image_data)


def assemble(
    config: Config, mesh: Mesh, images: Split, held_out: Split, model: nnx.Module
) -> Setup:
    """The setup of a complete config. The model may be abstract (`nnx.eval_shape`)."""
    steps_per_epoch = data.epoch_length(len(images.labels), config.data.repeats) / config.batch_size
    epochs = config.epochs if config.steps is None else config.steps / steps_per_epoch
    total = max(1, round(epochs * steps_per_epoch))
    with blame("--config.optim.milestones"):
        schedule = optim.learning_rate_schedule(
            optim.in_epochs(config.optim, None if config.steps is None else steps_per_epoch),
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
        )
    graph, params, _, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    model_params = seeds.take(params, config.seeds)  # decay and layer rates depend on shapes
    optimizer = optim.make_optimizer(config.optim, schedule, model_params, on_every_device(mesh))
    return Setup(
        config=config,
        mesh=mesh,
        images=images,
        held_out=held_out,
        graph=graph,
        rest=rest,
        optimizer=optimizer,
        schedule=schedule,
        total_steps=total,
        windows=model.window_rule(scaled=config.eval.scale_windows),
        task=find_task(model),
    )


def initial_state(setup: Setup, model: nnx.Module) -> State:
    """The state before the first step, laid out over the mesh."""
    params, stats = (
        nnx.to_pure_dict(nnx.state(model, kind)) for kind in (nnx.Param, nnx.BatchStat)
    )
    init = seeds.vmap(setup.optimizer.init, setup.config.seeds, in_axes=0)
    state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt": init(params)}
    if stats:
        state["stats"] = stats
    if setup.config.ema_decay is not None:
        state["ema"] = jax.tree.map(jnp.copy, params)  # a copy: the step donates its buffers
    return jax.device_put(state, state_shardings(state, setup.mesh))


def training_batches(
    setup: Setup, first: int, *, waiting: Callable[[int], None] = lambda seconds: None
) -> tuple[Any, dict[str, Any]]:
    """The batches of this process from step `first` on, and arrays to be added to each of them.

    These arrays are the images, if the data set is kept on the device. For `waiting` see
    `rope_jax.data.batches`.
    """
    config, images = setup.config, setup.images
    options = {
        "batch_size": config.batch_size,
        "start_step": first,
        "augment": setup.loader,
        "repeats": config.data.repeats,
        "shard": process_shard(),
    }
    if config.data.on_device:
        streams = [DeviceBatches(images, seed=seed, **options) for seed in config.all_seeds]
        resident = jax.device_put((streams[0].pixels, images.labels), replicate(setup.mesh))
        stream = streams[0] if config.seeds == 1 else seeds.InterleavedBatches(streams)
        return stream, {"set": resident}

    def resize(size: tuple[int, int]) -> Split:
        if images.in_memory:
            return load_split(config, "train", size)
        return dataclasses.replace(images, size=size)  # without listing the files again

    sets = [images, *map(resize, config.data.other_sizes)]
    workers = data.worker_count(config.data.workers)
    streams = [
        data.batches(
            images,
            seed=config.seed,
            ahead=not images.in_memory,
            workers=min(workers, max(1, workers // len(sets))),
            bad_images=config.data.bad_images,
            waiting=waiting,
            canvases=config.data.canvas_sizes,
            max_boxes=config.data.max_boxes,
            copy=copy,
            **options,
        )
        for copy, images in enumerate(sets)
    ]
    return (streams[0] if len(streams) == 1 else data.SeveralSizes(streams)), {}


def batch_ids(setup: Setup, step: int, seed: int) -> list[int]:
    """Ids of the images in the batch of a step."""
    config = setup.config
    return data.batch_ids(
        setup.images,
        step - 1,
        batch_size=config.batch_size,
        seed=seed,
        augment=setup.loader,
        repeats=config.data.repeats,
    )
