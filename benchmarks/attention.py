"""Attention kernels against XLA, cuDNN and torch: layers of ViT, Swin, NAT and DiNAT in bfloat16.

    python -m benchmarks attention --out benchmarks/results/attention_gpu.json

Programs are compiled side by side, first those of one layer for each goal, and torch is measured
last. A call that is interrupted, or ends at --limit-s, is continued by the same command. On a CPU
only small layers and XLA are measured, because timings of interpreted kernels mean nothing.

Every form maps the packed projection [B, ..., 3, N, D] to the output [B, ..., N, D]. A form is
named by its implementation and, after a plus, its position information: rope (half of the channels
rotated, with learned frequencies per head) or bias (the tables of Swin and NAT).

    xla       rope_jax_kernels in plain jax.numpy
    triton    rope_jax_kernels' Triton kernels; mosaic: its Mosaic GPU kernels
    default   what `implementation=None` takes here, measured choices included
    cudnn     jax.nn.dot_product_attention on q, k, v unpacked and rotated in jax.numpy;
              for neighbourhoods, over all tokens of the map
    unpack    the same, with the kernel that unpacks and rotates
    torch     if installed, forward only: scaled_dot_product_attention, or FlexAttention with the
              pattern as mask, with torch.compile and without rotation

Times are medians per layer of a compiled loop of dependent layers; forms are timed in turns. "hot"
uses one array repeatedly, "cold" cycles through arrays that together exceed every cache; the goals
are for cold caches. `traffic_us` is the time to read or write q, k, v and the output once at the
bandwidth of a copy, measured in the same process. `graphs` is the share of a loop's launches that
XLA compiled into CUDA graphs. Forms that fail are listed in `left_out` with the reason; after one
that hangs, the process ends, and the next call goes on without it.
"""

import concurrent.futures
import functools
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks._goals import goal_table, spread
from benchmarks._layers import ROUNDS, STEPS, Layer, compile_form, copies_of, layers, sees
from benchmarks._runner import Keep, Result, earlier, end_now
from benchmarks._timing import (
    Timer,
    groups,
    machine_limits,
    reason_of,
    take_turns,
    torch_on_gpu,
    within,
    working,
)
from rope_jax_kernels import Global

TOGETHER = 4  # layers that are compiled together, then measured one by one
HANGS_S = 20.0  # in which the first run of a form must end
KERNELS = ("triton", "mosaic")  # with the rotation inside


def timer_of(run: Callable, qkvs: list[jax.Array], rest: list, steps: int) -> Timer:
    """Returns a timer of one of `steps` layers of a compiled loop.

    Raises:
        TimeoutError: a first run does not end.
    """
    # XLA launches kernel by kernel in the first run, and forms graphs in the second.
    within(HANGS_S, lambda: [jax.block_until_ready(run(qkvs, *rest)) for _ in range(2)])

    def elapsed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(qkvs, *rest))
        return 1e6 * (time.perf_counter() - start) / steps

    return elapsed


class Hangs(Exception):
    """The first run of this form does not end."""


Compiled = dict[str, tuple[Callable, float | None] | str]  # by form, from `compile_form`


def timers_of(
    loops: Compiled, arrays: dict[str, list[jax.Array]], rest: list, steps: int
) -> tuple[dict[str, dict[str, Timer]], dict[str, str]]:
    """Timers by temperature and form, and the reason for each form without one.

    Raises:
        Hangs: the device does not answer after a form.
    """
    timers: dict[str, dict[str, Timer]] = {temperature: {} for temperature in arrays}
    left_out = {form: loop for form, loop in loops.items() if isinstance(loop, str)}
    for form in [form for form in loops if form not in left_out]:
        try:
            own = {
                name: timer_of(loops[form][0], some, rest, steps) for name, some in arrays.items()
            }
        except TimeoutError as error:
            raise Hangs(form) from error
        except Exception as error:  # such as too little memory
            left_out[form] = reason_of(error)
        else:
            for temperature, timer in own.items():
                timers[temperature][form] = timer
    return timers, left_out


def measure(layer: Layer, loops: Compiled, turns: int, limits: dict[str, Any]) -> dict[str, Any]:
    """Measures a layer; returns its fields, and microseconds by temperature and form."""
    on_gpu = jax.default_backend() == "gpu"
    copies, steps = copies_of(layer, on_gpu), ROUNDS * STEPS if on_gpu else 2
    qkvs, *rest = jax.jit(lambda: layer.operands(copies))()
    arrays = {"cold": qkvs, "hot": qkvs[:1] * copies} if on_gpu else {"hot": qkvs}
    timers, left_out = timers_of(loops, arrays, rest, steps)
    figures = {temperature: take_turns(forms, turns) for temperature, forms in timers.items()}
    traffic_us = layer.moved_bytes / limits["copy_gb_per_s"] / 1e3
    row = layer.about | {"moved_bytes": layer.moved_bytes, "traffic_us": traffic_us}
    graphs = {form: loop[1] for form, loop in loops.items() if form not in left_out}
    return row | {"microseconds": figures, "graphs": graphs, "left_out": left_out}


