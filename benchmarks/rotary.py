"""Rotary kernels against XLA: the 300 problem sizes of Kane's thesis (table A.1), three precisions, forward and backward.

    python -m benchmarks rotary --out benchmarks/results/rotary_h200.json     on a GPU: all sizes
    python -m benchmarks rotary                                               on a CPU: a short form of the same

Features are [B, N, H*W, C], theta is [N, H*W, C/4] (half of the channels turn), as in the thesis' protocol. The forms:

    eager     jnp, operation by operation: what the thesis calls eager
    jnp       jnp under jit, as XLA fuses it: writes a new array
    kernel    rope_jax_kernels' kernel in place (on a GPU only)

beside, from the same process, what a launch costs (one number multiplied) and what memory gives (1 GiB read and written; 64 MiB on a CPU).
All but eager run inside one compiled loop whose steps depend on each other, so that a time is that of the device and not of Python. The
forms take turns; a figure is the median. "hot" repeats on one array, which stays in cache when it fits; "cold" goes round arrays that
together do not fit. Ratios are plain time ratios: jnp / kernel = 2 means that the kernel takes half the time.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from benchmarks._record import record, write
from rope_jax_kernels import explain, rotate_by_angles

BATCHES, HEADS, SIDES, CHANNELS = (1, 16, 32, 64, 128), (1, 3, 4, 6, 8), (56, 28, 14, 7), (32, 64, 128)
SHORT = ((1, 16), (3,), (14, 7), (32, 64))
DTYPES = {"16-16": ("bfloat16", "bfloat16"), "16-32": ("bfloat16", "float32"), "32-32": ("float32", "float32")}
CACHE_BYTES = 256 * 2**20  # more than any device's last cache
MOST_COPIES = 16  # in one loop; smaller problems than CACHE_BYTES / 16 are bound by their launch, and measured hot only


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
        """Of the features, [B, N, L, C]."""
        return self.batch, self.heads, self.side**2, self.channels

    @property
    def moved_bytes(self) -> int:
        """Bytes that a rotation in place has to move: half of the channels read and written, and theta read once."""
        features, theta = (jnp.dtype(name).itemsize for name in DTYPES[self.precision])
        batch, heads, tokens, channels = self.shape
        return heads * tokens * (batch * channels * features + channels // 4 * theta)


def cases(short: bool) -> Iterator[Case]:
    """All problems, 1,800 or the short form's 48."""
    sizes = SHORT if short else (BATCHES, HEADS, SIDES, CHANNELS)
    for precision, direction, *size in itertools.product(DTYPES, ("forward", "backward"), *sizes):
        yield Case(*size, precision, direction)


def step_of(case: Case, implementation: str) -> Callable:
    """(features, theta) -> features: the rotation, or the gradient with respect to the features, which is the rotation back.

    The kernel's is what autodiff gives. That of jnp is written out, because this is its best form: autodiff adds two padded halves.
    """
    turn = functools.partial(rotate_by_angles, layout="BNLD", implementation=implementation)
    if case.direction == "forward":
        return turn
    if implementation == "xla":
        return lambda x, theta: turn(x, -theta)
    return lambda x, theta: jax.vjp(lambda y: turn(y, theta), x)[1](x)[0]


