"""What position costs a whole model: images per second of the forward pass and of a training step, per scheme and implementation.

    python -m benchmarks models --torch --out benchmarks/results/models_h200.json     on a GPU: ViT, Swin and NAT, in 8 minutes
    python -m benchmarks models --torch                                               on a CPU: a short form of the same
    python -m benchmarks models --models swin_t --positions none rpb axial_rope --implementations None xla --batches 64 256
    python -m benchmarks models --table 4.4

An implementation is that of attention in all layers: None is what models take by themselves, other names are those of rope_jax_kernels, and
`jnp` is what one would write without it: the rotation in jax.numpy in front of `jax.nn.dot_product_attention` (cuDNN on a GPU), tokens
of a ViT only. With --torch, timm's models stand beside ours where timm and torch are installed: under torch.compile, captured as a CUDA
graph on a GPU, in training with autocast and fused AdamW. What a model, an implementation or this machine refuses is left out, and the
reason is printed.

Both sides compute in the same dtype and keep nothing that the other throws away; in training parameters are float32, there is no clipping
of gradients, and drop path is that of our model. Forms take turns, so that a busy moment of the machine hits all of them; the median and
the quartiles are reported, the position tax against `none` (time, in per cent), the bytes that the compiled program allocates beside its
arguments, and the share of the serial roofline: images per second over those of a model whose matrix products run at the rate of a large
one and whose activations, 26 passes a layer, move at the bandwidth of a copy, one after the other. Both rates are measured in the same
run. A training step counts as three forward passes.

`--table 4.4` and `--table D.1` measure the models of those tables of the thesis with its three schemes, forward, at 224 pixels, and put its
numbers (A100, fp16) beside ours.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import rope_jax
from benchmarks._goals import GOALS
from benchmarks._record import record, write
from benchmarks._timing import geometric_mean, machine_limits
from benchmarks._training import training_step
from rope_jax import optim
from rope_jax.analysis import expected
from rope_jax.config import OptimConfig
from rope_jax.models.cost import cost
from rope_jax_kernels import Global, rotate
from rope_jax_kernels.attention import api
from rope_jax_kernels.attention.patterns import Pattern
from rope_jax_kernels.rotation import Rotation

SCHEMES = ("none", "rpb", "axial_rope")
TABLES = {
    "4.4": [f"{family}_{size}" for family in ("nat", "dinat") for size in ("mini", "tiny", "small", "base")]
    + ["swin_t", "swin_s", "swin_b", "vit_s16", "vit_b16"],
    "D.1": [f"{family}_{size}" for family in ("nat_s", "dinat_s") for size in ("tiny", "small", "base")],
}
# What timm calls a model with a scheme.
TIMM = {
    ("deit_s16", "ape"): "deit_small_patch16_224",
    ("deit3_s16", "ape"): "deit3_small_patch16_224",
    ("deit3_b16", "ape"): "deit3_base_patch16_224",
    ("deit3_s16", "rope2d"): "vit_small_patch16_rope_224",
    ("deit3_b16", "rope2d"): "vit_base_patch16_rope_224",
    ("deit3_s16", "rope_mixed"): "vit_small_patch16_rope_mixed_224",
    ("deit3_b16", "rope_mixed"): "vit_base_patch16_rope_mixed_224",
    ("swin_t", "rpb"): "swin_tiny_patch4_window7_224",
    ("swin_s", "rpb"): "swin_small_patch4_window7_224",
    ("swin_b", "rpb"): "swin_base_patch4_window7_224",
}
VIT = ("deit3_s16", "deit3_b16")
# Goal -> program, models, and the two sides of a ratio of images per second: software and scheme, each with its fastest implementation.
RATIOS = {
    "M1": ("forward", VIT, ("rope_jax", "none"), ("rope_jax", "axial_rope")),
    "M2": ("forward", VIT, ("rope_jax", "rope_mixed"), ("timm", "rope_mixed")),
    "M3": ("forward", ("deit3_s16", "swin_t", "nat_mini"), ("rope_jax", "axial_rope"), ("rope_jax", "rpb")),
    "T1": ("train", ("deit3_s16",), ("rope_jax", "rope_mixed"), ("timm", "rope_mixed")),
}
ROOFLINE = ("deit3_b16", "deit3_s16", "swin_t", "nat_mini")  # of M4, with axial_rope
TRAINING_BATCH = 256  # of T1 and T2
PASSES = 26  # over the activations of a layer, in the serial roofline


@dataclasses.dataclass(frozen=True)
class Row:
    """One model with one scheme.

    Attributes:
        model, position, program: what was measured; program is "forward" or "train".
        software: "rope_jax", or "timm".
        implementation: of attention; None for what the model takes by itself.
        dtype, batch: in which and how many images at once.
        milliseconds, low, high: median and quartiles of one batch.
        images_per_second: of the median.
        roofline_share: of the images per second of the serial roofline.
        tax_percent: time beyond that of the same model and implementation with `none`, or None where that was not measured.
        temp_bytes: that the program allocates beside its arguments and results, or None.
    """

    model: str
    position: str
    program: str
    software: str
    implementation: str | None
    dtype: str
    batch: int
    milliseconds: float
    low: float
    high: float
    images_per_second: float
    roofline_share: float
    tax_percent: float | None
    temp_bytes: int | None


def attention_of_jnp(
    *operands: jax.Array, pattern: Pattern, rotation: Rotation | None, bias: jax.Array | None, scale: float | None
) -> jax.Array:
    """Attention without this package: jnp's rotation of q and k, then jax's own attention. Takes q, k, v apart, or packed."""
    if not isinstance(pattern, Global):
        raise ValueError(f"implementation='jnp' knows attention of all tokens only, and the pattern is {type(pattern).__name__}")
    q, k, v = operands if len(operands) == 3 else jnp.moveaxis(operands[0], -3, 0)
    if rotation is not None:
        q, k = rotate(q, k, rotation, implementation="xla")
    bias = None if bias is None else bias[None].astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, bias, scale=scale, implementation="cudnn" if jax.default_backend() == "gpu" else "xla")


@contextlib.contextmanager
def attention_by(implementation: str | None) -> Iterator[None]:
    """What is traced inside attends by this implementation, see the module's docstring; what it refuses is a ValueError."""

    def choose(op: str, backends: Any, asked: str | None, *call: Any) -> Callable:
        return attention_of_jnp if implementation == "jnp" else original(op, backends, implementation or asked, *call)

    original = api.choose
    with mock.patch.object(api, "choose", choose):
        yield


