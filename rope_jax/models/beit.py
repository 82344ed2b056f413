"""BEiT (Bao et al., arXiv 2106.08254), as fine-tuned for classification: a relative bias in every layer is its only position.

Class token and patches have biases of their own towards each other (`rpb(prefix=True)`), q and v have a bias and k none, and the head
reads the normalised mean of the patches. Weights come by timm's names, which are the official ones.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from rope_jax.models.registry import register
from rope_jax.models.vit import SIZES, ViT, ViTOptions


class BEiT(ViT):
    """A `ViT` that starts as BEiT does: what layer l adds is divided by sqrt(2 l), and the head's weights by 1000."""

    def __init__(self, options: ViTOptions, **creation):
        super().__init__(options, **creation)
        layers = np.arange(1, options.depth + 1)
        stacked = [(self.blocks, layers[:, None, None])] if options.scan_layers else zip(self.blocks, layers, strict=True)
        kernels = [(kernel, (2 * layer) ** -0.5) for block, layer in stacked for kernel in (block.attn.proj.kernel, block.mlp.fc2.kernel)]
        for kernel, factor in [*kernels, (self.head.kernel, 1e-3)]:
            kernel.set_value(kernel[...] * jnp.asarray(factor, kernel.dtype))


_BEIT = ViTOptions(k_bias=False, pooling="mean", pool_norm=True)

register("beit_b16", BEiT, dataclasses.replace(_BEIT, **SIZES["b"], layer_scale=0.1, drop_path=0.1), position="rpb(prefix=True,std=0)")
register("beit_l16", BEiT, dataclasses.replace(_BEIT, **SIZES["l"], layer_scale=1e-5, drop_path=0.2), position="rpb(prefix=True,std=0)")
