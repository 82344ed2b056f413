"""Rotary kernels against XLA and others, at the 300 problem sizes of Kane's thesis (table A.1).

    python -m benchmarks rotary --out benchmarks/results/rotary_gpu.json

On a GPU, all sizes take eight minutes, in three precisions, forward and backward; on a CPU a short
version runs. Features are [B, N, H*W, C] and theta is [N, H*W, C/4] (half of the channels are
rotated), as in the thesis. The forms:

    eager     jax.numpy without jit, as in the thesis
    xla       jax.numpy with jit, in its fastest form: one pass that writes a new array, with
              tables of cosines and sines
    triton    rope_jax_kernels' kernel in place (on a GPU only); --kernels selects others

Other libraries, if installed, are measured on q and k [B, L, N, C] whose heads share their angles:
torch (a plain rotation in place with torch.compile), liger (Liger-Kernel; all channels) and
flash_attn (its Triton kernel in place, one launch each for q and k). The last part packs the
gradients of q, k and v into that of the packed projection.

The same process measures the launch times of an XLA operation and of an empty kernel, and the
bandwidth of a copy (1 GiB; 64 MiB on a CPU). All forms but eager run in one compiled loop of
dependent steps (torch's in a CUDA graph), so that times exclude Python. Forms are timed in turns,
and medians are reported. "hot" uses one array repeatedly, which stays in cache if it fits; "cold"
cycles through arrays that together exceed the cache. Ratios are ratios of times: xla / triton = 2
means that the kernel takes half the time.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._goals import geometric_mean, goal_table, spread
from benchmarks._runner import Keep, Result
from benchmarks._timing import (
    REPEATS,
    Loop,
    Timer,
    compile_loop,
    copies_beyond_cache,
    machine_limits,
    serves,
    take_turns,
)
from rope_jax.text import format_table
from rope_jax_kernels import Rotation, rotate, rotate_by_angles
from rope_jax_kernels.dispatch import IMPLEMENTATIONS
from rope_jax_kernels.rotary import rotate_back_and_pack

# Batches, heads, sides and channels.
SIZES = ((1, 16, 32, 64, 128), (1, 3, 4, 6, 8), (56, 28, 14, 7), (32, 64, 128))
SHORT = ((1, 16), (3,), (14, 7), (32, 64))
DTYPES = {
    "16-32": ("bfloat16", "float32"),
    "16-16": ("bfloat16", "bfloat16"),
    "32-32": ("float32", "float32"),
}
KERNELS = ["triton"]
# [B, L, N, C]
_VITS = [(batch, 196, 6, 64) for batch in (1, 16, 128)]
PEER_SHAPES = [*_VITS, (16, 3136, 6, 64), (128, 196, 12, 32)]
PEER_ROUNDS = 8
PACK_SHAPES = [(64, 196, 6, 64), (128, 196, 6, 64), (256, 196, 6, 64), (128, 196, 12, 64)]


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


def cases(short: bool) -> Iterator[Case]:
    """Returns all 1,800 problems, or 48 of them."""
    sizes = SHORT if short else SIZES
    for precision, direction, *size in itertools.product(DTYPES, ("forward", "backward"), *sizes):
        yield Case(*size, precision, direction)


def rotate_by_tables(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The rotation that XLA compiles to the fastest program, with tables [N, L, R].

    Given theta instead of tables, XLA would launch three kernels.
    """
    pairs = cos.shape[-1]
    a, b = x[..., :pairs].astype(cos.dtype), x[..., pairs : 2 * pairs].astype(cos.dtype)
    rotated = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*rotated, x[..., 2 * pairs :]], axis=-1)


