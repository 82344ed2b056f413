"""NAT and DiNAT: neighbourhood attention, dilated in every second block of DiNAT; the -s forms have Swin's stem and downsampling."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import conv_init, fan_in_bias_init
from rope_jax.models.attention import SelfAttention
from rope_jax.models.layers import layer_norm
from rope_jax.models.registry import register
from rope_jax.models.swin import SIZES, Hierarchy, HierarchyOptions
from rope_jax.positions import Position, Terms
from rope_jax.positions.grids import Grid
from rope_jax_kernels import Neighborhood
from rope_jax_kernels.attention.patterns import Pattern


@dataclasses.dataclass(frozen=True)
class NATOptions(HierarchyOptions):
    """NAT's options.

    Attributes:
        kernel_size: side of the neighbourhood in tokens.
        dilations: of the neighbourhood in every second block of each stage; the others have none. More than there are stages do no harm.
        convolutions: "overlapping", two of 3 x 3 pixels and stride 2 before the first stage and one between stages, or "patches" as
            Swin has them (the -s forms).
        pad_compat: whether maps are padded as by NATTEN 0.14, which gave the published numbers: the input of the projection to q, k, v gets
            zeros at the bottom and right, until kernel_size * dilation tokens stand along each axis, and tokens attend to them. Without
            it no padding takes part. At 224 pixels there is none either way; below, all stages of DiNAT and the last one of NAT differ.
    """

    kernel_size: int = 7
    dilations: tuple = (1, 1, 1, 1)
    convolutions: str = "overlapping"
    pad_compat: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.kernel_size < 1:
            raise ValueError(f"kernel_size={self.kernel_size} must be at least 1")
        if len(self.dilations) < len(self.depths) or not all(isinstance(n, int) and n >= 1 for n in self.dilations):
            raise ValueError(f"dilations={self.dilations} must be one whole number of at least 1 for each of the {len(self.depths)} stages")
        if self.convolutions not in ("overlapping", "patches"):
            raise ValueError(f"convolutions={self.convolutions!r} is not allowed; use one of overlapping, patches")
        if self.convolutions == "overlapping" and self.width % 2:
            raise ValueError(f"width={self.width} must be even: the first convolution of the stem has half as many channels")


def halving(inputs: int, outputs: int, *, use_bias: bool, rngs: nnx.Rngs, dtypes: dict) -> nnx.Conv:
    """A convolution of 3 x 3 with stride 2 and a border of zeros, with torch's initialisation."""
    return nnx.Conv(
        inputs,
        outputs,
        (3, 3),
        strides=2,
        padding=1,
        use_bias=use_bias,
        kernel_init=conv_init,
        bias_init=fan_in_bias_init(9 * inputs),
        rngs=rngs,
        **dtypes,
    )


