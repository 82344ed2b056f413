"""A run ready to train: what a config determines, and one jitted, donated step over a plain dict of arrays.

The state of a run is a pure function of (config, step): data order, augmentation and drop path are derived from the step, so that a run
that was interrupted ends exactly where it would have ended anyway.
"""

import dataclasses
import importlib.util
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, UInt32

from rope_jax import data, members, optim, restore
from rope_jax.config import Config, ConfigError, blame
from rope_jax.data import on_device
from rope_jax.evaluate import load_images, normalise, resolutions
from rope_jax.losses import LOSSES, soft_targets
from rope_jax.models.registry import find_model, image_pair
from rope_jax.sharding import in_force, make_mesh, replicated, share, state_shardings

# step i32[], params, opt; ema where the config asks for it, stats where the model has batch norms. Of several seeds see `rope_jax.members`.
State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that a config determines, ready to train: see `prepare`.

    Attributes:
        config: with everything filled in that the data and the model decide.
        mesh: the devices.
        images: the training split.
        fingerprint: of the data, by split.
        graph, rest: the model without its parameters and batch statistics.
        seed: of what is drawn in a step. Of several seeds at once these are all of them, and `rest` is of all of their models.
        optimizer, schedule: of the parameters, and of its learning rate.
        total_steps: of the whole run.
    """

    config: Config
    mesh: Mesh
    images: data.Images | data.Streamed
    fingerprint: dict[str, str]
    graph: nnx.GraphDef
    rest: nnx.State
    seed: int | UInt32[Array | np.ndarray, "*K"]
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    total_steps: int

    def apply(self, params: Any, stats: Any, images: Array, **options: Any) -> tuple[Array, Any]:
        """Logits of the model with these parameters and batch statistics, and the statistics after that: new ones in training."""
        model = nnx.merge(self.graph, params, stats, self.rest)
        with in_force(self.mesh):
            logits = model(images, **options)
        return logits, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    @property
    def plan(self) -> on_device.Plan:
        """Which augmentations are done by the loader, and which in the step."""
        return on_device.parse(self.config.data.augment)

    def about(self) -> dict[str, Any]:
        """What is stored beside the weights."""
        return {"config": dataclasses.asdict(self.config), "data": self.fingerprint}


def prepare(config: Config) -> tuple[Run, nnx.Module]:
    """Loads the images, checks that everything goes together, and makes the model and the optimiser.

    Returns:
        The run, and its model; of several seeds at once the models of all of them, joined into one.

    Raises:
        ConfigError: an impossible combination; the message names the flag to change.
    """
    with blame("--config.mesh.fsdp"):
        mesh = make_mesh(config.mesh.fsdp)
    parts = mesh.size * config.accumulate
    if config.batch_size % parts:
        below = config.batch_size - config.batch_size % parts
        fitting = " or ".join(str(size) for size in (below, below + parts) if size)
        times = "" if config.accumulate == 1 else f", times --config.accumulate={config.accumulate}"
        raise ConfigError(
            f"--config.batch_size={config.batch_size} cannot be divided over {mesh.size} devices{times}; use {fitting}, or fewer devices"
        )
    if config.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise ConfigError("--config.tensorboard=True needs tensorboardX: pip install 'rope_jax[log]', or set it to False")
    images, held_out = (load_images(config, split, config.data.image_size) for split in ("train", "test"))
    with blame("--config.data.path"):
        _check_classes(images, held_out)
    with blame("--config.data.augment"):
        data.batches(images, batch_size=1, seed=config.seed, augment=on_device.parse(config.data.augment).host)
    if config.seeds > 1 and isinstance(images, data.Streamed):
        raise ConfigError(
            f"--config.seeds={config.seeds} needs images that lie in memory, and those of {images.name} are read one at a time "
            f"(--config.data.source={config.data.source}): use --config.seeds=1"
        )
    if config.data.on_device:
        with blame("--config.data.on_device"):
            on_device.Places(images, batch_size=1, seed=config.seed, augment=on_device.parse(config.data.augment).host)
    with blame("--config.data.repeats"):
        data.epoch_length(len(images.labels), config.data.repeats)
    classes = config.model.num_classes
    if classes is not None and classes < images.classes:
        raise ConfigError(f"--config.model.num_classes={classes}, but {images.name} has {images.classes} classes: use at least that many")
    with blame("--config.model.name"):
        position = config.model.position or find_model(config.model.name).position
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, position=position, num_classes=classes or images.classes),
        data=dataclasses.replace(config.data, image_size=images.size),
    )
    model = restore.create(config)
    with blame("--config.eval.resolutions"):
        for size in resolutions(config, image_pair(config.data.image_size)):
            model.grids(size)
    fingerprint = {split.split: data.fingerprint(split) for split in (images, held_out)}
    run = assemble(config, mesh, images, fingerprint, model)
    if config.seeds == 1:
        return run, model
    model = members.join([model, *(restore.create(members.config_of(config, seed)) for seed in members.seeds(config)[1:])])
    return dataclasses.replace(run, rest=_parts_of(model)[-1], seed=np.array(members.seeds(config), np.uint32)), model


def _check_classes(images: data.Images | data.Streamed, held_out: data.Images | data.Streamed) -> None:
    """Refuses splits whose labels do not mean the same (sets in memory have no names of classes)."""
    if not isinstance(images, data.Streamed) or not isinstance(held_out, data.Streamed):
        return
    here, there = images.source.about["class_names"], held_out.source.about["class_names"]
    for label, pair in enumerate(itertools.zip_longest(here, there)):
        if pair[0] != pair[1]:
            raise ValueError(
                f"the splits of {images.name} have other classes: label {label} is {pair[0]!r} in the training split and {pair[1]!r} in "
                f"the test split ({len(here)} and {len(there)} classes): prepare both with the same list of classes"
            )


def assemble(config: Config, mesh: Mesh, images: data.Images | data.Streamed, fingerprint: dict[str, str], model: nnx.Module) -> Run:
    """The run of a config that is complete, with its optimiser. Also works on a model that is only traced, where no array is needed."""
    steps_per_epoch = data.epoch_length(len(images.labels), config.data.repeats) / config.batch_size
    total = max(1, round(config.epochs * steps_per_epoch))
    schedule = optim.learning_rate_schedule(config.optim, epochs=config.epochs, steps_per_epoch=steps_per_epoch)
    graph, params, _, rest = _parts_of(model)
    optimizer = optim.make_optimizer(config.optim, schedule, params)
    return Run(config, mesh, images, fingerprint, graph, rest, config.seed, optimizer, schedule, total)


def _parts_of(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State, nnx.State]:
    """A model's graph, parameters, batch statistics, and what else it holds."""
    return nnx.split(model, nnx.Param, nnx.BatchStat, ...)


