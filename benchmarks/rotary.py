"""Rotary kernels against XLA and others: the 300 problem sizes of Kane's thesis (table A.1), three precisions, forward and backward.

    python -m benchmarks rotary --out benchmarks/results/rotary_h200.json     on a GPU: all sizes, in 8 minutes
    python -m benchmarks rotary                                               on a CPU: a short form of the same

Features are [B, N, H*W, C], theta is [N, H*W, C/4] (half of the channels turn), as in the thesis' protocol. The forms:

    eager     jnp, operation by operation: what the thesis calls eager
    xla       jnp under jit, in its best form: one pass that writes a new array, with cosines and sines from tables
    triton    rope_jax_kernels' kernel in place (on a GPU only), and so every one that --kernels names

Then the peers, on q and k [B, L, N, C] whose heads share their angles, and the gradients' way back into the packed projection. A peer that
is not installed is left out: torch (a plain rotation in place under torch.compile), liger (Liger-Kernel; all channels turn) and
flash_attn (its Triton kernel in place, a launch each for q and k).

Beside all this, from the same process: what an operation of XLA and an empty kernel cost to launch, and what memory gives (1 GiB read and
written; 64 MiB on a CPU). All but eager run in one compiled loop whose steps depend on each other, peers in a CUDA graph, so that a time is
the device's and not Python's. The forms take turns; a figure is the median. "hot" repeats on one array, which stays in cache when it fits;
"cold" goes round arrays that together do not fit. Ratios are plain time ratios: xla / triton = 2 means that the kernel takes half the time.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._goals import GOALS
from benchmarks._record import record, write
from benchmarks._timing import (
    REPEATS,
    Loop,
    Timer,
    compile_loop,
    copies_beyond_cache,
    geometric_mean,
    machine_limits,
    serves,
    take_turns,
)
from rope_jax_kernels import Rotation, rotate, rotate_by_angles
from rope_jax_kernels.rotary.api import ROTATE
from rope_jax_kernels.rotary.unpack import rotate_back_and_pack

BATCHES, HEADS, SIDES, CHANNELS = (1, 16, 32, 64, 128), (1, 3, 4, 6, 8), (56, 28, 14, 7), (32, 64, 128)
SHORT = ((1, 16), (3,), (14, 7), (32, 64))
DTYPES = {"16-32": ("bfloat16", "float32"), "16-16": ("bfloat16", "bfloat16"), "32-32": ("float32", "float32")}
PEER_SHAPES = [(1, 196, 6, 64), (16, 196, 6, 64), (128, 196, 6, 64), (16, 3136, 6, 64), (128, 196, 12, 32)]  # [B, L, N, C]
PEER_ROUNDS = 8
PACK_SHAPES = [(64, 196, 6, 64), (128, 196, 6, 64), (256, 196, 6, 64), (128, 196, 12, 64)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: sizes, precision (of features and theta) and direction."""

    batch: int
    heads: int
    side: int
    channels: int
    precision: str
    direction: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the features, canonical: [B, 1, N*H*W, C], for each head and token is a row with its own angles: 4 of 7x7 are 1 of 14x14."""
        return self.batch, 1, self.heads * self.side**2, self.channels

    @property
    def moved_bytes(self) -> int:
        """Bytes that a rotation in place has to move: half of the channels read and written, and theta read once."""
        features, theta = (jnp.dtype(name).itemsize for name in DTYPES[self.precision])
        batch, _, rows, channels = self.shape
        return rows * (batch * channels * features + channels // 4 * theta)


def cases(short: bool) -> Iterator[Case]:
    """All problems, 1,800 or the short form's 48."""
    sizes = SHORT if short else (BATCHES, HEADS, SIDES, CHANNELS)
    for precision, direction, *size in itertools.product(DTYPES, ("forward", "backward"), *sizes):
        yield Case(*size, precision, direction)


