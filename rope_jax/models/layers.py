"""Layers that all backbones share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

# torch's trunc_normal_(std=0.02) cuts at +-2, a hundred standard deviations: a normal distribution.
linear_init = nnx.initializers.normal(0.02)
# torch's default for convolutions, weights and bias alike: uniform in +-1/sqrt(fan_in).
conv_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def fan_in_bias_init(fan_in: int) -> Callable:
    """torch's default bias of a convolution: uniform in +-1/sqrt(fan_in)."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -1, 1) / np.sqrt(fan_in).astype(dtype)


class Linear(nnx.Linear):
    """A dense layer on the last axis, as one matrix product.

    (XLA computes the gradient of a product with several leading axes 1.5 times slower on a CPU.)
    """

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


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


class LayerScale(nnx.Module):
    """Learned factor per channel on a residual branch (CaiT, arXiv 2103.17239)."""

    def __init__(self, features: int, initial: float, dtype: np.dtype):
        self.gamma = nnx.Param(jnp.full((features,), initial, dtype))

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        return x * self.gamma[...].astype(x.dtype)


def check_images(images: Array) -> None:
    """Refuses anything but images [B, H, W, 3]."""
    if images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(
            f"images have shape {images.shape}; they must be [B, H, W, 3]: repeat the channel of grey images three times, drop a fourth one"
        )


class PatchProjection(nnx.Module):
    """A convolution whose stride is its kernel, as the product of patches and a matrix: its gradient is a matrix product too.

    (XLA computes the gradient of such a convolution 20 times slower on a CPU.)
    """

    def __init__(self, patch_size: int, features: int, *, rngs: nnx.Rngs, dtypes: dict):
        self.dtype = dtypes["dtype"]
        shape = (patch_size, patch_size, 3, features)
        self.kernel = nnx.Param(conv_init(rngs.params(), shape, dtypes["param_dtype"]))
        self.bias = nnx.Param(fan_in_bias_init(3 * patch_size**2)(rngs.params(), (features,), dtypes["param_dtype"]))

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B h w C"]:
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


def drop_path(branch: Float[Array, "B ..."], rate: float, key: Array | None) -> Float[Array, "B ..."]:
    """Drops a residual branch for whole examples with probability `rate` and scales the others up (arXiv 1603.09382); no key, no drop."""
    if key is None or rate == 0.0:
        return branch
    keep = jax.random.bernoulli(key, 1 - rate, (branch.shape[0],) + (1,) * (branch.ndim - 1))
    return jnp.where(keep, branch / (1 - rate), jnp.zeros((), branch.dtype))


def dtypes_of(dtype: np.dtype) -> dict:
    """Compute and parameter dtype as flax layers take them: parameters are float32, or float64 when everything is."""
    dtype = jnp.dtype(dtype)
    return {"dtype": dtype, "param_dtype": param_dtype(dtype)}


def param_dtype(dtype: np.dtype) -> np.dtype:
    """float64 for float64, float32 for everything else."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