def initial_state(run: Run, model: nnx.Module) -> State:
    """The state before the first step, from the model's parameters and batch statistics, laid out over the mesh."""
    params, stats = (nnx.to_pure_dict(nnx.state(model, kind)) for kind in (nnx.Param, nnx.BatchStat))
    init = run.optimizer.init if run.config.seeds == 1 else jax.vmap(run.optimizer.init)
    state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt": init(params)}
    if stats:
        state["stats"] = stats
    if run.config.ema_decay is not None:
        state["ema"] = jax.tree.map(jnp.copy, params)  # a copy: the step donates its buffers
    return jax.device_put(state, state_shardings(state, run.mesh))


def make_step(run: Run) -> Callable[[State, dict[str, Any]], tuple[State, dict[str, Array]]]:
    """The jitted training step: (state, batch) -> (state, metrics); the old state is donated. Of several seeds, that of all of them."""

    def of_one(rest: nnx.State, seed: UInt32[Array, ""], state: State, batch: dict[str, Any]) -> tuple[State, dict[str, Array]]:
        return _step(dataclasses.replace(run, rest=rest, seed=seed), state, batch)

    def step(state: State, batch: dict[str, Any]) -> tuple[State, dict[str, Array]]:
        if run.config.seeds == 1:
            new, metrics = _step(run, state, batch)
        else:
            new, metrics = members.together(of_one, run.rest, run.seed, state, batch)
        return jax.lax.with_sharding_constraint((new, metrics), (state_shardings(new, run.mesh), replicated(run.mesh)))

    return jax.jit(step, donate_argnums=0)


