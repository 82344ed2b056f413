"""Small models for the tests."""

import functools

import jax
import numpy as np
from flax import nnx

import rope_jax
from rope_jax.models.heads import HEADS
from rope_jax.models.layers import layer_dtypes

SMALL = {"width": 48, "heads": 3, "depth": 2, "patch_size": 2, "mlp_ratio": 2.0}


def make_filled_model(name, position=None, *, num_classes=5, **options):
    """A model with weights of the size of trained ones, equal in any dtype."""
    make = lambda: rope_jax.create_model(
        name, position=position, num_classes=num_classes, **options
    )
    return fill(nnx.eval_shape(make))  # the initial weights are replaced: no need to draw them


def create_head(name, channels, num_classes, dtype=np.float32, **options):
    """A head by itself, for maps of these channels."""
    settings = {"rngs": nnx.Rngs(0), "dtypes": layer_dtypes(np.dtype(dtype))}
    entry = HEADS[name]
    options = entry.options.override(name, options)
    return entry.family(options, channels=tuple(channels), num_classes=num_classes, **settings)


def abstract(name, **options):
    """A model of shapes only."""
    return nnx.eval_shape(lambda: rope_jax.create_model(name, **options))


def abstract_call(model, height, width, method="__call__"):
    """The shapes of the results of a model's method for one image."""
    graph, state = nnx.split(model)
    images = jax.ShapeDtypeStruct((1, height, width, 3), np.float32)
    run = lambda state, images: getattr(nnx.merge(graph, state), method)(images)
    return jax.eval_shape(run, state, images)


def small_model(name, position=None, **changes):
    """A small model for 3 x 5 patches and 5 classes."""
    kernel = {"kernel_size": 3} if "nat_" in name else {}
    return make_filled_model(name, position, **SMALL | {"image_size": (6, 10)} | kernel | changes)


def fill(model):
    """Sets weights and batch statistics of the size of trained ones."""
    rng = np.random.default_rng(0)
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        spread = np.prod(param.shape[:-1]) ** -0.5 if path[-1] == "kernel" else 0.3
        values = rng.standard_normal(param.shape) * spread + (path[-1] in ("scale", "gamma"))
        param.set_value(jax.device_put(values.astype(param.dtype)))
    for path, stat in nnx.to_flat_state(nnx.state(model, nnx.BatchStat)):
        noise = 0.3 * rng.standard_normal(stat.shape)
        values = 1 + abs(noise) if path[-1] == "variance" else noise
        stat.set_value(jax.device_put(values.astype(stat.dtype)))
    return model


@functools.partial(jax.jit, static_argnames=("graph", "train"))
def _run(graph, state, images, train, key):
    model = nnx.merge(graph, state)
    return model(images, train=train, key=key), nnx.state(model, nnx.BatchStat)


def run(model, images, train=False, key=None):
    """Logits of a model and its new batch statistics; compiled once for equal models."""
    logits, statistics = _run(*nnx.split(model), images, train, key)
    return np.asarray(logits), statistics


def compile_read(model, read):
    """Compiles read(model, images, key)."""
    graph, state = nnx.split(model)
    run = jax.jit(lambda state, images, key: read(nnx.merge(graph, state), images, key))
    return lambda images, key=None: run(state, images, key)


def compile_call(model):
    """Compiles model(*arguments)."""
    graph, state = nnx.split(model)
    run = jax.jit(lambda state, *arguments: nnx.merge(graph, state)(*arguments))
    return lambda *arguments: run(state, *arguments)


def compile_gradient(model, loss, has_aux=False):
    """Compiles loss(model, *arguments) with its gradients by all parameters."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    call = lambda params, *arguments: loss(nnx.merge(graph, params, rest), *arguments)
    run = jax.jit(jax.value_and_grad(call, has_aux=has_aux))
    return lambda *arguments: run(params, *arguments)


def check_gradients(gradients, silent=lambda path: False):
    """Checks that all gradients are finite, and none is zero except of silent parameters."""
    for path, gradient in nnx.to_flat_state(gradients):
        gradient = np.asarray(gradient[...])  # jnp would compile a program for each shape
        assert np.isfinite(gradient).all(), path
        assert (gradient != 0).any() or silent(path), f"{path} takes no part"


def pictures(height, width, batch=2):
    """Random images, always the same ones."""
    rng = np.random.default_rng(1)
    return jax.device_put(rng.standard_normal((batch, height, width, 3)).astype(np.float32))