class Program:
    """A forward pass or training step with what it works on; to be compiled before it is called."""

    def __init__(self, model: nnx.Module, implementation: str | None, program: str, images: jax.Array):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        optimizer = optim.make_optimizer(OptimConfig(clip_norm=None), optax.constant_schedule(1e-4), params)
        params = jax.tree.map(jnp.copy, nnx.to_pure_dict(params))  # they will be donated, and the model makes other programs
        if program == "forward":
            # Inference keeps its weights in the dtype in which it computes; those of positions are float32 always.
            is_position = lambda path: any(getattr(key, "key", None) == "position" for key in path)
            self.state = jax.tree.map_with_path(lambda path, x: x if is_position(path) else x.astype(images.dtype), params)
            step = lambda state, images: (state, nnx.merge(graph, state, rest)(images))
        else:
            self.state, step = {"params": params, "opt": optimizer.init(params)}, training_step(graph, rest, optimizer)
        self.images = images
        with attention_by(implementation):
            self._lowered = jax.jit(step, donate_argnums=0).lower(self.state, images)

    def compile(self) -> None:
        """Compiles it; apart, because several can be compiled at once, and only one be traced."""
        self.step = self._lowered.compile()
        self.temp_bytes = self.step.memory_analysis().temp_size_in_bytes

    def __call__(self, passes: int) -> float:
        """Runs `passes` batches one after the other; returns milliseconds of one."""
        start = time.perf_counter()
        for _ in range(passes):
            self.state, out = self.step(self.state, self.images)
        jax.block_until_ready((self.state, out))
        return 1e3 * (time.perf_counter() - start) / passes


def depth_of(depth: int | None) -> dict[str, int]:
    """The override of a model's depth, if there is one."""
    return {} if depth is None else {"depth": depth}


