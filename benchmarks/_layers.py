"""Cases of `speed`: attention in layers of ViT, Swin, NAT and DiNAT, in bfloat16."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._model_shapes import LAYERS, Layer
from benchmarks._timing import Case, copies_beyond_cache, torch_on_gpu
from rope_jax.analysis.timing import compile_loop
from rope_jax_kernels import Global, Pattern, Rotation, attention_qkv
from rope_jax_kernels.rotary import unpack_and_rotate

LEARNED = {"rope": "freqs", "bias": "bias"}  # by a form's position information
_BARE = ("xla", "ours", "triton")
_ROPE = ("xla+rope", "ours+rope", "triton+rope")
_JAX = ("jax.nn+rope", "cudnn+rope", "unpack+rope", "mosaic+rope")
VIT = (*_ROPE, *_JAX, *_BARE, "cudnn", "mosaic")
LOCAL = (*_ROPE, "xla+bias", "ours+bias", "triton+bias", *_BARE)
BOTH = ("forward", "training")
# Layers of `LAYERS`, images, directions and forms.
MEASURED = (
    *(("vit_s", batch, BOTH, VIT) for batch in (64, 128, 256)),
    *((f"swin_t_{stage}", 128, BOTH, LOCAL) for stage in (1, 2, 3, 4)),
    ("nat_mini_1", 64, BOTH, (*LOCAL, "cudnn+all")),
    ("dinat_mini_1", 64, ("forward",), LOCAL),
)


def operands(layer: Layer, batch: int, copies: int) -> tuple:
    """Returns `copies` projections, coords, freqs, bias and the gradient of the output."""
    shapes = layer.shapes(batch)
    qkv = jax.random.normal(jax.random.key(0), shapes["qkv"].shape, jnp.bfloat16)
    (tokens, _), freqs = shapes["coords"].shape, shapes["freqs"]
    coords = jnp.linspace(-1, 1, 2 * tokens).reshape(tokens, 2)
    freqs = jnp.linspace(1, 10, freqs.size).reshape(freqs.shape)
    bias = jnp.linspace(-1, 1, shapes["bias"].size).reshape(shapes["bias"].shape)
    dout = jnp.ones(shapes["out"].shape, jnp.bfloat16)
    return tuple(qkv + i for i in range(copies)), coords, freqs, bias, dout


def attend(
    form: str,
    pattern: Pattern,
    qkv: jax.Array,
    coords: jax.Array,
    freqs: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    """Computes the output of a form from a packed projection."""
    implementation, _, position = form.partition("+")
    rotation = Rotation(coords, freqs) if position == "rope" else None
    if implementation in ("cudnn", "jax.nn"):
        tokens = qkv.reshape(qkv.shape[0], -1, *qkv.shape[-3:])
        q, k, v = unpack_and_rotate(tokens, rotation, implementation="xla")
        kernel = "cudnn" if implementation == "cudnn" else "xla"
        out = jax.nn.dot_product_attention(q, k, v, implementation=kernel)
        return out.reshape(*qkv.shape[:-3], *qkv.shape[-2:])
    terms = {"rotation": rotation, "bias": bias if position == "bias" else None}
    names: dict[str, str | None] = {"ours": None, "unpack": "cudnn"}
    implementation = names.get(implementation, implementation)
    return attention_qkv(qkv, pattern=pattern, **terms, implementation=implementation)


def make_step(pattern: Pattern, form: str, direction: str) -> Callable:
    """Returns a function of (qkv, coords, freqs, bias, dout).

    In training it also returns the gradients of qkv and of the form's learned operands.
    """
    position = form.partition("+")[2]

    def forward(qkv, coords, freqs, bias, dout):
        return attend(form, pattern, qkv, coords, freqs, bias)

    def training(qkv, coords, freqs, bias, dout):
        terms = {"freqs": freqs, "bias": bias}
        learned = {name: terms[name] for name in terms if name == LEARNED.get(position)}

        def run(qkv: jax.Array, learned: dict[str, Any]) -> jax.Array:
            return attend(form, pattern, qkv, coords, **terms | learned)

        out, pull_back = jax.vjp(run, qkv, learned)
        return out, pull_back(dout)

    return training if direction == "training" else forward


def attention(*, small: bool) -> Iterator[Case]:
    """The layers; small ones with the same patterns where there is no GPU."""
    measured = [MEASURED[0], MEASURED[3], MEASURED[7]] if small else MEASURED
    for name, batch, directions, forms in measured:
        layer = LAYERS[name]
        if small:
            places = layer.places if layer.pattern == Global() else (14, 14)
            batch, layer = 1, dataclasses.replace(layer, places=places)
        shape = layer.shapes(batch)["qkv"]
        size = shape.size * shape.dtype.itemsize
        copies = copies_beyond_cache(size)
        arguments = functools.partial(operands, layer, batch, copies)
        for direction in directions:
            moved = 4 * size // 3 * (2 if direction == "training" else 1)
            makers = {
                form: functools.partial(
                    compile_loop, make_step(layer.pattern, form, direction), arguments
                )
                for form in forms
            }
            if direction == "forward" and torch_on_gpu():
                from benchmarks import _torch

                makers |= _torch.attentions(layer.pattern, arguments)
            group = f"attention, {name.partition('_')[0]}, {direction}"
            yield Case(group, f"{name}, {batch} images", makers, moved)
