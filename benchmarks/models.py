"""The cost of position information in whole models: images per second by scheme and implementation.

    python -m benchmarks models --torch --out benchmarks/results/models_gpu.json
    python -m benchmarks models --models swin_t --implementations None xla --batches 64 256
    python -m benchmarks models --table 4.4

On a GPU, the first command measures inference and training steps of ViT, Swin and NAT in eight
minutes; on a CPU a short version runs. --implementations selects the implementation of attention in
all layers: None is the model's own choice, other names are those of rope_jax_kernels, and `jnp` is
the usual code without this package: a rotation in jax.numpy before `jax.nn.dot_product_attention`
(cuDNN on a GPU), for global attention only. With --torch, timm's models are also measured if timm
and torch are installed: with torch.compile, on a GPU captured as a CUDA graph, and in training with
autocast and fused AdamW. Combinations that a model, an implementation or the machine does not
support are skipped, and the reason is printed.

Both libraries compute in the same dtype; in training, parameters are float32, gradients are not
clipped, and timm's model has the drop path rate of ours. The programs are timed in turns, so that
other load on the machine affects all of them. A result has the median and quartiles of the time,
the position tax (time beyond that of `none`, in per cent), the bytes that the compiled program
allocates, and the fraction of the serial roofline: images per second relative to a model whose
matrix products run at the rate of one large product, followed by 26 passes over the activations of
each layer at the bandwidth of a copy. Both rates are measured in the same run. A training step
counts as three forward passes.

`--table 4.4` and `--table D.1` measure the models in these tables of the thesis with its three
schemes: inference at 224 pixels, with the thesis' figures (A100, fp16) next to ours.
"""

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import math
import pathlib
import statistics
import time
import types
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import rope_jax
from benchmarks._goals import GOALS, spread
from benchmarks._models import OURS, PEER, programs
from benchmarks._runner import Keep, Result, earlier
from benchmarks._timing import machine_limits
from rope_jax.analysis import expected
from rope_jax.models.cost import cost
from rope_jax.text import markdown_table
from rope_jax_kernels import dispatch

NOT_SET = ("keep", "out")  # parameters of `run` that are no settings
SCHEMES = ["none", "rpb", "axial_rope"]  # of the thesis
_NATS = itertools.product(("nat", "dinat"), ("mini", "tiny", "small", "base"))
_NAT_SS = itertools.product(("nat_s", "dinat_s"), ("tiny", "small", "base"))
_OTHERS = ["swin_t", "swin_s", "swin_b", "vit_s16", "vit_b16"]
TABLES = {"4.4": [*map("_".join, _NATS), *_OTHERS], "D.1": [*map("_".join, _NAT_SS)]}
_VITS, _KINDS = ("deit3_s16", "deit3_b16"), ("deit3_s16", "swin_t", "nat_mini")
# Goal -> program, models, and numerator and denominator of a ratio of images per second, each a
# (software, scheme) with its fastest implementation.
RATIOS = {
    "M1": ("forward", _VITS, (OURS, "none"), (OURS, "axial_rope")),
    "M2": ("forward", _VITS, (OURS, "rope_mixed"), (PEER, "rope_mixed")),
    "M3": ("forward", _KINDS, (OURS, "axial_rope"), (OURS, "rpb")),
    "T1": ("train", ("deit3_s16",), (OURS, "rope_mixed"), (PEER, "rope_mixed")),
}
ROOFLINE = ("deit3_b16", *_KINDS)  # of M4, with axial_rope
TRAINING_BATCH = 256  # of T1 and T2
PASSES = 26  # over the activations of a layer, in the serial roofline
POSITIONS = [*SCHEMES, "rope_mixed"]
PROGRAMS = ["forward", "train"]


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurement of one model with one scheme.

    Attributes:
        model, position: names of the model and the scheme.
        program: "forward" or "train".
        software: "rope_jax" or "timm".
        implementation: of attention; None for the model's own choice.
        dtype, batch: dtype and number of the images.
        milliseconds, low, high: median and quartiles of the time of one batch.
        images_per_second: speed at the median.
        roofline_share: images per second as a fraction of the serial roofline's.
        tax_percent: time beyond that of the same implementation with `none`; None without it.
        temp_bytes: bytes allocated beside arguments and results; None for timm.
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


