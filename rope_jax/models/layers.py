"""Layers that all backbones share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import conv_init, fan_in_bias_init, linear_init
from rope_jax.sharding import by_example

STORED = (nnx.Param, nnx.BatchStat)
"""Variables that files of weights hold: what is trained, and the running statistics of batch norms. The rest is computed."""


class Linear(nnx.Linear):
    """A dense layer on the last axis, as one matrix product.

    (XLA computes the gradient of a product with several leading axes 1.5 times slower on a CPU.)
    """

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        x = by_example(x)
        return by_example(super().__call__(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1))


def linear(inputs: int, outputs: int, *, rngs: nnx.Rngs, dtypes: dict, use_bias: bool = True) -> Linear:
    """A dense layer with the initialisation of DeiT, Swin and NAT: normal of 0.02, zero bias."""
    return Linear(inputs, outputs, use_bias=use_bias, kernel_init=linear_init, rngs=rngs, **dtypes)


def layer_norm(features: int, epsilon: float, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.LayerNorm:
    """Layer normalisation over the last axis; the variance in two passes, as torch computes it."""
    return nnx.LayerNorm(features, epsilon=epsilon, use_fast_variance=False, rngs=rngs, **dtypes)


class Mlp(nnx.Module):
    """Linear, GELU (exact), linear."""

    def __init__(self, features: int, hidden: int, *, rngs: nnx.Rngs, dtypes: dict):
        self.fc1 = linear(features, hidden, rngs=rngs, dtypes=dtypes)
        self.fc2 = linear(hidden, features, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))


class SwiGLU(nnx.Module):
    """Linear, the first half of it through SiLU times the other half, linear (arXiv 2002.05202).

    Of `hidden` channels it takes two thirds, which makes it as large as the MLP, rounded up to a multiple of 8 (DINOv2, DINOv3).
    """

    def __init__(self, features: int, hidden: int, *, rngs: nnx.Rngs, dtypes: dict):
        hidden = -(-int(hidden * 2 / 3) // 8) * 8
        self.fc1 = linear(features, 2 * hidden, rngs=rngs, dtypes=dtypes)
        self.fc2 = linear(hidden, features, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        gate, value = jnp.split(self.fc1(x), 2, axis=-1)
        return self.fc2(jax.nn.silu(gate) * value)


FEED_FORWARD = {"mlp": Mlp, "swiglu": SwiGLU}


class LayerScale(nnx.Module):
    """Learned factor per channel on a residual branch (CaiT, arXiv 2103.17239)."""

    def __init__(self, features: int, initial: float, dtype: np.dtype):
        self.gamma = nnx.Param(jnp.full((features,), initial, dtype))

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        return x * self.gamma[...].astype(x.dtype)


def check_images(images: Array) -> None:
    """Refuses anything but floating-point images [B, H, W, 3]."""
    if images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(
            f"images have shape {images.shape}; they must be [B, H, W, 3]: repeat the channel of grey images three times, drop a fourth one"
        )
    if 0 in images.shape:
        raise ValueError(f"images have shape {images.shape}, in which nothing is: pass at least one image of at least one pixel")
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(f"images have dtype {images.dtype}; they must be floating-point numbers, normalised: (images / 255 - mean) / std")


class PatchProjection(nnx.Module):
    """A convolution whose stride is its kernel, as the product of patches and a matrix: its gradient is a matrix product too.

    (XLA computes the gradient of such a convolution 20 times slower on a CPU.)
    """

    def __init__(self, patch_size: int, features: int, *, rngs: nnx.Rngs, dtypes: dict, inputs: int = 3, kernel_init: Callable = conv_init):
        self.dtype = dtypes["dtype"]
        shape = (patch_size, patch_size, inputs, features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, dtypes["param_dtype"]))
        self.bias = nnx.Param(fan_in_bias_init(inputs * patch_size**2)(rngs.params(), (features,), dtypes["param_dtype"]))

    def __call__(self, images: Float[Array, "B H W I"]) -> Float[Array, "B h w C"]:
        images, kernel, bias = (x.astype(self.dtype) for x in (images, self.kernel[...], self.bias[...]))
        patch, _, channels, _ = kernel.shape
        batch, height, width, _ = images.shape
        patches = images.reshape(batch, height // patch, patch, width // patch, patch, channels)
        return jnp.einsum("bhpwqc,pqcd->bhwd", patches, kernel) + bias


class PatchEmbed(nnx.Module):
    """Non-overlapping patches of images [B, H, W, 3], projected: [B, H / patch, W / patch, C]; optionally normalised."""

    def __init__(self, patch_size: int, features: int, *, norm_epsilon: float | None, rngs: nnx.Rngs, dtypes: dict):
        self.proj = PatchProjection(patch_size, features, rngs=rngs, dtypes=dtypes)
        self.norm = None if norm_epsilon is None else layer_norm(features, norm_epsilon, rngs=rngs, dtypes=dtypes)

    def __call__(self, images: Float[Array, "..."]) -> Float[Array, "B h w C"]:
        check_images(images)
        x = self.proj(images)
        return x if self.norm is None else self.norm(x)


def dtypes_of(dtype: np.dtype) -> dict:
    """Compute and parameter dtype as flax layers take them: parameters are float32, or float64 when everything is."""
    dtype = jnp.dtype(dtype)
    return {"dtype": dtype, "param_dtype": param_dtype(dtype)}


def param_dtype(dtype: np.dtype) -> np.dtype:
    """float64 for float64, float32 for everything else."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
