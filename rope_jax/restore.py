"""From files to models: what a workdir holds, and weights as the start of another run."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax import members
from rope_jax.checkpoint import Checkpoints, named_leaves, some_of
from rope_jax.config import Config, blame, model_overrides, resolve
from rope_jax.models.layers import STORED
from rope_jax.models.pretrained.files import WeightsFile, open_weights
from rope_jax.models.registry import create_model, image_pair
from rope_jax.sharding import like, make_mesh, replicated


def create(config: Config) -> nnx.Module:
    """The model that a config describes, freshly initialised.

    Raises:
        ConfigError: name, position, options and image size do not go together.
    """
    with blame("--config.model or --config.data.image_size"):
        return create_model(
            config.model.name,
            position=config.model.position,
            num_classes=config.model.num_classes,
            image_size=None if config.data.image_size is None else image_pair(config.data.image_size),
            seed=config.seed,
            dtype=jnp.dtype(config.dtype),
            **model_overrides(config.model.options),
        )


def load_checkpoint(path: str, *, step: int | None = None, ema: bool | None = None, seed: int | None = None) -> tuple[nnx.Module, Config]:
    """Loads what a run wrote.

    Args:
        path: the run's workdir.
        step: which checkpoint; None for the newest that verifies.
        ema: True for the averaged weights, False for the last ones; None for those that the run evaluates, see `EvalConfig.ema`. Batch
            statistics are the running ones either way.
        seed: which model of a run that trained several seeds at once; None for the first.

    Returns:
        The model with its weights, and the run's config; of several seeds at once, that of the one alone.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: ema=True, but the run kept no average; the run has no such seed; or the checkpoint, or each of them, is damaged.
    """
    folder = pathlib.Path(path) / "checkpoints"
    if not folder.is_dir():
        raise FileNotFoundError(f"{path} holds no checkpoints; pass the --workdir of a run of rope_jax.main")
    with Checkpoints(folder) as checkpoints:
        steps = checkpoints.steps()
        if step is None:
            step = checkpoints.newest_verified()
            if step is None:
                raise FileNotFoundError(f"{path} holds no checkpoints yet")
        elif step in steps and (problem := checkpoints.problem(step)):
            raise ValueError(f"checkpoint {folder / str(step)} is damaged: {problem}; others are {', '.join(map(str, steps))}")
        if step not in steps:
            raise FileNotFoundError(f"{path} has no checkpoint of step {step}; there are {', '.join(map(str, steps)) or 'none'}")
        config = resolve(checkpoints.about(step)["config"])
        if ema and config.ema_decay is None:
            raise ValueError("ema=True, but this run kept no averaged weights (--config.ema_decay): use ema=None or False")
        averaged = config.averaged if ema is None else ema
        own = members.config_of(config, seed)
        model = create(own)
        kinds = {"ema" if averaged else "params": nnx.Param, "stats": nnx.BatchStat}
        states = {entry: state for entry, kind in kinds.items() if (state := _state(model, kind))}
        if config.seeds > 1:
            states = jax.eval_shape(lambda states: members.stack([states] * config.seeds), states)
        for state in checkpoints.load(step, like(states, replicated(make_mesh()))).values():
            nnx.update(model, state if config.seeds == 1 else members.take(state, own.seed - config.seed))
    return model, own


def start_from(model: nnx.Module, config: Config) -> None:
    """Puts the weights of `config.init_from` into a fresh model.

    A workdir's weights belong to that run's resolution: its position tables are resized to the model's by their scheme's rule. A file of
    weights (see `save_weights`) must fit as it is. A head for another number of classes stays fresh.

    Raises:
        ConfigError: there are no weights, or they are of another model.
    """
    own = _weights(model)
    with blame("--config.init_from"), _stored_weights(config) as stored:
        both = [(name, list(stored.shapes[name][0]), list(own[name].shape)) for name in own if name in stored.shapes]
        fresh = [name for name, there, here in both if name.startswith("head.") and there != here]
        problems = [f"{name} has shape {there}, not {here}" for name, there, here in both if there != here and name not in fresh]
        kinds = [(name, stored.shapes[name][1]) for name, _, _ in both]
        problems += [f"{name} holds {kind}, not numbers" for name, kind in kinds if not jnp.issubdtype(kind, jnp.number)]
        problems += [f"{name} is missing" for name in own if name not in stored.shapes]
        problems += [f"{name} is not expected" for name in stored.shapes if name not in own]
        if problems:
            raise ValueError(f"the weights of {config.init_from} are of another model: {some_of(problems)}")
        weights = {name: own[name] if name in fresh else stored.read(name) for name in own}
        state = _state(model, STORED)
        leaves = [jnp.asarray(weights[name], leaf.dtype) for name, leaf in named_leaves(state)]
        nnx.update(model, jax.tree.unflatten(jax.tree.structure(state), leaves))
    print(f"starting from the weights of {config.init_from}" + (" with a fresh head" if fresh else ""))


def save_weights(model: nnx.Module, path: str) -> None:
    """Writes a model's weights into one .npz file, by name ("blocks.0.attn.qkv.kernel"), for `--config.init_from`."""
    np.savez(path, **_weights(model))


def _state(model: nnx.Module, kinds: Any) -> dict:
    """The arrays of a model's variables of some kinds, as a pure dict."""
    return nnx.to_pure_dict(nnx.state(model, kinds))


def _weights(model: nnx.Module) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(_state(model, STORED))}


@contextlib.contextmanager
def _stored_weights(config: Config) -> Iterator[WeightsFile]:
    """What `init_from` holds: of a file names and shapes alone, until one of its arrays is read."""
    if config.init_from.endswith(".npz"):
        with open_weights(config.init_from) as file:
            yield file
    else:
        trained, _ = load_checkpoint(config.init_from)
        trained.resize(image_pair(config.data.image_size))
        weights = _weights(trained)
        yield WeightsFile({name: (array.shape, array.dtype) for name, array in weights.items()}, weights.__getitem__)
