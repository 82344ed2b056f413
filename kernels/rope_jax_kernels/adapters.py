"""Attention functions for the attention modules of Flax, Linen and NNX."""

import math
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float

from rope_jax_kernels.attention import Global, Pattern, attention
from rope_jax_kernels.rotation import Rotation


def flax_attention_fn(
    rotation: Rotation | None = None,
    *,
    pattern: Pattern = Global(),  # noqa: B008 (immutable)
    grid: tuple[int, int] | None = None,
    bias: Float[Array, "N ..."] | None = None,
    implementation: str | None = None,
) -> Callable[..., Array]:
    """Returns an `attention_fn` with a rotation for Flax attention modules.

    For `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`.

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import Rotation
        >>> from rope_jax_kernels.adapters import flax_attention_fn
        >>> attend = flax_attention_fn(Rotation(jnp.arange(4.0)[:, None], jnp.ones((1, 1, 4))))
        >>> q = k = v = jnp.ones((1, 4, 2, 8))
        >>> attend(q, k, v).shape  # nnx.MultiHeadAttention(..., attention_fn=attend)
        (1, 4, 2, 8)

    Args:
        rotation: as in `rope_jax_kernels.attention`, like `pattern`, `bias` and `implementation`.
        pattern: which tokens attend to which.
        grid: (H, W), required for windows and neighbourhoods, as Flax has one axis of H * W tokens.
        bias: added to the logits.
        implementation: None for the best that applies, or a name.

    Raises:
        ValueError: a window or neighbourhood without `grid`, or `Global` with one. The returned
            function raises it if the number of tokens is not that of `grid`, or Flax passes a mask,
            attention dropout, causal attention, `sow_weights` or `input_positions`.
    """
    if (grid is None) != isinstance(pattern, Global):
        raise ValueError(
            f"pattern={pattern} does not fit grid={grid}: pass grid=(H, W), the size of the map in "
            "tokens, for windows and neighbourhoods, and none for Global()"
        )

    def attend(
        query: Float[Array, "*B L N D"],
        key: Float[Array, "*B L N D"],
        value: Float[Array, "*B L N D"],
        mask: Bool[Array, "..."] | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        module: Any = None,
        is_causal: bool = False,
        input_positions: Any = None,
        **_: Any,
    ) -> Float[Array, "*B L N D"]:
        unsupported = {
            "a mask": mask is not None,
            "attention dropout": dropout_rate > 0 and not deterministic,
            "causal attention": is_causal,
            "attention weights (sow_weights)": module is not None,
            "input_positions, as the rotation has the coordinates": input_positions is not None,
        }
        passed = [name for name, is_passed in unsupported.items() if is_passed]
        if passed:
            raise ValueError(
                f"flax_attention_fn does not support {' and '.join(passed)}: switch it off in the "
                "attention module"
            )
        places = query.shape[-3:-2] if grid is None else grid
        for name, x in {"query": query, "key": key, "value": value}.items():
            if grid is not None and x.shape[-3] != math.prod(grid):
                raise ValueError(
                    f"{name} has {x.shape[-3]} tokens, but grid={grid[0]}x{grid[1]} has "
                    f"{math.prod(grid)}: pass the rows and columns of the map in tokens"
                )
        q, k, v = (x.reshape(-1, *places, *x.shape[-2:]) for x in (query, key, value))
        terms = {"rotation": rotation, "bias": bias, "implementation": implementation}
        return attention(q, k, v, pattern=pattern, **terms).reshape(query.shape)

    return attend
