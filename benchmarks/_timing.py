"""Timing on a GPU: compiled loops, interleaved timing, and the limits of the machine."""

import concurrent.futures
import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from rope_jax_kernels import device, explain

CACHE_BYTES = 256 * 2**20  # more than the last-level cache of any device
# Arrays in one loop. Problems below CACHE_BYTES / 16 are launch-bound and measured hot only.
MOST_COPIES = 16
# Steps per array in the body of a loop. The number is even, because otherwise a form that writes a
# new array would have to copy it back for the next iteration. Together with the copies there are
# enough steps for XLA to launch a body as one CUDA graph.
REPEATS = {"hot": 8, "cold": 2}
# XLA writes what it will launch into these files; the second exists where graphs were formed.
LAUNCHES = ("thunk_sequence.txt", "thunk_sequence_after_thunk_passes.txt")
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}

Timer = Callable[[], float]  # returns microseconds per step


def copies_beyond_cache(size: int) -> int | None:
    """Number of arrays of `size` bytes that exceed every cache; None if above MOST_COPIES."""
    copies = -(-CACHE_BYTES // size)
    return copies if copies <= MOST_COPIES else None


def graph_share(text: str) -> float:
    """Share of the launches in a program's loops that are part of CUDA graphs.

    Args:
        text: a file of LAUNCHES, with a line for each launch, indented as they are nested.

    Returns:
        From 0.0 to 1.0; NaN without loops.
    """
    inside, found = [], []  # the blocks around a line, as (indent, kind); launches in graphs or not
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        inside = [block for block in inside if block[0] < indent]
        launch = re.match(r"\s*\d+: (k\w+)", line)
        if line.strip() == "body:":
            inside.append((indent, "body"))
        elif launch and launch[1] in ("kCommandBuffer", "kWhile", "kSequential"):
            inside.append((indent, launch[1]))
        elif launch and (kinds := {kind for _, kind in inside}) >= {"body"}:
            found.append("kCommandBuffer" in kinds)
    return sum(found) / len(found) if found else float("nan")


def compile_loop_of(
    f: Callable, shapes: Sequence, donate: tuple[int, ...] = (), options: Mapping[str, Any] = {}
) -> tuple[jax.stages.Compiled, float | None]:
    """Compiles a function; also returns its `graph_share`, or None on a CPU."""
    lowered = jax.jit(f, donate_argnums=donate).lower(*shapes)
    if not device.is_gpu():
        return lowered.compile(), None
    with tempfile.TemporaryDirectory() as folder:
        # Nothing of the compiler's own stages is written: that would take most of the time.
        dump = {"xla_dump_to": folder, "xla_dump_emitter_re": "none"}
        compiled = lowered.compile(compiler_options={**dump, **options})
        return compiled, graph_share(launches_in(pathlib.Path(folder)))


def launches_in(folder: pathlib.Path) -> str:
    """The content of the last of LAUNCHES in a folder; "" without any."""
    found = [path for name in LAUNCHES for path in folder.glob(f"*.{name}")]
    return found[-1].read_text() if found else ""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A compiled loop of dependent steps on each of several arrays.

    Attributes:
        make: returns the loop's arguments: a tuple of arrays, and further arguments of the step.
        run: runs the loop and returns the arrays, which are donated.
        steps: number of steps in one run.
        graphs: share of its launches in CUDA graphs, or None on a CPU.
    """

    make: jax.stages.Compiled
    run: jax.stages.Compiled
    steps: int
    graphs: float | None = None

    def timer(self) -> Timer:
        """Runs the loop twice and returns a timer of further runs."""
        arrays, *rest = self.make()
        state = self.run(arrays, *rest)
        # XLA launches kernel by kernel in the first run, and forms graphs in the second.
        state = jax.block_until_ready(self.run(state, *rest))

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


def compile_loop(
    step: Callable,
    arguments: Callable[[], tuple],
    rounds: int,
    repeats: int,
    options: Mapping[str, Any] = {},
) -> Loop:
    """Compiles the loop over the arrays of `arguments()`, which returns (arrays, *rest)."""
    shapes = jax.eval_shape(arguments)
    run, graphs = compile_loop_of(loop_of(step, rounds, repeats), shapes, (0,), options)
    steps = rounds * repeats * len(shapes[0])
    return Loop(jax.jit(arguments).lower().compile(), run, steps, graphs)


def take_turns(timers: Mapping[str, Timer], turns: int) -> dict[str, float]:
    """Calls timers in turns and returns each one's median, in microseconds."""
    times = {name: [] for name in timers}
    for _ in range(turns):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: statistics.median(values) for name, values in times.items()}


