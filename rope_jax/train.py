"""Training: one jitted, donated step over a plain dict of arrays, and the loop around it.

The state of a run is a pure function of (config, step): data order, augmentation and drop path are derived from the step, so that a run
that was interrupted ends exactly where it would have ended anyway.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from rope_jax import data, optim, restore
from rope_jax.analysis.plots import accuracy_against_resolution
from rope_jax.checkpoint import Checkpoints
from rope_jax.config import Config, ConfigError, blame, differences, resolve, to_json
from rope_jax.evaluate import evaluate, load_images, normalise, read_results, resolutions, results_table, write_results
from rope_jax.metrics import MetricsWriter, Progress, parameter_table, progress_line, write_file
from rope_jax.models.registry import find_model, image_pair
from rope_jax.sharding import like, make_mesh, put_batch, replicated

State = dict[str, Any]  # step i32[], params, opt; ema where the config asks for it, stats where the model has batch norms


class Interrupted(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM); what was reached is saved."""


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
        optimizer, schedule: of the parameters, and of its learning rate.
        total_steps: of the whole run.
    """

    config: Config
    mesh: Mesh
    images: data.Images
    fingerprint: dict[str, str]
    graph: nnx.GraphDef
    rest: nnx.State
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    total_steps: int

    def apply(self, params: Any, stats: Any, images: Array, **options: Any) -> tuple[Array, Any]:
        """Logits of the model with these parameters and batch statistics, and the statistics after that: new ones in training."""
        model = nnx.merge(self.graph, params, stats, self.rest)
        logits = model(images, **options)
        return logits, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    def about(self) -> dict[str, Any]:
        """What is stored beside the weights."""
        return {"config": dataclasses.asdict(self.config), "data": self.fingerprint}


def prepare(config: Config) -> tuple[Run, nnx.Module]:
    """Loads the images, checks that everything goes together, and makes the model and the optimiser.

    Raises:
        ConfigError: an impossible combination; the message names the flag to change.
    """
    mesh = make_mesh()
    if config.batch_size % mesh.size:
        below = config.batch_size - config.batch_size % mesh.size
        fitting = " or ".join(str(size) for size in (below, below + mesh.size) if size)
        raise ConfigError(
            f"--config.batch_size={config.batch_size} cannot be divided over {mesh.size} devices; use {fitting}, or fewer devices"
        )
    if config.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise ConfigError("--config.tensorboard=True needs tensorboardX: pip install 'rope_jax[log]', or set it to False")
    images, held_out = (load_images(config, split, config.data.image_size) for split in ("train", "test"))
    with blame("--config.data.augment"):
        data.pipeline.batch(images, 0, batch_size=1, seed=config.seed, augment=config.data.augment)
    classes = config.model.num_classes
    if classes is not None and classes < images.classes:
        raise ConfigError(f"--config.model.num_classes={classes}, but {images.name} has {images.classes} classes: use at least that many")
    with blame("--config.model.name"):
        position = config.model.position or find_model(config.model.name).position
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, position=position, num_classes=classes or images.classes),
        data=dataclasses.replace(config.data, image_size=images.images.shape[1:3]),
    )
    model = restore.create(config)
    with blame("--config.eval.resolutions"):
        for size in resolutions(config, image_pair(config.data.image_size)):
            model.grids(size)
    o, steps_per_epoch = config.optim, len(images.labels) / config.batch_size
    total = max(1, round(config.epochs * steps_per_epoch))
    warmup = round(o.warmup_epochs * steps_per_epoch)
    schedule = optim.learning_rate_schedule(peak=o.learning_rate, end=o.min_learning_rate, warmup_steps=warmup, total_steps=total)
    graph, params, _, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    optimizer = optim.adamw(
        schedule, mask=optim.decay_mask(params), weight_decay=o.weight_decay, b1=o.b1, b2=o.b2, eps=o.eps, clip_norm=o.clip_norm
    )
    fingerprint = {split.split: data.fingerprint(split) for split in (images, held_out)}
    return Run(config, mesh, images, fingerprint, graph, rest, optimizer, schedule, total), model


def initial_state(run: Run, model: nnx.Module) -> State:
    """The state before the first step, from the model's parameters and batch statistics, on every device of the mesh."""
    params, stats = (nnx.to_pure_dict(nnx.state(model, kind)) for kind in (nnx.Param, nnx.BatchStat))
    state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt": run.optimizer.init(params)}
    if stats:
        state["stats"] = stats
    if run.config.ema_decay is not None:
        state["ema"] = jax.tree.map(jnp.copy, params)  # a copy: the step donates its buffers
    return jax.device_put(state, replicated(run.mesh))