def measure_peers(
    layer: Layer, loops: Compiled, turns: int, limits: dict[str, Any]
) -> dict[str, Any]:
    """Measures torch and our forms without a position in turns, with cold caches."""
    from benchmarks import _torch

    del limits
    copies, is_global = copies_of(layer, True), isinstance(layer.pattern, Global)
    qkvs, *rest = jax.jit(lambda: layer.operands(copies))()
    timers, left_out = timers_of(loops, {"cold": qkvs}, rest, ROUNDS * STEPS)
    mask = None if is_global else functools.partial(sees, layer.pattern, layer.places)
    torch, refused = working(_torch.attentions(mask, layer.shape, copies, -(-STEPS // copies)))
    figures = {"cold": take_turns(timers["cold"] | torch, turns)}
    return layer.about | {"microseconds": figures, "left_out": left_out | refused}


MEASURES = {"rows": measure, "peers": measure_peers}
IDENTITY = ("model", "pattern", "batch", "places", "direction")  # of a layer in a result


# Goal -> model, direction, and the forms in numerator and denominator; "ours" is the faster of
# KERNELS with the rotation, "bare" the same kernel without it.
RATIOS = {
    "A1": ("ViT", "forward", "cudnn+rope", "ours"),
    "A2": ("ViT", "forward", "ours", "bare"),
    "A3": ("Swin", "forward", "xla+rope", "ours"),
    "A4": ("Swin", "training", "xla+bias", "ours"),
    "A5": ("NAT", "forward", "cudnn", "ours"),
    "A6": ("NAT", "forward", "ours", "traffic"),
}


def goals(rows: Sequence[dict]) -> dict[str, dict[str, Any]]:
    """The goals that were measured, with cold caches."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        times = dict(row["microseconds"].get("cold", {}))
        ours = [name for name in KERNELS if f"{name}+rope" in times]
        if ours:
            best = min(ours, key=lambda name: times[f"{name}+rope"])
            times |= {"ours": times[f"{best}+rope"], "traffic": row["traffic_us"]}
            times |= {"bare": times[best]} if best in times else {}
        for name, (model, direction, over, under) in RATIOS.items():
            if (model, direction) == (row["model"], row["direction"]) and {over, under} <= {*times}:
                ratios.setdefault(name, []).append(times[over] / times[under])
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
        lines.append(f"  traffic {row['traffic_us']:.1f} us")
        lines += [f"  {form} is left out: {reason}" for form, reason in row["left_out"].items()]
    for row in result["peers"]:
        times = row["microseconds"]["cold"].items()
        figures = "  ".join(f"{form} {us:.1f}" for form, us in times)
        lines += ["", f"{row['model']}, {row['pattern']}, without position: {figures} us"]
        lines += [f"  {form} is left out: {reason}" for form, reason in row["left_out"].items()]
    return "\n".join([*lines, "", goal_table(result["goals"], "A")])


def tasks(short: bool, on_gpu: bool) -> list[tuple[str, Layer]]:
    """All layers for the rows of a result, then those for its peers, if torch finds a GPU."""
    found = list(layers(short))
    with_torch = on_gpu and torch_on_gpu()
    others = [layer for layer in found if layer.direction == "forward" and with_torch]
    return [("rows", layer) for layer in found] + [("peers", layer) for layer in others]


def compile_all(
    pool: concurrent.futures.Executor,
    group: Sequence[tuple[str, Layer]],
    hangs: Sequence,
    on_gpu: bool,
) -> list[dict[str, Any]]:
    """`compile_form` of all forms of some tasks, side by side; compilers release the GIL."""

    def wanted(kind: str, layer: Layer, form: str) -> bool:
        compared = kind == "rows" or "+" not in form
        return compared and (on_gpu or form.startswith("xla")) and [layer.about, form] not in hangs

    compiling = [
        {
            form: pool.submit(compile_form, layer, form, on_gpu)
            for form in layer.forms
            if wanted(kind, layer, form)
        }
        for kind, layer in group
    ]
    return [{form: x.result() for form, x in of_one.items()} for of_one in compiling]


def run(
    keep: Keep,
    *,
    out: pathlib.Path | None,
    short: bool = False,
    turns: int = 11,
    limit_s: float = 400.0,
) -> None:
    """Measures layers one after the other, and saves the result after each.

    Args:
        keep: saves the result.
        out: of an earlier call, to continue.
        short: measure small layers, as on a CPU
        turns: timed turns of each form
        limit_s: end after this many seconds
    """
    deadline, on_gpu = time.monotonic() + limit_s, jax.default_backend() == "gpu"
    before = earlier(out, "attention", {"short": short, "turns": turns})
    figures = {name: before.get(name, []) for name in ("rows", "peers", "hangs")}
    limits, everything = machine_limits(turns), tasks(short or not on_gpu, on_gpu)

    def missing() -> list[tuple[str, Layer]]:
        done = [(kind, *map(row.get, IDENTITY)) for kind, rows in figures.items()
                if kind != "hangs" for row in rows]  # fmt: skip
        return [
            (kind, layer)
            for kind, layer in everything
            if (kind, *map(layer.about.get, IDENTITY)) not in done
        ]

    def keep_all() -> Result:
        return keep(limits=limits, **figures, goals=goals(figures["rows"]), left=len(missing()))

    result, todo = keep_all(), missing()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for group in groups(todo, TOGETHER):
            # Nothing compiles during timing.
            compiled = compile_all(pool, group, figures["hangs"], on_gpu)
            for (kind, layer), loops in zip(group, compiled, strict=True):
                if time.monotonic() > deadline:
                    break
                try:
                    figures[kind].append(MEASURES[kind](layer, loops, turns, limits))
                except Hangs as form:
                    figures["hangs"].append([layer.about, str(form)])
                    keep_all()
                    end_now(f"{form} of {layer.model} does not end; the next call goes on without")
                result = keep_all()
            if time.monotonic() > deadline:
                print(f"stopped with {result['left']} layers left: --limit-s={limit_s:g}")
                break
    print(summary(result))