def mixed(items: Sequence) -> list:
    """The items in an order in which every beginning is spread over all of them.

    >>> mixed(range(8))
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    width = len(items).bit_length()
    return [items[i] for i in sorted(range(len(items)), key=lambda i: f"{i:0{width}b}"[::-1])]


def groups(items: Sequence, size: int) -> list:
    """The items in groups: the first of one item, so that a short call completes at least that.

    >>> groups("abcdef", 3)
    ['a', 'bcd', 'ef']
    """
    starts = [0, *range(1, len(items), size)] if items else []
    ends = [*starts[1:], len(items)]
    return [items[start:end] for start, end in zip(starts, ends, strict=False)]


def torch_on_gpu() -> bool:
    """Whether torch is installed and finds a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    return importlib.import_module("torch").cuda.is_available()


def within(limit_s: float, work: Callable[[], Any]) -> Any:
    """The result of the work, in a thread that is left behind if it does not end.

    Raises:
        TimeoutError: there is no result after `limit_s` seconds.
    """
    outcome = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised in the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(limit_s)


def working(makers: Mapping[str, Callable[[], Timer]]) -> tuple[dict[str, Timer], dict[str, str]]:
    """The timers that can be made, by form, and the reasons why others cannot."""
    timers, left_out = {}, {}
    for form, make in makers.items():
        try:
            timers[form] = make()
        except Exception as error:  # the other forms are measured nevertheless
            left_out[form] = reason_of(error)
    return timers, left_out


def reason_of(error: BaseException) -> str:
    """Kind and first line of an error, for what is left out of a result."""
    return f"{type(error).__name__}: {str(error).partition('\n')[0]}"


def serves(implementation: str, op: Callable, *args: Any, **kwargs: Any) -> bool:
    """Whether an implementation supports this call of `op`; arguments may be shapes."""
    answers = {}
    jax.eval_shape(lambda *args: answers.update(explain(op, *args, **kwargs)), *args)
    return answers[implementation] == "ok"


def _scaled(x: jax.Array) -> jax.Array:
    return x * 1.0000001  # prevents XLA from removing or merging steps


def _ones(*shape: int) -> tuple:
    return ((jnp.ones(shape),),)


def stored(x: jax.Array) -> jax.Array:
    """A Triton kernel of one program of one warp, which writes one number and reads nothing."""

    def kernel(_: Any, out: Any) -> None:
        triton.store(out.at[0], jnp.float32(1))

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        input_output_aliases={0: 0},
        compiler_params=triton.CompilerParams(num_warps=1),
        interpret=device.interpreted(),
        name="stored",
    )(x)


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
        and of a kernel that only stores a number; copy_gb_per_s: GB/s of a copy, read plus written;
        gemm_tflop_per_s: TFLOP/s of a large matrix product, by dtype. On a GPU also
        launch_without_graphs_us, of the same operation launched by itself, and launch_graphs, the
        share of CUDA graphs in launch_us: if the times are equal, the graphs had no effect.
    """
    on_gpu = device.is_gpu()
    size, side = (2**30, 8192) if on_gpu else (2**26, 1024)
    hot = REPEATS["hot"]
    loops = {
        "copy": compile_loop(_scaled, functools.partial(_ones, size // 4), 5, 2),
        "launch_us": compile_loop(_scaled, _ones, 40, hot),
    }
    if on_gpu:
        alone = compile_loop(_scaled, _ones, 40, hot, NO_GRAPHS)
        loops["launch_without_graphs_us"] = alone
    if device.refusal() is None:
        loops["kernel_launch_us"] = compile_loop(stored, functools.partial(_ones, 1), 40, hot)
    for dtype in dtypes:
        arguments = functools.partial(_factors, side, dtype)
        loops[dtype] = compile_loop(jnp.matmul, arguments, 5, 2)
    figures = take_turns({name: loop.timer() for name, loop in loops.items()}, turns)
    limits: dict[str, Any] = {"copy_gb_per_s": 2 * size / figures["copy"] / 1e3}
    limits |= {name: us for name, us in figures.items() if name.endswith("_us")}
    if on_gpu:
        limits["launch_graphs"] = loops["launch_us"].graphs
    if dtypes:
        limits["gemm_tflop_per_s"] = {x: 2 * side**3 / figures[x] / 1e6 for x in dtypes}
    return limits
