"""Layers that all backbones share."""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from rope_jax.positions.grids import Grid
from rope_jax.positions.initializers import (
    conv_init,
    fan_in_bias_init,
    linear_init,
    normal_init,
)
from rope_jax.system.cores import multiplies_bfloat16
from rope_jax.system.sharding import by_example

STORED = (nnx.Param, nnx.BatchStat)
"""Variables stored in weight files: trained parameters and running statistics."""
PRODUCT = "product"
"""Name of the outputs of dense layers, for policies of `jax.checkpoint`."""
SUM_OF_PRODUCTS = "sum_of_products"
"""Scope of products that are not matrix products, which `models.cost` counts."""


class Linear(nnx.Linear):
    """A dense layer on the last axis, as one matrix product.

    (XLA computes the gradient of a product with several leading axes 1.5 times slower on a CPU.)
    """

    def __call__(
        self,
        x: Float[Array, "... I"],
        norm: "LayerNorm | None" = None,
        layer_scale: "LayerScale | None" = None,
        bias: Float[Array, " O"] | None = None,
    ) -> Float[Array, "... O"]:
        """Returns layer_scale(norm(x) @ kernel + bias); `bias` is for layers without their own.

        In mixed precision the norm's scale and bias act on the kernel and bias: (h * s + b) @ W =
        h @ (s * W) + b @ W, and in bfloat16 LayerScale does, too. Their gradients then follow from
        those of kernel and bias, and need no sums over all rows.
        """
        mixed = self.dtype != self.kernel.dtype
        if norm is not None and not mixed:
            x = norm(x)
        rows = by_example(x).reshape(-1, x.shape[-1])
        if not mixed:
            out = super().__call__(rows)
            out = out if bias is None else out + bias
        else:
            kernel, bias = self.kernel[...], bias if self.bias is None else self.bias[...]
            if norm is not None:
                rows = standardize(rows, norm.epsilon)
                shift = (norm.bias[...][:, None] * kernel).sum(axis=0)
                bias = shift if bias is None else bias + shift
                kernel = norm.scale[...][:, None] * kernel
            # float16 cannot hold a kernel times the small factors that LayerScale starts with.
            if layer_scale is not None and self.dtype == jnp.bfloat16:
                gamma, layer_scale = layer_scale.gamma[...], None
                kernel, bias = kernel * gamma, None if bias is None else bias * gamma
            out = affine(rows.astype(self.dtype), kernel, bias)
        out = out if layer_scale is None else layer_scale(out)
        return checkpoint_name(by_example(out.reshape(*x.shape[:-1], -1)), PRODUCT)


@jax.custom_vjp
def affine(
    x: Float[Array, "B I"], kernel: Float[Array, "I O"], bias: Float[Array, " O"] | None
) -> Float[Array, "B O"]:
    """x @ kernel + bias in the dtype of x, for parameters of a wider dtype.

    Gradients of the parameters are summed over all rows in the parameters' dtype. By default, XLA
    rounds each device's sum to the dtype of x, and the total once more per device.
    """
    out = x @ kernel.astype(x.dtype)
    return out if bias is None else out + bias.astype(x.dtype)


def _affine_forward(
    x: Array, kernel: Array, bias: Array | None
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    return affine(x, kernel, bias), (x, kernel, bias)


def _affine_backward(
    kept: tuple[Array, Array, Array | None], d_out: Array
) -> tuple[Array, Array, Array | None]:
    x, kernel, bias = kept
    d_kernel = _contract(x, d_out, 0, kernel.dtype)
    d_bias = None if bias is None else d_out.sum(0, dtype=bias.dtype)
    return _contract(d_out, kernel.astype(x.dtype), 1, x.dtype), d_kernel, d_bias


def _contract(a: Array, b: Array, axis: int, dtype: Any) -> Array:
    """The product of two matrices over this axis of both, in bfloat16 as fast as a @ b.

    Of products of matrices, XLA's CPU compiler computes only a @ b with a CPU's instructions for
    bfloat16, the others in float32. Operands with two contracted axes are transposed to that form.
    """

    def product(a: Array, b: Array, *axes: int) -> Array:
        return jax.lax.dot_general(a, b, ((axes, axes), ((), ())), preferred_element_type=dtype)

    def product_of_halves(a: Array, b: Array) -> Array:
        halves = (x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :]) for x in (a, b))
        return product(*halves, axis, axis + 1)

    whole = lambda a, b: product(a, b, axis)
    if a.dtype != jnp.bfloat16 or a.shape[axis] % 2 or not multiplies_bfloat16():
        return whole(a, b)
    return jax.lax.platform_dependent(a, b, cpu=product_of_halves, default=whole)


affine.defvjp(_affine_forward, _affine_backward)


