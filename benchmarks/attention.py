"""Attention kernels against XLA, cuDNN and torch: layers of ViT, Swin, NAT and DiNAT in bfloat16.

    python -m benchmarks attention --out benchmarks/results/attention_gpu.json

On a GPU, all layers take eight minutes, forward and backward. On a CPU only small layers and XLA
are measured, because timings of interpreted kernels mean nothing.

Every form maps the packed projection [B, ..., 3, N, D] to the output [B, ..., N, D]. A form is
named by its implementation and, after a plus, its position information: rope (half of the channels
rotated, with learned frequencies per head) or bias (the tables of Swin and NAT).

    xla       rope_jax_kernels in plain jax.numpy
    triton    rope_jax_kernels' Triton kernels; mosaic: its Mosaic GPU kernels
    cudnn     jax.nn.dot_product_attention on q, k, v unpacked and rotated in jax.numpy;
              for neighbourhoods, over all tokens of the map
    unpack    the same, with the kernel that unpacks and rotates
    torch     if installed, forward only: scaled_dot_product_attention, or FlexAttention with the
              pattern as mask, with torch.compile and without rotation

Times are medians per layer of a program of several dependent layers; forms are timed in turns.
"hot" uses one array repeatedly, "cold" cycles through arrays that together exceed every cache; the
goals are for cold caches. `traffic_us` is the time to read or write q, k, v and the output once at
the bandwidth of a copy, measured in the same process.
"""

import dataclasses
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._goals import goal_table, spread
from benchmarks._runner import Keep, Result
from benchmarks._timing import CACHE_BYTES, Timer, machine_limits, take_turns
from rope_jax_kernels import Global, Neighborhood, Pattern, Rotation, Window, attention_qkv
from rope_jax_kernels.rotary import unpack_and_rotate

STEPS, PASSES = 8, 4  # layers per program; runs of the program per measurement
_VIT = ("cudnn+rope", "unpack+rope", "cudnn", "xla+rope", "triton+rope", "triton")
_VIT_FORMS = (*_VIT, "mosaic+rope", "mosaic")
_LOCAL_FORMS = ("xla+rope", "xla+bias", "triton+rope", "triton+bias", "triton")


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
    """Returns all layers, or small layers of the same kinds."""
    for batch in (2,) if short else (64, 128, 256):
        yield Layer("ViT", Global(), batch, (196,), 6, 64, "forward", _VIT_FORMS)
    batch, window = 2 if short else 128, Window((7, 7), (3, 3))
    for side, heads in ((14, 3),) if short else ((56, 3), (28, 6), (14, 12), (7, 24)):
        for direction in ("forward", "training"):
            yield Layer("Swin", window, batch, (side, side), heads, 32, direction, _LOCAL_FORMS)
    batch, map_ = (1, (14, 14)) if short else (64, (56, 56))
    near, far = Neighborhood((7, 7)), Neighborhood((7, 7), (8, 8))
    yield Layer("NAT", near, batch, map_, 2, 32, "forward", ("cudnn", *_LOCAL_FORMS))
    if not short:
        yield Layer("ViT", Global(), 128, (196,), 6, 64, "training", _VIT_FORMS)
        yield Layer("NAT", near, batch, map_, 2, 32, "training", _LOCAL_FORMS)
        yield Layer("DiNAT", far, batch, map_, 2, 32, "forward", _LOCAL_FORMS)


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
    implementation = "cudnn" if implementation == "unpack" else implementation
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
    """Returns a function of (qkv, coords, freqs, bias, dout); in training, with gradients."""
    run = functools.partial(attend, form, layer.pattern)

    def forward(qkv, coords, freqs, bias, dout):
        return run(qkv, coords, freqs, bias)

    def training(qkv, coords, freqs, bias, dout):
        out, pull_back = jax.vjp(lambda q, f, b: run(q, coords, f, b), qkv, freqs, bias)
        return out, pull_back(dout.reshape(out.shape))

    return training if layer.direction == "training" else forward


def one_after_another(step: Callable, qkvs: list[jax.Array], *rest: jax.Array) -> list:
    """Applies a step to several projections, one after the other."""
    results = []
    for qkv in qkvs:
        # Makes each step depend on the previous one; otherwise XLA merges or interleaves steps.
        qkv, results = jax.lax.optimization_barrier((qkv, results))
        results.append(step(qkv, *rest))
    return results


def timer_of(run: Callable, qkvs: list[jax.Array], rest: list) -> Timer:
    """Returns a timer of one step of a compiled program."""
    jax.block_until_ready(run(qkvs, *rest))

    def elapsed() -> float:
        start = time.perf_counter()
        # Not synchronised, so that all but the first are launched while the GPU is busy.
        jax.block_until_ready([run(qkvs, *rest) for _ in range(PASSES)][-1])
        return 1e6 * (time.perf_counter() - start) / len(qkvs) / PASSES

    return elapsed


