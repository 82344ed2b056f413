"""The layers and the forms of attention that `benchmarks attention` measures."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._timing import CACHE_BYTES, compile_loop_of, reason_of
from rope_jax_kernels import Global, Neighborhood, Pattern, Rotation, Window, attention_qkv
from rope_jax_kernels.rotary import unpack_and_rotate

LEARNED = {"rope": "freqs", "bias": "bias"}  # by a form's position information
STEPS, ROUNDS = 8, 4  # layers in the body of a loop; its iterations
_VIT = ("cudnn+rope", "unpack+rope", "cudnn", "xla+rope", "triton+rope", "triton")
_VIT_FORMS = (*_VIT, "mosaic+rope", "mosaic", "default+rope")
_LOCAL_FORMS = ("xla+rope", "xla+bias", "triton+rope", "triton+bias", "triton", "default+rope")


@dataclasses.dataclass(frozen=True)
class Layer:
    """The attention of one layer, "forward" or "training" (with gradients of all inputs)."""

    model: str
    pattern: Pattern
    batch: int
    places: tuple[int, ...]
    heads: int
    head_dim: int
    direction: str
    forms: tuple[str, ...]

    @property
    def about(self) -> dict[str, Any]:
        """The fields by name, as they are in a result."""
        fields = dataclasses.asdict(self) | {"pattern": str(self.pattern)}
        return fields | {"places": list(self.places), "forms": list(self.forms)}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the packed projection."""
        return self.batch, *self.places, 3, self.heads, self.head_dim

    @property
    def moved_bytes(self) -> int:
        """Bytes of q, k, v and the output."""
        return 4 * 2 * self.batch * math.prod(self.places) * self.heads * self.head_dim

    def operands(self, copies: int) -> tuple:
        """Returns `copies` projections, coords, freqs, bias and the gradient of the output."""
        tokens, table = self.pattern.rotated_tokens(self.places), (self.heads, 1)
        if not isinstance(self.pattern, Global):
            table = self.pattern.bias_shape(self.heads, self.places)
        qkv = jax.random.normal(jax.random.key(0), self.shape, jnp.bfloat16)
        coords = jnp.linspace(-1, 1, 2 * tokens).reshape(tokens, 2)
        freqs = jnp.linspace(1, 10, self.heads * self.head_dim // 2).reshape(self.heads, 2, -1)
        dout = jnp.ones((self.batch, *self.places, self.heads, self.head_dim), jnp.bfloat16)
        return [qkv + i for i in range(copies)], coords, freqs, jnp.zeros(table), dout


def layers(short: bool) -> Iterator[Layer]:
    """Returns all layers, one for each goal first; or small layers of the same kinds."""
    batches, batch, side = ((2,), 2, 14) if short else ((128, 64, 256), 128, 56)
    window, near, far = Window((7, 7), (3, 3)), Neighborhood((7, 7)), Neighborhood((7, 7), (8, 8))
    map_, batch_of_map = ((14, 14), 1) if short else ((56, 56), 64)
    vits = [
        Layer("ViT", Global(), batch, (196,), 6, 64, "forward", _VIT_FORMS) for batch in batches
    ]
    swins = [
        Layer("Swin", window, batch, (side >> n,) * 2, 3 << n, 32, direction, _LOCAL_FORMS)
        for n in range(1 if short else 4)
        for direction in ("forward", "training")
    ]
    of_maps = {"places": map_, "heads": 2, "head_dim": 32}
    nat = Layer(
        "NAT", near, batch_of_map, **of_maps, direction="forward", forms=("cudnn", *_LOCAL_FORMS)
    )
    yield from (vits[0], *swins[:2], nat)
    if not short:
        vit = dataclasses.replace(vits[0], direction="training")
        training = dataclasses.replace(nat, direction="training", forms=_LOCAL_FORMS)
        dilated = dataclasses.replace(nat, model="DiNAT", pattern=far, forms=_LOCAL_FORMS)
        yield from (vit, *vits[1:], training, *swins[2:], dilated)


def attend(
    form: str,
    pattern: Pattern,
    qkv: jax.Array,
    coords: jax.Array,
    freqs: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    """Computes the output of a form; the shape depends on the form."""
    implementation, _, position = form.partition("+")
    rotation = Rotation(coords, freqs) if position == "rope" else None
    if implementation == "cudnn":
        tokens = qkv.reshape(qkv.shape[0], -1, *qkv.shape[-3:])
        q, k, v = unpack_and_rotate(tokens, rotation, implementation="xla")
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    terms = {"rotation": rotation, "bias": bias if position == "bias" else None}
    names: dict[str, str | None] = {"unpack": "cudnn", "default": None}
    implementation = names.get(implementation, implementation)
    return attention_qkv(qkv, pattern=pattern, **terms, implementation=implementation)


def sees(pattern: Window | Neighborhood, places: tuple[int, int], query: Any, key: Any) -> Any:
    """Whether queries attend to keys, for torch's masks; window and dilation must divide the map.

    Args:
        pattern: the attention pattern.
        places: (rows, columns) of the map.
        query: indices of query tokens, an integer array of any library.
        key: indices of key tokens.
    """
    fitted = pattern.fit(places) if isinstance(pattern, Window) else pattern
    steps = fitted.shift if isinstance(fitted, Window) else fitted.dilation

    def along(axis: int, query: Any, key: Any) -> Any:
        length, size, step = places[axis], fitted.size[axis], steps[axis]
        if isinstance(fitted, Window):
            same_window = (query - step) % length // size == (key - step) % length // size
            return same_window & ((query < step) == (key < step))
        first = (query // step - size // 2).clip(0, max(length // step - size, 0))
        return (query % step == key % step) & (first <= key // step) & (key // step < first + size)

    width = places[1]
    rows = along(0, query // width, key // width)
    return rows & along(1, query % width, key % width)


def pass_of(layer: Layer, form: str) -> Callable:
    """Returns a function of (qkv, coords, freqs, bias, dout).

    In training it also returns the gradients of qkv and of what the form learns.
    """
    position = form.partition("+")[2]

    def forward(qkv, coords, freqs, bias, dout):
        return attend(form, layer.pattern, qkv, coords, freqs, bias)

    def training(qkv, coords, freqs, bias, dout):
        known = {"freqs": freqs, "bias": bias}
        learned = {name: known[name] for name in known if name == LEARNED.get(position)}

        def run(qkv, learned):
            return attend(form, layer.pattern, qkv, coords, **known | learned)

        out, pull_back = jax.vjp(run, qkv, learned)
        return out, pull_back(dout.reshape(out.shape))

    return training if layer.direction == "training" else forward


def loop_of(layer: Layer, form: str, rounds: int, steps: int) -> Callable:
    """Returns a loop (qkvs, *rest) -> results of `steps` layers, which share the projections."""
    step = jax.jit(pass_of(layer, form))  # traced and lowered once

    def loop(qkvs: list[jax.Array], *rest: jax.Array) -> list:
        def body(_: jax.Array, results: list) -> list:
            results = list(results)
            for i in range(steps):
                # Depends on the layer before, and shares nothing with it: otherwise XLA would merge
                # layers, or compute angles once for all.
                qkv, own, results = jax.lax.optimization_barrier(
                    (qkvs[i % len(qkvs)], rest, results)
                )
                results[i] = step(qkv, *own)
            return results

        shapes = [jax.eval_shape(step, qkvs[0], *rest)] * steps
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(0, rounds, body, empty)

    return loop


def compile_form(layer: Layer, form: str, on_gpu: bool) -> tuple[Callable, float | None] | str:
    """A form's loop and its share of CUDA graphs, or why there is none."""
    rounds, steps = (ROUNDS, STEPS) if on_gpu else (1, 2)
    shapes = jax.eval_shape(lambda: layer.operands(copies_of(layer, on_gpu)))
    try:
        return compile_loop_of(loop_of(layer, form, rounds, steps), shapes)
    except Exception as error:  # the other forms are measured nevertheless
        return reason_of(error)


def copies_of(layer: Layer, on_gpu: bool) -> int:
    """How many projections exceed every cache."""
    size = 3 * layer.moved_bytes // 4
    return min(STEPS, max(2, -(-CACHE_BYTES // size))) if on_gpu else 1
