"""What position costs a whole model: images per second of the forward pass and of a training step, per scheme.

    python -m benchmarks models --models deit3_s16 swin_t --positions none rpb rope2d axial_rope --out results.json
    python -m benchmarks models --table 4.4

Forms take turns, so that a busy moment of the machine hits all of them; the median and the quartiles are reported, the position tax against
`none` (time, in per cent), and the bytes that the compiled program allocates beside its arguments. `--table 4.4` and `--table D.1` measure
the models of those tables of the thesis with its three schemes, forward, at 224 pixels, and put its numbers (A100, fp16) beside ours. Where
timm and torch are installed, `--torch` measures timm's models with torch.compile, too. Without a GPU the short form of small images and
batches is the default.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import rope_jax
from benchmarks._record import record, write
from rope_jax import optim
from rope_jax.analysis import expected
from rope_jax.config import OptimConfig

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
    ("deit3_s16", "rope2d"): "vit_small_patch16_rope_224",
    ("deit3_s16", "rope_mixed"): "vit_small_patch16_rope_mixed_224",
    ("deit3_b16", "rope2d"): "vit_base_patch16_rope_224",
    ("swin_t", "rpb"): "swin_tiny_patch4_window7_224",
    ("swin_s", "rpb"): "swin_small_patch4_window7_224",
    ("swin_b", "rpb"): "swin_base_patch4_window7_224",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One model with one scheme.

    Attributes:
        model, position, program: what was measured; program is "forward" or "train".
        software: "rope_jax", or "timm".
        milliseconds, low, high: median and quartiles of one batch.
        images_per_second: of the median.
        tax_percent: time beyond that of the same model with `none`, or None where that was not measured.
        temp_bytes: that the program allocates beside its arguments and results, or None.
    """

    model: str
    position: str
    program: str
    software: str
    milliseconds: float
    low: float
    high: float
    images_per_second: float
    tax_percent: float | None
    temp_bytes: int | None


class Program:
    """A compiled forward pass or training step with what it works on."""

    def __init__(self, name: str, position: str, program: str, args: argparse.Namespace):
        dtype = jnp.dtype(args.dtype)
        overrides = {} if args.depth is None else {"depth": args.depth}
        model = rope_jax.create_model(name, position=position, image_size=args.image_size, dtype=dtype, **overrides)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        # The batch is in the model's dtype, as after a pipeline that normalises on the device.
        images = jax.random.normal(jax.random.key(0), (args.batch, args.image_size, args.image_size, 3), dtype)
        params = nnx.to_pure_dict(params)
        if program == "forward":
            # Inference keeps its weights in the dtype in which it computes; those of positions are float32 always.
            is_position = lambda path: any(getattr(key, "key", None) == "position" for key in path)
            self.state = jax.tree.map_with_path(lambda path, x: x if is_position(path) else x.astype(dtype), params)
            step = lambda state, images: (state, nnx.merge(graph, state, rest)(images))
        else:
            optimizer = optim.make_optimizer(OptimConfig(), optax.constant_schedule(1e-4), nnx.state(model, nnx.Param))
            self.state = {"params": params, "opt": optimizer.init(params)}

            def step(state: dict[str, Any], images: jax.Array) -> tuple[dict[str, Any], jax.Array]:
                def loss_of(params: Any) -> jax.Array:
                    logits = nnx.merge(graph, params, rest)(images, train=True, key=jax.random.key(1))
                    return -jax.nn.log_softmax(logits.astype(jnp.float32))[:, 0].mean()

                loss, grads = jax.value_and_grad(loss_of)(state["params"])
                updates, opt = optimizer.update(grads, state["opt"], state["params"])
                return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

        self.images = images
        self.step = jax.jit(step, donate_argnums=0).lower(self.state, images).compile()
        self.temp_bytes = self.step.memory_analysis().temp_size_in_bytes

    def __call__(self, passes: int) -> float:
        """Runs `passes` batches one after the other; returns milliseconds of one."""
        start = time.perf_counter()
        for _ in range(passes):
            self.state, out = self.step(self.state, self.images)
        jax.block_until_ready((self.state, out))
        return 1e3 * (time.perf_counter() - start) / passes