def linear(
    inputs: int, outputs: int, *, rngs: nnx.Rngs, dtypes: dict, use_bias: bool = True
) -> Linear:
    """A dense layer initialised as in DeiT, Swin and NAT: normal with std 0.02, zero bias."""
    return Linear(inputs, outputs, use_bias=use_bias, kernel_init=linear_init, rngs=rngs, **dtypes)


def torch_linear(
    inputs: int, outputs: int, *, rngs: nnx.Rngs, dtypes: dict, use_bias: bool = True
) -> Linear:
    """A dense layer with torch's default initialisation, uniform in +-1/sqrt(inputs)."""
    init = {"kernel_init": conv_init, "bias_init": fan_in_bias_init(inputs)}
    return Linear(inputs, outputs, use_bias=use_bias, rngs=rngs, **init, **dtypes)


class Identity(nnx.Module):
    """The head of a model with `num_classes=0`, whose outputs are the pooled features."""

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        return x


def make_head(
    inputs: int,
    num_classes: int,
    *,
    rngs: nnx.Rngs,
    dtypes: dict,
    make: Callable[..., nnx.Module] = linear,
) -> nnx.Module:
    """The classifier of pooled features, a dense layer of `make`; `Identity` for 0 classes."""
    return make(inputs, num_classes, rngs=rngs, dtypes=dtypes) if num_classes else Identity()


def conv(
    inputs: int,
    outputs: int,
    kernel: int,
    *,
    stride: int,
    padding: int,
    rngs: nnx.Rngs,
    dtypes: dict,
    use_bias: bool = False,
    kernel_init: Callable = conv_init,
    bias_init: Callable | None = None,
) -> nnx.Conv:
    """A convolution with a square kernel, padded with zeros; torch's initialisation by default."""
    return nnx.Conv(
        inputs,
        outputs,
        (kernel, kernel),
        strides=stride,
        padding=padding,
        use_bias=use_bias,
        kernel_init=kernel_init,
        bias_init=bias_init or fan_in_bias_init(kernel**2 * inputs),
        rngs=rngs,
        **dtypes,
    )


def draw_he(layer: nnx.Module, fan_out: int, rngs: nnx.Rngs) -> None:
    """Draws a layer's kernel anew, normal with variance 2 / fan_out; its bias becomes 0."""
    kernel, bias = layer.kernel, layer.bias
    init = normal_init((2 / fan_out) ** 0.5)
    kernel.set_value(init(rngs.params(), kernel.shape, kernel.dtype))
    bias.set_value(jnp.zeros_like(bias[...]))


