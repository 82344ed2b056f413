"""The smallest run that still goes through everything, shared by the tests of training."""

import dataclasses
import pathlib

from rope_jax import config as cfg
from rope_jax import train

TINY = "depth=1,width=16,heads=1"


def tiny(**changes) -> cfg.Config:
    """Two epochs of digits with 12 steps each, on a model of one block; changes replace fields, dotted ones as section__field."""
    raw = cfg.default()
    raw.update({"epochs": 2.0, "batch_size": 120, "log_every": 1, "checkpoint_every": 8})
    raw.optim.update({"learning_rate": 5e-3, "warmup_epochs": 0.5})
    raw.model.options = TINY
    raw.model.position = "rope_mixed"
    raw.data.augment = "crop(pad=1)"
    raw.eval.resolutions = ((4, 6),)
    raw.eval.batch_size = 64
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        with (raw[section] if section else raw).ignore_type():
            (raw[section] if section else raw)[field] = value
    return cfg.resolve(raw)


def run(workdir: pathlib.Path, **changes) -> cfg.Config:
    """Trains the tiny recipe in `workdir`."""
    config = tiny(**changes)
    train.train(config, workdir)
    return config


def final_state(workdir: pathlib.Path, **changes) -> dict:
    """The newest state in a workdir."""
    prepared, model = train.prepare(tiny(**changes))
    with train.Checkpoints(workdir / "checkpoints") as checkpoints:
        return train.load_newest(prepared, model, checkpoints, workdir)


def replaced(config: cfg.Config, section: str, **changes) -> cfg.Config:
    """A config with fields of one section replaced."""
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})
