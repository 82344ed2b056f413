"""DINOv2 and DINOv3: isotropic ViTs with registers, LayerScale, SwiGLU, and DINOv3's rotation.

The releases are backbones without a classifier. The head here takes the class token and the mean of
the patches, as the official linear classifiers do (dinov2 `hub/classifiers.py` with layers=1,
dinov3's); `pooling="class"` or "mean" changes this. Weights are named as in the official
repositories (sources "dinov2", "dinov3") or in timm; a head that is missing from a file keeps its
initialisation.

DINOv2's table of 37 x 37 positions is resized as in its code; registers are prepended after it. The
official models with registers have a position for the class token, which timm adds to its class
token: use `embed_class_token=False` for timm's files. DINOv3 has no bias of k; timm's files without
"_qkvb" in their names have no bias of q and v either: use `qkv_bias=False`.
"""

from rope_jax.models.registry import register
from rope_jax.models.vit import SIZES, ViT, ViTOptions

_SHARED = {"layer_scale": 1e-5, "pooling": "class_mean", "drop_path_schedule": "constant"}
_V2 = ViTOptions(patch_size=14, token_std=1e-6, **_SHARED)
_V3 = ViTOptions(registers=4, k_bias=False, norm_epsilon=1e-5, **_SHARED)
_GIANT = {"width": 1536, "depth": 40, "heads": 24, "feed_forward": "swiglu"}
_HUGE = {"width": 1280, "depth": 32, "heads": 20}
_PLUS = {"feed_forward": "swiglu", "mlp_ratio": 6.0}

for size, shape in {"s": SIZES["s"], "b": SIZES["b"], "l": SIZES["l"], "g": _GIANT}.items():
    name, shape = f"dinov2_{size}14", {"image_size": 518} | shape
    register(name, ViT, _V2, position="ape(resize=dinov2)", **shape)
    register(f"{name}_reg", ViT, _V2, position="ape(resize=antialias)", registers=4, **shape)
for size in ("s", "b", "l"):
    register(f"dinov3_{size}16", ViT, _V3, position="dinov3", **SIZES[size])
for size, shape in {"s": SIZES["s"], "h": _HUGE}.items():
    register(f"dinov3_{size}16_plus", ViT, _V3, position="dinov3", **shape, **_PLUS)
