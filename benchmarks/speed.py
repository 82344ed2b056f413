"""Speed of kernels and models compared with jax.nn, cuDNN and other libraries, in one table.

    python -m benchmarks speed --out benchmarks/results/speed_gpu.json
    python -m benchmarks speed --parts attention --only nat_mini
    python -m benchmarks speed --table 4.4 --out benchmarks/results/speed_4.4_gpu.json

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
                array, with tables of cosines and sines; eager: without jit
    jax.nn, cudnn   rotation in jax.numpy, then jax.nn.dot_product_attention; "+all": over all
                tokens of a map instead of a neighbourhood
    torch, flash_attn, natten, timm   if installed, with torch.compile where they are in Python, as
                CUDA graphs

Times are medians, in microseconds of a step; those of jax are of compiled loops of dependent steps,
which XLA launches as CUDA graphs, except the calls of cuDNN and Mosaic GPU. Arrays are cycled
through that together exceed every cache, unless sixteen do not. `copy_us` is the time of the needed
memory traffic at the bandwidth of a copy, which is measured in the same process (`limits`). Ratios
are of a form's time to that of the fastest of our kernels with the same position.

--table measures the cases of a table of the thesis, and shows its numbers next to ours: A.1 and A.2
(rotations, cache hot), 4.4 and D.1 (images per second of models).
"""

import concurrent.futures
import importlib.metadata
import importlib.util
import itertools
import os
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks import _layers, _models, _rotations
from benchmarks._runner import Keep, earlier_result
from benchmarks._timing import Case, Start, Timer, machine_limits, take_turns
from rope_jax.names.text import format_table
from rope_jax.papers import published
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
SCHEMES = ("none", "rpb", "axial_rope")  # of the thesis
_NATS = itertools.product(("nat", "dinat"), ("mini", "tiny", "small", "base"))
_NAT_SS = itertools.product(("nat_s", "dinat_s"), ("tiny", "small", "base"))
_OTHERS = ("swin_t", "swin_s", "swin_b", "vit_s16", "vit_b16")
MODELS = {"4.4": [*map("_".join, _NATS), *_OTHERS], "D.1": [*map("_".join, _NAT_SS)]}
FORMS = {"compiled": "xla", "fused": "triton", "eager": "eager"}  # of table A.2


def cases(parts: Sequence[str], table: str | None, *, small: bool) -> Iterator[Case]:
    """The cases of some parts, or of a table of the thesis."""
    if table in MODELS:
        batch, dtype = (4, jnp.float32) if small else (256, jnp.bfloat16)
        images = jax.ShapeDtypeStruct((batch, 224, 224, 3), dtype)
        for name in MODELS[table]:
            yield _models.program_case(name, "forward", SCHEMES, images)
    elif table:
        yield from _rotations.sizes(directions=("forward",), hot=True, small=small)
    else:
        for part in parts:
            yield from PARTS[part](small=small)


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


def speedups(measured: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Rows of table A.2: our ratios of times, and those printed in the thesis (A100, %)."""
    printed: dict[tuple[str, str, str], list[float]] = {}  # average, least, most
    for cell in published("thesis/table_A.2"):
        key = (cell.key["precision"], cell.key["over"], cell.key["form"])
        printed.setdefault(key, []).append(cell.value)
    for (precision, slow, fast), percents in printed.items():
        over, form = FORMS[slow], FORMS[fast]
        each = [
            row["microseconds"][over] / row["microseconds"][form]
            for row in measured
            if row["group"].split(", ")[1] == precision and {over, form} <= {*row["microseconds"]}
        ]
        ours = (statistics.fmean(each), min(each), max(each)) if each else ("-",) * 3
        yield [precision, f"{slow} / {fast}", len(each), *ours, *percents]


def throughput(table: str, measured: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Rows of table 4.4 or D.1: images per second, and the thesis' by its fastest kernel."""
    for row in measured:
        name, images = row["case"].split(", ")[:2]
        for form, us in row["microseconds"].items():
            software, position = form.split("+")
            key = {"quantity": "images_per_second", "model": name, "position": position}
            cells = published(f"thesis/table_{table}")
            best = max(
                (cell for cell in cells if key.items() <= cell.key.items()),
                key=lambda cell: cell.value,
            )
            speed = 1e6 * int(images.split()[0]) / us
            yield [name, position, software, speed, f"{best.value:,} ({best.key['kernel']})"]


def make_table(table: str | None, measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Makes the columns and rows of a table of the thesis, or of the ratios."""
    if table == "A.1":
        columns = ["precision", "size", *(f"{form}, us" for form in FORMS)]
        rows = []
        for row in measured:
            times = [row["microseconds"].get(form, "-") for form in FORMS.values()]
            rows.append([row["group"].split(", ")[1], row["case"], *times])
    elif table == "A.2":
        figures = ("average", "least", "most")
        columns = ["precision", "times", "sizes", *figures, *(f"thesis, %: {x}" for x in figures)]
        rows = list(speedups(measured))
    elif table:
        columns = ["model", "position", "by", "images/s", "thesis, images/s on an A100"]
        rows = list(throughput(table, measured))
    else:
        columns = ["measured", "form / ours", "cases", "geometric mean", "least", "most"]
        rows = ratios(measured)
    return {"columns": columns, "rows": rows}


def run(
    keep: Keep,
    *,
    out: pathlib.Path | None = None,
    parts: list[Literal[*PARTS]] = ALL_PARTS,
    only: str = "",
    table: Literal["A.1", "A.2", "4.4", "D.1"] | None = None,
    turns: int = 9,
) -> None:
    """Measures the cases that the file lacks, and saves the result after each.

    Args:
        keep: saves the result.
        out: the JSON file to write; cases in it are not measured again
        parts: parts to measure
        only: measure only cases with this in their name
        table: a table of the thesis
        turns: timed turns of each form
    """
    small = jax.default_backend() != "gpu"
    settings = {"table": table, "turns": turns}
    measured = earlier_result(out, "speed", settings).get("measured", [])
    done = {(row["group"], row["case"]) for row in measured}
    todo = [
        case
        for case in cases(parts, table, small=small)
        if (case.group, case.name) not in done and only in f"{case.group}, {case.name}"
    ]
    limits = machine_limits(turns)
    installed = filter(importlib.util.find_spec, PEERS)
    versions = {name: importlib.metadata.version(name) for name in installed}
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
                keep(**context, measured=measured, **make_table(table, measured))
                times = ", ".join(f"{form} {us:.4g}" for form, us in row["microseconds"].items())
                print(f"{case.group}: {case.name}: {times} us", flush=True)
                for form, reason in row["left_out"].items():
                    print(f"  {form} is left out: {reason}")
    final = make_table(table, measured)
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in final["rows"]]
    print(format_table(final["columns"], cells))
