"""BEiT (Bao et al., arXiv 2106.08254), fine-tuned for classification.

Its only position is a relative bias in every layer, with separate biases between class token and
patches (`rpb(prefix=True)`). q and v have a bias, k has none; the head takes the normalised mean of
the patches. Weights are named as in timm and in the official code.

For other sizes, tables are resampled by the rule of the official code, which has it for square maps
only. timm moves offsets as far apart, but interpolates linearly between them by default.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.models.registry import register
from rope_jax.models.vit import SIZES, ViT, ViTOptions


class BEiT(ViT):
    """A `ViT` with the initialisation of BEiT.

    Output projections of layer l are divided by sqrt(2 l), and the head's weights by 1000.
    """

    def add_modules(self, *, rngs: nnx.Rngs, dtypes: dict) -> None:
        options = self.options
        layers = np.arange(1, options.depth + 1)
        if options.scan_layers:
            blocks = [(self.blocks, layers[:, None, None])]
        else:
            blocks = zip(self.blocks, layers, strict=True)
        for block, layer in blocks:
            _multiply(block.attn.proj.kernel, (2 * layer) ** -0.5)
            _multiply(block.mlp.fc2.kernel, (2 * layer) ** -0.5)
        if self.num_classes:
            _multiply(self.head.kernel, 1e-3)


def _multiply(kernel: nnx.Param, factor: float | np.ndarray) -> None:
    kernel.set_value(kernel[...] * jnp.asarray(factor, kernel.dtype))


_BEIT = ViTOptions(k_bias=False, pooling="mean", pool_norm=True)

for size, layer_scale, drop_path in (("b", 0.1, 0.1), ("l", 1e-5, 0.2)):
    register(
        f"beit_{size}16",
        BEiT,
        _BEIT,
        position="rpb(prefix=True,std=0,grow=geometric,shrink=geometric)",
        layer_scale=layer_scale,
        drop_path=drop_path,
        **SIZES[size],
    )