def measure(
    name: str,
    program: str,
    dtype: str,
    batch: int,
    limits: dict[str, Any],
    args: types.SimpleNamespace,
) -> list[Row]:
    """Measures all schemes and implementations of a model in turns."""
    # In the model's dtype, as images are after normalisation on the device.
    shape = (batch, args.image_size, args.image_size, 3)
    images = jax.random.normal(jax.random.key(0), shape, jnp.dtype(dtype))
    forms = programs(name, program, images, args)
    times = {form: [] for form in forms}
    for turn, (form, run) in itertools.product(range(args.warmup + args.turns), forms.items()):
        took = run(args.passes)
        if turn >= args.warmup:
            times[form].append(took)
    medians = {form: statistics.median(values) for form, values in times.items()}
    options = {} if args.depth is None else {"depth": args.depth}
    amount = work(name, args.image_size, images.dtype.itemsize, **options)
    roofline = 1e3 / serial_ms(*amount, dtype, limits) / (3 if program == "train" else 1)
    rows = []
    for form, median in medians.items():
        bare = medians.get(dataclasses.replace(form, position="none"))
        low, high = median, median
        if len(times[form]) > 1:
            low, _, high = statistics.quantiles(times[form], n=4)
        speed = 1e3 * batch / median
        row = Row(
            model=name,
            position=form.position,
            program=program,
            software=form.software,
            implementation=form.implementation,
            dtype=dtype,
            batch=batch,
            milliseconds=median,
            low=low,
            high=high,
            images_per_second=speed,
            roofline_share=speed / roofline,
            tax_percent=None if bare is None else 100 * (median / bare - 1),
            temp_bytes=getattr(forms[form], "temp_bytes", None),
        )
        rows.append(row)
    return rows


def work(name: str, image_size: int, itemsize: int, **overrides: Any) -> tuple[float, float]:
    """Operations of a forward pass per image, and bytes of PASSES passes over its activations."""
    model = nnx.eval_shape(lambda: rope_jax.create_model(name, image_size=image_size, **overrides))
    stages = [part.position.stage for part in getattr(model, "stages", (model,))]
    activations = sum(x.depth * (x.prefix + math.prod(x.grid)) * x.channels for x in stages)
    operations = 2.0 * sum(row.multiply_adds for row in cost(model, image_size))
    return operations, float(PASSES * itemsize * activations)


def serial_ms(operations: float, moved: float, dtype: str, limits: dict[str, Any]) -> float:
    """Milliseconds of the operations, then of the memory traffic, at the machine's rates."""
    computing = operations / limits["gemm_tflop_per_s"][dtype] / 1e12
    return 1e3 * (computing + moved / limits["copy_gb_per_s"] / 1e9)