def timm_program(name: str, args: argparse.Namespace) -> Callable[[int], float] | None:
    """The forward pass of timm's model under torch.compile, or None where it is not installed or fails here; the failure is printed."""
    if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torch") is None:
        return None
    import timm
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype)
    try:
        model = torch.compile(timm.create_model(name, img_size=args.image_size).to(device, dtype).eval(), mode="max-autotune-no-cudagraphs")
        images = torch.randn(args.batch, 3, args.image_size, args.image_size, device=device, dtype=dtype)
        with torch.inference_mode():
            model(images)
    except Exception as error:  # a peer that does not run here must not end a benchmark of ours
        print(f"timm's {name} is left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None

    def run(passes: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            for _ in range(passes):
                model(images)
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / passes

    return run


def measure(name: str, program: str, args: argparse.Namespace) -> list[Row]:
    """Measures all schemes of a model, in turns. Schemes that the model refuses are left out, and the reason is printed."""
    programs: dict[tuple[str, str], Any] = {}
    for position in args.positions:
        try:
            programs["rope_jax", position] = Program(name, position, program, args)
        except ValueError as error:
            print(f"{name} with {position} is left out: {error}")
        peer = TIMM.get((name, position)) if args.torch and program == "forward" and args.depth is None else None
        if peer is not None and (found := timm_program(peer, args)):
            programs["timm", position] = found
    times = {key: [] for key in programs}
    for turn, (key, run) in itertools.product(range(args.warmup + args.turns), programs.items()):
        took = run(args.passes)
        if turn >= args.warmup:
            times[key].append(took)
    bare = statistics.median(times["rope_jax", "none"]) if ("rope_jax", "none") in times else None
    rows = []
    for (software, position), values in times.items():
        median = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (median,) * 3
        tax = 100 * (median / bare - 1) if bare is not None and software == "rope_jax" else None
        temp = getattr(programs[software, position], "temp_bytes", None)
        rows.append(Row(name, position, program, software, median, low, high, 1e3 * args.batch / median, tax, temp))
    return rows


def papers(row: Row, table: str) -> str:
    """What the thesis measured for a row: the fastest of its kernels, with its name."""
    source = f"Kane, thesis, table {table}"
    found = [e for e in expected.entries() if e["source"] == source and (e["model"], e["position"]) == (row.model, row.position)]
    found = [entry for entry in found if "images_per_second" in entry]
    best = max(found, key=lambda entry: entry["images_per_second"], default=None)
    return "-" if best is None else f"{best['images_per_second']:,} ({best['kernel']})"


def table_of(rows: list[Row], table: str | None) -> str:
    """The rows as a table in Markdown; beside the thesis' numbers where one of its tables is asked for."""
    head = ["model", "position", "program", "software", "images/s", "ms (quartiles)", "position tax, %", "temporary memory, MB"]
    lines = [head + (["thesis, images/s on an A100"] if table else [])]
    for row in rows:
        tax = "-" if row.tax_percent is None else f"{row.tax_percent:+.1f}"
        memory = "-" if row.temp_bytes is None else f"{row.temp_bytes / 1e6:.0f}"
        speed, spread = f"{row.images_per_second:,.1f}", f"{row.milliseconds:.2f} ({row.low:.2f}, {row.high:.2f})"
        cells = [row.model, row.position, row.program, row.software, speed, spread, tax, memory]
        lines.append(cells + ([papers(row, table)] if table else []))
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line; what is not given depends on whether there is a GPU."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["deit3_s16"] if on_gpu else ["deit3_ti16"], help="of rope_jax.list_models()")
    parser.add_argument("--positions", nargs="+", default=["none", "ape", "rope2d", "rope_mixed", "axial_rope"])
    parser.add_argument("--programs", nargs="+", choices=["forward", "train"], default=["forward", "train"])
    parser.add_argument("--table", choices=sorted(TABLES), help="the models and schemes of a table of the thesis, forward")
    parser.add_argument("--batch", type=int, default=128 if on_gpu else 4)
    parser.add_argument("--image-size", type=int, help="default: 224; without a GPU and a --table 64")
    parser.add_argument("--depth", type=int, help="of isotropic models, for short runs")
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--warmup", type=int, default=3 if on_gpu else 1, help="turns before the clock counts")
    parser.add_argument("--turns", type=int, default=10 if on_gpu else 3)
    parser.add_argument("--passes", type=int, default=10 if on_gpu else 2, help="batches in a turn")
    parser.add_argument("--torch", action="store_true", help="timm with torch.compile beside it, where both are installed")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if args.image_size is None:
        args.image_size = 224 if on_gpu or args.table else 64
    if args.table:
        args.models, args.positions, args.programs = TABLES[args.table], list(SCHEMES), ["forward"]
    return args


def main(argv: list[str]) -> None:
    """Measures and prints the table."""
    args = parse(argv)
    rows = []
    for name, program in itertools.product(args.models, args.programs):
        rows += measure(name, program, args)
        if args.out:  # what is measured is kept, also when a later model ends the run
            write(record("models", vars(args), rows=[dataclasses.asdict(row) for row in rows]), args.out)
    print(table_of(rows, args.table))
