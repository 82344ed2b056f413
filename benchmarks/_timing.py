"""Timing on a GPU: cases and their forms, compiled loops, turns, and the limits of the machine."""

import dataclasses
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax_kernels import device

CACHE_BYTES = 256 * 2**20  # more than the last-level cache of any device
# Arrays in one loop. Problems below CACHE_BYTES / 16 are launch-bound and measured hot only.
MOST_COPIES = 16
LOOP_BYTES = 2**30  # moved by a loop, about; some milliseconds

Timer = Callable[[], float]  # returns microseconds per step
Start = Callable[[], tuple[list[np.ndarray], Timer]]  # a sample of a step's results, and its timer
Maker = Callable[[], Start]  # compiles


@dataclasses.dataclass(frozen=True)
class Case:
    """One computation in several forms.

    Attributes:
        group: its part and kind; ratios are averaged over a group.
        name: its size, unique in the group.
        makers: of each form, by SOFTWARE or SOFTWARE+POSITION; those with one position compute the
            same, the first of them is the reference.
        moved_bytes: bytes that every form has to move; 0 if they are not counted.
    """

    group: str
    name: str
    makers: dict[str, Maker]
    moved_bytes: int = 0


def copies_beyond_cache(size: int) -> int:
    """Number of arrays of `size` bytes that exceed every cache; 1 if that is above MOST_COPIES."""
    copies = -(-CACHE_BYTES // size)
    return copies if copies <= MOST_COPIES else 1


def sample(results: Any) -> list[np.ndarray]:
    """The first and the last element of each array in a tree, in float32."""
    arrays = jax.tree.leaves(results)
    return [np.float32(x[:: max(1, len(x) - 1)] if x.ndim else x) for x in arrays]


def count_steps(copies: int) -> int:
    """Number of steps in the body of a loop over `copies` arrays.

    Their number per array is even, because otherwise a form that writes a new array would have to
    copy it back for the next iteration. There are enough for XLA to launch a body as a CUDA graph.
    """
    return copies * max(2, 8 // copies // 2 * 2)


def make_loop(step: Callable, rounds: int, *, in_place: bool) -> Callable:
    """Returns a loop (xs, *rest) -> results of dependent steps on each of several arrays.

    Args:
        step: a function of (x, *rest).
        rounds: iterations of the loop, each of `count_steps` steps.
        in_place: whether the result of a step takes the place of its array.
    """
    jitted = jax.jit(step)  # traced and lowered once

    def loop(xs: Sequence[Any], *rest: Any) -> tuple:
        steps, source = count_steps(len(xs)), () if in_place else tuple(xs)

        def body(_: jax.Array, results: list) -> list:
            for i in range(steps):
                # Each step depends on the one before and shares nothing with it: otherwise XLA
                # would merge steps, or compute angles once for all.
                barrier = jax.lax.optimization_barrier
                results, others, operands = barrier((list(results), source, rest))
                place = i % len(xs)
                if in_place:
                    results[place] = jitted(results[place], *operands)
                else:
                    results[i] = jitted(others[place], *operands)
            return results

        shapes = [] if in_place else [jax.eval_shape(step, xs[0], *rest)] * steps
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return tuple(jax.lax.fori_loop(0, rounds, body, list(xs) if in_place else empty))

    return loop


def compile_loop(
    step: Callable, arguments: Callable[[], tuple], moved_bytes: float, *, in_place: bool = False
) -> Start:
    """Compiles the loop over the arrays of `arguments()`, which returns (arrays, *rest)."""
    shapes = jax.eval_shape(arguments)
    xs, *rest = shapes
    steps = count_steps(len(xs))
    rounds = int(max(2, min(50, LOOP_BYTES // (moved_bytes * steps))))
    loop = make_loop(step, rounds, in_place=in_place)
    make = jax.jit(arguments).lower().compile()
    single_step = jax.jit(step).lower(xs[0], *rest).compile()
    if device.is_gpu():
        run = jax.jit(loop, donate_argnums=(0,) if in_place else ()).lower(*shapes).compile()
    else:  # for a CPU, XLA merges the steps in spite of the barriers
        rounds, steps = 1, 1
        run = lambda xs, *rest: (single_step(xs[0], *rest),)

    def start() -> tuple[list[np.ndarray], Timer]:
        xs, *rest = make()
        results = sample(single_step(xs[0], *rest))

        def measure() -> float:
            nonlocal xs
            begun = time.perf_counter()
            outputs = jax.block_until_ready(run(xs, *rest))
            seconds = time.perf_counter() - begun
            xs = outputs if in_place else xs
            return 1e6 * seconds / rounds / steps

        for _ in range(2):  # XLA launches kernel by kernel at first, and forms graphs in the second
            measure()
        return results, measure

    return start


def take_turns(timers: Mapping[str, Timer], turns: int) -> dict[str, float]:
    """Calls timers in turns and returns each one's median, in microseconds."""
    times = [{name: timer() for name, timer in timers.items()} for _ in range(turns)]
    return {name: statistics.median(turn[name] for turn in times) for name in timers}


def torch_on_gpu() -> bool:
    """True if torch is installed and finds a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    return importlib.import_module("torch").cuda.is_available()


def machine_limits(turns: int) -> dict[str, float]:
    """Measures the limits of this machine, in this process.

    Returns:
        launch_us, microseconds of a tiny operation; copy_gb_per_s, GB/s of a copy, read plus
        written.
    """
    size = 2**30 if device.is_gpu() else 2**26
    scaled = lambda x: x * 1.0000001  # prevents XLA from removing or merging steps
    ones = lambda *shape: ((jnp.ones(shape),),)
    starts = {
        "copy": compile_loop(scaled, lambda: ones(size // 4), 2 * size, in_place=True),
        "launch_us": compile_loop(scaled, ones, 8, in_place=True),
    }
    figures = take_turns({name: start()[1] for name, start in starts.items()}, turns)
    return {"copy_gb_per_s": 2 * size / figures.pop("copy") / 1e3} | figures
