"""The rotation type: a rotary position embedding is a linear map of coordinates.

Letters in shapes, in the whole package: B batch, L tokens, N heads, D head dimension, A axes,
R rotated pairs of channels, H W rows and columns of a feature map.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Pairing = Literal["half", "interleaved"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """The rotation angle of every pair of channels, for every head and token.

    Pair r of head n at token l turns by `theta[n, l, r] = sum_a coords[l, a] * freqs[n, a, r]`
    radians. The published rotary embeddings with commuting rotations differ only in these two
    arrays, in the pairing, and in how many channels turn (RoFormer, arXiv 2104.09864, eq. 34;
    RoPE-ViT, arXiv 2403.13298, eq. 14).

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import Rotation
        >>> coords = jnp.arange(4.0)[:, None]  # 4 tokens in a row, [L, A]
        >>> rotation = Rotation(coords, freqs=jnp.array([[[1.0, 0.1]]]))  # 2 pairs, [N, A, R]
        >>> rotation.angles().shape
        (1, 4, 2)

    Attributes:
        coords: Float[Array, "L A"], position of each token in the unit that `freqs` expects
            (patches, or a box from -1 to 1); integers and lists become such an array. A token with
            coordinates 0 is not rotated: class and register tokens have them.
        freqs: Float[Array, "N A R"], radians per unit of coordinate, with N = 1 for frequencies
            that all heads share. May be learnable.
        pairing: "half" pairs channels (r, R + r), "interleaved" pairs (2r, 2r + 1). Channels from
            2R on stay as they are.

    Both arrays are float32 (float64 for float64 data; NumPy's float64 becomes float32 unless
    jax_enable_x64 is set): an angle of 10 pi is off by 0.09 rad in bfloat16. The constructor checks
    nothing, because jax also creates instances with placeholders; the functions that take a
    rotation check it.
    """

    coords: Any
    freqs: Any
    pairing: Pairing = dataclasses.field(default="half", metadata={"static": True})

    def __post_init__(self):
        for name, x in vars(self).items():
            if isinstance(x, np.ndarray):  # of the type that jax would read
                dtype = jax.dtypes.canonicalize_dtype(x.dtype)
                object.__setattr__(self, name, x.astype(dtype, copy=False))
        integers = hasattr(self.coords, "astype") and jnp.issubdtype(self.coords.dtype, jnp.integer)
        if integers or isinstance(self.coords, list):
            # Not wider under jax_enable_x64: kernels take no float64.
            dtype = jnp.result_type(jnp.float32, getattr(self.freqs, "dtype", jnp.float32))
            object.__setattr__(self, "coords", jnp.asarray(self.coords, dtype))

    def angles(self) -> Float[Array, "N L R"]:
        """The angles theta in radians; N is 1 if the heads share their frequencies."""
        precise = jnp.promote_types(
            jnp.promote_types(self.coords.dtype, self.freqs.dtype), jnp.float32
        )
        coords = self.coords.astype(precise)[None, :, :, None]
        freqs = self.freqs.astype(precise)[:, None, :, :]
        # A sum of products, because a GPU may round a matrix product to TF32.
        return jnp.sum(coords * freqs, axis=2)
