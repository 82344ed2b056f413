"""Speed of kernels and models compared with jax.nn, cuDNN and other libraries, in one table.

    python -m benchmarks speed --out benchmarks/results/speed_gpu.json
    python -m benchmarks speed --parts attention --only nat_mini

A case is one computation in several forms. Forms are compiled side by side, compared with each
other at the first step, and timed in turns in one process; a form that fails, or computes something
else, is in `left_out` with the reason. The file has a row as each case ends, and the same command
measures only what it lacks. Without a GPU small cases are measured, without kernels, whose
interpreted timings mean nothing. The parts:

    rotation    the 300 sizes of Kane's thesis (batch x heads x map x channels, half of the channels
                turned), in three precisions (features-angles), forward and backward
    attention   layers of ViT, Swin, NAT and DiNAT from the packed projection on, in bfloat16
    models      forward passes and training steps of whole models by positional scheme

A form is a software, and after a plus its position information:

    ours        rope_jax_kernels, with the implementation that it takes here, measured choices
                included; triton, mosaic, xla, unpack (the kernel that unpacks and rotates, then
                cuDNN): a named one
    xla         of rotations jax.numpy with jit, in its fastest form: one pass that writes a new
                array, with tables of cosines and sines
    jax.nn, cudnn   rotation in jax.numpy, then jax.nn.dot_product_attention; "+all": over all
                tokens of a map instead of a neighbourhood
    torch, flash_attn, natten, timm   if installed, with torch.compile where they are in Python, as
                CUDA graphs

Times are medians, in microseconds of a step; those of jax are of compiled loops of dependent steps,
which XLA launches as CUDA graphs, except the calls of cuDNN and Mosaic GPU. Arrays are cycled
through that together exceed every cache, unless sixteen do not. `copy_us` is the time of the needed
memory traffic at the bandwidth of a copy, which is measured in the same process (`limits`). Ratios
are of a form's time to that of the fastest of our kernels with the same position.

`rope_jax reproduce thesis/table_A.2` shows the thesis' numbers next to ours: there rotations are in
float16 with warm caches, and also without jit.
"""

import concurrent.futures
import importlib.metadata
import importlib.util
import itertools
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import jax

from benchmarks import _layers, _models, _rotations
from benchmarks._runner import Keep, earlier_result, print_table
from benchmarks._timing import Case, machine_limits
from rope_jax.analysis.timing import Start, Timer, take_turns
from rope_jax_kernels.accuracy import error

PARTS = {
    "rotation": _rotations.sizes,
    "attention": _layers.attention,
    "models": _models.models,
}
ALL_PARTS = list(PARTS)
OURS = ("ours", "triton", "mosaic")
PEERS = ("torch", "timm", "flash_attn", "natten")
TOGETHER = 16  # cases that are compiled together, then measured one by one
ALLOWED = 8 / 2**8  # of the largest element: some roundings of bfloat16
COLUMNS = ["measured", "form / ours", "cases", "geometric mean", "least", "most"]


def measure(
    case: Case, forms: Mapping[str, Future[Start]], turns: int, limits: Mapping[str, float]
) -> dict[str, Any]:
    """Compares the compiled forms of a case, and times them in turns."""
    timers: dict[str, Timer] = {}
    left_out: dict[str, str] = {}
    references: dict[str, list] = {}
    for form, start in forms.items():
        try:
            results, timer = start.result()()
            reference = references.setdefault(form.partition("+")[2], results)
            compared = zip(results, reference, strict=True) if results else ()
            wrong = [off for x, y in compared if not (off := error(x, y)) <= ALLOWED]  # also NaN
        except Exception as failure:  # the other forms are measured nevertheless
            left_out[form] = f"{type(failure).__name__}: {str(failure).partition('\n')[0]}"
            continue
        if wrong:
            left_out[form] = f"wrong by {wrong[0]:.2g} of the largest element"
        else:
            timers[form] = timer
    times = take_turns(timers, turns)
    row = {"group": case.group, "case": case.name, "microseconds": times, "left_out": left_out}
    return row | {"copy_us": case.moved_bytes / limits["copy_gb_per_s"] / 1e3}


def ratios(measured: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Rows (group, form, cases, mean, least, most) of times over those of our fastest kernel."""
    relative_times: dict[tuple[str, str], list[float]] = {}
    for row in measured:
        times = {tuple(form.split("+")): us for form, us in row["microseconds"].items()}
        for (software, *position), us in times.items():
            ours = [times[key] for name in OURS if (key := (name, *position)) in times]
            if software not in OURS and ours:
                form = "+".join((software, *position))
                relative_times.setdefault((row["group"], form), []).append(us / min(ours))
    return [
        [*key, len(each), statistics.geometric_mean(each), min(each), max(each)]
        for key, each in relative_times.items()
    ]


def run(
    keep: Keep,
    *,
    out: pathlib.Path | None = None,
    parts: list[Literal[*PARTS]] = ALL_PARTS,
    only: str = "",
    turns: int = 9,
) -> None:
    """Measures the cases that the file lacks, and saves the result after each.

    Args:
        keep: saves the result.
        out: the JSON file to write; cases in it are not measured again
        parts: parts to measure
        only: measure only cases with this in their name
        turns: timed turns of each form
    """
    settings = {"turns": turns}
    measured = earlier_result(out, "speed", settings).get("measured", [])
    done = {(row["group"], row["case"]) for row in measured}
    todo = [
        case
        for part in parts
        for case in PARTS[part](small=jax.default_backend() != "gpu")
        if (case.group, case.name) not in done and only in f"{case.group}, {case.name}"
    ]
    if not todo:
        print_table(COLUMNS, ratios(measured))
        return
    limits = machine_limits(turns)
    versions = {x: importlib.metadata.version(x) for x in PEERS if importlib.util.find_spec(x)}
    context = {"settings": settings, "limits": limits, "versions": versions}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for group in itertools.batched(todo, TOGETHER):
            compiling = [
                {form: pool.submit(make) for form, make in case.makers.items()} for case in group
            ]
            # Nothing compiles during timing.
            concurrent.futures.wait([start for forms in compiling for start in forms.values()])
            for case, forms in zip(group, compiling, strict=True):
                row = measure(case, forms, turns, limits)
                measured.append(row)
                keep(**context, columns=COLUMNS, rows=ratios(measured), measured=measured)
                times = ", ".join(f"{form} {us:.4g}" for form, us in row["microseconds"].items())
                print(f"{case.group}: {case.name}: {times} us", flush=True)
                for form, reason in row["left_out"].items():
                    print(f"  {form} is left out: {reason}")
