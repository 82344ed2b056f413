"""Rotary kernels against XLA and others, at the 300 problem sizes of Kane's thesis (table A.1).

    python -m benchmarks rotary --out benchmarks/results/rotary_gpu.json

All sizes are measured in three precisions, forward and backward, in an order in which every
beginning has sizes of all kinds: first what the goals need, then the other libraries, then the
rest. A call that is interrupted, or ends at --limit-s, is continued by the same command. On a CPU a
short version runs. Features are [B, N, H*W, C] and theta is [N, H*W, C/4] (half of the channels are
rotated), as in the thesis. The forms:

    eager     jax.numpy without jit, as in the thesis
    xla       jax.numpy with jit, in its fastest form: one pass that writes a new array, with
              tables of cosines and sines
    triton    rope_jax_kernels' kernel in place (on a GPU only); --kernels selects others

Other libraries, if installed, are measured on q and k [B, L, N, C] whose heads share their angles:
torch (a plain rotation in place with torch.compile), liger (Liger-Kernel; all channels) and
flash_attn (its Triton kernel in place, one launch each for q and k). The last part packs the
gradients of q, k and v into that of the packed projection.

The same process measures the launch times of an XLA operation and of a kernel that only stores a
number, and the bandwidth of a copy (1 GiB; 64 MiB on a CPU). All forms but eager run in one
compiled loop of dependent steps (torch's in a CUDA graph), so that times exclude Python; `graphs`
is the share of a loop's launches that XLA compiled into CUDA graphs. Forms are timed in turns, and
medians are reported; those that fail are listed in `left_out` with the reason. "hot" uses one array
repeatedly, which stays in cache if it fits; "cold" cycles through arrays that together exceed the
cache. Ratios are ratios of times: xla / triton = 2 means that the kernel takes half the time.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks._goals import geometric_mean, goal_table, spread
from benchmarks._rotations import (
    pack_rows,
    peer_rows,
    rotate_back_by_tables,
    rotate_by_tables,
)
from benchmarks._runner import Keep, Result, earlier
from benchmarks._timing import (
    REPEATS,
    Loop,
    Timer,
    compile_loop,
    copies_beyond_cache,
    groups,
    machine_limits,
    mixed,
    reason_of,
    serves,
    take_turns,
    working,
)
from rope_jax.text import format_table
from rope_jax_kernels import rotate_by_angles
from rope_jax_kernels.dispatch import IMPLEMENTATIONS

# Batches, heads, sides and channels.
SIZES = ((1, 16, 32, 64, 128), (1, 3, 4, 6, 8), (56, 28, 14, 7), (32, 64, 128))
SHORT = ((1, 16), (3,), (14, 7), (32, 64))
DTYPES = {
    "16-32": ("bfloat16", "float32"),
    "16-16": ("bfloat16", "bfloat16"),
    "32-32": ("float32", "float32"),
}
KERNELS = ["triton"]
SAVED_EVERY_S = 2.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem: sizes, precision (of features and theta) and direction."""

    batch: int
    heads: int
    side: int
    channels: int
    precision: str
    direction: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The canonical shape of the features, [B, 1, N*H*W, C].

        Each head and token is a row with its own angles, so four heads of 7x7 equal one of 14x14.
        """
        return self.batch, 1, self.heads * self.side**2, self.channels

    @property
    def problem(self) -> tuple:
        """Key that is equal for cases with the same canonical problem."""
        return self.shape, self.precision, self.direction

    @property
    def moved_bytes(self) -> int:
        """Bytes that a rotation in place moves: half of the channels twice, theta once."""
        features, theta = (jnp.dtype(name).itemsize for name in DTYPES[self.precision])
        batch, _, rows, channels = self.shape
        return rows * (batch * channels * features + channels // 4 * theta)


def cases(short: bool) -> list[Case]:
    """All 1,800 problems, or 48 of them; those of the goals first, sizes mixed."""
    sizes = SHORT if short else SIZES
    found = []
    for precision, direction in itertools.product(DTYPES, ("forward", "backward")):
        some = [Case(*size, precision, direction) for size in itertools.product(*sizes)]
        found += mixed(sorted(some, key=lambda case: case.moved_bytes))
    return found


def step_of(case: Case, form: str) -> Callable:
    """Returns a function of (features, *angles): the rotation, or its gradient."""
    if form == "xla":
        return rotate_by_tables if case.direction == "forward" else rotate_back_by_tables
    kernel = "xla" if form == "eager" else form
    forward = functools.partial(rotate_by_angles, layout="BNLD", implementation=kernel)

    def backward(x: jax.Array, theta: jax.Array) -> jax.Array:
        return jax.vjp(lambda y: forward(y, theta), x)[1](x)[0]

    return forward if case.direction == "forward" else backward


def operands(case: Case, form: str, copies: int) -> tuple:
    """Returns `copies` features, and the angles of `step_of`: theta, or cosines and sines."""
    features, dtype = DTYPES[case.precision]
    _, heads, rows, channels = case.shape
    theta = jnp.linspace(0, 10, heads * rows * (channels // 4)).reshape(heads, rows, channels // 4)
    angles = (jnp.cos(theta), jnp.sin(theta)) if form == "xla" else (theta.astype(dtype),)
    return tuple(jnp.full(case.shape, 1 + n, features) for n in range(copies)), *angles


def loops_of(
    case: Case, kernels: Iterable[str], steps: int
) -> tuple[dict[str, dict[str, Loop]], dict[str, str]]:
    """Compiled loops of about `steps` steps, by temperature and form; and why others fail."""
    (x,), theta = jax.eval_shape(lambda: operands(case, "triton", 1))
    all_copies = {"hot": 1, "cold": copies_beyond_cache(x.size * x.dtype.itemsize)}
    forms = ["xla"] + [k for k in kernels if serves(k, rotate_by_angles, x, theta, layout="BNLD")]
    loops: dict[str, dict[str, Loop]] = {}
    left_out: dict[str, str] = {}
    for temperature, copies in all_copies.items():
        if copies:
            repeats = REPEATS[temperature]
            rounds = max(2, steps // repeats // copies)
            loops[temperature] = {}
            for form in forms:
                arguments = functools.partial(operands, case, form, copies)
                try:
                    loop = compile_loop(step_of(case, form), arguments, rounds, repeats)
                    loops[temperature][form] = loop
                except Exception as error:  # the other forms are measured nevertheless
                    left_out[form] = reason_of(error)
    return loops, left_out


def eager_timer(case: Case) -> Timer:
    """Returns a timer of the jax.numpy form without jit."""
    (x,), theta = jax.jit(lambda: operands(case, "eager", 1))()
    step = step_of(case, "eager")

    def elapsed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(step(x, theta))
        return 1e6 * (time.perf_counter() - start)

    elapsed()
    return elapsed


def prepare(
    case: Case, kernels: Sequence[str], loop_us: float, limits: dict[str, float]
) -> tuple[dict[str, dict[str, Loop]], dict[str, str], Timer | None]:
    """What is compiled before a case is measured: `loops_of`, and its `eager_timer`."""
    step_us = max(limits["launch_us"], ideal_us(case, limits))
    with_eager = (case.precision, case.direction) == ("16-32", "forward")
    steps = max(4, min(400, round(loop_us / step_us)))
    loops, left_out = loops_of(case, kernels, steps)
    makers = {"eager": lambda: eager_timer(case)} if with_eager else {}
    timers, refused = working(makers)
    return loops, left_out | refused, timers.get("eager")


def ideal_us(case: Case, limits: dict[str, float]) -> float:
    """Microseconds to move a case's bytes at the bandwidth of a copy."""
    return case.moved_bytes / limits["copy_gb_per_s"] / 1e3


