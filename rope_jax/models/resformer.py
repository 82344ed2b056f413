"""ResFormer (Tian et al., arXiv 2212.00776): DeiT whose positions come out of convolutions, for images of many sizes.

A smoothed sinusoid on maps of one size is added to the tokens (`gpe`), and a convolution of the values to the output of attention in every
layer (`lpe`). Both are defined for any map. Training at several sizes at once is a matter of the recipe.
"""

import dataclasses

from rope_jax.models.registry import register
from rope_jax.models.vit import SIZES, ViT, ViTOptions

for size in ("ti", "s", "b"):
    register(f"resformer_{size}16", ViT, dataclasses.replace(ViTOptions(drop_path=0.1), **SIZES[size]), position="gpe+lpe")
