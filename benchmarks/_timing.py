"""Timing on a GPU: compiled loops, interleaved timing, and the limits of the machine."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rope_jax_kernels import explain, rotate_by_angles

CACHE_BYTES = 256 * 2**20  # more than the last-level cache of any device
# Arrays in one loop. Problems below CACHE_BYTES / 16 are launch-bound and measured hot only.
MOST_COPIES = 16
# Steps per array in the body of a loop. The number is even, because otherwise a form that writes a
# new array would have to copy it back for the next iteration. Together with the copies there are
# enough steps for XLA to launch a body as one CUDA graph.
REPEATS = {"hot": 8, "cold": 2}

Timer = Callable[[], float]  # returns microseconds per step


def copies_beyond_cache(size: int) -> int | None:
    """Number of arrays of `size` bytes that exceed every cache; None if above MOST_COPIES."""
    copies = -(-CACHE_BYTES // size)
    return copies if copies <= MOST_COPIES else None


@dataclasses.dataclass(frozen=True)
class Loop:
    """A compiled loop of dependent steps on each of several arrays.

    Attributes:
        make: returns the loop's arguments: a tuple of arrays, and further arguments of the step.
        run: runs the loop and returns the arrays, which are donated.
        steps: number of steps in one run.
    """

    make: jax.stages.Compiled
    run: jax.stages.Compiled
    steps: int

    def timer(self) -> Timer:
        """Runs the loop once and returns a timer of further runs."""
        arrays, *rest = self.make()
        state = jax.block_until_ready(self.run(arrays, *rest))

        def elapsed() -> float:
            nonlocal state
            start = time.perf_counter()
            state = jax.block_until_ready(self.run(state, *rest))
            return 1e6 * (time.perf_counter() - start) / self.steps

        return elapsed


def loop_of(step: Callable, rounds: int, repeats: int) -> Callable:
    """Returns a loop over a tuple of arrays, in which `step(array, *rest)` returns a new array."""

    # The barrier prevents XLA from fusing steps; the inner jit traces the step only once.
    @jax.jit
    def one(x: jax.Array, *rest: jax.Array) -> jax.Array:
        return step(jax.lax.optimization_barrier(x), *rest)

    def loop(xs: tuple, *rest: jax.Array) -> tuple:
        def body(_: jax.Array, xs: tuple) -> tuple:
            for _ in range(repeats):
                xs = tuple(one(x, *rest) for x in xs)
            return xs

        return jax.lax.fori_loop(0, rounds, body, xs)

    return loop


def compile_loop(step: Callable, arguments: Callable[[], tuple], rounds: int, repeats: int) -> Loop:
    """Compiles the loop over the arrays of `arguments()`, which returns (arrays, *rest)."""
    shapes = jax.eval_shape(arguments)
    run = jax.jit(loop_of(step, rounds, repeats), donate_argnums=0).lower(*shapes).compile()
    return Loop(jax.jit(arguments).lower().compile(), run, rounds * repeats * len(shapes[0]))


def take_turns(timers: Mapping[str, Timer], turns: int) -> dict[str, float]:
    """Calls timers in turns and returns each one's median, in microseconds."""
    times = {name: [] for name in timers}
    for _ in range(turns):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: statistics.median(values) for name, values in times.items()}


def serves(implementation: str, op: Callable, *args: Any, **kwargs: Any) -> bool:
    """Whether an implementation supports this call of `op`; arguments may be shapes."""
    answers = {}
    jax.eval_shape(lambda *args: answers.update(explain(op, *args, **kwargs)), *args)
    return answers[implementation] == "ok"


def _scaled(x: jax.Array) -> jax.Array:
    return x * 1.0000001  # prevents XLA from removing or merging steps


def _ones(*shape: int) -> tuple:
    return ((jnp.ones(shape),),)


def _smallest_kernel(x: jax.Array) -> jax.Array:
    return rotate_by_angles(x, jnp.ones((1, 1, 1)), implementation="triton")


def _factors(side: int, dtype: str) -> tuple:
    """Two random square matrices, whose product has the norm of the first.

    Random, because GPUs need less power for regular values and run faster on them.
    """
    x, w = jax.random.normal(jax.random.key(0), (2, side, side))
    return (x.astype(dtype),), (w * side**-0.5).astype(dtype)


def machine_limits(turns: int, dtypes: Sequence[str] = ()) -> dict[str, Any]:
    """Measures the limits of this machine, in this process.

    Args:
        turns: number of measurements of each limit.
        dtypes: dtypes of the matrix products to measure.

    Returns:
        launch_us and (where Triton runs) kernel_launch_us: microseconds of a tiny XLA operation
        and of a tiny kernel; copy_gb_per_s: GB/s of a copy, read plus written; gemm_tflop_per_s:
        TFLOP/s of a large matrix product, by dtype.
    """
    on_gpu = jax.default_backend() == "gpu"
    size, side = (2**30, 8192) if on_gpu else (2**26, 1024)
    hot = REPEATS["hot"]
    timers = {
        "copy": compile_loop(_scaled, functools.partial(_ones, size // 4), 5, 2),
        "launch": compile_loop(_scaled, _ones, 40, hot),
    }
    x = jax.ShapeDtypeStruct((1, 1, 1, 2), jnp.float32)
    theta = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
    if serves("triton", rotate_by_angles, x, theta):
        arguments = functools.partial(_ones, 1, 1, 1, 2)
        timers["kernel"] = compile_loop(_smallest_kernel, arguments, 40, hot)
    for dtype in dtypes:
        arguments = functools.partial(_factors, side, dtype)
        timers[dtype] = compile_loop(jnp.matmul, arguments, 5, 2)
    figures = take_turns({name: loop.timer() for name, loop in timers.items()}, turns)
    limits = {"copy_gb_per_s": 2 * size / figures["copy"] / 1e3, "launch_us": figures["launch"]}
    if "kernel" in figures:
        limits["kernel_launch_us"] = figures["kernel"]
    if dtypes:
        limits["gemm_tflop_per_s"] = {x: 2 * side**3 / figures[x] / 1e6 for x in dtypes}
    return limits