def left_out(name: str, program: str, form: tuple[str, str, str | None], error: BaseException) -> None:
    """Prints that a form is left out, and why, in one line."""
    software, position, implementation = form
    what = f"{software}'s {name} with {position}" + (f" by {implementation}" if implementation else "")
    print(f"{what}, {program}, is left out: {type(error).__name__}: {str(error).partition('\n')[0]}", flush=True)


def programs(name: str, program: str, images: jax.Array, args: argparse.Namespace) -> dict[tuple[str, str, str | None], Any]:
    """(software, position, implementation) -> what runs it, compiled; what is refused or fails is left out, and the reason is printed."""
    traced, ready, drop_path, size = {}, {}, {}, images.shape[1]
    for position in args.positions:
        try:
            model = rope_jax.create_model(name, position=position, image_size=size, dtype=images.dtype, **depth_of(args.depth))
        except ValueError as error:
            left_out(name, program, ("rope_jax", position, None), error)
            continue
        drop_path[position] = getattr(model.options, "drop_path", 0.0)
        for implementation in args.implementations:
            try:
                traced["rope_jax", position, implementation] = Program(model, implementation, program, images)
            except Exception as error:  # a form that does not run here must not end the measurement of the others
                left_out(name, program, ("rope_jax", position, implementation), error)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiling = {key: pool.submit(form.compile) for key, form in traced.items()}
    for key, future in compiling.items():
        if (error := future.exception()) is None:
            ready[key] = traced[key]
        else:
            left_out(name, program, key, error)
    # After all compilation here: while torch captures a graph nobody else may ask the GPU for memory.
    if args.torch and args.depth is None and all(map(importlib.util.find_spec, ("timm", "torch"))):
        settings = {"program": program, "batch": len(images), "image_size": size, "dtype": images.dtype.name, "mode": args.torch}
        for position in (position for position in drop_path if (name, position) in TIMM):
            try:
                from benchmarks import _torch

                ready["timm", position, None] = _torch.model(TIMM[name, position], drop_path=drop_path[position], **settings)
            except Exception as error:  # nor must a peer
                left_out(name, program, ("timm", position, None), error)
    for key in list(ready):
        try:
            ready[key](1)
        except Exception as error:  # the memory of the device may not be enough for it
            left_out(name, program, key, error)
            del ready[key]
    return ready


def measure(name: str, program: str, dtype: str, batch: int, limits: dict[str, Any], args: argparse.Namespace) -> list[Row]:
    """Measures all schemes and implementations of a model, in turns."""
    # The batch is in the model's dtype, as after a pipeline that normalises on the device.
    images = jax.random.normal(jax.random.key(0), (batch, args.image_size, args.image_size, 3), jnp.dtype(dtype))
    forms = programs(name, program, images, args)
    times = {key: [] for key in forms}
    for turn, (key, run) in itertools.product(range(args.warmup + args.turns), forms.items()):
        took = run(args.passes)
        if turn >= args.warmup:
            times[key].append(took)
    medians = {key: statistics.median(values) for key, values in times.items()}
    fastest = 1e3 / serial_ms(*work(name, args.image_size, images.dtype.itemsize, **depth_of(args.depth)), dtype, limits)
    fastest /= 3 if program == "train" else 1
    rows = []
    for (software, position, implementation), median in medians.items():
        values, bare = times[software, position, implementation], medians.get((software, "none", implementation))
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (median,) * 3
        tax = None if bare is None else 100 * (median / bare - 1)
        temp, speed = getattr(forms[software, position, implementation], "temp_bytes", None), 1e3 * batch / median
        figures = (median, low, high, speed, speed / fastest, tax, temp)
        rows.append(Row(name, position, program, software, implementation, dtype, batch, *figures))
    return rows


def work(name: str, image_size: int, itemsize: int, **overrides: Any) -> tuple[float, float]:
    """Operations of an image's forward pass, and the bytes of its activations that PASSES passes over each layer move."""
    model = nnx.eval_shape(lambda: rope_jax.create_model(name, image_size=image_size, **overrides))
    stages = [part.position.stage for part in getattr(model, "stages", (model,))]
    activations = sum(stage.depth * (stage.prefix + math.prod(stage.grid)) * stage.channels for stage in stages)
    return 2.0 * sum(row.multiply_adds for row in cost(model, image_size)), float(PASSES * itemsize * activations)


