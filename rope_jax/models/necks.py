"""Necks: from the maps of a backbone to those that a head takes."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import fan_in_bias_init
from rope_jax.models.layers import BatchNorm, affine


class Deconv(nnx.Module):
    """A transposed convolution of 2 x 2 with stride 2: each token becomes four.

    Attributes:
        kernel: [2, 2, O, I], as flax has it with transpose_kernel=True; bias: [O].
    """

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs, dtypes: dict):
        self.dtype, param_dtype = dtypes["dtype"], dtypes["param_dtype"]
        # torch takes the fan of a transposed convolution from its outputs.
        shape, init = (2, 2, outputs, inputs), fan_in_bias_init(4 * outputs)
        self.kernel = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(init(rngs.params(), (outputs,), param_dtype))

    def __call__(self, maps: Float[Array, "B H W I"]) -> Float[Array, "B H2 W2 O"]:
        batch, height, width, inputs = maps.shape
        kernel = jnp.moveaxis(self.kernel[...], 3, 0)  # [I, 2, 2, O]
        bias = jnp.broadcast_to(self.bias[...], kernel.shape[1:])
        rows = maps.astype(self.dtype).reshape(-1, inputs)
        x = affine(rows, kernel.reshape(inputs, -1), bias.reshape(-1))
        x = x.reshape(batch, height, width, *kernel.shape[1:])
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, 2 * height, 2 * width, -1)


class FourScales(nnx.Module):
    """Four maps of a plain ViT at 4, 2, 1 and 1/2 times their size, with the same channels.

    Source: BEiT's segmentation (arXiv 2106.08254, appendix; its code).
    """

    def __init__(self, features: int, *, rngs: nnx.Rngs, dtypes: dict):
        settings = {"rngs": rngs, "dtypes": dtypes}
        self.up1 = Deconv(features, features, **settings)
        self.norm = BatchNorm(features, dtypes=dtypes)
        self.up2 = Deconv(features, features, **settings)
        self.up = Deconv(features, features, **settings)

    def __call__(
        self, maps: list[Float[Array, "B H W C"]], train: bool
    ) -> list[Float[Array, "B h w C"]]:
        first, second, third, fourth = maps
        larger = jax.nn.gelu(self.norm(self.up1(first), train), approximate=False)
        halved = nnx.max_pool(fourth, (2, 2), (2, 2))
        return [self.up2(larger), self.up(second), third, halved]