def measure(
    loops: dict[str, dict[str, Loop]], left_out: dict[str, str], eager: Timer | None, turns: int
) -> dict[str, Any]:
    """Times, graphs and failures of a problem."""
    times: dict[str, dict[str, float]] = {}
    for temperature, forms in loops.items():
        timers: dict[str, Timer] = {}
        for form, loop in forms.items():
            try:
                timers[form] = loop.timer()
            except Exception as error:  # such as too little memory
                left_out[form] = reason_of(error)
        times[temperature] = take_turns(timers, turns)
    if eager:
        times["hot"] |= take_turns({"eager": eager}, turns)
    graphs = {
        name: {form: loop.graphs for form, loop in forms.items()} for name, forms in loops.items()
    }
    return {"microseconds": times, "graphs": graphs, "left_out": left_out}


def measured(
    todo: Sequence[Case],
    kernels: Sequence[str],
    turns: int,
    loop_us: float,
    together: int,
    limits: dict[str, float],
) -> Iterator[dict[str, Any]]:
    """Measures cases and yields their rows; `together` are compiled, then measured one by one."""
    figures: dict[tuple, dict] = {}
    # Compilation takes most of the time and releases the GIL. Nothing compiles during timing.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for group in groups(todo, together):
            new = {case.problem: case for case in group if case.problem not in figures}
            prepared = dict(
                zip(
                    new,
                    pool.map(lambda case: prepare(case, kernels, loop_us, limits), new.values()),
                    strict=True,
                )
            )
            for case in group:
                if case.problem in prepared:
                    figures[case.problem] = measure(*prepared.pop(case.problem), turns)
                row = dataclasses.asdict(case) | {"moved_bytes": case.moved_bytes}
                row |= {"ideal_us": ideal_us(case, limits)}
                row |= {"empty_us": limits.get("kernel_launch_us")}
                yield row | figures[case.problem]