def goals(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The goals measured in bfloat16, each with its ratios by model and batch."""
    rows = [row for row in rows if row.dtype == "bfloat16"]
    ratios: dict[str, dict[str, float]] = {}

    def fastest(model: str, program: str, batch: int, software: str, position: str) -> Row | None:
        wanted = (model, program, batch, software, position)
        found = [x for x in rows if (x.model, x.program, x.batch, x.software, x.position) == wanted]
        return max(found, key=lambda row: row.images_per_second, default=None)

    for batch in sorted({row.batch for row in rows}):
        for goal, (program, models, *sides) in RATIOS.items():
            for model in models if program == "forward" or batch == TRAINING_BATCH else ():
                over, under = (fastest(model, program, batch, *side) for side in sides)
                if over and under:
                    ratio = over.images_per_second / under.images_per_second
                    ratios.setdefault(goal, {})[f"{model}, {batch}"] = ratio
        for model in ROOFLINE:
            if row := fastest(model, "forward", batch, OURS, "axial_rope"):
                ratios.setdefault("M4", {})[f"{model}, {batch}"] = row.roofline_share
    wanted = ("deit3_s16", "train", "rope_mixed", OURS, TRAINING_BATCH)
    held = {
        x.implementation: x.temp_bytes
        for x in rows
        if (x.model, x.program, x.position, x.software, x.batch) == wanted
    }
    if held.get(None) and held.get("jnp"):
        ratios["T2"] = {f"deit3_s16, {TRAINING_BATCH}": held["jnp"] / held[None]}
    return {goal: spread(list(each.values())) | {"each": each} for goal, each in ratios.items()}


def papers(row: Row, table: str) -> str:
    """The thesis' figure for a row: that of its fastest kernel, with the kernel's name."""
    wanted = (f"Kane, thesis, table {table}", row.model, row.position)
    found = [
        entry
        for entry in expected.entries()
        if (entry["source"], entry.get("model"), entry.get("position")) == wanted
        and "images_per_second" in entry
    ]
    best = max(found, key=lambda entry: entry["images_per_second"], default=None)
    return "-" if best is None else f"{best['images_per_second']:,} ({best['kernel']})"


HEADER = [
    *("model", "position", "program", "software", "attention", "dtype", "batch", "images/s"),
    *("ms (quartiles)", "position tax, %", "of the roofline", "temporary memory, MB"),
]


def table(result: Result) -> str:
    """A result as a table in Markdown, with the thesis' figures where --table was given."""
    thesis_table, limits = result["settings"]["table"], result["limits"]
    lines = []
    for row in (Row(**row) for row in result["rows"]):
        attention = "-" if row.software != OURS else row.implementation or "default"
        cells = [row.model, f"`{row.position}`", row.program, row.software, attention, row.dtype]
        cells += [str(row.batch), f"{row.images_per_second:,.1f}"]
        cells.append(f"{row.milliseconds:.2f} ({row.low:.2f}, {row.high:.2f})")
        cells.append("-" if row.tax_percent is None else f"{row.tax_percent:+.1f}")
        cells.append(f"{row.roofline_share:.2f}")
        cells.append("-" if row.temp_bytes is None else f"{row.temp_bytes / 1e6:.0f}")
        lines.append([*cells, papers(row, thesis_table)] if thesis_table else cells)
    header = [*HEADER, "thesis, images/s on an A100"] if thesis_table else HEADER
    gemm = limits["gemm_tflop_per_s"].items()
    rates = ", ".join(f"{rate:,.3g} TFLOP/s in {dtype}" for dtype, rate in gemm)
    copy = f"a copy moves {limits['copy_gb_per_s']:,.0f} GB/s"
    return f"{markdown_table(header, lines)}\nA large matrix product runs at {rates}, {copy}.\n"


def summary(result: Result) -> str:
    """Table and goals, for the terminal."""
    lines = [table(result)]
    for goal in GOALS:
        if found := result["goals"].get(goal.name):
            each = ", ".join(f"{of}: {value:.3f}" for of, value in found["each"].items())
            levels = f"floor {goal.floor}, goal {goal.goal}: {goal.what}"
            lines.append(f"{goal.name} {found['value']:.3f} ({each}); {levels}")
    return "\n".join(lines)


def with_defaults(given: dict[str, Any]) -> types.SimpleNamespace:
    """The arguments of `run`, with this machine's defaults in place of None.

    Raises:
        SystemExit: if a model is unknown.
    """
    on_gpu, args = jax.default_backend() == "gpu", types.SimpleNamespace(**given)
    if unknown := set(args.models or ()) - set(rope_jax.list_models()):
        names = " ".join(sorted(unknown))
        raise SystemExit(f"--models {names}: unknown; rope_jax.list_models() lists all models")
    if args.table:
        args.models, args.positions, args.programs = TABLES[args.table], SCHEMES, ["forward"]
    if args.implementations is None:
        args.implementations = ["None", "jnp", "cudnn", "xla"] if on_gpu else ["None"]
    args.implementations = [None if name == "None" else name for name in args.implementations]
    args.models = args.models or ([*_KINDS, "deit3_b16"] if on_gpu else ["deit3_ti16"])
    args.batches = args.batches or [256 if on_gpu else 4]
    args.dtypes = args.dtypes or ["bfloat16" if on_gpu else "float32"]
    args.image_size = args.image_size or (224 if on_gpu or args.table else 64)
    args.warmup = args.warmup if args.warmup is not None else 3 if on_gpu else 1
    args.turns = args.turns or (21 if on_gpu else 5)
    args.passes = args.passes or (5 if on_gpu else 2)
    return args


def peer_versions() -> dict[str, str]:
    """Versions of torch and timm, where they are installed."""
    installed = [name for name in ("torch", "timm") if importlib.util.find_spec(name)]
    return {name: importlib.metadata.version(name) for name in installed}


def run(
    keep: Keep,
    *,
    out: pathlib.Path | None,
    models: list[str] | None = None,
    positions: list[str] = POSITIONS,
    implementations: list[Literal["None", "jnp", *dispatch.IMPLEMENTATIONS["attention"]]]
    | None = None,
    programs: list[Literal["forward", "train"]] = PROGRAMS,
    table: Literal["4.4", "D.1"] | None = None,
    batches: list[int] | None = None,
    dtypes: list[Literal["float32", "bfloat16", "float16"]] | None = None,
    image_size: int | None = None,
    depth: int | None = None,
    warmup: int | None = None,
    turns: int | None = None,
    passes: int | None = None,
    limit_turns: int = 9,
    limit_s: float = 400.0,
    torch: bool = False,
    torch_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default",
) -> None:
    """Measures models one after the other, and saves the result after each.

    Args:
        keep: saves the result.
        out: of an earlier call, to continue.
        models: names from rope_jax.list_models()
        positions: schemes
        implementations: implementations of attention; None is the model's own choice
        programs: forward passes, training steps
        table: measure the models and schemes of a table of the thesis, forward
        batches: images per batch
        dtypes: dtypes of the computation
        image_size: side in pixels; default: 224, or 64 without a GPU and --table
        depth: number of blocks of isotropic models, for short runs
        warmup: turns before the measurement
        turns: timed turns of each form
        passes: batches per turn
        limit_turns: turns for the limits of the machine
        limit_s: end after this many seconds
        torch: also measure timm's models, if timm and torch are installed
        torch_mode: mode of torch.compile
    """
    args = with_defaults({name: value for name, value in locals().items() if name not in NOT_SET})
    deadline = time.monotonic() + limit_s
    settings = {name: value for name, value in vars(args).items() if name != "limit_s"}
    before = earlier(out, "models", settings)
    rows, done = [Row(**row) for row in before.get("rows", [])], before.get("done", [])
    limits = machine_limits(limit_turns, args.dtypes)
    todo = list(itertools.product(args.programs, args.models, args.dtypes, args.batches))
    todo = [combination for combination in todo if list(combination) not in done]

    def keep_all() -> Result:
        figures = {"limits": limits, "rows": [dataclasses.asdict(row) for row in rows]}
        figures |= {"done": done, "left": len(todo)}
        reached = goals(rows) if jax.default_backend() == "gpu" else {}
        return keep(settings=vars(args), versions=peer_versions(), **figures, goals=reached)

    result = keep_all()
    while todo and time.monotonic() <= deadline:
        program, name, dtype, batch = todo[0]
        rows += measure(name, program, dtype, batch, limits, args)
        done.append(list(todo.pop(0)))
        result = keep_all()
    if todo:
        print(f"stopped with {len(todo)} combinations left: --limit-s={limit_s:g}")
    print(summary(result))
