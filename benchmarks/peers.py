"""ViT-S/16 on a CPU, trained and forward, compared with other JAX libraries: time and memory.

    pip install --target build/peers --no-deps -r benchmarks/peers.txt
    PYTHONPATH=build/peers python -m benchmarks peers --out benchmarks/results/peers_cpu.json

All train a model of equal parameters with one step of optax's AdamW, compiled by jax with the state
donated, on the same images, and compute its logits; peers that are not installed are left out. Each
takes steps in turns, so that other load on the machine affects all, and ratios are of times within
a turn. Dropout and drop path are off. `make test-aot ARGS=--peers` compiles the same training steps
for an H200.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import _peers
from benchmarks._runner import Keep
from benchmarks.cpu import quartiles
from rope_jax.system.cores import cores, keep_freed_memory, multiplies_bfloat16

COLUMNS = ("position", "pass", "dtype", "library", "ms", "relative to ours (quartiles)")
COLUMNS += ("relative to its float32", "memory, MB")
DTYPES = ("float32", "bfloat16")
PASSES = {"training": _peers.train, "forward": _peers.infer}


def start(
    model: _peers.Model, form: str, batch: int, size: int
) -> tuple[Callable[[int], float], int, int]:
    """Compiles one of PASSES; returns how to take steps, temporary bytes, and parameters."""
    images, labels = model.images(batch, size), np.arange(batch) % _peers.CLASSES
    drawn = np.random.default_rng(0).standard_normal((batch, size, size, 3), np.float32)
    values = drawn.transpose(0, 3, 1, 2) if model.channels_first else drawn
    state = jax.jit(functools.partial(_peers.init_state, model))()
    step = jax.jit(functools.partial(PASSES[form], model), donate_argnums=0)
    compiled = step.lower(state, images, labels).compile()

    def take(steps: int) -> float:
        nonlocal state
        begun = time.perf_counter()
        for _ in range(steps):
            state, result = compiled(state, values, labels)
        jax.block_until_ready((state, result))
        if not np.isfinite(result).all():
            raise SystemExit(f"the loss or the logits are {result}")
        return (time.perf_counter() - begun) / steps

    count = sum(x.size for x in jax.tree.leaves(state[0]))
    return take, compiled.memory_analysis().temp_size_in_bytes, count


def compare(position: str, form: str, *, batch: int, size: int, turns: int) -> list[dict[str, Any]]:
    """Measures our step and those of the peers, in float32 and bfloat16, in turns."""
    started = {
        (dtype, name): start(model, form, batch, size)
        for dtype in DTYPES
        for name, model in _peers.models(position, size, dtype).items()
    }
    counts = {count for _, _, count in started.values()}
    if max(counts) - min(counts) > _peers.FREQUENCIES:  # which Equimo counts
        raise SystemExit(f"the models differ: they have {sorted(counts)} parameters")
    steps = {key: max(1, round(1 / take(2))) for key, (take, *_) in started.items()}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in started}
    for _, (key, (take, *_)) in itertools.product(range(turns), started.items()):
        seconds[key].append(take(steps[key]))

    def ratios(times: list[float], other: tuple[str, str]) -> list[float]:
        return [x / y for x, y in zip(times, seconds[other], strict=True)]

    return [
        {
            "position": position,
            "dtype": dtype,
            "pass": form,
            "library": name,
            "parameters": count,
            "memory": memory,
            "seconds": times,
            "relative": ratios(times, (dtype, _peers.OURS)),
            "relative_to_float32": ratios(times, ("float32", name)),
        }
        for ((dtype, name), (_, memory, count)), times in zip(
            started.items(), seconds.values(), strict=True
        )
    ]


def row(case: dict[str, Any]) -> list[str]:
    """A row of COLUMNS."""

    def ratio(name: str, shown: bool) -> str:
        low, median, high = quartiles(case[name])
        return f"{median:.2f} ({low:.2f} to {high:.2f})" if shown else ""

    return [
        f"`{case['position']}`",
        case["pass"],
        case["dtype"],
        case["library"],
        f"{1e3 * statistics.median(case['seconds']):.0f}",
        ratio("relative", case["library"] != _peers.OURS),
        ratio("relative_to_float32", case["dtype"] != "float32"),
        f"{case['memory'] / 1e6:.0f}",
    ]


def run(keep: Keep, *, batch: int = 8, size: int = 112, turns: int = 10) -> None:
    """Measures each position in float32 and bfloat16, trained and forward.

    Args:
        keep: saves the result.
        batch: images in a step
        size: side of the images in pixels
        turns: of each library, of about a second
    """
    keep_freed_memory()
    cases: list[dict[str, Any]] = []
    settings = {"batch": batch, "size": size, "turns": turns}
    native = multiplies_bfloat16()
    for terms in itertools.product(_peers.POSITIONS, PASSES):
        cases += compare(*terms, **settings)
        keep(
            settings=settings | {"bfloat16_instructions": native},
            versions=_peers.versions(),
            columns=COLUMNS,
            rows=[row(case) for case in cases],
            note=f"ViT-S/16, {batch} images of {size} px, {cores()} cores "
            f"{'with' if native else 'without'} bfloat16 instructions.",
            cases=cases,
        )
