"""Timing: compiled loops of dependent steps, whole programs, and turns in one process."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax_kernels import device

LOOP_BYTES = 2**30  # moved by a loop, about; some milliseconds
CALLS = 5  # of a whole program, in a turn

Timer = Callable[[], float]  # returns microseconds per step
Start = Callable[[], tuple[list[np.ndarray], Timer]]  # a sample of a step's results, and its timer


def sample(results: Any) -> list[np.ndarray]:
    """The first and the last element of each array in a tree, in float32."""
    return [
        np.asarray(x[:: max(1, len(x) - 1)] if x.ndim else x, np.float32)
        for x in jax.tree.leaves(results)
    ]


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
                results, others, operands = jax.lax.optimization_barrier(
                    (list(results), source, rest)
                )
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
    step: Callable, arguments: Callable[[], tuple], *, in_place: bool = False
) -> Start:
    """Compiles the loop over the arrays of `arguments()`, which returns (arrays, *rest).

    Args:
        step: a function of (x, *rest).
        arguments: makes the operands, under jit; a loop has fewer steps of larger arrays.
        in_place: whether the result of a step takes the place of its array.
    """
    shapes = jax.eval_shape(arguments)
    xs, *rest = shapes
    steps = count_steps(len(xs))
    rounds = max(2, min(50, LOOP_BYTES // (2 * steps * xs[0].size * xs[0].dtype.itemsize)))
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


def measure_call(function: Callable, *arguments: Any) -> float:
    """Calls a function and returns the microseconds until its result is ready."""
    begun = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return 1e6 * (time.perf_counter() - begun)


def compile_program(
    step: Callable, new_state: Callable[[], tuple[Any, Any]], images: jax.ShapeDtypeStruct
) -> Start:
    """Compiles a program that is timed call by call, CALLS in a turn.

    Args:
        step: a function of (state, rest, images) that returns (new state, results).
        new_state: makes (state, rest); the new state takes the place of the old one.
        images: [B, H, W, 3], in the dtype of the computation; they are drawn at random.
    """
    shapes = (*jax.eval_shape(new_state), images)
    compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()

    def start() -> tuple[list[np.ndarray], Timer]:
        state, rest = new_state()
        batch = jax.random.normal(jax.random.key(0), images.shape, images.dtype)
        state, out = compiled(state, rest, batch)

        def measure() -> float:
            nonlocal state
            begun = time.perf_counter()
            for _ in range(CALLS):
                state, out = compiled(state, rest, batch)
            jax.block_until_ready((state, out))
            return 1e6 * (time.perf_counter() - begun) / CALLS

        measure()
        return sample(out), measure

    return start


def take_turns(timers: Mapping[str, Timer], turns: int) -> dict[str, float]:
    """Calls timers in turns and returns each one's median, in microseconds."""
    times = [{name: timer() for name, timer in timers.items()} for _ in range(turns)]
    return {name: statistics.median(turn[name] for turn in times) for name in timers}
