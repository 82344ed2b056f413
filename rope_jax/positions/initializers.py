"""Initializers: functions of key, shape and dtype, like flax's, that draw numbers with NumPy.

Initial weights are the same on every device, and nothing needs to be compiled: `jax.random`
compiles a program for each shape, which takes 15 seconds for a Swin.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

Shape = tuple[int, ...]


def _make_init(sample: Callable[[np.random.Generator, Shape], np.ndarray]) -> Callable:
    """Returns an initializer that draws with `sample(generator, shape)`."""

    def init(key: Array, shape: Shape, dtype: Any) -> Array:
        def draw(words: Any) -> np.ndarray:
            return sample(np.random.default_rng(np.asarray(words)), shape).astype(dtype)

        words = jax.random.key_data(key)
        if isinstance(words, jax.core.Tracer):  # in jit, or in eval_shape, which needs no numbers
            return jax.pure_callback(draw, jax.ShapeDtypeStruct(shape, dtype), words)
        return jax.device_put(draw(words))  # jnp.asarray compiles a program for each shape

    return init


def normal_init(std: float) -> Callable:
    """A normal distribution around 0."""
    return _make_init(lambda rng, shape: np.float32(std) * rng.standard_normal(shape, np.float32))


# torch's trunc_normal_(std=0.02) cuts at +-2, 100 standard deviations: a normal distribution.
linear_init = normal_init(0.02)


def he_init(key: Array, shape: Shape, dtype: Any) -> Array:
    """torch's kaiming_normal_, which preserves the variance through a following ReLU."""
    return normal_init((2 / math.prod(shape[:-1])) ** 0.5)(key, shape, dtype)


def _orthogonal(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    q, r = np.linalg.qr(rng.standard_normal((shape[1], shape[0]), np.float32))
    return (q * np.sign(np.diag(r))).T


# Orthonormal rows [M, C], M <= C, uniform over all directions.
orthogonal_init = _make_init(_orthogonal)


def uniform_init(limit: float) -> Callable:
    """A uniform distribution in +-limit."""
    return _make_init(
        lambda rng, shape: np.float32(limit) * (2 * rng.random(shape, np.float32) - 1)
    )


def fan_in_bias_init(fan_in: int) -> Callable:
    """torch's default bias of a convolution: uniform in +-1/sqrt(fan_in)."""
    return uniform_init(fan_in**-0.5)


def glorot_init(key: Array, shape: Shape, dtype: Any) -> Array:
    """torch's xavier_uniform_ of a kernel [..., I, O], as of DETR's transformers."""
    fans = math.prod(shape[:-2]) * sum(shape[-2:])
    return uniform_init((6 / fans) ** 0.5)(key, shape, dtype)


def conv_init(key: Array, shape: Shape, dtype: Any) -> Array:
    """torch's default kernel of a convolution [kh, kw, I, O]: uniform in +-1/sqrt(fan_in)."""
    return fan_in_bias_init(math.prod(shape[:-1]))(key, shape, dtype)
