"""The smallest run that still exercises everything, shared by the tests of training."""

import contextlib
import dataclasses
import pathlib
import resource
import signal
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax.runs.run
from rope_jax import config as cfg
from rope_jax import data
from rope_jax.evaluate import read_results
from rope_jax.runs import restore
from rope_jax.system.sharding import put_batch
from rope_jax.training.folder import Run
from rope_jax.training.metrics import read_metrics
from rope_jax.training.report import Reporter
from rope_jax.training.setup import Setup, create, initial_state, prepare, training_batches
from rope_jax.training.signals import Interrupted
from rope_jax.training.step import make_step
from rope_jax.training.trees import tree_hash
from tests.faults.attacks import durable

TINY = "depth=1,width=16,heads=1"
CEIT = {  # a model with batch statistics
    "model__name": "ceit_t",
    "model__options": "depth=1,width=16,heads=1,mlp_ratio=2,patch_size=4,stem_width=4",
    "model__position": "ape",
    "eval__resolutions": (),
    "epochs": 0.5,
    "ema_decay": 0.9,
}


def tiny(**changes) -> cfg.Config:
    """Two epochs of 12 steps on digits, one block; changes are `field` or `section__field`."""
    raw = cfg.default()
    raw.update({"epochs": 2.0, "batch_size": 120, "log_every": 1, "checkpoint_every": 8})
    raw.optim.update({"learning_rate": 5e-3, "warmup_epochs": 0.5})
    raw.model.update({"options": TINY, "position": "rope_mixed"})
    raw.data.update({"augment": "crop(pad=1)", "workers": 0})
    raw.eval.update({"resolutions": ((4, 6),), "batch_size": 64})
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        with (raw[section] if section else raw).ignore_type():
            (raw[section] if section else raw)[field] = value
    return cfg.resolve(raw)


def run(workdir: pathlib.Path, **changes) -> cfg.Config:
    """Trains the tiny recipe in `workdir`."""
    config = tiny(**changes)
    rope_jax.runs.run.train(config, workdir)
    return config


def start(**changes) -> tuple[Setup, dict, Callable]:
    """The tiny recipe, its first state and its step."""
    setup, model = prepare(tiny(**changes))
    return setup, initial_state(setup, model), make_step(setup)


def advance(setup: Setup, state: dict, step: Callable, first: int, last: int) -> tuple[dict, dict]:
    """The state after steps first to last (the argument is kept), and the metrics of the last."""
    state = jax.tree.map(jnp.copy, state)
    batches, resident = training_batches(setup, first)
    for _ in range(first, last):
        state, metrics = step(state, put_batch(next(batches), setup.mesh) | resident)
    return state, {name: np.asarray(value)[()] for name, value in metrics.items()}


def final_state(workdir: pathlib.Path, **changes) -> dict:
    """The newest state in a workdir."""
    setup, model = prepare(tiny(**changes))
    with Run.open(workdir, "evaluate") as workdir_run:
        return workdir_run.resume(setup, model)


def assert_refused(message: str, **changes) -> None:
    """Expects the tiny recipe with these changes to be refused before training."""
    with pytest.raises(cfg.ConfigError, match=message):
        prepare(tiny(**changes))


def replace_settings(config: cfg.Config, section: str, **changes) -> cfg.Config:
    """Replaces settings of one section of a config."""
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **changes)}
    )


def start_from(source: pathlib.Path | str, **changes) -> nnx.Module:
    """A model of the tiny recipe (8 x 8 pixels, ten classes) with the weights of `init_from`."""
    complete = {"data__image_size": (8, 8), "model__num_classes": 10, "init_from": str(source)}
    config = tiny(**complete | changes)
    model = create(config)
    restore.start_from(model, config.init_from, config.data)
    return model


def logits(model: nnx.Module, images: np.ndarray) -> np.ndarray:
    """Logits of a model, compiled at once."""
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, images))


def accuracy(model: nnx.Module, config: cfg.Config, resolution: tuple[int, int]) -> float:
    """Top-1 of a model on the test digits at a resolution, without the code of evaluation."""
    images = data.load("digits", None, "test", tuple(resolution))
    x = (images.images / np.float32(255) - config.data.mean) / config.data.std
    return (logits(model, x.astype(np.float32)).argmax(-1) == images.labels).mean()


def interrupt_at(monkeypatch, step):
    """Sends SIGINT while the batch of this step is drawn."""
    waiting = Reporter.waiting_for_batch

    def interrupt(self, number):
        if number == step:
            signal.raise_signal(signal.SIGINT)
        return waiting(self, number)

    monkeypatch.setattr(Reporter, "waiting_for_batch", interrupt)


def run_in_parts(workdir: pathlib.Path, *steps: int, **changes) -> None:
    """Trains the tiny recipe to its end, with a stop by a signal after each of the steps."""
    for step in steps:
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, step)
            with pytest.raises(Interrupted, match="SIGINT"):
                run(workdir, **changes)
        assert durable(workdir) == step
    run(workdir, **changes)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limits the size of files that this process writes, to simulate a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def assert_same_end(first: pathlib.Path, second: pathlib.Path, **changes) -> None:
    """Checks that two workdirs have the same last state, losses and results to the bit."""
    states = [tree_hash(final_state(workdir, **changes)) for workdir in (first, second)]
    assert states[0] == states[1]
    assert losses(first) == losses(second)
    assert read_results(first) == read_results(second)


def losses(workdir: pathlib.Path) -> list[tuple[int, float]]:
    """(step, loss) of each line of metrics."""
    return [(line["step"], line["loss"]) for line in read_metrics(workdir / "metrics.jsonl")]
