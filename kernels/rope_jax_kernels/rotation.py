"""The one abstraction of this package: a rotary embedding is a linear map of coordinates.

Letters used in shapes everywhere: B batch, L tokens, N heads, D head dim, A axes, R rotated pairs, H W rows and columns.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Pairing = Literal["half", "interleaved"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Which angle turns which pair of channels of which head at which token.

    Pair r of head n at token l is turned by `theta[n, l, r] = sum_a coords[l, a] * freqs[n, a, r]` (radians). All published rotary
    embeddings with commuting rotations differ only in these two arrays, the pairing, and how many channels are rotated.

    Attributes:
        coords: [L, A] position of each token, in whatever unit `freqs` expects (patches, or a box of -1..1). A token at the origin
            is not rotated: that is how class and register tokens are left alone.
        freqs: [N, A, R] radians per unit of coordinate, or [1, A, R] shared by all heads. May be learnable.
        pairing: "half" pairs channels (r, R + r), "interleaved" pairs (2r, 2r + 1). Channels from 2R on are never touched.

    Both arrays are float32 (float64 when the data is): an angle of 10 pi is off by 0.09 rad in bfloat16. Nothing is checked here, not
    even types, because jax also builds instances around placeholders; the functions that take one check it.
    """

    coords: Any
    freqs: Any
    pairing: Pairing = dataclasses.field(default="half", metadata={"static": True})

    def angles(self) -> Float[Array, "N L R"]:
        """The angles theta in radians, [N or 1, L, R]."""
        # A sum of products and not a matrix product, which a GPU would be free to round to TF32.
        precise = jnp.promote_types(jnp.promote_types(self.coords.dtype, self.freqs.dtype), jnp.float32)
        coords, freqs = self.coords.astype(precise)[None, :, :, None], self.freqs.astype(precise)[:, None, :, :]
        return jnp.sum(coords * freqs, axis=2)