class ConvTokenizer(nnx.Module):
    """Two convolutions without an activation between them, then a layer norm: tokens of 4 x 4 pixels that see 7 x 7."""

    def __init__(self, features: int, norm_epsilon: float, *, rngs: nnx.Rngs, dtypes: dict):
        conv = functools.partial(halving, use_bias=True, rngs=rngs, dtypes=dtypes)
        self.proj = nnx.List([conv(3, features // 2), conv(features // 2, features)])
        self.norm = layer_norm(features, norm_epsilon, rngs=rngs, dtypes=dtypes)

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B h w C"]:
        return self.norm(self.proj[1](self.proj[0](images)))


class ConvDownsampler(nnx.Module):
    """A convolution to half the rows and columns and twice the channels, then a layer norm."""

    def __init__(self, features: int, norm_epsilon: float, *, rngs: nnx.Rngs, dtypes: dict):
        self.reduction = halving(features, 2 * features, use_bias=False, rngs=rngs, dtypes=dtypes)
        self.norm = layer_norm(2 * features, norm_epsilon, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w C2"]:
        return self.norm(self.reduction(x))


class PaddedAttention(SelfAttention):
    """Attention to neighbourhoods on a map that is padded where it has fewer tokens than they span, see `NATOptions.pad_compat`."""

    def __init__(self, unpadded: SelfAttention):
        for name, value in vars(unpadded).items():
            if not name.startswith("_"):  # those are flax's own
                setattr(self, name, value)

    def __call__(self, x: Float[Array, "B L C"], grid: Grid, pattern: Pattern, terms: Terms, *dropping: Any) -> Float[Array, "B L C"]:
        """See `SelfAttention`."""
        if terms.add is not None:
            x, terms = x + terms.add.astype(x.dtype), dataclasses.replace(terms, add=None)
        batch, _, features = x.shape
        padded = tuple(max(n, size * step) for n, size, step in zip(grid, pattern.size, pattern.dilation, strict=True))
        x = jnp.pad(x.reshape(batch, *grid, features), ((0, 0), (0, padded[0] - grid[0]), (0, padded[1] - grid[1]), (0, 0)))
        x = super().__call__(x.reshape(batch, -1, features), padded, pattern, terms, *dropping).reshape(batch, *padded, features)
        return x[:, : grid[0], : grid[1]].reshape(batch, -1, features)


class NAT(Hierarchy):
    """Neighbourhood attention transformer (arXiv 2204.07143; dilated: 2209.15001)."""

    def __init__(self, options: NATOptions, *, position: str, **settings: Any):
        super().__init__(options, position=position, **settings)
        if not options.pad_compat:
            return
        for stage in self.stages:
            schemes = [module for _, module in nnx.iter_modules(stage.position) if isinstance(module, Position)]
            if any(word in scheme.acts for scheme in schemes for word in ("rotation", "transform")):
                raise ValueError(
                    f"position={position!r} does not go with pad_compat=True, which reproduces NATTEN 0.14: padding has no place on the "
                    "map that a rotation or transform could use; leave pad_compat out, or use rpb, none or absolute positions"
                )
            for block in stage.blocks if isinstance(stage.blocks, nnx.List) else [stage.blocks]:
                block.attn = PaddedAttention(block.attn)

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        """See `Hierarchy.stem`."""
        if self.options.convolutions == "patches":
            return super().stem(rngs=rngs, dtypes=dtypes)
        return ConvTokenizer(self.options.width, self.options.norm_epsilon, rngs=rngs, dtypes=dtypes)

    def downsample(self, features: int, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        """See `Hierarchy.downsample`."""
        if self.options.convolutions == "patches":
            return super().downsample(features, rngs=rngs, dtypes=dtypes)
        return ConvDownsampler(features, self.options.norm_epsilon, rngs=rngs, dtypes=dtypes)

    def pattern(self) -> Neighborhood:
        """See `Hierarchy.pattern`."""
        return Neighborhood((self.options.kernel_size,) * 2)

    def patterns(self, stage: int, grid: Grid) -> list[Pattern]:
        """See `Hierarchy.patterns`. Dilations are those of training on every map (methods 2.3)."""
        dilated = Neighborhood(self.pattern().size, (self.options.dilations[stage],) * 2)
        return [dilated if block % 2 else self.pattern() for block in range(self.options.depths[stage])]


_MINI = NATOptions(width=64, depths=(3, 4, 6, 5), heads=(2, 4, 8, 16), mlp_ratio=3.0)
_TINY = dataclasses.replace(_MINI, depths=(3, 4, 18, 5))
_SMALL = NATOptions(width=96, depths=(3, 4, 18, 5), mlp_ratio=2.0, layer_scale=1e-5, drop_path=0.3)
_BASE = dataclasses.replace(_SMALL, width=128, heads=(4, 8, 16, 32), drop_path=0.5)
_DILATED = (8, 4, 2, 1)

for name, options in {"mini": _MINI, "tiny": _TINY, "small": _SMALL, "base": _BASE}.items():
    register(f"nat_{name}", NAT, options, position="rpb")
    # The official DiNAT-Small has no LayerScale, unlike NAT-Small (methods 2.3).
    scale = None if name == "small" else options.layer_scale
    register(f"dinat_{name}", NAT, dataclasses.replace(options, dilations=_DILATED, layer_scale=scale), position="rpb")
for name, sizes in {"tiny": SIZES["t"], "small": SIZES["s"], "base": SIZES["b"]}.items():
    options = NATOptions(convolutions="patches", **sizes)
    register(f"nat_s_{name}", NAT, options, position="rpb")
    register(f"dinat_s_{name}", NAT, dataclasses.replace(options, dilations=_DILATED), position="rpb")
