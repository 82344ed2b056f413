"""Mask2Former's decoder: queries that attend to the pixels of their masks."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from rope_jax.models.heads.maps import resize_maps
from rope_jax.models.heads.mask2former.options import Mask2FormerOptions
from rope_jax.models.heads.queries import (
    EPSILON,
    Attention,
    FeedForward,
    perceptron,
    sine_positions,
)
from rope_jax.models.layers import layer_norm, torch_linear
from rope_jax.positions.initializers import normal_init

_LEVELS = 3  # maps, to which layers attend in turn


def mask_logits(
    embeddings: Float[Array, "B Q C"], pixels: Float[Array, "B h w C"]
) -> Float[Array, "B h w Q"]:
    """Logits of a mask for every query: its products with the features of pixels.

    They are float32 or wider.
    """
    wide = jnp.promote_types(pixels.dtype, jnp.float32)
    return jnp.einsum("bhwc,bqc->bhwq", pixels, embeddings, preferred_element_type=wide)


def attention_mask(logits: Float[Array, "B h w Q"]) -> Bool[Array, "B Q L"]:
    """Mask of the tokens that each query attends to: those of its mask, or all if it has none.

    >>> attention_mask(jnp.array([[[[1.0, -1.0], [-1.0, -1.0]]]])).tolist()
    [[[True, False], [True, True]]]

    Args:
        logits: of the masks, as large as the map.
    """
    batch, _, _, queries = logits.shape
    inside = jax.nn.sigmoid(logits).reshape(batch, -1, queries).swapaxes(1, 2) >= 0.5
    return inside | ~inside.any(axis=-1, keepdims=True)


class MaskedLayer(nnx.Module):
    """Masked attention to a map, attention of the queries to each other, and two dense layers."""

    def __init__(self, options: Mask2FormerOptions, *, rngs: nnx.Rngs, dtypes: dict):
        settings, width = {"rngs": rngs, "dtypes": dtypes}, options.width
        self.cross = Attention(width, options.heads, **settings)
        self.cross_norm = layer_norm(width, EPSILON, **settings)
        self.attn = Attention(width, options.heads, **settings)
        self.norm = layer_norm(width, EPSILON, **settings)
        self.mlp = FeedForward(width, options.hidden, **settings)

    def __call__(
        self,
        x: Float[Array, "B Q C"],
        positions: Float[Array, "Q C"],
        tokens: Float[Array, "B L C"],
        places: Float[Array, "L C"],
        mask: Bool[Array, "B Q L"],
    ) -> Float[Array, "B Q C"]:
        """Returns the queries after this layer.

        Args:
            x: queries.
            positions: of the queries, learned.
            tokens: of a map.
            places: positions of the tokens.
            mask: see `attention_mask`.
        """
        x = self.cross_norm(x + self.cross(x + positions, tokens + places, tokens, mask))
        placed = x + positions
        return self.mlp(self.norm(x + self.attn(placed, placed, x)))


class MaskedDecoder(nnx.Module):
    """Learned queries that attend to the maps of strides 32, 16 and 8 in turn.

    Before the first layer and after every one, each query predicts a class and a mask, to which it
    attends in the next layer.

    Source: Cheng et al., arXiv 2112.01527, section 3.2.

    Attributes:
        queries, positions: learned.
        levels: added to the tokens of each map.
        layers: of type `MaskedLayer`.
        norm, classify, embed: from queries to predictions; the last class is that of no object.
    """

    def __init__(
        self, options: Mask2FormerOptions, num_classes: int, *, rngs: nnx.Rngs, dtypes: dict
    ):
        width = options.width

        def draw(count: int) -> nnx.Param:
            values = normal_init(1.0)(rngs.params(), (count, width), dtypes["param_dtype"])
            return nnx.Param(values, decay=False)

        settings = {"rngs": rngs, "dtypes": dtypes}
        self.queries, self.positions = draw(options.queries), draw(options.queries)
        self.levels = draw(_LEVELS)
        self.layers = nnx.List(MaskedLayer(options, **settings) for _ in range(options.depth))
        self.norm = layer_norm(width, EPSILON, **settings)
        self.classify = torch_linear(width, num_classes + 1, **settings)
        self.embed = nnx.List(torch_linear(width, width, **settings) for _ in range(3))

    def __call__(
        self, pixels: Float[Array, "B h w C"], maps: Sequence[Float[Array, "B _h _w C"]]
    ) -> tuple[Float[Array, "layers B Q K1"], Float[Array, "layers B Q C"]]:
        """Logits of classes, and embeddings of masks, before the first and after each layer.

        Args:
            pixels: features of pixels.
            maps: of strides 32, 16 and 8.
        """
        batch, _, _, width = pixels.shape
        dtype = pixels.dtype
        # Masks are linear in the pixels: resizing these once is resizing the masks of all layers.
        frozen = jax.lax.stop_gradient(pixels)
        resized = [resize_maps(frozen, x.shape[1:3]) for x in maps]
        tokens = [
            x.reshape(batch, -1, width) + level.astype(dtype)
            for x, level in zip(maps, self.levels[...], strict=True)
        ]
        places = [
            jnp.asarray(sine_positions(x.shape[1:3], width), dtype).reshape(-1, width) for x in maps
        ]
        positions = self.positions[...].astype(dtype)
        x = jnp.broadcast_to(self.queries[...].astype(dtype), (batch, *positions.shape))
        predictions = [self.predict(x)]
        for number, layer in enumerate(self.layers):
            level, (_, embedding) = number % _LEVELS, predictions[-1]
            mask = attention_mask(mask_logits(jax.lax.stop_gradient(embedding), resized[level]))
            x = layer(x, positions, tokens[level], places[level], mask)
            predictions.append(self.predict(x))
        classes, embeddings = zip(*predictions, strict=True)
        return jnp.stack(classes), jnp.stack(embeddings)

    def predict(
        self, x: Float[Array, "B Q C"]
    ) -> tuple[Float[Array, "B Q K1"], Float[Array, "B Q C"]]:
        """Logits of the classes of queries, and the embeddings of their masks."""
        x = self.norm(x)
        return self.classify(x), perceptron(self.embed, x)