def make_step(run: Run) -> Callable[[State, dict[str, Array]], tuple[State, dict[str, Array]]]:
    """The jitted training step: (state, batch) -> (state, metrics); the old state is donated.

    Batch statistics are those of the whole batch, over whatever devices it is divided.
    """
    config = run.config

    def loss_of(params: Any, stats: Any, batch: dict[str, Array], key: Array) -> tuple[Array, tuple[Array, Any]]:
        logits, stats = run.apply(params, stats, normalise(batch["image"], config), train=True, key=key)
        logits = logits.astype(jnp.float32)
        targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], logits.shape[-1]), config.label_smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean(), ((logits.argmax(-1) == batch["label"]).mean(), stats)

    def step(state: State, batch: dict[str, Array]) -> tuple[State, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(config.seed), state["step"])
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, (accuracy, stats)), grads = gradient(state["params"], state.get("stats", {}), batch, key)
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
        return new, metrics

    shardings = replicated(run.mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, shardings))


def train(config: Config, workdir: pathlib.Path) -> None:
    """Trains, or resumes, or finds nothing left to do; then evaluates. Leaves its files in `workdir`.

    Raises:
        ConfigError: an impossible combination, or a workdir of another run.
        Interrupted: the run was asked to stop; a checkpoint of the last finished step is on disk.
        NonFinite: the loss or a gradient is not finite; nothing of it is on disk.
    """
    run, model = prepare(config)
    config = run.config
    with blame("--workdir"):
        workdir.mkdir(parents=True, exist_ok=True)
    with stop_signals() as poll, Checkpoints(workdir / "checkpoints", keep=config.keep_checkpoints) as checkpoints:
        state = load_newest(run, model, checkpoints, workdir)
        if state is None:
            if config.init_from is not None:
                restore.start_from(model, config)
            state = initial_state(run, model)
            print(parameter_table(state["params"]))
        write_file(workdir / "config.json", to_json(config) + "\n")
        if int(state["step"]) < run.total_steps:
            with MetricsWriter(workdir, restored_step=int(state["step"]), tensorboard=config.tensorboard) as writer:
                state = loop(run, state, checkpoints, writer, poll)
        finish(run, state, workdir, poll)


def evaluate_newest(config: Config, workdir: pathlib.Path) -> None:
    """Evaluates the newest checkpoint of a run, finished or not, at the config's resolutions.

    Raises:
        ConfigError: there is no checkpoint, or it is of another run.
    """
    missing = ConfigError(f"--workdir={workdir} holds no checkpoints: train first, with --mode=train")
    if not (workdir / "checkpoints").is_dir():
        raise missing
    run, model = prepare(config)
    with stop_signals() as poll, Checkpoints(workdir / "checkpoints") as checkpoints:
        state = load_newest(run, model, checkpoints, workdir)
        if state is None:
            raise missing
        finish(run, state, workdir, poll)


def load_newest(run: Run, model: nnx.Module, checkpoints: Checkpoints, workdir: pathlib.Path) -> State | None:
    """The newest state on disk, or None; refuses that of a run with another config."""
    step = checkpoints.newest()
    if step is None:
        return None
    with blame("--workdir"):
        about = checkpoints.about(step)
    changed = differences(resolve(about["config"]), run.config)
    changed += [f"the images of the {split} split" for split, value in run.fingerprint.items() if about["data"][split] != value]
    if changed:
        raise ConfigError(
            f"--workdir={workdir} holds a run of another config ({'; '.join(changed)}): use another workdir, or the same settings"
        )
    shapes = jax.eval_shape(lambda: initial_state(run, model))
    with blame("--workdir"):
        state = checkpoints.load(step, like(shapes, replicated(run.mesh)))
    print(f"found step {step} of {run.total_steps} in {workdir}" + (": training is complete" if step == run.total_steps else ""))
    return state