def rotate_back_by_tables(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Gradient of `rotate_by_tables` in the same form; autodiff would add two padded halves."""
    return rotate_by_tables(x, cos, -sin)


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


def loops_of(case: Case, kernels: Iterable[str], steps: int) -> dict[str, dict[str, Loop]]:
    """Compiled loops of about `steps` steps, by temperature and form."""
    (x,), theta = jax.eval_shape(lambda: operands(case, "triton", 1))
    all_copies = {"hot": 1, "cold": copies_beyond_cache(x.size * x.dtype.itemsize)}
    forms = ["xla"] + [k for k in kernels if serves(k, rotate_by_angles, x, theta, layout="BNLD")]
    loops: dict[str, dict[str, Loop]] = {}
    for temperature, copies in all_copies.items():
        if copies:
            repeats = REPEATS[temperature]
            rounds = max(2, steps // repeats // copies)
            loops[temperature] = {}
            for form in forms:
                arguments = functools.partial(operands, case, form, copies)
                loop = compile_loop(step_of(case, form), arguments, rounds, repeats)
                loops[temperature][form] = loop
    return loops


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


def rotate_both(
    form: str | None, qk: tuple[jax.Array, jax.Array], first: jax.Array, second: jax.Array
) -> tuple[jax.Array, ...]:
    """Rotates q and k [B, L, N, C] with tables (form "xla") or with coords and freqs."""
    if form == "xla":
        return tuple(rotate_by_tables(x, first, second) for x in qk)
    return rotate(*qk, Rotation(first, second), implementation=form)


def qk_and_angles(shape: tuple[int, ...], copies: int, angles: tuple) -> tuple:
    """Returns `copies` pairs of q and k, and the angles."""
    pairs = [tuple(jnp.full(shape, 1 + i, jnp.bfloat16) for i in range(2)) for _ in range(copies)]
    return tuple(pairs), *map(jnp.asarray, angles)


def peer_rows(kernels: Sequence[str], turns: int) -> list[dict[str, Any]]:
    """Measures our rotations of q and k and those of other libraries, at PEER_SHAPES."""
    rows = []
    for shape, temperature in itertools.product(PEER_SHAPES, ("hot", "cold")):
        size = 2 * 2 * math.prod(shape)
        copies = 1 if temperature == "hot" else copies_beyond_cache(size)
        if copies is None:
            continue
        _, tokens, _, channels = shape
        coords = np.linspace(0, 1, tokens, dtype=np.float32)[:, None]
        freqs = np.linspace(1, 10, channels // 4, dtype=np.float32)
        theta = coords * freqs
        timers = {}
        for form in ("xla", *kernels):
            # Tables [L, 1, R], or coords [L, 1] and freqs [1, 1, R].
            tables = (np.cos(theta)[:, None], np.sin(theta)[:, None])
            angles = tables if form == "xla" else (coords, freqs[None, None])
            step = functools.partial(rotate_both, form)
            arguments = functools.partial(qk_and_angles, shape, copies, angles)
            (qk, *_), *where = jax.eval_shape(arguments)
            if form == "xla" or serves(form, rotate, *qk, Rotation(*where)):
                loop = compile_loop(step, arguments, PEER_ROUNDS, REPEATS[temperature])
                timers[form] = loop.timer()
        if importlib.util.find_spec("torch"):
            from benchmarks import _torch

            steps = PEER_ROUNDS * REPEATS[temperature]
            timers |= _torch.rotations(shape, theta.tolist(), copies, steps)
        times = take_turns(timers, turns)
        rows.append({"shape": shape, "temperature": temperature, "microseconds": times})
    return rows


def pack_separately(q: jax.Array, k: jax.Array, v: jax.Array, rotation: Rotation) -> jax.Array:
    """Packs in separate passes, as with a library's rotation and a concatenation."""
    rotated = []
    for x in (q, k):
        back = rotate_by_angles(
            x, -rotation.angles(), pairing=rotation.pairing, implementation="xla"
        )
        rotated.append(jax.lax.optimization_barrier(back))
    return jnp.stack([*rotated, v], axis=2)


PACKS = {
    "separate": pack_separately,
    "xla": functools.partial(rotate_back_and_pack, implementation="xla"),
    "triton": functools.partial(rotate_back_and_pack, implementation="triton"),
}


def pack_all(
    pack: Callable, gradients: list[tuple], coords: jax.Array, freqs: jax.Array
) -> list[jax.Array]:
    """Packs several triples (q, k, v), one after the other."""
    packed = []
    for gs in gradients:
        # Depends on the previous one; otherwise XLA would fuse them.
        gs, packed = jax.lax.optimization_barrier((gs, packed))
        packed.append(pack(*gs, Rotation(coords, freqs)))
    return packed


def pack_timer(pack: Callable, arguments: tuple, passes: int = 4) -> Timer:
    """Returns a timer of the packing of one triple."""
    run = jax.jit(functools.partial(pack_all, pack))
    jax.block_until_ready(run(*arguments))

    def elapsed() -> float:
        start = time.perf_counter()
        jax.block_until_ready([run(*arguments) for _ in range(passes)])
        return 1e6 * (time.perf_counter() - start) / passes / len(arguments[0])

    return elapsed


def pack_rows(turns: int, copies: int = 8) -> list[dict[str, Any]]:
    """Measures the packing of the gradients of q, k and v, at PACK_SHAPES."""
    rows = []
    for shape, share in itertools.product(PACK_SHAPES, (2, 1)):
        _, tokens, heads, channels = shape
        pairs = channels // 2 // share
        coords = jnp.linspace(-1, 1, tokens)[:, None]
        freqs = jnp.linspace(1, 10, heads * pairs).reshape(heads, 1, -1)
        triples = [
            tuple(jnp.full(shape, i + n, jnp.bfloat16) for n in range(3)) for i in range(copies)
        ]
        timers = {name: pack_timer(pack, (triples, coords, freqs)) for name, pack in PACKS.items()}
        rows.append({"shape": shape, "pairs": pairs, "microseconds": take_turns(timers, turns)})
    return rows


def measured(
    todo: Sequence[Case],
    kernels: Sequence[str],
    turns: int,
    loop_us: float,
    together: int,
    limits: dict[str, float],
) -> Iterator[list[dict[str, Any]]]:
    """Measures all cases and yields their rows, in groups of `together`."""
    figures: dict[tuple, dict] = {}

    def prepare(case: Case) -> tuple[dict[str, dict[str, Loop]], Timer | None]:
        step_us = max(limits["launch_us"], case.moved_bytes / limits["copy_gb_per_s"] / 1e3)
        with_eager = (case.precision, case.direction) == ("16-32", "forward")
        steps = max(4, min(400, round(loop_us / step_us)))
        return loops_of(case, kernels, steps), eager_timer(case) if with_eager else None

    # Compilation takes most of the time and releases the GIL. Nothing compiles during timing.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(todo), together):
            group = todo[start : start + together]
            new = {case.problem: case for case in group if case.problem not in figures}
            prepared = list(pool.map(prepare, new.values()))
            for problem, (loops, eager) in zip(new, prepared, strict=True):
                figures[problem] = {
                    temperature: take_turns({x: loop.timer() for x, loop in forms.items()}, turns)
                    for temperature, forms in loops.items()
                }
                if eager:
                    figures[problem]["hot"] |= take_turns({"eager": eager}, turns)
            yield [
                dataclasses.asdict(case)
                | {"moved_bytes": case.moved_bytes, "microseconds": figures[case.problem]}
                for case in group
            ]


def goals(figures: dict[str, Any], ours: str) -> dict[str, dict[str, Any]]:
    """The goals that were measured.

    Args:
        figures: limits, rows, peers and packs of a result.
        ours: name of our kernel.
    """
    limits = figures["limits"]
    ratios: dict[str, list[float]] = {f"K{n}": [] for n in range(1, 8)}
    for row in figures["rows"]:
        hot = row["microseconds"]["hot"]
        best = row["microseconds"].get("cold") or hot
        if (row["precision"], row["direction"]) != ("16-32", "forward") or ours not in best:
            continue
        ideal = row["moved_bytes"] / limits["copy_gb_per_s"] / 1e3
        ratios["K1"].append(best["xla"] / best[ours])
        if ideal >= 10 and row["channels"] >= 64:
            ratios["K2"].append(best["xla"] / best[ours])
        if ideal >= 20 and row["channels"] >= 64:
            ratios["K3"].append(ideal / best[ours])
        if ideal < 1:
            ratios["K4"].append(hot[ours] / limits["kernel_launch_us"])
        ratios["K5"].append(hot["eager"] / hot[ours])
    cold = {tuple(row["shape"]) for row in figures["peers"] if row["temperature"] == "cold"}
    for row in figures["peers"]:
        times = row["microseconds"]
        counts = row["temperature"] == "cold" or tuple(row["shape"]) not in cold
        if counts and "torch" in times:
            ratios["K6"].append(times["torch"] / times[ours])
    for row in figures["packs"]:
        ratios["K7"].append(row["microseconds"]["separate"] / row["microseconds"]["triton"])
    found = {name: spread(values) for name, values in ratios.items() if values}
    if "K5" in found:  # an arithmetic mean, as in the thesis
        found["K5"]["value"] = statistics.fmean(ratios["K5"])
    return found


RATIO_HEADER = (
    "precision (features-theta)",
    "direction",
    "cache",
    "time ratio",
    "sizes",
    "geometric mean",
    "least",
    "most",
)


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
        launch += f", an empty kernel {limits['kernel_launch_us']:.2f} us"
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
    return "\n".join([*lines, "", goal_table(result["goals"], "K")])


def run(
    keep: Keep,
    *,
    short: bool = False,
    kernels: list[Literal[*sorted(set(IMPLEMENTATIONS["rotate"]) - {"xla"})]] = KERNELS,
    turns: int = 9,
    loop_us: float = 1000.0,
    together: int = 64,
    limit_s: float = 450.0,
) -> None:
    """Measures the cases in groups, and saves the result after each.

    Args:
        keep: saves the result.
        short: measure 16 sizes instead of 300, as on a CPU
        kernels: implementations to measure; the goals use the first one
        turns: timed turns of each form
        loop_us: approximate time of one compiled loop, in microseconds
        together: cases per group; a group is compiled, then measured
        limit_s: start no group after this many seconds
    """
    deadline, on_gpu = time.monotonic() + limit_s, jax.default_backend() == "gpu"
    limits = machine_limits(turns)
    figures = {"limits": limits, "rows": [], "peers": [], "packs": []}

    def keep_all() -> Result:
        return keep(**figures, goals=goals(figures, kernels[0]))

    if on_gpu:
        figures["peers"] = peer_rows(kernels, turns)
        keep_all()
        figures["packs"] = pack_rows(turns)
    result = keep_all()
    todo = list(cases(short or not on_gpu))
    for rows in measured(todo, kernels, turns, loop_us, together, limits):
        figures["rows"] += rows
        result = keep_all()
        done = len(figures["rows"])
        if time.monotonic() > deadline and done < len(todo):
            print(f"stopped after {done} of {len(todo)} cases: --limit-s={limit_s}")
            break
    print(summary(result))