def goals(figures: dict[str, Any], ours: str) -> dict[str, dict[str, Any]]:
    """The goals that were measured.

    Args:
        figures: rows, peers and packs of a result.
        ours: name of our kernel.
    """
    ratios: dict[str, list[float]] = {f"K{n}": [] for n in range(1, 8)}
    for row in figures["rows"]:
        hot = row["microseconds"]["hot"]
        best = row["microseconds"].get("cold") or hot
        if (row["precision"], row["direction"]) != ("16-32", "forward"):
            continue
        if not {"xla", ours} <= best.keys() & hot.keys():  # one of them was left out
            continue
        ideal = row["ideal_us"]
        ratios["K1"].append(best["xla"] / best[ours])
        if ideal >= 10 and row["channels"] >= 64:
            ratios["K2"].append(best["xla"] / best[ours])
        if ideal >= 20 and row["channels"] >= 64:
            ratios["K3"].append(ideal / best[ours])
        if ideal < 1:
            ratios["K4"].append(hot[ours] / row["empty_us"])
        if "eager" in hot:
            ratios["K5"].append(hot["eager"] / hot[ours])
    cold = {tuple(row["shape"]) for row in figures["peers"] if row["temperature"] == "cold"}
    for row in figures["peers"]:
        times = row["microseconds"]
        counts = row["temperature"] == "cold" or tuple(row["shape"]) not in cold
        if counts and {"torch", ours} <= {*times}:
            ratios["K6"].append(times["torch"] / times[ours])
    for row in figures["packs"]:
        if {"separate", "triton"} <= {*row["microseconds"]}:
            ratios["K7"].append(row["microseconds"]["separate"] / row["microseconds"]["triton"])
    found = {name: spread(values) for name, values in ratios.items() if values}
    if "K5" in found:  # an arithmetic mean, as in the thesis
        found["K5"]["value"] = statistics.fmean(ratios["K5"])
    return found


RATIO_HEADER = ("precision (features-theta)", "direction", "cache", "time ratio", "sizes")
RATIO_HEADER += ("geometric mean", "least", "most")


def ratio_rows(result: Result) -> list[tuple[str, ...]]:
    """Cells of a table with RATIO_HEADER: how many times faster the second form is."""
    names = ["xla", *result["settings"]["kernels"]]
    ratios = [("xla", name) for name in names[1:]] + [("eager", name) for name in names]
    lines = []
    for kind in itertools.product(DTYPES, ("forward", "backward"), ("hot", "cold")):
        times = [
            row["microseconds"][kind[2]]
            for row in result["rows"]
            if (row["precision"], row["direction"]) == kind[:2] and kind[2] in row["microseconds"]
        ]
        for slow, fast in ratios:
            if values := [x[slow] / x[fast] for x in times if slow in x and fast in x]:
                figures = (geometric_mean(values), min(values), max(values))
                cells = (f"{slow} / {fast}", str(len(values)), *(f"{x:.2f}" for x in figures))
                lines.append((*kind, *cells))
    return lines


