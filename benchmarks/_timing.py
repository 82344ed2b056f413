"""How benchmarks time what a GPU does: compiled loops, forms in turns, and the limits of the machine."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rope_jax_kernels import explain, rotate_by_angles

CACHE_BYTES = 256 * 2**20  # more than any device's last cache
MOST_COPIES = 16  # in one loop; smaller problems than CACHE_BYTES / 16 are bound by their launch, and measured hot only
# Steps on one array in the body of a loop. Even, or what writes a new array would have to copy it back to where the loop began; and
# together with the copies enough for XLA to launch a body as one CUDA graph.
REPEATS = {"hot": 8, "cold": 2}

Timer = Callable[[], float]  # microseconds of one step


def copies_beyond_cache(size: int) -> int | None:
    """How many arrays of `size` bytes do not fit into any cache together, or None where that would be too many to be worth it."""
    copies = -(-CACHE_BYTES // size)
    return copies if copies <= MOST_COPIES else None


@dataclasses.dataclass(frozen=True)
class Loop:
    """A compiled loop, in place: `rounds` rounds of `repeats` steps on each of its arrays, each step waiting for the one before.

    Attributes:
        make: gives its arguments: a tuple of arrays, and what the step takes beside one of them.
        run: takes them, and returns the arrays.
        steps: how many it takes.
    """

    make: jax.stages.Compiled
    run: jax.stages.Compiled
    steps: int

    def timer(self) -> Timer:
        """Warms up, and returns what times the next run."""
        arrays, *rest = self.make()
        state = [jax.block_until_ready(self.run(arrays, *rest))]

        def elapsed() -> float:
            start = time.perf_counter()
            state[0] = jax.block_until_ready(self.run(state[0], *rest))
            return 1e6 * (time.perf_counter() - start) / self.steps

        return elapsed


def loop_of(step: Callable, rounds: int, repeats: int) -> Callable:
    """The loop over a tuple of arrays: `step(array, *rest)` gives the next array."""
    # The barrier keeps XLA from fusing steps. Under a jit of its own the step is traced once, not in every place of the body.
    one = jax.jit(lambda x, *rest: step(jax.lax.optimization_barrier(x), *rest))

    def loop(xs: tuple, *rest: jax.Array) -> tuple:
        def body(_: jax.Array, xs: tuple) -> tuple:
            for _ in range(repeats):
                xs = tuple(one(x, *rest) for x in xs)
            return xs

        return jax.lax.fori_loop(0, rounds, body, xs)

    return loop


def compile_loop(step: Callable, arguments: Callable[[], tuple], rounds: int, repeats: int) -> Loop:
    """Compiles the loop over the arrays of `arguments() = (arrays, *rest)`."""
    shapes = jax.eval_shape(arguments)
    run = jax.jit(loop_of(step, rounds, repeats), donate_argnums=0).lower(*shapes).compile()
    return Loop(jax.jit(arguments).lower().compile(), run, rounds * repeats * len(shapes[0]))


def take_turns(timers: dict[str, Timer], turns: int) -> dict[str, float]:
    """Median microseconds of each, measured in turns."""
    times = {name: [] for name in timers}
    for _ in range(turns):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: statistics.median(values) for name, values in times.items()}


def serves(implementation: str, op: Callable, *args: Any, **kwargs: Any) -> bool:
    """Whether an implementation takes this call of `op`; asked with shapes, without arrays."""
    answers = {}
    jax.eval_shape(lambda *args: answers.update(explain(op, *args, **kwargs)), *args)
    return answers[implementation] == "ok"


def machine_limits(turns: int, dtypes: Sequence[str] = ()) -> dict[str, Any]:
    """What this machine gives in this process.

    Returns:
        launch_us and (where there are kernels) kernel_launch_us: microseconds of an operation of XLA and of a kernel that do nothing;
        copy_gb_per_s: GB/s, read and written; gemm_tflop_per_s: TFLOP/s of a large matrix product, by dtype, of those asked for.
    """
    on_gpu = jax.default_backend() == "gpu"
    size, side = (2**30, 8192) if on_gpu else (2**26, 1024)
    scaled = lambda x: x * 1.0000001  # keeps XLA from dropping or joining the steps
    smallest = lambda x: rotate_by_angles(x, jnp.ones((1, 1, 1)), implementation="triton")
    ones = lambda *shape: lambda: ((jnp.ones(shape),),)
    forms = {"copy": (scaled, ones(size // 4), 5, 2), "launch": (scaled, ones(), 40, REPEATS["hot"])}
    if serves("triton", rotate_by_angles, jax.ShapeDtypeStruct((1, 1, 1, 2), jnp.float32), jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)):
        forms["kernel"] = (smallest, ones(1, 1, 1, 2), 40, REPEATS["hot"])
    for dtype in dtypes:
        forms[dtype] = (jnp.matmul, functools.partial(_factors, side, dtype), 5, 2)
    timers = {name: compile_loop(step, arguments, rounds, repeats).timer() for name, (step, arguments, rounds, repeats) in forms.items()}
    figures = take_turns(timers, turns)
    limits = {"copy_gb_per_s": 2 * size / figures["copy"] / 1e3, "launch_us": figures["launch"]}
    limits |= {"kernel_launch_us": figures["kernel"]} if "kernel" in figures else {}
    return limits | ({"gemm_tflop_per_s": {dtype: 2 * side**3 / figures[dtype] / 1e6 for dtype in dtypes}} if dtypes else {})


def _factors(side: int, dtype: str) -> tuple:
    """Two square matrices, the second of which keeps the first one's norm. Random: on regular numbers a GPU saves power and runs faster."""
    x, w = jax.random.normal(jax.random.key(0), (2, side, side))
    return (x.astype(dtype),), (w * side**-0.5).astype(dtype)


def geometric_mean(values: list[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(statistics.fmean(map(math.log, values)))
