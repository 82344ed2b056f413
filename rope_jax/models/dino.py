"""DINOv2 and DINOv3: the isotropic ViT with register tokens, LayerScale, SwiGLU in the large ones, and DINOv3's rotation.

What is released are backbones without a classifier. The head here reads the class token beside the mean of the patches, as the official
linear classifiers do (dinov2 `hub/classifiers.py` with layers=1, dinov3's): `pooling="class"` or "mean" for another one. Weights come by
the names of the official repositories (sources "dinov2", "dinov3") or timm's; a head that a file does not have keeps its start.

DINOv2's table of 37 x 37 positions is resized as its code does; registers join after it. The official models with registers know the
class token's position, too, which timm folds into its class token: create them with `embed_class_token=False` for timm's files.
DINOv3 has no bias of k; of timm's files those without "_qkvb" in their names have no bias of q and v either: `qkv_bias=False`.
"""

import dataclasses

from rope_jax.models.registry import register
from rope_jax.models.vit import SIZES, ViT, ViTOptions

_V2 = ViTOptions(patch_size=14, layer_scale=1e-5, token_std=1e-6, pooling="class_mean", drop_path_schedule="constant")
_V3 = ViTOptions(registers=4, layer_scale=1e-5, k_bias=False, norm_epsilon=1e-5, pooling="class_mean", drop_path_schedule="constant")
_GIANT = {"width": 1536, "depth": 40, "heads": 24, "feed_forward": "swiglu"}
_HUGE = {"width": 1280, "depth": 32, "heads": 20}
_PLUS = {"feed_forward": "swiglu", "mlp_ratio": 6.0}

for size, shape in {"s": SIZES["s"], "b": SIZES["b"], "l": SIZES["l"], "g": _GIANT}.items():
    options = dataclasses.replace(_V2, **shape)
    register(f"dinov2_{size}14", ViT, options, position="ape(resize=dinov2)", image_size=518)
    register(f"dinov2_{size}14_reg", ViT, dataclasses.replace(options, registers=4), position="ape(resize=antialias)", image_size=518)
for size in ("s", "b", "l"):
    register(f"dinov3_{size}16", ViT, dataclasses.replace(_V3, **SIZES[size]), position="dinov3")
for size, shape in {"s": SIZES["s"], "h": _HUGE}.items():
    register(f"dinov3_{size}16_plus", ViT, dataclasses.replace(_V3, **shape, **_PLUS), position="dinov3")
