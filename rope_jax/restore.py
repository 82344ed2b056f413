"""Models from files: a run's checkpoint, or initial weights for another run."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax import seeds
from rope_jax.config import Config, blame, model_overrides, resolve
from rope_jax.models.layers import STORED
from rope_jax.models.pretrained.files import WeightsFile, open_weights
from rope_jax.models.registry import create_model
from rope_jax.sharding import make_mesh, replicated, with_shardings
from rope_jax.text import image_pair
from rope_jax.workdir.checkpoint import Checkpoints
from rope_jax.workdir.trees import named_leaves, some_of


def create(config: Config) -> nnx.Module:
    """The model of a config, with fresh weights.

    Raises:
        ConfigError: name, position, options and image size are not compatible.
    """
    size = config.data.image_size
    with blame("--config.model or --config.data.image_size"):
        return create_model(
            config.model.name,
            position=config.model.position,
            num_classes=config.model.num_classes,
            image_size=None if size is None else image_pair(size),
            seed=config.seed,
            dtype=jnp.dtype(config.dtype),
            **model_overrides(config.model.options),
        )


def load_checkpoint(
    path: str, *, step: int | None = None, ema: bool | None = None, seed: int | None = None
) -> tuple[nnx.Module, Config]:
    """Loads a model from a run's checkpoint.

    >>> import dataclasses, tempfile
    >>> config = resolve(
    ...     {
    ...         "model": {"num_classes": 10, "options": "depth=1,width=16,heads=2"},
    ...         "data": {"image_size": 8},
    ...     }
    ... )
    >>> trained, workdir = create(config), pathlib.Path(tempfile.mkdtemp())
    >>> with Checkpoints(workdir / "checkpoints") as checkpoints:  # as a run does
    ...     state = {"params": nnx.to_pure_dict(nnx.state(trained, nnx.Param))}
    ...     checkpoints.save(1, state, about={"config": dataclasses.asdict(config)})
    >>> model, config = load_checkpoint(str(workdir))
    >>> config.model.name, model.head.kernel.shape
    ('vit_digits', (16, 10))

    Args:
        path: the run's workdir.
        step: of the checkpoint; None for the newest valid one.
        ema: True for the averaged weights, False for the current ones; None for those that the run
            evaluates (`eval.ema`). Batch statistics are the running ones either way.
        seed: of the model, in a run that trained several seeds at once; None for the first.

    Returns:
        The model, and the run's config (for several seeds, that of a run with this seed alone).

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: ema=True for a run without averages; an unknown seed; a damaged checkpoint.
    """
    model, config, _ = read_checkpoint(path, step=step, ema=ema, seed=seed)
    return model, config


def read_checkpoint(
    path: str, *, step: int | None = None, ema: bool | None = None, seed: int | None = None
) -> tuple[nnx.Module, Config, int]:
    """The model and config of `load_checkpoint`, and the checkpoint's step."""
    folder = pathlib.Path(path) / "checkpoints"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{path} holds no checkpoints; pass the --workdir of a run of rope_jax.main"
        )
    with Checkpoints(folder) as checkpoints:
        step = _valid_step(checkpoints, path, step)
        config = resolve(checkpoints.about(step)["config"])
        if ema and config.ema_decay is None:
            raise ValueError(
                "ema=True, but this run kept no averaged weights (--config.ema_decay): use "
                "ema=None or False"
            )
        averaged = config.averaged if ema is None else ema
        own = seeds.single(config, seed)
        model = create(own)
        kinds = {"ema" if averaged else "params": nnx.Param, "stats": nnx.BatchStat}
        states = {name: state for name, kind in kinds.items() if (state := _state(model, kind))}
        shapes = jax.eval_shape(lambda: seeds.stack([states] * config.seeds))
        loaded = checkpoints.load(step, with_shardings(shapes, replicated(make_mesh())))
        for state in seeds.take(loaded, config, own.seed - config.seed).values():
            nnx.update(model, state)
    return model, own, step


def _valid_step(checkpoints: Checkpoints, path: str, step: int | None) -> int:
    """The step to load, verified; by default the newest valid one."""
    steps = checkpoints.steps()
    if step is None:
        step = checkpoints.newest_verified()
        if step is None:
            raise FileNotFoundError(f"{path} holds no checkpoints yet")
    elif step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise FileNotFoundError(f"{path} has no checkpoint of step {step}; there are {there}")
    elif problem := checkpoints.problem(step):
        raise ValueError(
            f"checkpoint {step} of {path} is damaged: {problem}; others are "
            f"{', '.join(map(str, steps))}"
        )
    return step


def start_from(model: nnx.Module, config: Config) -> None:
    """Loads the weights of `config.init_from` into a fresh model.

    Position tables of a workdir are resized to the model's resolution by their scheme's rule; a
    file of weights (see `save_weights`) must match exactly. A head for different classes keeps its
    initial weights.

    Raises:
        ConfigError: there are no weights, or they belong to another model.
    """
    own = _weights(model)
    with blame("--config.init_from"), _stored_weights(config) as stored:
        both = [
            (name, list(stored.shapes[name][0]), list(own[name].shape))
            for name in own
            if name in stored.shapes
        ]
        fresh = [name for name, there, here in both if name.startswith("head.") and there != here]
        problems = [
            f"{name} has shape {there}, not {here}"
            for name, there, here in both
            if there != here and name not in fresh
        ]
        kinds = [(name, stored.shapes[name][1]) for name, _, _ in both]
        problems += [
            f"{name} holds {kind}, not numbers"
            for name, kind in kinds
            if not jnp.issubdtype(kind, jnp.number)
        ]
        problems += [f"{name} is missing" for name in own if name not in stored.shapes]
        problems += [f"{name} is not expected" for name in stored.shapes if name not in own]
        if problems:
            raise ValueError(
                f"the weights of {config.init_from} are of another model: {some_of(problems)}"
            )
        weights = {name: own[name] if name in fresh else stored.read(name) for name in own}
        state = _state(model, STORED)
        leaves = [jnp.asarray(weights[name], leaf.dtype) for name, leaf in named_leaves(state)]
        nnx.update(model, jax.tree.unflatten(jax.tree.structure(state), leaves))
    print(
        f"starting from the weights of {config.init_from}" + (" with a fresh head" if fresh else "")
    )


def save_weights(model: nnx.Module, path: str) -> None:
    """Writes all weights by name ("blocks.0.attn.qkv.kernel") to an .npz file, for `init_from`."""
    np.savez(path, **_weights(model))


def _state(model: nnx.Module, kinds: Any) -> dict:
    """The variables of some kinds as a pure dict of arrays."""
    return nnx.to_pure_dict(nnx.state(model, kinds))


def _weights(model: nnx.Module) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(_state(model, STORED))}


@contextlib.contextmanager
def _stored_weights(config: Config) -> Iterator[WeightsFile]:
    """The weights of `init_from`; arrays of a file are read one at a time."""
    if config.init_from.endswith(".npz"):
        with open_weights(config.init_from) as file:
            yield file
    else:
        trained, _ = load_checkpoint(config.init_from)
        trained.resize(image_pair(config.data.image_size))
        weights = _weights(trained)
        yield WeightsFile(
            {name: (array.shape, array.dtype) for name, array in weights.items()},
            weights.__getitem__,
        )
