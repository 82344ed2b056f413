"""DINO's transformer: encoder, choice of queries, decoder that refines a box for every query.

Boxes are (x, y, width, height) around their centres, 0 to 1 within an image's extent; their logits
are inverse sigmoids.

Source: Zhang et al., arXiv 2203.03605, section 3; as in detrex.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from rope_jax.models.deformable import DeformableAttention
from rope_jax.models.heads.dino.levels import Levels, map_positions
from rope_jax.models.heads.dino.options import DinoOptions
from rope_jax.models.heads.head import Maps
from rope_jax.models.heads.maps import flatten
from rope_jax.models.heads.queries import (
    EPSILON,
    Attention,
    EncoderLayer,
    FeedForward,
    glorot_linear,
    perceptron,
    sines,
)
from rope_jax.models.layers import Linear, layer_norm, torch_linear
from rope_jax.positions.initializers import conv_init, glorot_init, normal_init

_NEAREST = 1e-3  # to 0 and 1 where the inverse sigmoid is taken


def inverse_sigmoid(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Logits of probabilities, which are taken to be 0.001 to 0.999 as in detrex.

    >>> [round(y, 4) for y in inverse_sigmoid(jnp.array([0.5, 0.75, 1.0])).tolist()]
    [0.0, 1.0986, 6.9078]
    """
    x = jnp.clip(x, 0, 1)
    return jnp.log(jnp.maximum(x, _NEAREST) / jnp.maximum(1 - x, _NEAREST))


class DecoderLayer(nnx.Module):
    """Self-attention, deformable attention to the maps, a feed-forward layer; norms after all."""

    def __init__(self, options: DinoOptions, *, rngs: nnx.Rngs, dtypes: dict):
        settings, width = {"rngs": rngs, "dtypes": dtypes}, options.width
        norm = functools.partial(layer_norm, width, EPSILON, **settings)
        self.attn, self.norm1 = Attention(width, options.heads, **settings), norm()
        self.cross = _deformable(options, **settings)
        self.norm2 = norm()
        self.mlp = FeedForward(width, options.hidden, **settings)

    def __call__(
        self,
        x: Float[Array, "B Q C"],
        positions: Float[Array, "B Q C"],
        references: Float[Array, "B Q levels 4"],
        tokens: Float[Array, "B S C"],
        levels: Levels,
        allowed: Bool[Array, "Q Q"] | None,
    ) -> Float[Array, "B Q C"]:
        placed, mask = x + positions, None if allowed is None else allowed[None]
        x = self.norm1(x + self.attn(placed, placed, x, mask))
        branch = self.cross(x + positions, references, tokens, levels.sizes, levels.padding)
        return self.mlp(self.norm2(x + branch))


def _deformable(options: DinoOptions, *, rngs: nnx.Rngs, dtypes: dict) -> DeformableAttention:
    """The attention of a layer to the maps."""
    shape = {"levels": options.levels, "heads": options.heads, "points": options.points}
    return DeformableAttention(options.width, **shape, rngs=rngs, dtypes=dtypes)


