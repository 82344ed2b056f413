"""Initial weights: functions of key, shape and dtype, as flax takes them, whose numbers NumPy draws from the key.

The same ones on every device, and nothing to compile: jax.random compiles a program for each shape, 15 seconds for a Swin.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def _drawn(sample: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]) -> Callable:
    """The initialiser whose numbers are those that `sample` draws for a shape."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        draw = lambda words: sample(np.random.default_rng(words), shape).astype(dtype)
        words = jax.random.key_data(key)
        if isinstance(words, jax.core.Tracer):  # within jit, or under eval_shape, which only asks for the shape
            return jax.pure_callback(lambda words: draw(np.asarray(words)), jax.ShapeDtypeStruct(shape, dtype), words)
        return jnp.asarray(draw(np.asarray(words)))

    return init


def normal_init(std: float) -> Callable:
    """A normal distribution around 0."""
    return _drawn(lambda rng, shape: np.float32(std) * rng.standard_normal(shape, np.float32))


# torch's trunc_normal_(std=0.02) cuts at +-2, a hundred standard deviations: a normal distribution.
linear_init = normal_init(0.02)


# torch's kaiming_normal_: the variance of what comes out stays through a rectifier.
he_init = _drawn(lambda rng, shape: np.float32((2 / math.prod(shape[:-1])) ** 0.5) * rng.standard_normal(shape, np.float32))


def _orthogonal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    q, r = np.linalg.qr(rng.standard_normal((shape[1], shape[0]), np.float32))
    return (q * np.sign(np.diag(r))).T


# Orthonormal rows [M, C], M <= C, all directions being as likely.
orthogonal_init = _drawn(_orthogonal)


def fan_in_bias_init(fan_in: int) -> Callable:
    """torch's default bias of a convolution: uniform in +-1/sqrt(fan_in)."""
    return _drawn(lambda rng, shape: np.float32(fan_in**-0.5) * (2 * rng.random(shape, np.float32) - 1))


def conv_init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """torch's default kernel of a convolution [kh, kw, I, O]: uniform in +-1/sqrt(fan_in), as its bias."""
    return fan_in_bias_init(math.prod(shape[:-1]))(key, shape, dtype)