def measure(layer: Layer, turns: int, on_gpu: bool) -> dict[str, Any]:
    """Measures a layer; returns its fields, and microseconds by temperature and form."""
    qkv_bytes = 3 * layer.moved_bytes // 4
    copies = min(STEPS, max(2, -(-CACHE_BYTES // qkv_bytes))) if on_gpu else 1
    qkvs, *rest = layer.operands(copies)
    arrays = {"hot": qkvs[:1] * STEPS}
    if on_gpu:
        arrays["cold"] = [qkvs[i % copies] for i in range(STEPS)]
    timers: dict[str, dict[str, Timer]] = {temperature: {} for temperature in arrays}
    for form in layer.forms:
        if on_gpu or form.startswith("xla"):
            run = jax.jit(functools.partial(one_after_another, pass_of(layer, form)))
            for temperature in arrays:
                timers[temperature][form] = timer_of(run, arrays[temperature], rest)
    if on_gpu and layer.direction == "forward" and importlib.util.find_spec("torch"):
        from benchmarks import _torch

        is_global = isinstance(layer.pattern, Global)
        mask = None if is_global else functools.partial(sees, layer.pattern, layer.places)
        timers["cold"] |= _torch.attentions(mask, layer.shape, copies, -(-STEPS // copies))
    figures = {temperature: take_turns(forms, turns) for temperature, forms in timers.items()}
    row = dataclasses.asdict(layer) | {"pattern": str(layer.pattern)}
    return row | {"moved_bytes": layer.moved_bytes, "microseconds": figures}


def traffic_us(row: dict, limits: dict[str, float]) -> float:
    """Microseconds to move q, k, v and the output at the bandwidth of a copy."""
    return row["moved_bytes"] / limits["copy_gb_per_s"] / 1e3


# Goal -> model, direction, and the forms in numerator and denominator.
RATIOS = {
    "A1": ("ViT", "forward", "cudnn+rope", "triton+rope"),
    "A2": ("ViT", "forward", "triton+rope", "triton"),
    "A3": ("Swin", "forward", "xla+rope", "triton+rope"),
    "A4": ("Swin", "training", "xla+bias", "triton+rope"),
    "A5": ("NAT", "forward", "cudnn", "triton+rope"),
}


def goals(limits: dict[str, float], rows: list[dict]) -> dict[str, dict[str, Any]]:
    """The goals that were measured, with cold caches."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        times = row["microseconds"].get("cold", {})
        kind = (row["model"], row["direction"])
        for name, (model, direction, slow, fast) in RATIOS.items():
            if (model, direction) == kind and {slow, fast} <= set(times):
                ratios.setdefault(name, []).append(times[slow] / times[fast])
        if kind == ("NAT", "forward") and "triton+rope" in times:
            ratios.setdefault("A6", []).append(times["triton+rope"] / traffic_us(row, limits))
    return {name: spread(values) for name, values in ratios.items()}


def summary(result: Result) -> str:
    """Limits, times and goals, for the terminal."""
    limits, device = result["limits"], result["machine"]["device"]
    copy = f"copy {limits['copy_gb_per_s']:,.0f} GB/s"
    lines = [f"launch {limits['launch_us']:.2f} us, {copy}, on {device}"]
    if result["machine"]["platform"] != "gpu":
        lines.append("no GPU: small layers and XLA only")
    for row in result["rows"]:
        tokens = "x".join(map(str, row["places"]))
        heads = f"{row['heads']} heads of {row['head_dim']}"
        sizes = f"batch {row['batch']}, {tokens} tokens, {heads}"
        lines += ["", f"{row['model']} {row['direction']}, {row['pattern']}, {sizes}"]
        for temperature, times in row["microseconds"].items():
            figures = "  ".join(f"{form} {us:.1f}" for form, us in times.items())
            lines.append(f"  {temperature:6}{figures} us")
        lines.append(f"  traffic {traffic_us(row, limits):.1f} us")
    return "\n".join([*lines, "", goal_table(result["goals"], "A")])


def run(keep: Keep, *, short: bool = False, turns: int = 21, limit_s: float = 400.0) -> None:
    """Measures layers one after the other, and saves the result after each.

    Args:
        keep: saves the result.
        short: measure small layers, as on a CPU
        turns: timed turns of each form
        limit_s: start no layer after this many seconds
    """
    deadline, on_gpu = time.monotonic() + limit_s, jax.default_backend() == "gpu"
    limits, rows = machine_limits(turns), []
    result = keep(limits=limits, rows=rows, goals={})
    todo = list(layers(short or not on_gpu))
    for done, layer in enumerate(todo):
        if time.monotonic() > deadline:
            print(f"stopped after {done} of {len(todo)} layers: --limit-s={limit_s}")
            break
        rows.append(measure(layer, turns, on_gpu))
        result = keep(limits=limits, rows=rows, goals=goals(limits, rows))
    print(summary(result))