def serial_ms(operations: float, moved: float, dtype: str, limits: dict[str, Any]) -> float:
    """Milliseconds of both, one after the other, at the machine's rates."""
    return 1e3 * (operations / limits["gemm_tflop_per_s"][dtype] / 1e12 + moved / limits["copy_gb_per_s"] / 1e9)


def goals(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Goal -> geometric mean, least and most of its ratios, how many, and each of them; of bfloat16, and only what was measured."""
    rows = [row for row in rows if row.dtype == "bfloat16"]
    ratios: dict[str, dict[str, float]] = {}

    def fastest(model: str, program: str, batch: int, software: str, position: str) -> Row | None:
        asked = (model, program, batch, software, position)
        found = [row for row in rows if (row.model, row.program, row.batch, row.software, row.position) == asked]
        return max(found, key=lambda row: row.images_per_second, default=None)

    for batch in sorted({row.batch for row in rows}):
        for goal, (program, models, *sides) in RATIOS.items():
            for model in models if program == "forward" or batch == TRAINING_BATCH else ():
                over, under = (fastest(model, program, batch, *side) for side in sides)
                if over and under:
                    ratios.setdefault(goal, {})[f"{model}, {batch}"] = over.images_per_second / under.images_per_second
        for model in ROOFLINE:
            if row := fastest(model, "forward", batch, "rope_jax", "axial_rope"):
                ratios.setdefault("M4", {})[f"{model}, {batch}"] = row.roofline_share
    held = {
        (row.batch, row.implementation): row.temp_bytes
        for row in rows
        if (row.model, row.program, row.position, row.software) == ("deit3_s16", "train", "rope_mixed", "rope_jax")
    }
    ours, plain = (held.get((TRAINING_BATCH, implementation)) for implementation in (None, "jnp"))
    if ours and plain:
        ratios["T2"] = {f"deit3_s16, {TRAINING_BATCH}": plain / ours}
    return {
        goal: {"value": geometric_mean(list(x.values())), "least": min(x.values()), "most": max(x.values()), "count": len(x), "each": x}
        for goal, x in ratios.items()
    }


def papers(row: Row, table: str) -> str:
    """What the thesis measured for a row: the fastest of its kernels, with its name."""
    source = f"Kane, thesis, table {table}"
    found = [e for e in expected.entries() if e["source"] == source and (e["model"], e["position"]) == (row.model, row.position)]
    found = [entry for entry in found if "images_per_second" in entry]
    best = max(found, key=lambda entry: entry["images_per_second"], default=None)
    return "-" if best is None else f"{best['images_per_second']:,} ({best['kernel']})"


def table(result: dict) -> str:
    """A result as a table in Markdown, beside the thesis' numbers where one of its tables was asked for; and the machine's limits."""
    asked, limits = result["settings"]["table"], result["limits"]
    head = ["model", "position", "program", "software", "attention", "dtype", "batch", "images/s", "ms (quartiles)", "position tax, %"]
    lines = [head + ["of the roofline", "temporary memory, MB"] + (["thesis, images/s on an A100"] if asked else [])]
    for row in (Row(**row) for row in result["rows"]):
        attention = "-" if row.software != "rope_jax" else row.implementation or "default"
        speed, spread = f"{row.images_per_second:,.1f}", f"{row.milliseconds:.2f} ({row.low:.2f}, {row.high:.2f})"
        tax = "-" if row.tax_percent is None else f"{row.tax_percent:+.1f}"
        memory = "-" if row.temp_bytes is None else f"{row.temp_bytes / 1e6:.0f}"
        cells = [row.model, f"`{row.position}`", row.program, row.software, attention, row.dtype, str(row.batch), speed, spread, tax]
        lines.append(cells + [f"{row.roofline_share:.2f}", memory] + ([papers(row, asked)] if asked else []))
    lines.insert(1, ["---"] * len(lines[0]))
    rates = ", ".join(f"{rate:,.3g} TFLOP/s in {dtype}" for dtype, rate in limits["gemm_tflop_per_s"].items())
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")
    return f"{text}\n\nA large matrix product runs at {rates}, a copy moves {limits['copy_gb_per_s']:,.0f} GB/s.\n"


def summary(result: dict) -> str:
    """The table, and the goals that it reaches."""
    lines = [table(result)]
    for goal in GOALS:
        if found := result["goals"].get(goal.name):
            each = ", ".join(f"{of}: {value:.3f}" for of, value in found["each"].items())
            lines.append(f"{goal.name} {found['value']:.3f} ({each}); floor {goal.floor}, goal {goal.goal}: {goal.what}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> dict:
    """Measures until the time is over, and returns what is worth keeping; writes it after every model."""
    deadline, rows = time.monotonic() + args.limit_s, []
    limits = machine_limits(args.limit_turns, args.dtypes)
    on_gpu = jax.default_backend() == "gpu"

    def result() -> dict:
        figures = {"limits": limits, "rows": [dataclasses.asdict(row) for row in rows], "goals": goals(rows) if on_gpu else {}}
        made = record("models", vars(args), **figures)
        made["versions"] |= {name: importlib.metadata.version(name) for name in ("torch", "timm") if importlib.util.find_spec(name)}
        return made

    todo = list(itertools.product(args.programs, args.models, args.dtypes, args.batches))
    for done, (program, name, dtype, batch) in enumerate(todo):
        if time.monotonic() > deadline:
            print(f"stopped after {done} of {len(todo)} models, programs, dtypes and batches: --limit-s={args.limit_s:g}")
            break
        rows += measure(name, program, dtype, batch, limits, args)
        write(result(), args.out)  # what is measured is kept, also when a later model ends the run
    return result()


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line; what is not given depends on whether there is a GPU."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [None, "jnp", *api.ATTENTION]
    parser.add_argument(
        "--models",
        nargs="+",
        default=["deit3_s16", "swin_t", "nat_mini", "deit3_b16"] if on_gpu else ["deit3_ti16"],
        help="of rope_jax.list_models()",
    )
    parser.add_argument("--positions", nargs="+", default=["none", "rpb", "axial_rope", "rope_mixed"])
    parser.add_argument(
        "--implementations",
        nargs="+",
        type=lambda text: None if text == "None" else text,
        choices=names,
        default=[None, "jnp", "cudnn", "xla"] if on_gpu else [None],
        help="of attention: None for what models take by themselves",
    )
    parser.add_argument("--programs", nargs="+", choices=["forward", "train"], default=["forward", "train"])
    parser.add_argument("--table", choices=sorted(TABLES), help="the models and schemes of a table of the thesis, forward")
    parser.add_argument("--batches", type=int, nargs="+", default=[256 if on_gpu else 4])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16" if on_gpu else "float32"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--image-size", type=int, help="default: 224; without a GPU and a --table 64")
    parser.add_argument("--depth", type=int, help="of isotropic models, for short runs")
    parser.add_argument("--warmup", type=int, default=3 if on_gpu else 1, help="turns before the clock counts")
    parser.add_argument("--turns", type=int, default=21 if on_gpu else 5)
    parser.add_argument("--passes", type=int, default=5 if on_gpu else 2, help="batches in a turn")
    parser.add_argument("--limit-turns", type=int, default=9, help="turns of the measurement of the machine's limits")
    parser.add_argument("--limit-s", type=float, default=400.0, help="start no model after this time; what is measured by then is kept")
    parser.add_argument(
        "--torch",
        nargs="?",
        const="default",
        choices=["default", "max-autotune-no-cudagraphs"],
        help="timm's models beside ours, where both are installed, and the mode of torch.compile",
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if unknown := set(args.models) - set(rope_jax.list_models()):
        parser.error(f"--models {' '.join(sorted(unknown))}: unknown; rope_jax.list_models() has them all")
    if args.image_size is None:
        args.image_size = 224 if on_gpu or args.table else 64
    if args.table:
        args.models, args.positions, args.programs = TABLES[args.table], list(SCHEMES), ["forward"]
    return args


def main(argv: list[str]) -> None:
    """Measures, prints the tables, and writes the figures where --out says."""
    # Other software needs room on the GPU, too. Read when jax first looks for devices.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args = parse(argv)
    result = run(args)
    print(summary(result))
    write(result, args.out)
