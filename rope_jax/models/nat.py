"""NAT and DiNAT: neighbourhood attention, dilated in every second block of DiNAT.

The -s forms have Swin's stem and downsampling.
"""

import dataclasses
from typing import Literal

from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.attention import PaddedNeighborhood
from rope_jax.models.layers import conv, layer_norm
from rope_jax.models.registry import check_divisible, register
from rope_jax.models.swin import SIZES, Hierarchy, HierarchyOptions
from rope_jax.names.options import Count
from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax_kernels import Neighborhood, Pattern


@dataclasses.dataclass(frozen=True)
class NATOptions(HierarchyOptions):
    """Options of NAT and DiNAT.

    Attributes:
        kernel_size: side of the neighbourhood in tokens.
        dilations: of the neighbourhood in every second block of each stage; the other blocks have
            none. More dilations than stages are allowed.
        convolutions: "overlapping" for two convolutions of 3 x 3 with stride 2 as stem and one
            between stages, or "patches" as in Swin (the -s forms).
        pad_compat: pad maps as NATTEN 0.14 did, which produced the published results. The input of
            the projection to q, k, v is padded with zeros at the bottom and right, up to
            kernel_size * dilation tokens along each axis, and tokens attend to them. Without it
            there is no padding. At 224 pixels there is none either way; below, all stages of DiNAT
            and the last one of NAT differ.
    """

    kernel_size: Count = 7
    dilations: tuple[Count, ...] = (1, 1, 1, 1)
    convolutions: Literal["overlapping", "patches"] = "overlapping"
    pad_compat: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.check_per_stage("dilations", exact=False)
        if self.convolutions == "overlapping":  # its first one has half as many channels
            check_divisible("the stem", self.width, {"its halves": 2})


class ConvTokenizer(nnx.Module):
    """Two convolutions without an activation, then a layer norm: tokens of 4 x 4 pixels."""

    def __init__(self, features: int, norm_epsilon: float, *, rngs: nnx.Rngs, dtypes: dict):
        settings = {"stride": 2, "padding": 1, "use_bias": True, "rngs": rngs, "dtypes": dtypes}
        first = conv(3, features // 2, 3, **settings)
        self.proj = nnx.List([first, conv(features // 2, features, 3, **settings)])
        self.norm = layer_norm(features, norm_epsilon, rngs=rngs, dtypes=dtypes)

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B h w C"]:
        return self.norm(self.proj[1](self.proj[0](images)))


class ConvDownsampler(nnx.Module):
    """A convolution to half the rows and columns and twice the channels, then a layer norm."""

    def __init__(self, features: int, norm_epsilon: float, *, rngs: nnx.Rngs, dtypes: dict):
        wide = 2 * features
        self.reduction = conv(features, wide, 3, stride=2, padding=1, rngs=rngs, dtypes=dtypes)
        self.norm = layer_norm(wide, norm_epsilon, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w C2"]:
        return self.norm(self.reduction(x))


class NAT(Hierarchy):
    """Neighbourhood attention transformer (arXiv 2204.07143; dilated: 2209.15001)."""

    def add_modules(self, *, rngs: nnx.Rngs, dtypes: dict) -> None:
        modules = nnx.iter_modules(self)
        acts = {module.acts for _, module in modules if isinstance(module, Position)}
        if self.options.pad_compat and acts & {"rotation", "transform"}:
            raise ValueError(
                "pad_compat=True reproduces NATTEN 0.14, whose padding has no place on the map "
                "that this position's rotation or transform could use: leave pad_compat out, or "
                "use rpb, none or absolute positions"
            )

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        options = self.options
        if options.convolutions == "patches":
            return super().stem(rngs=rngs, dtypes=dtypes)
        return ConvTokenizer(options.width, options.norm_epsilon, rngs=rngs, dtypes=dtypes)

    def downsample(self, features: int, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        if self.options.convolutions == "patches":
            return super().downsample(features, rngs=rngs, dtypes=dtypes)
        return ConvDownsampler(features, self.options.norm_epsilon, rngs=rngs, dtypes=dtypes)

    def pattern(self) -> Neighborhood:
        kind = PaddedNeighborhood if self.options.pad_compat else Neighborhood
        return kind((self.options.kernel_size,) * 2)

    def patterns(self, part: int, grid: Grid) -> list[Pattern]:
        # Dilations are those of training, on every map.
        plain, options = self.pattern(), self.options
        dilated = dataclasses.replace(plain, dilation=(options.dilations[part],) * 2)
        return [dilated if block % 2 else plain for block in range(options.depths[part])]


_MINI = NATOptions(width=64, depths=(3, 4, 6, 5), heads=(2, 4, 8, 16), mlp_ratio=3.0)
_TINY = dataclasses.replace(_MINI, depths=(3, 4, 18, 5))
_SMALL = NATOptions(width=96, depths=(3, 4, 18, 5), mlp_ratio=2.0, layer_scale=1e-5, drop_path=0.3)
_BASE = dataclasses.replace(_SMALL, width=128, heads=(4, 8, 16, 32), drop_path=0.5)
_DILATED = {"dilations": (8, 4, 2, 1)}

for name, options in {"mini": _MINI, "tiny": _TINY, "small": _SMALL, "base": _BASE}.items():
    register(f"nat_{name}", NAT, options, position="rpb")
    # The official DiNAT-Small has no LayerScale, unlike NAT-Small.
    scale = None if name == "small" else options.layer_scale
    register(f"dinat_{name}", NAT, options, position="rpb", layer_scale=scale, **_DILATED)
for name, size in (("tiny", "t"), ("small", "s"), ("base", "b")):
    options = NATOptions(convolutions="patches", **SIZES[size])
    register(f"nat_s_{name}", NAT, options, position="rpb")
    register(f"dinat_s_{name}", NAT, options, position="rpb", **_DILATED)
