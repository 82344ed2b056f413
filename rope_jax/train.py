"""Training: one jitted, donated step over a plain dict of arrays, and the loop around it.

The state of a run is a pure function of (config, step): data order, augmentation and drop path are derived from the step, so that a run
that was interrupted ends exactly where it would have ended anyway.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import pathlib
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, UInt32

from rope_jax import data, members, optim, restore
from rope_jax.analysis.plots import accuracy_against_resolution
from rope_jax.checkpoint import Checkpoints, not_finite
from rope_jax.config import COSMETIC, SEMANTIC, Config, ConfigError, blame, differences, resolve, to_json
from rope_jax.data import on_device, order
from rope_jax.evaluate import Row, evaluate, load_images, normalise, protocol, read_results, resolutions, results_table, write_results
from rope_jax.hints import closest
from rope_jax.losses import LOSSES, soft_targets
from rope_jax.metrics import MetricsWriter, Profiler, Progress, parameter_table, progress_line
from rope_jax.models.registry import find_model, image_pair
from rope_jax.sharding import in_force, like, make_mesh, of_first, put_batch, replicated, share, state_shardings
from rope_jax.signals import Interrupted, Signals, stop_signals
from rope_jax.workdir import locked, warn, write_file

MAX_SKIPPED = 10  # steps in a row whose numbers are not finite, before a run with non_finite="skip" stops

# step i32[], params, opt; ema where the config asks for it, stats where the model has batch norms. Of several seeds see `rope_jax.members`.
State = dict[str, Any]


class NonFinite(Exception):
    """The loss or a gradient is not finite; the message names the step."""


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


def train(config: Config, workdir: pathlib.Path, *, strict_restore: bool = False, resume_override: Sequence[str] = ()) -> None:
    """Trains, or resumes, or finds nothing left to do; then evaluates. Leaves its files in `workdir`.

    Args:
        config: of the run.
        workdir: its folder, which no other process may be using.
        strict_restore: stop at a damaged checkpoint instead of going back to one that verifies.
        resume_override: config fields (and "images") that may differ from those of the run that is resumed.

    Raises:
        ConfigError: an impossible combination, or a workdir of another run, or one that cannot be used.
        Interrupted: the run was asked to stop; a checkpoint of the last finished step is on disk.
        NonFinite: the loss or a gradient is not finite; nothing of it is on disk.
        SaveFailed: a checkpoint or a line of metrics could not be written.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(stop_signals())
        with blame("--workdir"):
            if jax.process_index() == 0:
                stack.enter_context(locked(workdir))
        signals.saved = any(path.name.isdecimal() for path in (workdir / "checkpoints").glob("*"))
        run, model = prepare(config)
        config = run.config
        with blame("--workdir"):
            checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", keep=config.keep_checkpoints))
            checkpoints.clean()
        state = load_newest(run, model, checkpoints, workdir, strict=strict_restore, override=resume_override, rename=True)
        signals.saved = state is not None
        if state is None:
            if jax.process_index() == 0:
                (workdir / "results.json").unlink(missing_ok=True)  # of a run whose checkpoints were moved away
            if config.init_from is not None:
                model = _started(model, config)
            state = initial_state(run, model)
            print(parameter_table(state["params"] if config.seeds == 1 else members.take(state["params"], 0)))
        if jax.process_index() == 0:
            write_file(workdir / "config.json", to_json(config) + "\n")
        if int(state["step"]) < run.total_steps:
            with MetricsWriter(workdir, restored_step=int(state["step"]), tensorboard=config.tensorboard) as writer:
                state = loop(run, state, checkpoints, writer, signals, workdir)
        finish(run, state, workdir, signals)


def _started(model: nnx.Module, config: Config) -> nnx.Module:
    """The model with the weights of `init_from`: those of all seeds start from the same."""
    models = [model] if config.seeds == 1 else members.part(model, config.seeds)
    for seed, each in zip(members.seeds(config), models, strict=True):
        restore.start_from(each, members.config_of(config, seed))
    return model if config.seeds == 1 else members.join(models)


def evaluate_newest(config: Config, workdir: pathlib.Path, *, strict_restore: bool = False, resume_override: Sequence[str] = ()) -> None:
    """Evaluates the newest checkpoint of a run, finished or not, at the config's resolutions. Arguments as in `train`.

    Raises:
        ConfigError: there is no checkpoint, or it is of another run.
    """
    missing = ConfigError(f"--workdir={workdir} holds no checkpoints: train first, with --mode=train")
    if not (workdir / "checkpoints").is_dir():
        raise missing
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(stop_signals())
        signals.saved = True
        with blame("--workdir"):
            if jax.process_index() == 0:
                stack.enter_context(locked(workdir))
        run, model = prepare(config)
        with Checkpoints(workdir / "checkpoints") as checkpoints:
            state = load_newest(run, model, checkpoints, workdir, strict=strict_restore, override=resume_override)
        if state is None:
            raise missing
        finish(run, state, workdir, signals)