def loop(run: Run, state: State, checkpoints: Checkpoints, writer: MetricsWriter, poll: Callable[[], None]) -> State:
    """Runs the remaining steps. The metrics of a step are fetched while the next one runs."""
    config = run.config
    first = int(state["step"])
    train_step = make_step(run)
    progress = Progress(total_steps=run.total_steps, batch_size=config.batch_size)
    stream = data.batches(run.images, batch_size=config.batch_size, seed=config.seed, start_step=first, augment=config.data.augment)

    def report(step: int, metrics: dict[str, Array]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        if not np.isfinite(values["loss"]) or not np.isfinite(values["grad_norm"]):
            last = checkpoints.newest()
            saved = "nothing was saved" if last is None else f"the newest checkpoint is of step {last}"
            examples = data.pipeline.examples(step - 1, batch_size=config.batch_size, seed=config.seed, count=len(run.images.labels))
            raise NonFinite(
                f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}; {saved}. Lower --config.optim.learning_rate, "
                f"or look at its examples: {', '.join(map(str, examples[:8]))}, ..."
            )
        speed = progress.at(step)
        if step % config.log_every == 0 or step == run.total_steps:
            writer.write(step, values | speed)
            print(progress_line(step, run.total_steps, values | speed), flush=True)

    def save(step: int, state: State) -> None:
        try:
            checkpoints.save(step, state, about=run.about())
        except ValueError as error:
            raise NonFinite(str(error)) from None

    pending = None
    for step in range(first + 1, run.total_steps + 1):
        state, metrics = train_step(state, put_batch(next(stream), run.mesh))
        if pending is not None:
            report(*pending)
        pending = (step, metrics)
        try:
            poll()
        except Interrupted:
            report(*pending)
            save(step, state)
            raise
        if step % config.checkpoint_every == 0 or step == run.total_steps:
            report(*pending)
            pending = None
            save(step, state)
    return state


def finish(run: Run, state: State, workdir: pathlib.Path, poll: Callable[[], None]) -> None:
    """Evaluates the state, unless that was done, and shows what came of it."""
    config, step = run.config, int(state["step"])
    size = image_pair(config.data.image_size)
    wanted = [list(pair) for pair in resolutions(config, size)]
    results = read_results(workdir)
    if results is None or results["step"] != step or [row["resolution"] for row in results["eval"]] != wanted:
        apply = lambda weights, images: run.apply(*weights, images)[0]
        weights = (state.get("ema", state["params"]), state.get("stats", {}))
        rows = evaluate(apply, weights, config, run.mesh, poll=poll)
        write_results(workdir, step, rows)
    else:
        rows = results["eval"]
    print(f"\n{rows[0]['dataset']} {rows[0]['split']}, {config.model.name} with {config.model.position}, step {step}")
    print(results_table(rows))
    picture = accuracy_against_resolution({config.model.position: rows}, workdir / "accuracy.png")
    print(f"\npicture: {picture}" if picture else "\nno picture: matplotlib is not installed (pip install 'rope_jax[plot]')")


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], None]]:
    """Within this context SIGINT and SIGTERM only leave a note, and the function given raises Interrupted once there is one.

    A second signal ends the process at once.
    """
    received: list[int] = []
    previous = {}

    def note(number: int, frame: Any) -> None:
        received.append(number)
        os.write(2, b"\nrope_jax: stopping after this step; once more to stop at once, without saving\n")  # print may not be used here
        for each, handler in previous.items():
            signal.signal(each, handler)

    def poll() -> None:
        if received:
            raise Interrupted(signal.Signals(received[0]).name)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, note)
    try:
        yield poll
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