def summary(result: Result) -> str:
    """Limits, ratios, other libraries, packing and goals, for the terminal."""
    limits, device = result["limits"], result["machine"]["device"]
    launch = f"launch {limits['launch_us']:.2f} us"
    if "kernel_launch_us" in limits:
        launch += f", a kernel that only stores {limits['kernel_launch_us']:.2f} us"
    lines = [f"{launch}, copy {limits['copy_gb_per_s']:,.0f} GB/s, on {device}", ""]
    if rows := ratio_rows(result):
        lines.append(format_table(RATIO_HEADER, rows))
    titles = {"peers": "q and k together, [B, L, N, C], us", "packs": "gradients packed, us"}
    for name, title in titles.items():
        lines += ["", title] if result[name] else []
        for row in result[name]:
            what = row.get("temperature") or f"{row['pairs']} pairs"
            times = "  ".join(f"{form} {us:.2f}" for form, us in row["microseconds"].items())
            lines.append(f"{row['shape']!s:22}{what:10}{times}")
            lines += [f"  {form} is left out: {reason}" for form, reason in row["left_out"].items()]
    return "\n".join([*lines, "", goal_table(result["goals"], "K")])


IDENTITY = ("batch", "heads", "side", "channels", "precision", "direction")  # of a row


def run(
    keep: Keep,
    *,
    out: pathlib.Path | None,
    short: bool = False,
    kernels: list[Literal[*sorted(set(IMPLEMENTATIONS["rotate"]) - {"xla"})]] = KERNELS,
    turns: int = 9,
    loop_us: float = 1000.0,
    together: int = 64,
    limit_s: float = 450.0,
) -> None:
    """Measures the cases in groups, and saves the result as it goes.

    Args:
        keep: saves the result.
        out: of an earlier call, to continue.
        short: measure 16 sizes instead of 300, as on a CPU
        kernels: implementations to measure; the goals use the first one
        turns: timed turns of each form
        loop_us: approximate time of one compiled loop, in microseconds
        together: cases per group; a group is compiled, then measured
        limit_s: end after this many seconds
    """
    deadline, on_gpu = time.monotonic() + limit_s, jax.default_backend() == "gpu"
    settings = {"short": short, "kernels": kernels, "turns": turns, "loop_us": loop_us}
    before = earlier(out, "rotary", settings)
    figures = {name: before.get(name, []) for name in ("rows", "peers", "packs")}
    limits = machine_limits(turns)
    known = {tuple(map(row.get, IDENTITY)) for row in figures["rows"]}
    todo = [case for case in cases(short or not on_gpu) if dataclasses.astuple(case) not in known]
    of_goals = [x for x in todo if (x.precision, x.direction) == ("16-32", "forward")]
    rest = [x for x in todo if x not in of_goals]

    def done(kind: str, second: str) -> set[tuple]:
        return {(tuple(row["shape"]), row[second]) for row in figures[kind]}

    # Evaluated one after the other: a generator does nothing before its first row.
    parts = [("rows", measured(of_goals, kernels, turns, loop_us, together, limits))]
    if on_gpu:
        parts.append(("packs", pack_rows(turns, done("packs", "pairs"))))
        parts.append(("peers", peer_rows(kernels, turns, done("peers", "temperature"))))
    parts.append(("rows", measured(rest, kernels, turns, loop_us, together, limits)))

    def keep_all(*, complete: bool) -> Result:
        return keep(
            limits=limits, **figures, goals=goals(figures, kernels[0]), left=int(not complete)
        )

    result, saved = keep_all(complete=False), time.monotonic()
    for kind, row in ((kind, row) for kind, rows in parts for row in rows):
        figures[kind].append(json.loads(json.dumps(row)))
        if time.monotonic() > deadline:
            print(f"stopped with {len(figures['rows'])} rows: --limit-s={limit_s:g}")
            result = keep_all(complete=False)
            break
        if time.monotonic() > saved + SAVED_EVERY_S:
            result, saved = keep_all(complete=False), time.monotonic()
    else:
        result = keep_all(complete=True)
    print(summary(result))
