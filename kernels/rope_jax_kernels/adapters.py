"""For users of Flax' own attention modules, Linen and NNX."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from rope_jax_kernels.attention import Global, attention
from rope_jax_kernels.attention.patterns import Pattern
from rope_jax_kernels.rotation import Rotation


def flax_attention_fn(
    rotation: Rotation | None = None,
    *,
    pattern: Pattern = Global(),  # noqa: B008 (immutable)
    grid: tuple[int, int] | None = None,
    bias: Array | None = None,
    implementation: str | None = None,
) -> Callable[..., Array]:
    """Returns an `attention_fn` for `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`.

        nnx.MultiHeadAttention(8, 512, decode=False, attention_fn=flax_attention_fn(rotation), rngs=rngs)

    Args:
        rotation, pattern, bias, implementation: as `rope_jax_kernels.attention` takes them.
        grid: (H, W), needed for windows and neighbourhoods: Flax' tokens are in one row, H * W of them.

    Raises:
        ValueError: a window or neighbourhood without `grid`; when called: Flax asks for a mask, attention dropout, causal attention or
            the attention weights, which have no place here.
    """
    if grid is None and not isinstance(pattern, Global):
        raise ValueError(f"pattern={pattern} needs the map's size: pass grid=(H, W)")

    def attend(
        query: Array,
        key: Array,
        value: Array,
        mask: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        module: Any = None,
        is_causal: bool = False,
        **_: Any,
    ) -> Array:
        unsupported = {"a mask": mask is not None, "attention dropout": dropout_rate > 0 and not deterministic}
        unsupported |= {"causal attention": is_causal, "attention weights (sow_weights)": module is not None}
        asked = [name for name, is_asked in unsupported.items() if is_asked]
        if asked:
            raise ValueError(f"flax_attention_fn has no place for {' and '.join(asked)}: switch it off in the attention module")
        places = query.shape[-3:-2] if grid is None else grid
        q, k, v = (x.reshape(-1, *places, *x.shape[-2:]) for x in (query, key, value))
        return attention(q, k, v, pattern=pattern, rotation=rotation, bias=bias, implementation=implementation).reshape(query.shape)

    return attend
