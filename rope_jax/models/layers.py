"""Layers that all backbones share."""

import functools
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
        rows = by_example(x).reshape(-1, x.shape[-1])
        if self.dtype == self.kernel.dtype:
            out = super().__call__(rows)
        else:
            out = affine(rows.astype(self.dtype), self.kernel[...], None if self.bias is None else self.bias[...])
        return by_example(out.reshape(*x.shape[:-1], -1))


@jax.custom_vjp
def affine(x: Float[Array, "B I"], kernel: Float[Array, "I O"], bias: Float[Array, " O"] | None) -> Float[Array, "B O"]:
    """x @ kernel + bias in the dtype of x, where the parameters have a wider one, in which their gradients are summed over all rows.

    By itself XLA would round each device's sum to the dtype of x, and then once more with every device that is added.
    """
    out = x @ kernel.astype(x.dtype)
    return out if bias is None else out + bias.astype(x.dtype)


def _affine_forward(x: Array, kernel: Array, bias: Array | None) -> tuple[Array, tuple[Array, Array, Array | None]]:
    return affine(x, kernel, bias), (x, kernel, bias)


def _affine_backward(kept: tuple[Array, Array, Array | None], d_out: Array) -> tuple[Array, Array, Array | None]:
    x, kernel, bias = kept
    d_kernel = jax.lax.dot_general(x, d_out, (((0,), (0,)), ((), ())), preferred_element_type=kernel.dtype)
    return d_out @ kernel.astype(x.dtype).T, d_kernel, None if bias is None else d_out.sum(0, dtype=bias.dtype)


affine.defvjp(_affine_forward, _affine_backward)


def linear(inputs: int, outputs: int, *, rngs: nnx.Rngs, dtypes: dict, use_bias: bool = True) -> Linear:
    """A dense layer with the initialisation of DeiT, Swin and NAT: normal of 0.02, zero bias."""
    return Linear(inputs, outputs, use_bias=use_bias, kernel_init=linear_init, rngs=rngs, **dtypes)


class LayerNorm(nnx.LayerNorm):
    """Layer normalisation that keeps its input for the backward pass, in the input's dtype, and not three float32 arrays."""

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        return jax.checkpoint(super().__call__)(x)


def layer_norm(features: int, epsilon: float, *, rngs: nnx.Rngs, dtypes: dict) -> LayerNorm:
    """Layer normalisation over the last axis; the variance in two passes, as torch computes it."""
    return LayerNorm(features, epsilon=epsilon, use_fast_variance=False, rngs=rngs, **dtypes)


class Mlp(nnx.Module):
    """Linear, GELU (exact), linear."""

    def __init__(self, features: int, hidden: int, *, rngs: nnx.Rngs, dtypes: dict):
        self.fc1 = linear(features, hidden, rngs=rngs, dtypes=dtypes)
        self.fc2 = linear(hidden, features, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        # Computed again in the backward pass: its derivative needs three arrays, and its input is one.
        return self.fc2(jax.checkpoint(functools.partial(jax.nn.gelu, approximate=False))(self.fc1(x)))


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
        kernel, bias = self.kernel[...], self.bias[...]
        patch, _, channels, features = kernel.shape
        batch, height, width, _ = images.shape
        patches = images.astype(self.dtype).reshape(batch, height // patch, patch, width // patch, patch, channels)
        if self.dtype == kernel.dtype:
            return jnp.einsum("bhpwqc,pqcd->bhwd", patches, kernel) + bias
        patches = by_example(patches.transpose(0, 1, 3, 2, 4, 5))
        rows = affine(patches.reshape(-1, kernel.size // features), kernel.reshape(-1, features), bias)
        return by_example(rows.reshape(*patches.shape[:3], features))


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