def load_newest(
    run: Run,
    model: nnx.Module,
    checkpoints: Checkpoints,
    workdir: pathlib.Path,
    *,
    strict: bool = False,
    override: Sequence[str] = (),
    rename: bool = False,
) -> State | None:
    """The newest state on disk that verifies, or None; refuses that of a run with another config, fields of `override` aside.

    See `Checkpoints.newest_verified` for `strict` and `rename`.
    """
    for name in override:
        if name not in (*SEMANTIC, *COSMETIC, "images"):
            raise ConfigError(f"--resume_override={name} is not a setting; {closest(name, (*SEMANTIC, 'images'))}")
    with blame("--workdir"):
        step = checkpoints.newest_verified(strict=strict, rename=rename)
        if step is None:
            return None
        about = checkpoints.about(step)
    stored = resolve(about["config"])
    changed = differences(stored, run.config, override)
    if "images" not in override:
        changed += [f"the images of the {split} split" for split, value in run.fingerprint.items() if about["data"][split] != value]
    if changed:
        names = ",".join(dict.fromkeys("images" if line.startswith("the images") else line.partition(":")[0] for line in changed))
        raise ConfigError(
            f"--workdir={workdir} holds a run of another config ({'; '.join(changed)}): use another workdir, or the same settings; "
            f"--resume_override={names} goes on with the new ones"
        )
    if overridden := differences(stored, run.config):
        warn(f"WARNING: going on with other settings: {'; '.join(overridden)}")
    shapes = jax.eval_shape(lambda: initial_state(run, model))
    with blame("--workdir"):
        state = checkpoints.load(step, like(shapes, state_shardings(shapes, run.mesh)))
    print(f"found step {step} of {run.total_steps} in {workdir}" + (": training is complete" if step == run.total_steps else ""))
    return state