def operands(case: Case, copies: int) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Features, as often as asked for, and theta."""
    features, theta = DTYPES[case.precision]
    _, heads, tokens, channels = case.shape
    angles = jnp.linspace(0, 10, heads * tokens * (channels // 4)).reshape(heads, tokens, channels // 4)
    return tuple(jnp.full(case.shape, 1 + n, features) for n in range(copies)), angles.astype(theta)


def copies_beyond_cache(case: Case) -> int | None:
    """How many arrays together do not fit into any cache, or None where that would be too many to be worth it."""
    size = math.prod(case.shape) * jnp.dtype(DTYPES[case.precision][0]).itemsize
    copies = -(-CACHE_BYTES // size)
    return copies if copies <= MOST_COPIES else None


def compile_loop(step: Callable, case: Case, steps: int, copies: int) -> jax.stages.Compiled:
    """Compiles `steps` rounds of `step` on each of `copies` arrays, in place, each step waiting for the one before."""

    # The barrier ties theta to the step: XLA would otherwise evaluate sine and cosine once, before the loop.
    one = lambda x, theta: step(*jax.lax.optimization_barrier((x, theta)))

    def loop(arrays: tuple, theta: jax.Array) -> tuple:
        return jax.lax.fori_loop(0, steps, lambda _, xs: tuple(one(x, theta) for x in xs), arrays)

    return jax.jit(loop, donate_argnums=0).lower(*jax.eval_shape(lambda: operands(case, copies))).compile()


def microseconds(run: Callable, arrays: tuple, *rest: jax.Array, steps: int) -> tuple[float, tuple]:
    """Time of one step, and the arrays to go on with (the old ones were given away)."""
    start = time.perf_counter()
    arrays = jax.block_until_ready(run(arrays, *rest))
    return 1e6 * (time.perf_counter() - start) / steps, arrays


def measure(loops: dict[tuple[str, str], tuple[jax.stages.Compiled, int, int]], case: Case, turns: int) -> dict[str, dict[str, float]]:
    """Median microseconds of one rotation, by form and temperature of the cache; the forms take turns."""
    state = {}
    for key, (run, steps, copies) in loops.items():
        arrays, theta = operands(case, copies)
        state[key] = (microseconds(run, arrays, theta, steps=steps)[1], theta)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in loops}
    for _ in range(turns):
        for key, (run, steps, copies) in loops.items():
            arrays, theta = state[key]
            elapsed, arrays = microseconds(run, arrays, theta, steps=steps * copies)
            times[key].append(elapsed)
            state[key] = (arrays, theta)
    figures: dict[str, dict[str, float]] = {}
    for (form, temperature), values in times.items():
        figures.setdefault(temperature, {})[form] = statistics.median(values)
    return figures


def eager_microseconds(case: Case, turns: int) -> float:
    """Median time of the jnp form outside jit, operation by operation."""
    (x,), theta = operands(case, 1)
    step = step_of(case, "xla")
    jax.block_until_ready(step(x, theta))
    return statistics.median(microseconds(lambda xs, theta: (step(xs[0], theta),), (x,), theta, steps=1)[0] for _ in range(turns))


def machine_limits(turns: int) -> dict[str, float]:
    """What a launch costs (microseconds) and what memory gives (GB/s, read and written), on this machine in this process."""
    big = jnp.ones((2**30 if jax.default_backend() == "gpu" else 2**26) // 4, jnp.float32)
    limits = {}
    for name, array, steps in (("launch", jnp.ones(()), 200), ("copy", big, 10)):
        # The factor keeps XLA from dropping or joining the steps.
        loop = jax.jit(lambda xs, steps=steps: (jax.lax.fori_loop(0, steps, lambda _, x: x * 1.0000001, xs[0]),), donate_argnums=0)
        _, arrays = microseconds(loop, (array,), steps=steps)
        times = []
        for _ in range(turns):
            elapsed, arrays = microseconds(loop, arrays, steps=steps)
            times.append(elapsed)
        limits[name] = statistics.median(times)
    return {"launch_us": limits["launch"], "copy_gb_per_s": 2 * big.nbytes / limits["copy"] / 1e3}


def run(args: argparse.Namespace) -> dict:
    """Measures all cases and returns everything that is worth keeping."""
    on_gpu = jax.default_backend() == "gpu"
    todo = list(cases(short=args.short or not on_gpu))
    limits = machine_limits(args.turns)

    def prepare(case: Case) -> dict:
        (x,), theta = operands(case, 1)
        forms = {"jnp": "xla"}
        if explain(rotate_by_angles, x, theta, layout="BNLD")["triton"] == "ok":
            forms["kernel"] = "triton"
        expected = max(limits["launch_us"], case.moved_bytes / limits["copy_gb_per_s"] / 1e3)
        steps = max(4, min(400, round(args.loop_us / expected)))
        loops = {}
        for form, implementation in forms.items():
            step = step_of(case, implementation)
            loops[form, "hot"] = (compile_loop(step, case, steps, 1), steps, 1)
            if (copies := copies_beyond_cache(case)) is not None:
                rounds = max(2, steps // copies)
                loops[form, "cold"] = (compile_loop(step, case, rounds, copies), rounds, copies)
        return loops

    rows, started = [], time.monotonic()
    # Compilation is most of the work and leaves Python's lock alone; measuring waits for nothing but the case at hand.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(todo), args.together):
            group = todo[start : start + args.together]
            for case, loops in zip(group, list(pool.map(prepare, group)), strict=True):
                figures = measure(loops, case, args.turns)
                if case.precision == "16-32" and case.direction == "forward":
                    figures["hot"]["eager"] = eager_microseconds(case, args.turns)
                rows.append(dataclasses.asdict(case) | {"moved_bytes": case.moved_bytes, "microseconds": figures})
            if time.monotonic() - started > args.limit_s:
                print(f"stopped after {len(rows)} of {len(todo)} cases: --limit-s={args.limit_s}")
                break
            write(record("rotary", vars(args), limits=limits, rows=rows), args.out)
    return record("rotary", vars(args), limits=limits, rows=rows)


def geometric_mean(values: list[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(result: dict) -> str:
    """One table: per precision and direction, how many times faster the second form is than the first."""
    limits = result["limits"]
    lines = [f"launch {limits['launch_us']:.2f} us, copy {limits['copy_gb_per_s']:,.0f} GB/s, on {result['machine']['device']}", ""]
    lines.append(f"{'precision':10}{'direction':10}{'cache':6}{'ratio':16}{'sizes':>6}{'geomean':>9}{'least':>8}{'most':>8}")
    for precision, direction, temperature in itertools.product(DTYPES, ("forward", "backward"), ("hot", "cold")):
        figures = [
            row["microseconds"][temperature]
            for row in result["rows"]
            if row["precision"] == precision and row["direction"] == direction and temperature in row["microseconds"]
        ]
        for slow, fast in (("jnp", "kernel"), ("eager", "kernel"), ("eager", "jnp")):
            ratios = [f[slow] / f[fast] for f in figures if slow in f and fast in f]
            if ratios:
                cells = f"{precision:10}{direction:10}{temperature:6}{slow + ' / ' + fast:16}{len(ratios):6}"
                lines.append(cells + f"{geometric_mean(ratios):9.2f}{min(ratios):8.2f}{max(ratios):8.2f}")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks rotary", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="16 sizes instead of 300, as on a CPU")
    parser.add_argument("--turns", type=int, default=9, help="how often the forms take turns")
    parser.add_argument("--loop-us", type=float, default=1000.0, help="about how long one compiled loop shall take")
    parser.add_argument("--together", type=int, default=64, help="cases that are compiled before they are measured")
    parser.add_argument("--limit-s", type=float, default=480.0, help="stop after this time; what is measured by then is kept")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write, after each group of cases")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Measures, prints one table, and writes the figures where --out says."""
    args = parse(argv)
    result = run(args)
    print(summary(result))
    write(result, args.out)