class BoxMlp(nnx.Module):
    """Three linear layers with ReLU between them; its first outputs are 0."""

    def __init__(self, width: int, *, rngs: nnx.Rngs, dtypes: dict):
        zeros = jax.nn.initializers.zeros
        self.layers = nnx.List(torch_linear(width, width, rngs=rngs, dtypes=dtypes) for _ in "12")
        self.layers.append(Linear(width, 4, kernel_init=zeros, rngs=rngs, **dtypes))

    def __call__(self, x: Float[Array, "B Q C"]) -> Float[Array, "B Q 4"]:
        return perceptron(self.layers, x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """The transformer's output, for R layers, T queries in all and Q chosen ones.

    Attributes:
        states: after every layer, normalised.
        initial: boxes before the first layer.
        references: boxes after every layer, from its box of the one before, which has no gradient.
        chosen: states of the tokens whose boxes are the first of the chosen queries.
        proposals: these boxes, with gradients.
    """

    states: Float[Array, "R B T C"]
    initial: Float[Array, "B T 4"]
    references: Float[Array, "R B T 4"]
    chosen: Float[Array, "B Q C"]
    proposals: Float[Array, "B Q 4"]


class Transformer(nnx.Module):
    """From maps of several sizes to states and boxes of queries.

    Args:
        options: of the head.
        num_classes: of the classifiers.
    """

    def __init__(self, options: DinoOptions, num_classes: int, *, rngs: nnx.Rngs, dtypes: dict):
        settings = {"rngs": rngs, "dtypes": dtypes}
        # Classes and boxes are as precise as parameters: their differences are small.
        wide = {"rngs": rngs, "dtypes": dtypes | {"dtype": dtypes["param_dtype"]}}
        param = dtypes["param_dtype"]
        width, queries = options.width, options.queries
        norm = functools.partial(layer_norm, width, EPSILON, **settings)
        self.num_classes, self.width, self.queries = num_classes, width, queries
        self.level_embed = nnx.Param(
            normal_init(1.0)(rngs.params(), (options.levels, width), param)
        )
        self.encoder = nnx.List(
            EncoderLayer(_deformable(options, **settings), width, options.hidden, **settings)
            for _ in range(options.encoder_depth)
        )
        self.choice, self.choice_norm = glorot_linear(width, width, **settings), norm()
        self.content = nnx.Param(glorot_init(rngs.params(), (queries, width), param))
        depth = options.decoder_depth
        self.decoder = nnx.List(DecoderLayer(options, **settings) for _ in range(depth))
        self.position = nnx.List(glorot_linear(n * width, width, **settings) for n in (2, 1))
        self.norm = norm()
        # One each for the layers of the decoder, and the last for the choice of queries.
        heads, rare = range(depth + 1), jax.nn.initializers.constant(-np.log(99))
        # The first probabilities are about 0.01 (arXiv 1708.02002).
        classifier = {"kernel_init": conv_init, "bias_init": rare, "rngs": rngs}
        self.classes = nnx.List(
            Linear(width, num_classes, **classifier, param_dtype=param, dtype=param) for _ in heads
        )
        self.boxes = nnx.List(BoxMlp(width, **wide) for _ in heads)

    def parts(self) -> dict[str, nnx.Module]:
        """Returns no parts, like heads."""
        return {}

    def __call__(
        self,
        maps: Maps,
        padding: list[Bool[Array, "B _h _w"]],
        extra: tuple[Float[Array, "B D C"], Float[Array, "B D 4"], Bool[Array, "T T"]]
        | None = None,
    ) -> Decoded:
        """Encodes maps, chooses queries and decodes them.

        Args:
            maps: of `width` channels, as many as `levels`.
            padding: of each map, True for tokens in padding.
            extra: content and boxes of queries of denoising, which come before the chosen ones, and
                the mask of all queries that attend; or None.
        """
        levels = Levels.from_padding(padding)
        tokens = flatten(maps)
        positions = flatten([map_positions(x, self.width) for x in padding])
        positions = positions.astype(tokens.dtype)
        positions += self.level_embed[...].astype(tokens.dtype)[levels.numbers]
        references = levels.places()
        for layer in self.encoder:
            tokens = layer(tokens, positions, references, levels.sizes, levels.padding)
        chosen, logits = self.choose(tokens, levels)
        references = jax.nn.sigmoid(jax.lax.stop_gradient(logits))
        content = self.content[...].astype(tokens.dtype)
        content = jnp.broadcast_to(content, (tokens.shape[0], *content.shape))
        allowed = None
        if extra is not None:
            more, boxes, allowed = extra
            content = jnp.concatenate([more.astype(tokens.dtype), content], axis=1)
            references = jnp.concatenate([boxes, references], axis=1)
        states, refined = self.decode(content, references, tokens, levels, allowed)
        return Decoded(states, references, refined, chosen, jax.nn.sigmoid(logits))

    def choose(
        self, tokens: Float[Array, "B S C"], levels: Levels
    ) -> tuple[Float[Array, "B Q C"], Float[Array, "B Q 4"]]:
        """The tokens with the highest logit of any class, and the logits of their boxes."""
        boxes, valid = proposals(levels)
        valid = (valid & ~levels.padding)[..., None]
        states = self.choice_norm(self.choice(jnp.where(valid, tokens, 0)))
        best = self.classes[-1](states).max(axis=-1)
        # A box of infinite logits, of a token that is not valid, has no gradient.
        logits = jnp.where(valid, jnp.log(boxes / (1 - boxes)), jnp.inf)
        chosen = jax.lax.top_k(best, self.queries)[1][..., None]
        states, logits = (jnp.take_along_axis(x, chosen, axis=1) for x in (states, logits))
        return states, self.boxes[-1](states) + logits

    def decode(
        self,
        content: Float[Array, "B T C"],
        references: Float[Array, "B T 4"],
        tokens: Float[Array, "B S C"],
        levels: Levels,
        allowed: Bool[Array, "T T"] | None,
    ) -> tuple[Float[Array, "R B T C"], Float[Array, "R B T 4"]]:
        """States and boxes of queries after every layer of the decoder."""
        fractions = jnp.concatenate([levels.fractions] * 2, axis=-1)[:, None]
        states, refined = [], []
        for number, layer in enumerate(self.decoder):
            places = references[:, :, None] * fractions
            positions = self.query_positions(places[:, :, 0]).astype(content.dtype)
            content = layer(content, positions, places, tokens, levels, allowed)
            states.append(self.norm(content))
            refined.append(self.refine(number, content, references))
            references = jax.lax.stop_gradient(refined[-1])
        return jnp.stack(states), jnp.stack(refined)

    def query_positions(self, boxes: Float[Array, "B T 4"]) -> Float[Array, "B T C"]:
        """Positions of queries, from the sines of their boxes, y before x."""
        order = np.array([1, 0, 2, 3])
        return perceptron(self.position, sines(boxes[..., order], self.width // 2))

    def refine(
        self, layer: int, states: Float[Array, "B T C"], references: Float[Array, "B T 4"]
    ) -> Float[Array, "B T 4"]:
        """Boxes after a layer of the decoder, from boxes before it."""
        return jax.nn.sigmoid(self.boxes[layer](states) + inverse_sigmoid(references))


def proposals(levels: Levels) -> tuple[Float[Array, "B S 4"], Bool[Array, "B S"]]:
    """A box around every token, of size 0.05 x 2^level, and whether it is valid.

    It is if its centre and size are within 0.01 to 0.99, as in Deformable DETR's code.
    """
    centres = levels.centres()
    sizes = (0.05 * 2.0**levels.numbers).astype(np.float32)
    sizes = jnp.broadcast_to(sizes[:, None], centres.shape)
    boxes = jnp.concatenate([centres, sizes], axis=-1)
    return boxes, ((boxes > 0.01) & (boxes < 0.99)).all(axis=-1)