def loop(run: Run, state: State, checkpoints: Checkpoints, writer: MetricsWriter, signals: Signals, workdir: pathlib.Path) -> State:
    """Runs the remaining steps. The metrics of a step are fetched while the next one runs, and checkpoints written beside all that.

    Before the first step of this process there is nothing that a signal could make us save: it ends the run at once. Later it ends it
    after the step under way.
    """
    config = run.config
    first = step = int(state["step"])
    train_step = make_step(run)
    progress = Progress(total_steps=run.total_steps, batch_size=config.batch_size * config.seeds)
    profiler = Profiler(workdir)
    skipped = dict.fromkeys(members.seeds(config), 0)  # in a row

    def examples(step: int, seed: int) -> str:
        count, repeats = len(run.images.labels), config.data.repeats
        numbers = order.examples(step - 1, batch_size=config.batch_size, seed=seed, count=count, repeats=repeats)
        return ", ".join(map(str, numbers[:8])) + ", ..."

    def lost(step: int, seed: int, told: str) -> NonFinite:
        last = checkpoints.newest()
        saved = "nothing was saved" if last is None else f"the newest checkpoint is of step {last}"
        return NonFinite(f"{told}; {saved}. Lower --config.optim.learning_rate, or look at its examples: {examples(step, seed)}")

    def check(step: int, values: dict[str, np.ndarray]) -> bool:
        """Whether all that a step computed is finite; stops the run, or says what is skipped, where it is not."""
        fine = True
        each = zip(skipped, members.names(config), np.ravel(values["loss"]), np.ravel(values["grad_norm"]), strict=True)
        for seed, name, loss, norm in each:
            if np.isfinite(loss) and np.isfinite(norm):
                skipped[seed] = 0
                continue
            fine = False
            skipped[seed] += 1
            told = f"step {step}{f' of seed {seed}' if name else ''}: loss {loss}, gradient norm {norm}"
            if config.non_finite == "stop" or skipped[seed] > MAX_SKIPPED:
                often = f", after {MAX_SKIPPED} skipped steps in a row" if skipped[seed] > MAX_SKIPPED else ""
                raise lost(step, seed, told + often)
            warn(f"WARNING: {told}; its update is skipped ({skipped[seed]} in a row). Its examples: {examples(step, seed)}")
            writer.event(step, "skipped", loss=str(loss), grad_norm=str(norm), **name)
        return fine

    def report(step: int, metrics: dict[str, Array]) -> None:
        values = jax.device_get(metrics)
        if not check(step, values):
            return
        logged = step % config.log_every == 0 or step == run.total_steps
        speed = progress.at(step) if logged or step == first + 1 else {}
        if logged:
            if batches.skipped:
                speed |= {"skipped_images": len(batches.skipped)}
            numbers = {name: float(value) for name, value in values.items()} if config.seeds == 1 else members.summary(values, config)
            writer.write(step, numbers | speed)
            print(progress_line(step, run.total_steps, numbers | speed), flush=True)

    def save(step: int, state: State) -> None:
        try:
            checkpoints.save(step, state, about=run.about())
        except ValueError as error:
            trees = [state] if config.seeds == 1 else [members.take(state, member) for member in range(config.seeds)]
            seed = next((seed for seed, tree in zip(members.seeds(config), trees, strict=True) if not_finite(tree)), config.seed)
            raise lost(step, seed, f"{error}{f' (seed {seed})' if config.seeds > 1 else ''}") from None

    def on_saved(step: int, size: int, seconds: float) -> None:
        signals.saved = True
        print(f"saved step {step}: {size / 1e6:.1f} MB in {seconds:.1f} s", flush=True)
        writer.event(step, "saved", bytes=size, seconds=round(seconds, 3))

    def profile(folder: str | None) -> None:
        if folder is not None:
            print(f"profile of {Profiler.STEPS} steps: {folder}", flush=True)
            writer.event(step, "profile", folder=folder)

    if writer.last_event is not None and writer.last_event["event"] == "start":
        print("the process before this one ended without a word: it was killed, or the machine went down", flush=True)
    writer.event(first, "start", resumes_from=first if signals.saved else None, total_steps=run.total_steps, devices=run.mesh.size)
    checkpoints.on_saved = on_saved
    batches, resident = feed(run, first)
    pending = None
    try:
        for step in range(first + 1, run.total_steps + 1):
            begun = time.monotonic()
            batch = put_batch(next(batches), run.mesh) | resident
            progress.waited(time.monotonic() - begun)
            if signals.profile_wanted() or step == config.profile_at:
                profiler.start(step)
            # After the first step, which compiles, nothing may move to the devices that was not put there.
            with jax.transfer_guard_host_to_device("allow" if step == first + 1 else "disallow"):
                state, metrics = train_step(state, batch)
            signals.at_once = False
            if pending is not None:
                report(*pending)
            pending = (step, metrics)
            profile(profiler.after(step, metrics))
            try:
                signals()
            except Interrupted:
                report(*pending)
                save(step, state)
                checkpoints.wait()
                raise
            if step % config.checkpoint_every == 0 or step == run.total_steps:
                report(*pending)
                pending = None
                save(step, state)
        checkpoints.wait()
    except BaseException as error:
        last = checkpoints.newest()
        why = f"stopped by {error}" if isinstance(error, Interrupted) else f"{type(error).__name__}: {error}"
        writer.event(step, "stop", why=why, resumes_from=last)
        print(f"stopped at step {step} of {run.total_steps}; the newest checkpoint is of step {last}", flush=True)
        raise
    finally:
        profile(profiler.close())
        batches.close()
    writer.event(step, "stop", why="complete", resumes_from=step)
    signals.at_once = True  # everything is saved
    signals()  # and a signal may have come meanwhile
    return state


def finish(run: Run, state: State, workdir: pathlib.Path, poll: Callable[[], None]) -> None:
    """Evaluates the state, unless that was done in the same way, and shows what came of it."""
    config, step = run.config, int(state["step"])
    how = protocol(run.images, config)
    sizes = resolutions(config, image_pair(config.data.image_size))
    wanted = [{"resolution": list(size), "protocol": how} | name for size in sizes for name in members.names(config)]
    results = read_results(workdir)
    kept = ("resolution", "protocol", "seed")
    done = [] if results is None else [{key: row[key] for key in kept if key in row} for row in results["eval"]]
    if of_first(results is None or results["step"] != step or done != wanted):
        weights = (state["ema" if config.averaged else "params"], state.get("stats", {}))
        if config.seeds == 1:
            apply = lambda weights, images: run.apply(*weights, images)[0]
        else:
            weights = (*weights, run.rest)
            apply = lambda weights, images: dataclasses.replace(run, rest=weights[2]).apply(*weights[:2], images)[0]
        rows = evaluate(apply, weights, config, run.mesh, poll=poll)
        if jax.process_index() == 0:
            write_results(workdir, step, rows)
    else:
        rows = results["eval"]
    if jax.process_index() > 0:
        return
    print(f"\n{rows[0]['dataset']} {rows[0]['split']}, {config.model.name} with {config.model.position}, step {step}")
    print(results_table(rows))
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(f"{config.model.position}, seed {row['seed']}" if "seed" in row else config.model.position, []).append(row)
    picture = accuracy_against_resolution(lines, workdir / "accuracy.png")
    print(f"\npicture: {picture}" if picture else "\nno picture: matplotlib is not installed (pip install 'rope_jax[plot]')")
