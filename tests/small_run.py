"""The workdir of a small run, without training."""

import dataclasses

from flax import nnx

from rope_jax.config import resolve
from rope_jax.training.checkpoint import Checkpoints
from rope_jax.training.setup import create

OPTIONS = "depth=1,width=16,heads=2"


def save_run(workdir, step, *, position=None, **settings):
    """Writes a checkpoint of the digits model with fresh weights; returns the model."""
    model = {"name": "vit_digits", "position": position, "options": OPTIONS}
    config = resolve({"model": model, "data": {"image_size": 8}, **settings})
    run_model = create(config)
    params = nnx.to_pure_dict(nnx.state(run_model, nnx.Param))
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        metadata = {"config": dataclasses.asdict(config)}
        checkpoints.save(step, {"params": params, "ema": params}, about=metadata)
    return run_model
