"""Attention kernels against XLA, cuDNN and others: layers of ViT, Swin, NAT and DiNAT in bfloat16, forward and with their backward pass.

    python -m benchmarks attention --out benchmarks/results/attention_h200.json     on a GPU: all layers, in 8 minutes
    python -m benchmarks attention                                                  on a CPU: small layers, the forms of XLA alone

Every form takes the packed projection [B, ..., 3, N, D] to the output [B, ..., N, D]. A form is an implementation and, after a plus, what
says where tokens are: rope (the rotation of half of the channels, its frequencies per head and learned) or bias (Swin's and NAT's tables).

    xla       rope_jax_kernels in plain jax.numpy
    triton    rope_jax_kernels' kernels (on a GPU only: interpreted they say nothing of time)
    cudnn     jax.nn.dot_product_attention; jnp takes q, k and v apart and turns them. Of neighbourhoods: over all tokens of the map
    unpack    the same behind the kernel that takes apart and turns (attention_qkv(implementation="cudnn"))
    torch     where it is installed, forward: scaled_dot_product_attention, and for windows and neighbourhoods FlexAttention with the
              pattern as its mask; under torch.compile, from the packed projection, without a rotation

A figure is the median of a program of several layers, each waiting for the one before; forms take turns. "hot" repeats on one array,
"cold" goes round arrays that together do not fit into a cache (the goals are cold). From the same process: what a launch costs, and what
memory gives. `traffic_us` is what q, k, v and the output take at that bandwidth, read or written once.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._goals import GOALS
from benchmarks._record import record, write
from benchmarks._timing import CACHE_BYTES, Timer, geometric_mean, machine_limits, take_turns
from rope_jax_kernels import Global, Neighborhood, Rotation, Window, attention_qkv
from rope_jax_kernels.attention.patterns import Pattern
from rope_jax_kernels.rotary.unpack import unpack_and_rotate

STEPS, PASSES = 8, 4  # layers in one program, and how often it is started for one figure


@dataclasses.dataclass(frozen=True)
class Layer:
    """One problem: the attention of a model's layer, forward or "training" (with the gradients of all that it is given)."""

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
        """Of the packed projection."""
        return self.batch, *self.places, 3, self.heads, self.head_dim

    @property
    def moved_bytes(self) -> int:
        """Bytes of q, k, v and the output."""
        return 4 * 2 * self.batch * int(np.prod(self.places)) * self.heads * self.head_dim

    def operands(self, copies: int) -> tuple:
        """Projections, as often as asked for, then coords, freqs, bias and the output's gradient."""
        tokens, table = int(np.prod(self.places)), (self.heads, 1)
        if isinstance(self.pattern, Window):
            window = self.pattern.fit(self.places)
            tokens, table = window.size[0] * window.size[1], window.bias_shape(self.heads)
        elif isinstance(self.pattern, Neighborhood):
            table = self.pattern.bias_shape(self.heads)
        qkv = jax.random.normal(jax.random.key(0), self.shape, jnp.bfloat16)
        coords = jnp.linspace(-1, 1, 2 * tokens).reshape(tokens, 2)
        freqs = jnp.linspace(1, 10, self.heads * self.head_dim // 2).reshape(self.heads, 2, -1)
        dout = jnp.ones((self.batch, *self.places, self.heads, self.head_dim), jnp.bfloat16)
        return [qkv + i for i in range(copies)], coords, freqs, jnp.zeros(table), dout


def layers(short: bool) -> Iterator[Layer]:
    """All problems, or small ones of the same kinds."""
    vit = ("cudnn+rope", "unpack+rope", "cudnn", "xla+rope", "triton+rope", "triton", "mosaic+rope", "mosaic")
    local = ("xla+rope", "xla+bias", "triton+rope", "triton+bias", "triton")
    dense = ("cudnn", *local)
    for batch in (2,) if short else (64, 128, 256):
        yield Layer("ViT", Global(), batch, (196,), 6, 64, "forward", vit)
    for side, heads in ((14, 3),) if short else ((56, 3), (28, 6), (14, 12), (7, 24)):
        yield Layer("Swin", Window((7, 7), (3, 3)), 2 if short else 128, (side, side), heads, 32, "forward", local)
        yield Layer("Swin", Window((7, 7), (3, 3)), 2 if short else 128, (side, side), heads, 32, "training", local)
    side, batch = (14, 1) if short else (56, 64)
    yield Layer("NAT", Neighborhood((7, 7)), batch, (side, side), 2, 32, "forward", dense)
    if not short:
        yield Layer("ViT", Global(), 128, (196,), 6, 64, "training", vit)
        yield Layer("NAT", Neighborhood((7, 7)), batch, (side, side), 2, 32, "training", local)
        yield Layer("DiNAT", Neighborhood((7, 7), (8, 8)), batch, (side, side), 2, 32, "forward", local)


def attend(form: str, pattern: Pattern, qkv: jax.Array, coords: jax.Array, freqs: jax.Array, bias: jax.Array) -> jax.Array:
    """The output of a form, in the shape that is its own."""
    implementation, _, position = form.partition("+")
    rotation = Rotation(coords, freqs) if position == "rope" else None
    if implementation == "cudnn":
        tokens = qkv.reshape(qkv.shape[0], -1, *qkv.shape[-3:])
        q, k, v = unpack_and_rotate(tokens, rotation, implementation="xla")
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    implementation = {"unpack": "cudnn"}.get(implementation, implementation)
    return attention_qkv(qkv, pattern=pattern, rotation=rotation, bias=bias if position == "bias" else None, implementation=implementation)


def sees(pattern: Window | Neighborhood, places: tuple[int, int], query: Any, key: Any) -> Any:
    """Whether queries attend to keys, by the numbers of their tokens (integer arrays of any kind); window and dilation divide the map."""

    def along(query: Any, key: Any, length: int, size: int, step: int) -> Any:
        if isinstance(pattern, Window):
            return ((query - step) % length // size == (key - step) % length // size) & ((query < step) == (key < step))
        first = (query // step - size // 2).clip(0, max(length // step - size, 0))
        return (query % step == key % step) & (first <= key // step) & (key // step < first + size)

    fitted = pattern.fit(places) if isinstance(pattern, Window) else pattern
    (h, w), (dy, dx) = fitted.size, fitted.shift if isinstance(fitted, Window) else fitted.dilation
    height, width = places
    return along(query // width, key // width, height, h, dy) & along(query % width, key % width, width, w, dx)


def pass_of(layer: Layer, form: str) -> Callable:
    """(qkv, coords, freqs, bias, dout) -> what the layer's direction asks for."""
    run = functools.partial(attend, form, layer.pattern)

    def training(qkv, coords, freqs, bias, dout):
        out, pull_back = jax.vjp(lambda qkv, freqs, bias: run(qkv, coords, freqs, bias), qkv, freqs, bias)
        return out, pull_back(dout.reshape(out.shape))

    return training if layer.direction == "training" else lambda *operands: run(*operands[:-1])


def one_after_another(step: Callable, qkvs: list[jax.Array], *rest: jax.Array) -> list:
    """The results of a step on each of several projections."""
    results = []
    for qkv in qkvs:
        # Waits for the one before. Without it XLA would join equal steps and mix the others.
        qkv, results = jax.lax.optimization_barrier((qkv, results))
        results.append(step(qkv, *rest))
    return results


def timer_of(run: Callable, qkvs: list[jax.Array], rest: tuple) -> Timer:
    """What times one step of a compiled program, in microseconds."""
    jax.block_until_ready(run(qkvs, *rest))

    def elapsed() -> float:
        start = time.perf_counter()
        # Started without waiting, so that all but the first start while the GPU is at work.
        jax.block_until_ready([run(qkvs, *rest) for _ in range(PASSES)][-1])
        return 1e6 * (time.perf_counter() - start) / len(qkvs) / PASSES

    return elapsed


def measure(layer: Layer, turns: int, on_gpu: bool) -> dict:
    """Figures of one layer: temperature -> form -> microseconds."""
    qkv_bytes = 3 * layer.moved_bytes // 4
    copies = min(STEPS, max(2, -(-CACHE_BYTES // qkv_bytes))) if on_gpu else 1
    qkvs, *rest = layer.operands(copies)
    timers: dict[str, dict[str, Timer]] = {"hot": {}, "cold": {}} if on_gpu else {"hot": {}}
    for form in layer.forms:
        if on_gpu or form.startswith("xla"):
            run = jax.jit(functools.partial(one_after_another, pass_of(layer, form)))
            arrays = {"hot": qkvs[:1] * STEPS, "cold": [qkvs[i % copies] for i in range(STEPS)]}
            for temperature, timers_of in timers.items():
                timers_of[form] = timer_of(run, arrays[temperature], tuple(rest))
    if on_gpu and layer.direction == "forward" and importlib.util.find_spec("torch"):
        from benchmarks import _torch

        mask = None if isinstance(layer.pattern, Global) else functools.partial(sees, layer.pattern, layer.places)
        timers["cold"] |= _torch.attentions(mask, layer.shape, copies, -(-STEPS // copies))
    figures = {temperature: take_turns(forms, turns) for temperature, forms in timers.items()}
    described = dataclasses.asdict(layer) | {"pattern": str(layer.pattern), "moved_bytes": layer.moved_bytes}
    return described | {"microseconds": figures}


def run(args: argparse.Namespace) -> dict:
    """Measures all layers until the time is over, and returns what is worth keeping."""
    deadline, on_gpu = time.monotonic() + args.limit_s, jax.default_backend() == "gpu"
    figures = {"limits": machine_limits(args.turns), "rows": []}
    result = lambda: record("attention", vars(args), **figures, goals=goals(figures))
    todo = list(layers(args.short or not on_gpu))
    for done, layer in enumerate(todo):
        if time.monotonic() > deadline:
            print(f"stopped after {done} of {len(todo)} layers: --limit-s={args.limit_s}")
            break
        figures["rows"].append(measure(layer, args.turns, on_gpu))
        write(result(), args.out)
    return result()


def traffic_us(row: dict, limits: dict[str, float]) -> float:
    """Microseconds that q, k, v and the output take at the bandwidth of a copy."""
    return row["moved_bytes"] / limits["copy_gb_per_s"] / 1e3


def goals(figures: dict) -> dict[str, dict[str, float]]:
    """Goal -> its value, the least and the most of the ratios it is made of, and how many these are. Only what was measured, cold."""
    ratios: dict[str, list[float]] = {}
    sides = {
        "A1": ("ViT", "forward", "cudnn+rope", "triton+rope"),
        "A2": ("ViT", "forward", "triton+rope", "triton"),
        "A3": ("Swin", "forward", "xla+rope", "triton+rope"),
        "A4": ("Swin", "training", "xla+bias", "triton+rope"),
        "A5": ("NAT", "forward", "cudnn", "triton+rope"),
    }
    for row in figures["rows"]:
        times = row["microseconds"].get("cold", {})
        for name, (model, direction, *forms) in sides.items():
            if (model, direction) == (row["model"], row["direction"]) and set(forms) <= set(times):
                ratios.setdefault(name, []).append(times[forms[0]] / times[forms[1]])
        if (row["model"], row["direction"]) == ("NAT", "forward") and "triton+rope" in times:
            ratios.setdefault("A6", []).append(times["triton+rope"] / traffic_us(row, figures["limits"]))
    return {
        name: {"value": geometric_mean(values), "least": min(values), "most": max(values), "count": len(values)}
        for name, values in ratios.items()
    }


def summary(result: dict) -> str:
    """What a reader wants first: limits, times, and the goals."""
    limits = result["limits"]
    lines = [f"launch {limits['launch_us']:.2f} us, copy {limits['copy_gb_per_s']:,.0f} GB/s, on {result['machine']['device']}"]
    if result["machine"]["platform"] != "gpu":
        lines.append("no GPU: small layers, and the forms of XLA alone; the kernels interpreted would say nothing of time")
    for row in result["rows"]:
        sizes = f"batch {row['batch']}, {'x'.join(map(str, row['places']))} tokens, {row['heads']} heads of {row['head_dim']}"
        lines += ["", f"{row['model']} {row['direction']}, {row['pattern']}, {sizes}"]
        for temperature, times in row["microseconds"].items():
            lines.append(f"  {temperature:6}" + "  ".join(f"{form} {us:.1f}" for form, us in times.items()) + " us")
        lines.append(f"  traffic {traffic_us(row, limits):.1f} us")
    lines += ["", f"{'goal':5}{'measured':>9}{'least':>8}{'most':>8}{'sizes':>6}  {'floor':8}{'goal':8}{'moonshot':9}what"]
    for goal in (goal for goal in GOALS if goal.name.startswith("A")):
        found = result["goals"].get(goal.name)
        figures = f"{found['value']:9.2f}{found['least']:8.2f}{found['most']:8.2f}{found['count']:6}" if found else f"{'not measured':>31}"
        lines.append(f"{goal.name:5}{figures}  {goal.floor:8}{goal.goal:8}{goal.moonshot:9}{goal.what}")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="small layers, as on a CPU")
    parser.add_argument("--turns", type=int, default=21, help="how often the forms take turns")
    parser.add_argument("--limit-s", type=float, default=400.0, help="start no layer after this time; what is measured by then is kept")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Measures, prints times and goals, and writes the figures where --out says."""
    # Other software needs room on the GPU, too. Read when jax first looks for devices.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args = parse(argv)
    result = run(args)
    print(summary(result))
    write(result, args.out)