def step_of(case: Case, form: str) -> Callable:
    """(features, *angles) -> features: the rotation, or the gradient with respect to the features, which is the rotation back.

    The kernel's is what autodiff gives. That of jnp is written out, because this is its best form: autodiff adds two padded halves.
    """
    if form == "xla":
        return turn_by_tables if case.direction == "forward" else lambda x, cos, sin: turn_by_tables(x, cos, -sin)
    turn = functools.partial(rotate_by_angles, layout="BNLD", implementation="xla" if form == "eager" else form)
    if case.direction == "forward":
        return turn
    return lambda x, theta: jax.vjp(lambda y: turn(y, theta), x)[1](x)[0]


def turn_by_tables(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The rotation in the form that XLA makes the fastest pass of: tables [N, L, R] from memory. From theta it would launch three."""
    pairs = cos.shape[-1]
    a, b = x[..., :pairs].astype(cos.dtype), x[..., pairs : 2 * pairs].astype(cos.dtype)
    turned = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*turned, x[..., 2 * pairs :]], axis=-1)


def operands(case: Case, form: str, copies: int) -> tuple:
    """Features, as often as asked for, and the angles as `step_of(case, form)` takes them: theta, or tables of cosines and sines."""
    features, dtype = DTYPES[case.precision]
    _, heads, rows, channels = case.shape
    theta = jnp.linspace(0, 10, heads * rows * (channels // 4)).reshape(heads, rows, channels // 4)
    angles = (jnp.cos(theta), jnp.sin(theta)) if form == "xla" else (theta.astype(dtype),)
    return tuple(jnp.full(case.shape, 1 + n, features) for n in range(copies)), *angles


def loops_of(case: Case, kernels: Iterable[str], steps: int) -> dict[str, dict[str, Loop]]:
    """Temperature -> form -> compiled loop of about `steps` steps."""
    (x,), theta = jax.eval_shape(lambda: operands(case, "triton", 1))
    copies = {"hot": 1, "cold": copies_beyond_cache(x.size * x.dtype.itemsize)}
    loops: dict[str, dict[str, Loop]] = {}
    for temperature, form in itertools.product(copies, ["xla", *kernels]):
        if copies[temperature] and (form == "xla" or serves(form, rotate_by_angles, x, theta, layout="BNLD")):
            repeats = REPEATS[temperature]
            rounds = max(2, steps // repeats // copies[temperature])
            arguments = functools.partial(operands, case, form, copies[temperature])
            loops.setdefault(temperature, {})[form] = compile_loop(step_of(case, form), arguments, rounds, repeats)
    return loops


def eager_timer(case: Case) -> Timer:
    """Times the jnp form outside jit, operation by operation."""
    (x,), theta = jax.jit(lambda: operands(case, "eager", 1))()
    step = step_of(case, "eager")

    def elapsed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(step(x, theta))
        return 1e6 * (time.perf_counter() - start)

    elapsed()
    return elapsed


def turn_both(form: str, qk: tuple[jax.Array, jax.Array], first: jax.Array, second: jax.Array) -> tuple[jax.Array, ...]:
    """q and k [B, L, N, C], turned by tables (form "xla") or by coords and freqs."""
    if form == "xla":
        return tuple(turn_by_tables(x, first, second) for x in qk)
    return rotate(*qk, Rotation(first, second), implementation=form)


def pairs_of(shape: tuple[int, ...], copies: int, angles: tuple) -> tuple:
    """Pairs of q and k, as often as asked for, and the angles."""
    return tuple(tuple(jnp.full(shape, 1 + i, jnp.bfloat16) for i in range(2)) for _ in range(copies)), *map(jnp.asarray, angles)


def peer_rows(kernels: Iterable[str], turns: int) -> list[dict]:
    """Rotations of q and k together, ours and those of other software, at PEER_SHAPES."""
    rows = []
    for shape, temperature in itertools.product(PEER_SHAPES, ("hot", "cold")):
        size = 2 * 2 * math.prod(shape)
        if (copies := 1 if temperature == "hot" else copies_beyond_cache(size)) is None:
            continue
        _, tokens, _, channels = shape
        coords, freqs = np.linspace(0, 1, tokens, dtype=np.float32)[:, None], np.linspace(1, 10, channels // 4, dtype=np.float32)
        timers = {}
        for form in ("xla", *kernels):
            # Tables [L, 1, R], or coords [L, 1] and freqs [1, 1, R].
            tables = (np.cos(coords * freqs)[:, None], np.sin(coords * freqs)[:, None])
            angles = tables if form == "xla" else (coords, freqs[None, None])
            step = functools.partial(turn_both, form)
            arguments = functools.partial(pairs_of, shape, copies, angles)
            (qk, *_), *where = jax.eval_shape(arguments)
            if form != "xla" and not serves(form, rotate, *qk, Rotation(*where)):
                continue
            timers[form] = compile_loop(step, arguments, PEER_ROUNDS, REPEATS[temperature]).timer()
        if importlib.util.find_spec("torch"):
            from benchmarks import _torch

            timers |= _torch.rotations(shape, (coords * freqs).tolist(), copies, PEER_ROUNDS * REPEATS[temperature])
        rows.append({"shape": shape, "temperature": temperature, "microseconds": take_turns(timers, turns)})
    return rows


def pack_separately(q: jax.Array, k: jax.Array, v: jax.Array, rotation: Rotation) -> jax.Array:
    """Every step a pass of its own: what software does that has a rotation and a concatenation."""
    theta, pairing = -rotation.angles(), rotation.pairing
    q, k = (jax.lax.optimization_barrier(rotate_by_angles(x, theta, pairing=pairing, implementation="xla")) for x in (q, k))
    return jnp.stack([q, k, v], axis=2)


PACKS = {
    "separate": pack_separately,
    "xla": functools.partial(rotate_back_and_pack, implementation="xla"),
    "triton": functools.partial(rotate_back_and_pack, implementation="triton"),
}


def pack_all(pack: Callable, gradients: list[tuple], coords: jax.Array, freqs: jax.Array) -> list[jax.Array]:
    """Packs several triples of q, k and v, one after the other."""
    packed = []
    for gs in gradients:
        # Waits for the one before: XLA would fuse them.
        gs, packed = jax.lax.optimization_barrier((gs, packed))
        packed.append(pack(*gs, Rotation(coords, freqs)))
    return packed


def pack_rows(turns: int, copies: int = 8) -> list[dict]:
    """The gradients of q, k and v back into that of the packed projection, at PACK_SHAPES, round `copies` triples of arrays."""
    rows = []
    for shape, share in itertools.product(PACK_SHAPES, (2, 1)):
        _, tokens, heads, channels = shape
        coords, freqs = jnp.linspace(-1, 1, tokens)[:, None], jnp.linspace(1, 10, heads * channels // 2 // share).reshape(heads, 1, -1)
        gradients = [tuple(jnp.full(shape, i + n, jnp.bfloat16) for n in range(3)) for i in range(copies)]
        timers = {}
        for name, pack in PACKS.items():
            run = jax.jit(functools.partial(pack_all, pack))
            jax.block_until_ready(run(gradients, coords, freqs))

            def elapsed(run=run, arguments=(gradients, coords, freqs), passes: int = 4) -> float:
                start = time.perf_counter()
                jax.block_until_ready([run(*arguments) for _ in range(passes)])
                return 1e6 * (time.perf_counter() - start) / passes / copies

            timers[name] = elapsed
        rows.append({"shape": shape, "pairs": channels // 2 // share, "microseconds": take_turns(timers, turns)})
    return rows


def sweep(args: argparse.Namespace, limits: dict[str, float], short: bool, deadline: float) -> Iterator[dict]:
    """Figures of all cases, group by group; stops at the deadline."""
    todo = list(cases(short))
    measured: dict[tuple, dict] = {}
    key = lambda case: (case.shape, case.precision, case.direction)
    steps = lambda case: max(4, min(400, round(args.loop_us / max(limits["launch_us"], case.moved_bytes / limits["copy_gb_per_s"] / 1e3))))

    def prepare(case: Case) -> tuple[dict[str, dict[str, Loop]], Timer | None]:
        eager = eager_timer(case) if (case.precision, case.direction) == ("16-32", "forward") else None
        return loops_of(case, args.kernels, steps(case)), eager

    # Compilation is most of the work and leaves Python's lock alone; measuring waits for nothing but the group at hand.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(todo), args.together):
            group = todo[start : start + args.together]
            new = {key(case): case for case in group if key(case) not in measured}
            for name, (loops, eager) in zip(new, list(pool.map(prepare, new.values())), strict=True):
                measured[name] = {
                    temperature: take_turns({form: loop.timer() for form, loop in forms.items()}, args.turns)
                    for temperature, forms in loops.items()
                }
                if eager:
                    measured[name]["hot"] |= take_turns({"eager": eager}, args.turns)
            for case in group:
                yield dataclasses.asdict(case) | {"moved_bytes": case.moved_bytes, "microseconds": measured[key(case)]}
            if time.monotonic() > deadline:
                print(f"stopped after {start + len(group)} of {len(todo)} cases: --limit-s={args.limit_s}")
                return


def run(args: argparse.Namespace) -> dict:
    """Measures everything and returns what is worth keeping."""
    deadline = time.monotonic() + args.limit_s
    on_gpu = jax.default_backend() == "gpu"
    limits = machine_limits(args.turns)
    peers, packs = (peer_rows(args.kernels, args.turns), pack_rows(args.turns)) if on_gpu else ([], [])
    figures = {"limits": limits, "rows": [], "peers": peers, "packs": packs}
    result = lambda: record("rotary", vars(args), **figures, goals=goals(figures, args.kernels[0]))
    for row in sweep(args, limits, args.short or not on_gpu, deadline):
        figures["rows"].append(row)
        if len(figures["rows"]) % args.together == 0:
            write(result(), args.out)
    return result()


def goals(figures: dict, ours: str) -> dict[str, dict[str, float]]:
    """Goal -> its value, the least and the most of the ratios it is made of, and how many these are. Only what was measured."""
    limits, ratios = figures["limits"], {}
    ideal = lambda row: row["moved_bytes"] / limits["copy_gb_per_s"] / 1e3
    best = lambda row: row["microseconds"].get("cold") or row["microseconds"]["hot"]
    rows = [row for row in figures["rows"] if (row["precision"], row["direction"]) == ("16-32", "forward") and ours in best(row)]
    large = lambda least: [row for row in rows if ideal(row) >= least and row["channels"] >= 64]
    ratios["K1"] = [best(row)["xla"] / best(row)[ours] for row in rows]
    ratios["K2"] = [best(row)["xla"] / best(row)[ours] for row in large(10)]
    ratios["K3"] = [ideal(row) / best(row)[ours] for row in large(20)]
    ratios["K4"] = [row["microseconds"]["hot"][ours] / limits["kernel_launch_us"] for row in rows if ideal(row) < 1]
    ratios["K5"] = [row["microseconds"]["hot"]["eager"] / row["microseconds"]["hot"][ours] for row in rows]
    peers = {(row["shape"], row["temperature"]): row["microseconds"] for row in figures["peers"]}
    ratios["K6"] = [
        x["torch"] / x[ours] for (shape, t), x in peers.items() if "torch" in x and (t == "cold" or (shape, "cold") not in peers)
    ]
    ratios["K7"] = [row["microseconds"]["separate"] / row["microseconds"]["triton"] for row in figures["packs"]]
    mean = lambda name: statistics.fmean if name == "K5" else geometric_mean
    return {
        name: {"value": mean(name)(values), "least": min(values), "most": max(values), "count": len(values)}
        for name, values in ratios.items()
        if values
    }


def ratio_table(result: dict) -> list[tuple[str, ...]]:
    """Precision, direction, cache, ratio, sizes, and geometric mean, least and most of a ratio: how many times faster the second is."""
    names = ["xla", *result["settings"]["kernels"]]
    lines = []
    for precision, direction, temperature in itertools.product(DTYPES, ("forward", "backward"), ("hot", "cold")):
        figures = [
            row["microseconds"][temperature]
            for row in result["rows"]
            if row["precision"] == precision and row["direction"] == direction and temperature in row["microseconds"]
        ]
        for slow, fast in [("xla", name) for name in names[1:]] + [("eager", name) for name in names]:
            if ratios := [f[slow] / f[fast] for f in figures if slow in f and fast in f]:
                values = (f"{x:.2f}" for x in (geometric_mean(ratios), min(ratios), max(ratios)))
                lines.append((precision, direction, temperature, f"{slow} / {fast}", str(len(ratios)), *values))
    return lines


def summary(result: dict) -> str:
    """What a reader wants first: limits, ratios, peers, the way back, and the goals."""
    limits = result["limits"]
    kernel = f", an empty kernel {limits['kernel_launch_us']:.2f} us" if "kernel_launch_us" in limits else ""
    lines = [f"launch {limits['launch_us']:.2f} us{kernel}, copy {limits['copy_gb_per_s']:,.0f} GB/s, on {result['machine']['device']}", ""]
    lines.append(f"{'precision':10}{'direction':10}{'cache':6}{'ratio':16}{'sizes':>6}{'geomean':>9}{'least':>8}{'most':>8}")
    for precision, direction, temperature, ratio, count, *values in ratio_table(result):
        lines.append(f"{precision:10}{direction:10}{temperature:6}{ratio:16}{count:>6}{values[0]:>9}{values[1]:>8}{values[2]:>8}")
    for title, rows in (("q and k together, [B, L, N, C], us", result["peers"]), ("gradients packed, us", result["packs"])):
        lines += ["", title] if rows else []
        for row in rows:
            what = row.get("temperature") or f"{row['pairs']} pairs"
            lines.append(f"{row['shape']!s:22}{what:10}" + "  ".join(f"{form} {us:.2f}" for form, us in row["microseconds"].items()))
    lines += ["", f"{'goal':5}{'measured':>9}{'least':>8}{'most':>8}{'sizes':>6}  {'floor':18}{'goal':8}{'moonshot':9}what"]
    for goal in (goal for goal in GOALS if goal.name.startswith("K")):
        found = result["goals"].get(goal.name)
        figures = f"{found['value']:9.2f}{found['least']:8.2f}{found['most']:8.2f}{found['count']:6}" if found else f"{'not measured':>31}"
        lines.append(f"{goal.name:5}{figures}  {goal.floor:18}{goal.goal:8}{goal.moonshot:9}{goal.what}")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks rotary", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="16 sizes instead of 300, as on a CPU")
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=["triton"],
        choices=sorted(set(ROTATE) - {"xla"}),
        help="implementations to measure; the goals are the first one's",
    )
    parser.add_argument("--turns", type=int, default=9, help="how often the forms take turns")
    parser.add_argument("--loop-us", type=float, default=1000.0, help="about how long one compiled loop shall take")
    parser.add_argument("--together", type=int, default=64, help="cases that are compiled before they are measured")
    parser.add_argument("--limit-s", type=float, default=450.0, help="stop after this time; what is measured by then is kept")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Measures, prints tables, and writes the figures where --out says."""
    # Other software needs room on the GPU, too. Read when jax first looks for devices.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args = parse(argv)
    result = run(args)
    print(summary(result))
    write(result, args.out)