def output_size(size: Grid, kernel: int, stride: int, padding: int) -> Grid:
    """Rows and columns of the output of a convolution or pooling of a map of `size`."""
    return tuple((n + 2 * padding - kernel) // stride + 1 for n in size)


class LayerNorm(nnx.LayerNorm):
    """Layer normalisation that is recomputed in the backward pass.

    It saves its input, in the input's dtype, instead of three float32 arrays.
    """

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        with jax.named_scope("norm"):
            return jax.checkpoint(super().__call__)(x)


@functools.partial(jax.checkpoint, static_argnums=1)
def standardize(x: Float[Array, "... C"], epsilon: float) -> Float[Array, "... C"]:
    """Layer normalisation without scale and bias, recomputed and as precise as `LayerNorm`."""
    with jax.named_scope("norm"):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        variance = wide.var(axis=-1, keepdims=True)
        return jax.nn.standardize(wide, variance=variance, epsilon=epsilon).astype(x.dtype)


def unit(x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """Vectors of length 1, float32 or wider; those shorter than 1e-12 are divided by 1e-12."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    squares = jnp.square(wide).sum(axis=-1, keepdims=True)
    return wide * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


def layer_norm(features: int, epsilon: float, *, rngs: nnx.Rngs, dtypes: dict) -> LayerNorm:
    """Layer normalisation of the last axis, with the variance in two passes, as in torch."""
    return LayerNorm(features, epsilon=epsilon, use_fast_variance=False, rngs=rngs, **dtypes)


class BatchNorm(nnx.Module):
    """Batch normalisation of the last axis as in torch: epsilon 1e-5, momentum 0.1.

    Called with train=True, it normalises by the batch and updates its running statistics
    (`nnx.BatchStat`) in place; otherwise it normalises by them. Batches are normalised by their
    biased variance; the running variance is of the unbiased one. Statistics are float32 or wider,
    and of the whole batch where it is divided over devices.
    """

    epsilon: ClassVar[float] = 1e-5
    momentum: ClassVar[float] = 0.1

    def __init__(self, features: int, *, dtypes: dict):
        full = functools.partial(jnp.full, (features,), dtype=dtypes["param_dtype"])
        self.scale, self.bias = nnx.Param(full(1)), nnx.Param(full(0))
        self.mean, self.variance = nnx.BatchStat(full(0)), nnx.BatchStat(full(1))

    def __call__(self, x: Float[Array, "... C"], train: bool) -> Float[Array, "... C"]:
        """Normalises.

        Args:
            x: input.
            train: normalise by the batch and update the running statistics.

        Raises:
            ValueError: there is one value per channel in training, which has no variance.
        """
        wide = x.astype(jnp.promote_types(x.dtype, self.scale.dtype))
        mean, variance = self.mean[...], self.variance[...]
        if train:
            count = math.prod(x.shape[:-1])
            if count < 2:
                raise ValueError(
                    f"batch normalisation of shape {x.shape} has one value per channel: train with "
                    "more images or larger ones"
                )
            axes = tuple(range(x.ndim - 1))
            mean, variance = wide.mean(axes), wide.var(axes)
            self.mean = self._update(self.mean, mean)
            self.variance = self._update(self.variance, variance * (count / (count - 1)))
        scale = self.scale[...] * jax.lax.rsqrt(variance + self.epsilon)
        return ((wide - mean) * scale + self.bias[...]).astype(x.dtype)

    def _update(self, running: nnx.BatchStat, value: Array) -> nnx.BatchStat:
        # A new variable: the old one may belong to a state outside of the trace.
        return running.replace((1 - self.momentum) * running[...] + self.momentum * value)


def dropout(
    x: Float[Array, "B ..."],
    rate: float | Array,
    key: Array | None,
    *,
    shared: tuple[int, ...] = (),
) -> Float[Array, "B ..."]:
    """Sets elements to 0 with probability `rate` and scales the others up.

    Args:
        x: any array.
        rate: 0 to below 1.
        key: None (evaluation) drops nothing.
        shared: axes along which elements are dropped together; the rows and columns of a map for
            torch's Dropout2d, which drops whole channels.
    """
    if key is None or (not isinstance(rate, jax.Array) and not rate):
        return x
    keep = 1 - jnp.asarray(rate, jnp.float32)
    shape = [1 if axis in shared else length for axis, length in enumerate(x.shape)]
    kept = jax.random.bernoulli(key, keep, shape)
    # A factor; a select would save a mask as large as x for the backward pass.
    return x * jnp.where(kept, 1 / keep, 0).astype(x.dtype)


@jax.checkpoint
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU (exact), recomputed in the backward pass: its derivative needs three arrays."""
    return jax.nn.gelu(x, approximate=False)


class Mlp(nnx.Module):
    """Linear, GELU (exact) or another activation, linear; the linear layers are those of `make`."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: Callable[[Array], Array] = gelu,
        make: Callable[..., Linear] = linear,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        self.activation = activation
        self.fc1 = make(features, hidden, rngs=rngs, dtypes=dtypes)
        self.fc2 = make(hidden, features, rngs=rngs, dtypes=dtypes)

    def __call__(
        self,
        x: Float[Array, "... C"],
        norm: LayerNorm | None = None,
        layer_scale: "LayerScale | None" = None,
    ) -> Float[Array, "... C"]:
        return self.fc2(self.activation(self.fc1(x, norm)), layer_scale=layer_scale)


class SwiGLU(nnx.Module):
    """Gated MLP: SiLU of the first half of a linear layer times the other half, then linear.

    Source: arXiv 2002.05202. Two thirds of the `hidden` channels are used, rounded up to a multiple
    of 8, which makes it as large as the MLP (DINOv2, DINOv3).
    """

    def __init__(self, features: int, hidden: int, *, rngs: nnx.Rngs, dtypes: dict):
        hidden = -(-int(hidden * 2 / 3) // 8) * 8
        self.fc1 = linear(features, 2 * hidden, rngs=rngs, dtypes=dtypes)
        self.fc2 = linear(hidden, features, rngs=rngs, dtypes=dtypes)

    def __call__(
        self,
        x: Float[Array, "... C"],
        norm: LayerNorm | None = None,
        layer_scale: "LayerScale | None" = None,
    ) -> Float[Array, "... C"]:
        gate, value = jnp.split(self.fc1(x, norm), 2, axis=-1)
        return self.fc2(jax.nn.silu(gate) * value, layer_scale=layer_scale)


FEED_FORWARD = {"mlp": Mlp, "swiglu": SwiGLU}


class LayerScale(nnx.Module):
    """Learned factor per channel on a residual branch (CaiT, arXiv 2103.17239)."""

    def __init__(self, features: int, initial: float, dtype: np.dtype):
        self.gamma = nnx.Param(jnp.full((features,), initial, dtype))

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        return x * self.gamma[...].astype(x.dtype)


def layer_scale(features: int, initial: float | None, dtype: np.dtype) -> LayerScale | None:
    """A LayerScale, or None without an initial value."""
    return None if initial is None else LayerScale(features, initial, dtype)


def check_images(images: Array) -> tuple[int, int]:
    """Returns (H, W) of floating-point images [B, H, W, 3]; raises ValueError for anything else."""
    floating = jnp.issubdtype(images.dtype, jnp.floating)
    if images.ndim != 4 or images.shape[3] != 3 or not images.size or not floating:
        raise ValueError(
            f"images have shape {images.shape} and dtype {images.dtype}; they must be "
            "[B, H, W, 3], channels last, at least one image and pixel, floating-point numbers, "
            "normalised: (images / 255 - mean) / std"
        )
    return images.shape[1:3]


class PatchProjection(nnx.Module):
    """A convolution whose stride is its kernel, as a matrix product of flattened patches.

    (XLA computes the gradient of such a convolution 20 times slower on a CPU.)
    """

    def __init__(
        self,
        patch_size: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        dtypes: dict,
        inputs: int = 3,
        kernel_init: Callable = conv_init,
    ):
        self.dtype, param_dtype = dtypes["dtype"], dtypes["param_dtype"]
        shape = (patch_size, patch_size, inputs, features)
        bias_init = fan_in_bias_init(inputs * patch_size**2)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(bias_init(rngs.params(), (features,), param_dtype))

    def __call__(self, images: Float[Array, "B H W I"]) -> Float[Array, "B h w C"]:
        kernel, bias = self.kernel[...], self.bias[...]
        side, _, channels, features = kernel.shape
        batch, height, width, _ = images.shape
        shape = (batch, height // side, side, width // side, side, channels)
        patches = images.astype(self.dtype).reshape(shape)
        patches = by_example(patches.transpose(0, 1, 3, 2, 4, 5))
        rows, kernel = patches.reshape(-1, side**2 * channels), kernel.reshape(-1, features)
        mixed = self.dtype != kernel.dtype
        out = affine(rows, kernel, bias) if mixed else rows @ kernel + bias
        return by_example(out.reshape(*patches.shape[:3], features))


class Deconv(nnx.Module):
    """A transposed convolution of 2 x 2 with stride 2: every token becomes 2 x 2 of them."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs, dtypes: dict):
        self.dtype, param_dtype = dtypes["dtype"], dtypes["param_dtype"]
        bound = (4 * outputs) ** -0.5  # torch's; it takes the outputs for the inputs

        def draw(*shape: int) -> nnx.Param:
            value = jax.random.uniform(rngs.params(), shape, param_dtype, -bound, bound)
            return nnx.Param(value)

        self.kernel, self.bias = draw(2, 2, inputs, outputs), draw(outputs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H2 W2 C2"]:
        kernel, bias = self.kernel[...], self.bias[...]
        outputs = len(bias)
        batch, height, width, inputs = x.shape
        rows = by_example(x.astype(self.dtype)).reshape(-1, inputs)
        # Columns in the order (row, column, channel) of the 2 x 2 tokens.
        kernel = kernel.transpose(2, 0, 1, 3).reshape(inputs, -1)
        out = affine(rows, kernel, jnp.tile(bias, 4))
        out = out.reshape(batch, height, width, 2, 2, outputs).swapaxes(2, 3)
        return by_example(out.reshape(batch, 2 * height, 2 * width, outputs))


class PatchEmbed(nnx.Module):
    """Projection of non-overlapping patches, optionally followed by a layer norm."""

    def __init__(
        self,
        patch_size: int,
        features: int,
        *,
        norm_epsilon: float | None,
        rngs: nnx.Rngs,
        dtypes: dict,
        kernel_init: Callable = conv_init,
    ):
        settings = {"kernel_init": kernel_init, "rngs": rngs, "dtypes": dtypes}
        self.proj = PatchProjection(patch_size, features, **settings)
        make = functools.partial(layer_norm, features, rngs=rngs, dtypes=dtypes)
        self.norm = None if norm_epsilon is None else make(norm_epsilon)

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B h w C"]:
        x = self.proj(images)
        return x if self.norm is None else self.norm(x)


def layer_dtypes(dtype: np.dtype) -> dict[str, np.dtype]:
    """Dtypes of activations and parameters, as keyword arguments of flax layers.

    Parameters are float64 for float64 activations and float32 for all others.
    """
    dtype = jnp.dtype(dtype)
    wide = dtype == jnp.float64
    return {"dtype": dtype, "param_dtype": jnp.dtype(jnp.float64 if wide else jnp.float32)}
