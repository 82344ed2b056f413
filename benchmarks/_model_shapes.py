"""Attention layers of published models, for tests, ahead-of-time compilation and benchmarks."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from rope_jax_kernels.attention.patterns import Global, Neighborhood, Pattern, Window


@dataclasses.dataclass(frozen=True)
class Layer:
    """Self-attention of one layer of a model.

    Example:
        >>> from benchmarks._model_shapes import LAYERS
        >>> layer = LAYERS["swin_t_1"]
        >>> layer.tokens, layer.heads, layer.head_dim
        (3136, 3, 32)
        >>> layer.shapes(batch=128)["qkv"].shape
        (128, 56, 56, 3, 3, 32)

    Attributes:
        pattern: which tokens attend to which.
        places: shape of the tokens of one example, (L,) or (H, W).
        heads: N.
        head_dim: D.
        pairs: R, rotated pairs of channels; 0 without rotation.
        bias: whether the layer has a relative bias (a matrix or a table, by the pattern).
    """

    pattern: Pattern
    places: tuple[int, ...]
    heads: int
    head_dim: int
    pairs: int
    bias: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of one example."""
        return math.prod(self.places)

    def shapes(
        self, batch: int, dtype: str = "bfloat16", axes: int = 2
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the operands and the output of `attention_qkv`.

        Args:
            batch: B.
            dtype: of qkv and the output; the others are float32.
            axes: A, coordinates of a token.

        Returns:
            "qkv", "coords", "freqs", "bias" (one number if the layer has none) and "out". Without
            rotation, "freqs" has one pair.
        """
        bias = self.pattern.bias_shape(self.heads, self.places) if self.bias else ()
        lead = (batch, *self.places)
        return {
            "qkv": jax.ShapeDtypeStruct((*lead, 3, self.heads, self.head_dim), dtype),
            "coords": self._float32(self.pattern.rotated_tokens(self.places), axes),
            "freqs": self._float32(self.heads, axes, max(1, self.pairs)),
            "bias": self._float32(*bias),
            "out": jax.ShapeDtypeStruct((*lead, self.heads, self.head_dim), dtype),
        }

    @staticmethod
    def _float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)


# Model -> the pattern of its layers, and the heads of its stages.
_STAGES = {
    "swin_t": (Window((7, 7), (3, 3)), (3, 6, 12, 24)),
    "nat_mini": (Neighborhood((7, 7)), (2, 4, 8, 16)),
}
# Name -> layer; "swin_t_1" is the first stage of a Swin-T, with shifted windows. At 224 px unless
# the name has another size. Use `dataclasses.replace` for variants.
LAYERS: dict[str, Layer] = {
    # At 224 px with patches of 16 px, with a class token (197) or mean pooling (196).
    "vit_s": Layer(Global(), (196,), 6, 64, 16),
    "vit_s_class_token": Layer(Global(), (197,), 6, 64, 16),
    "vit_s_rope_mixed": Layer(Global(), (196,), 6, 64, 32),  # all channels rotate
    "vit_s_512px": Layer(Global(), (1025,), 6, 64, 16),
    "vit_b": Layer(Global(), (196,), 12, 64, 16),
    "vit_s_12_heads": Layer(Global(), (196,), 12, 32, 8),  # vit_s16: heads of 32 channels
    "vit_heads_of_128": Layer(Global(), (196,), 6, 128, 64),
    "swin_384px": Layer(Window((12, 12), (6, 6)), (48, 48), 3, 32, 16, bias=True),
    "dinat_mini_1": Layer(Neighborhood((7, 7), (8, 8)), (56, 56), 2, 32, 16),
    **{
        f"{model}_{i + 1}": Layer(pattern, (56 >> i, 56 >> i), n, 32, 8, bias=True)
        for model, (pattern, heads) in _STAGES.items()
        for i, n in enumerate(heads)
    },
}
