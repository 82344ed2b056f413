"""The model of a config."""

import jax.numpy as jnp
from flax import nnx

from rope_jax.config import Config, blame, model_overrides
from rope_jax.training import seeds
from rope_jax.weights.create import create_model


def create(config: Config) -> nnx.Module:
    """The model of a config, with fresh weights.

    Raises:
        ConfigError: name, position, options and image size are not compatible.
    """
    m = config.model
    settings = {
        "position": m.position,
        "num_classes": m.num_classes,
        "image_size": config.data.image_size,
        "seed": config.seed,
        "dtype": jnp.dtype(config.dtype),
        **model_overrides(m.options),
    }
    with blame("--config.model or --config.data.image_size"):
        return create_model(m.name, head=m.head, **settings)


def create_seeds(config: Config) -> nnx.Module:
    """The model of a config; for several seeds, one module with stacked variables.

    A stacked module can be split into graph and state, but not called.
    """
    if config.seeds == 1:
        return create(config)
    models = [create(seeds.single(config, seed)) for seed in config.all_seeds]
    graph, _ = nnx.split(models[0])
    return nnx.merge(graph, seeds.stack([nnx.state(model) for model in models]))