def _step(run: Run, state: State, batch: dict[str, Any]) -> tuple[State, dict[str, Array]]:
    """The next state, and what there is to tell of it.

    Batch statistics are those of the whole batch, over whatever devices it is divided, or where `accumulate` cuts it into parts, of each
    part after the other.
    """
    config = run.config

    def loss_of(params: Any, stats: Any, batch: dict[str, Array], key: Array) -> tuple[Array, tuple[Array, Any]]:
        logits, stats = run.apply(params, stats, batch["image"], train=True, key=key)
        logits = logits.astype(jnp.float32)
        return LOSSES[config.loss](logits, batch["target"]), ((logits.argmax(-1) == batch["label"]).mean(), stats)

    gradient = jax.value_and_grad(loss_of, has_aux=True)

    def of_parts(params: Any, stats: Any, batch: dict[str, Array], key: Array) -> tuple[tuple[Array, tuple[Array, Any]], Any]:
        """What `gradient` gives, as the mean over parts of the batch that are computed one after the other."""
        count = config.accumulate
        # Part i has every count-th example from i on, so that each device finds its share of all parts in its own share of the batch.
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), batch)

        def add(carry: Any, part: Any) -> tuple[Any, None]:
            stats, totals = carry
            (loss, (accuracy, stats)), grads = gradient(params, stats, *part)
            return (stats, jax.tree.map(jnp.add, totals, (loss, accuracy, grads))), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), jnp.float32(0), params))
        (stats, totals), _ = jax.lax.scan(add, (stats, zeros), (parts, jax.random.split(key, count)))
        loss, accuracy, grads = jax.tree.map(lambda total: total / count, totals)
        return (loss, (accuracy, stats)), grads

    key = jax.random.fold_in(jax.random.key(run.seed), state["step"])
    batch = _augmented(run, batch, key)
    compute = gradient if config.accumulate == 1 else of_parts
    (loss, (accuracy, stats)), grads = compute(state["params"], state.get("stats", {}), batch, key)
    updates, opt = run.optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    new = {"step": state["step"] + 1, "params": params, "opt": opt}
    if stats:
        new["stats"] = stats
    if config.ema_decay is not None:
        new["ema"] = optax.incremental_update(params, state["ema"], 1 - config.ema_decay)
    metrics = {
        "loss": loss,
        "accuracy": accuracy,
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": jnp.asarray(run.schedule(state["step"]), jnp.float32),
    }
    if config.non_finite == "skip":
        fine = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
        new = jax.tree.map(lambda after, before: jnp.where(fine, after, before), new, state) | {"step": new["step"]}
    return new, metrics


def feed(run: Run, first: int) -> tuple[data.Batches | on_device.Places | members.Streams, dict[str, Any]]:
    """The training batches of this process from step `first` on, and what is on the devices all the time and belongs to each of them."""
    config, images = run.config, run.images
    options = {"batch_size": config.batch_size, "seed": config.seed, "start_step": first, "augment": run.plan.host}
    options |= {"repeats": config.data.repeats, "shard": share()}
    if config.data.on_device:
        streams = [on_device.Places(images, **options | {"seed": seed}) for seed in members.seeds(config)]
        resident = {"set": jax.device_put((images.images, images.labels), replicated(run.mesh))}
        return (streams[0] if config.seeds == 1 else members.Streams(streams)), resident
    ahead = isinstance(images, data.Streamed)
    return data.batches(images, **options, ahead=ahead, workers=config.data.workers, bad_images=config.data.bad_images), {}


def _augmented(run: Run, batch: dict[str, Array], key: Array) -> dict[str, Array]:
    """Normalised images, augmented and mixed, with their soft targets and own labels."""
    config, plan = run.config, run.plan
    if "set" in batch:
        batch = on_device.take(*batch["set"], batch, plan.host)
    images, labels = batch["image"], batch["label"]
    if plan.pixels or plan.erasing:
        keys = on_device.example_keys(run.seed, batch["epoch"], batch["index"])
    if plan.pixels:
        images = on_device.apply(images, keys, plan.pixels, tuple(round(255 * x) for x in config.data.mean))
    images, others, share, m = normalise(images, config), labels, 1.0, config.mix
    if plan.erasing and not m.before_erasing:
        images = on_device.apply_erasing(images, keys, plan.erasing)
    if m.mixup or m.cutmix:
        enabled = True if m.off_epoch is None else batch["epoch"][0] < m.off_epoch
        options = {"mixup": m.mixup, "cutmix": m.cutmix, "prob": m.prob, "switch_prob": m.switch_prob, "enabled": enabled}
        images, share = on_device.mix(images, jax.random.fold_in(key, zlib.crc32(b"mix")), **options)
        others = labels[::-1]
    if plan.erasing and m.before_erasing:
        images = on_device.apply_erasing(images, keys, plan.erasing)
    targets = soft_targets(labels, others, share, config.model.num_classes, config.label_smoothing)
    return {"image": images, "label": labels, "target": targets}
