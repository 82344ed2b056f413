"""ViT-S/16 in this package and in other JAX libraries, with equal parameters, and its training."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rope_jax

OURS = "rope_jax"
POSITIONS = ("ape", "dinov3")
"""The learned table that all have, and the rotary embedding that Equimo has, too."""
FREQUENCIES = 16
"""Of the rotary embedding, fixed."""
CLASSES, WIDTH, DEPTH, HEADS, PATCH, EPSILON = 1000, 384, 12, 6, 16, 1e-6


@dataclasses.dataclass(frozen=True)
class Model:
    """A model without dropout and drop path.

    Attributes:
        init: draws the parameters, float32.
        logits: of parameters and normalised images.
        channels_first: whether images are [B, 3, H, W], not [B, H, W, 3].
    """

    init: Callable[[], Any]
    logits: Callable[[Any, jax.Array], jax.Array]
    channels_first: bool = False

    def images(self, batch: int, size: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a batch of images."""
        shape = (batch, 3, size, size) if self.channels_first else (batch, size, size, 3)
        return jax.ShapeDtypeStruct(shape, jnp.float32)


def ours(position: str, size: int, dtype: np.dtype, **options: Any) -> Model:
    """The model of this package, with further options."""
    options = {"drop_path": 0.0, "position": position, "image_size": size} | options
    new = functools.partial(rope_jax.create_model, "deit_s16", dtype=dtype, **options)
    graph, _, others = nnx.split(nnx.eval_shape(new), nnx.Param, ...)

    def logits(params: Any, images: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, others)(images)

    return Model(lambda: nnx.to_pure_dict(nnx.state(new(), nnx.Param)), logits)


def equimo(position: str, size: int, dtype: np.dtype, *, cudnn: bool = False) -> Model:
    """Equimo's; in bfloat16, all parameters and images are cast at the start of a step."""
    import equinox as eqx
    from equimo.core.layers.attention import with_attention_implementation
    from equimo.vision.models.vit import VisionTransformer

    new = functools.partial(
        VisionTransformer,
        img_size=size,
        in_channels=3,
        dim=WIDTH,
        patch_size=PATCH,
        num_heads=HEADS,
        depths=[DEPTH],
        key=jax.random.key(0),
        reg_tokens=0,
        use_global_pos_embed=position == "ape",
        use_local_pos_embed=position == "dinov3",
        global_pool="token",
        num_classes=CLASSES,
        eps=EPSILON,
    )
    attention = "cudnn" if cudnn else "xla"
    shapes = eqx.filter_eval_shape(new)
    _, static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def logits(params: Any, images: jax.Array) -> jax.Array:
        params, images = jax.tree.map(lambda x: x.astype(dtype), (params, images))
        model = with_attention_implementation(eqx.combine(params, static), attention)
        return jax.vmap(lambda image: model(image, key=None, inference=True))(images)

    init = lambda: eqx.filter(new(), eqx.is_inexact_array)
    return Model(init, logits, channels_first=True)


def transformers(position: str, size: int, dtype: np.dtype, *, cudnn: bool = False) -> Model:
    """Hugging Face's Flax ViT of transformers 4, which has no attention of cuDNN.

    Raises:
        ImportError: for a position that it does not have.
    """
    from transformers import ViTConfig
    from transformers.models.vit.modeling_flax_vit import FlaxViTForImageClassification

    if position != "ape":
        raise ImportError("the Flax ViT of transformers has no rotary embedding")
    settings = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        image_size=size,
        patch_size=PATCH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
        layer_norm_eps=EPSILON,
    )
    model = FlaxViTForImageClassification(settings, dtype=dtype, _do_init=False)

    def logits(params: Any, images: jax.Array) -> jax.Array:
        return model(images, params=params).logits

    init = lambda: model.init_weights(jax.random.key(0), (1, size, size, 3))
    return Model(init, logits, channels_first=True)


PEERS = {"Equimo": equimo, "transformers": transformers}


def models(position: str, size: int, dtype: str, *, cudnn: bool = False) -> dict[str, Model]:
    """Our model, and those of the peers that are installed and have the position, by name.

    Args:
        position: one of POSITIONS.
        size: side of the images in pixels.
        dtype: of the activations.
        cudnn: whether peers that can use cuDNN's attention do.
    """
    made = {OURS: ours(position, size, jnp.dtype(dtype))}
    for name, make in PEERS.items():
        if importlib.util.find_spec(name.lower()):
            try:
                made[name] = make(position, size, jnp.dtype(dtype), cudnn=cudnn)
            except ImportError as error:
                print(f"{name} is left out: {error}")
    return made


def versions() -> dict[str, str]:
    """The versions of the peers that are installed."""
    installed = [name for name in PEERS if importlib.util.find_spec(name.lower())]
    return {name.lower(): importlib.metadata.version(name) for name in installed}


OPTIMIZER = optax.adamw(1e-4, weight_decay=0.05)


def init_state(model: Model) -> tuple[Any, Any]:
    """Parameters and the state of the optimizer."""
    params = model.init()
    return params, OPTIMIZER.init(params)


def train(
    model: Model, state: tuple[Any, Any], images: jax.Array, labels: jax.Array
) -> tuple[tuple[Any, Any], jax.Array]:
    """A step of AdamW: the new state, and the loss before it."""

    def compute_loss(params: Any) -> jax.Array:
        logits = model.logits(params, images).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    params, moments = state
    loss, gradients = jax.value_and_grad(compute_loss)(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def infer(
    model: Model, state: tuple[Any, Any], images: jax.Array, labels: jax.Array
) -> tuple[tuple[Any, Any], jax.Array]:
    """A forward pass, in the form of `train`: the same state, and the logits."""
    return state, model.logits(state[0], images)
