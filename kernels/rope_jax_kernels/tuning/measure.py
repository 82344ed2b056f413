"""Measuring on this device which implementation and which tile serve each call best.

A candidate must first be correct: within the tests' tolerances of "xla" in float64, and bit for bit
equal in two runs. One that is wrong, crashes or does not compile is left out. The fastest of the
others is chosen.

A program computes a call (and its gradients) `count` times in one compiled loop, so that launches
from Python are not timed, and one run with count 1 gives the results to compare.
"""

import concurrent.futures
import functools
import os
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array

from rope_jax_kernels import device, dispatch
from rope_jax_kernels.accuracy import allowed_error, error
from rope_jax_kernels.tuning.choices import Choice, Choices, Measured
from rope_jax_kernels.tuning.record import Call, split_arrays
from rope_jax_kernels.tuning.tiles import OTHER_TILES

COMPILING = 0.7  # of the time, after which no further program is compiled
WORTH = 0.98  # of the default's time; a smaller gain is noise
NO_CALLS = (
    "nothing to tune: no call was recorded. Calls with a named implementation, and those that XLA "
    "may partition over several devices, are not"
)
NO_TIME = "no time was left"
XLA, EXACT = Choice("xla"), Choice("exact")  # the latter stands for `Problem.compile_exact`
# Operation -> the operands whose places its outputs take, as a kernel in place writes them.
IN_PLACE = {"rotate": ("q", "k"), "rotate_qkv": ("qkv",), "rotate_by_angles": ("x",)}
ENDS = 4  # examples at either end of the batch whose results are compared
RUN_S = 0.01  # of one timed run
RUNS = 5
MOST_STEPS = 1000  # of one run

Named = dict[str, Any]  # arrays, or their shapes, by name
Programs = dict[Choice, concurrent.futures.Future]


def tune(
    calls: Iterable[Call], *, seconds: float = 60.0, say: Callable[[str], None] = device.say
) -> Choices:
    """Measures calls on the current device, with the gradients that were taken of them.

    Candidates are all implementations that serve a call, Triton's with several tiles; they are
    compiled side by side. On a device without kernels, such as a CPU, there is nothing to measure.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from rope_jax_kernels import Global, attention, record, tune
        >>> x = jax.ShapeDtypeStruct((2, 5, 3, 16), jnp.float32)
        >>> with record() as calls:
        ...     shape = jax.eval_shape(lambda x: attention(x, x, x, pattern=Global()), x)
        >>> with tune(calls, say=print) as choices:  # in force inside
        ...     pass
        nothing to tune: kernels need a GPU, and this is cpu; "xla" serves every call

    Args:
        calls: from `record`.
        seconds: after which nothing else is started. The calls that take longest come first; the
            remaining calls keep their defaults, and the remaining candidates are not chosen.
        say: takes one sentence about each omission and its reason.

    Returns:
        The choices for calls with more than one candidate.

    Raises:
        TypeError: `calls` are not those that `record` notes.
    """
    calls = list(calls) if isinstance(calls, Iterable) else [calls]
    if any(not isinstance(call, Call) for call in calls):
        raise TypeError(
            f"calls={calls!r} must be calls that were recorded: trace a program inside "
            "`with record() as calls:` and pass this list"
        )
    choices = Choices(device.kind())
    if reason := nothing_to_tune() or (None if calls else NO_CALLS):
        say(reason)
        return choices
    deadline, unmeasured = time.monotonic() + seconds, 0
    problems = sorted(map(Problem, calls), key=lambda problem: problem.weight, reverse=True)
    all_programs = _compile_all(problems, seconds)
    for problem, programs in all_programs.items():
        call, measured = problem.call, _measure(problem, programs, deadline)
        if measured.microseconds:
            choices.calls.setdefault(call.key, {})[call.direction] = measured
        else:
            unmeasured += 1
        for name, reason in measured.left_out.items():
            if reason != NO_TIME and " " not in name:  # an implementation, not another tile of one
                say(f"{name} {reason}; it is left out of {call.key}")
    if unmeasured:
        say(f"{unmeasured} of {len(all_programs)} calls were not measured and keep their defaults")
    return choices


def nothing_to_tune() -> str | None:
    """The reason why nothing can be measured on the current device; None if kernels run on it."""
    if device.is_gpu() or device.is_interpreted():
        return None
    return (
        f'nothing to tune: kernels need a GPU, and this is {device.kind()}; "xla" serves every call'
    )


def on_one_device() -> Any:
    """A context for calls that XLA need not partition, as each of several devices makes them."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=target)
    return jax.sharding.use_abstract_mesh(mesh)


class Problem:
    """A call whose candidates are compared and timed, with the gradients that were taken of it.

    Attributes:
        call: the call.
        shapes: of the operands by name, and of the cotangents: one for each output.
        weight: estimate of the time that a program spends in it: its bytes, times its count.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        operands, self._put = split_arrays(call.arguments)
        self.weight = call.count * sum(x.size * x.dtype.itemsize for x in operands.values())
        with on_one_device():
            self.shapes = operands, jax.eval_shape(functools.partial(self._outputs, XLA), operands)

    def candidates(self) -> list[Choice]:
        """ "xla", the default, and all that do not refuse, with their planned and other tiles."""
        op, candidates = self.call.op, [XLA, Choice(self.call.default)]

        def find(operands: Named) -> None:
            arguments = self._put(operands)
            for name, module in dispatch.IMPLEMENTATIONS[op].items():
                if dispatch.refusal(op, name, arguments) is None:
                    other_tiles = OTHER_TILES.get(module, lambda *_: [])
                    tiles = other_tiles(bool(self.call.gradients), arguments)
                    candidates.extend(Choice(name, tile) for tile in [(), *tiles])

        with on_one_device():
            jax.eval_shape(find, self.shapes[0])
        return list(dict.fromkeys(candidates))

    def _outputs(self, choice: Choice, operands: Named) -> tuple:
        """The outputs, by one candidate."""
        arguments = self._put(operands)
        out = dispatch.run(self.call.op, choice.implementation, arguments, choice.tile)
        return out if isinstance(out, tuple) else (out,)

    def _step(self, choice: Choice, operands: Named, cotangents: tuple) -> tuple[tuple, Named]:
        """Outputs and gradients, by one candidate."""
        if not self.call.gradients:
            return self._outputs(choice, operands), {}
        inputs = {name: operands[name] for name in sorted(self.call.gradients)}
        out, pull = jax.vjp(lambda some: self._outputs(choice, operands | some), inputs)
        return out, pull(cotangents)[0]

    def loop(self, choice: Choice, operands: Named, cotangents: tuple, count: Any) -> Named:
        """`count` steps by one candidate, each after the one before; results of the last one.

        Outputs of rotations are the data of the next step, and so for their gradients: a kernel in
        place then needs no copy, as in a model.
        """
        forth = IN_PLACE.get(self.call.op, ())
        back = forth if self.call.gradients.issuperset(forth) else ()

        def step(_: Any, carry: tuple[Named, tuple, Named]) -> tuple[Named, tuple, Named]:
            operands, cotangents, _ = jax.lax.optimization_barrier(carry)
            out, gradients = self._step(choice, operands, cotangents)
            operands |= dict(zip(forth, out, strict=False))
            if back:
                cotangents = tuple(gradients.pop(name) for name in back)
            others = {f"output {n}": x for n, x in enumerate(out) if n >= len(forth)}
            others |= {f"gradient of {name}": x for name, x in gradients.items()}
            return operands, cotangents, others

        shapes = jax.eval_shape(step, 0, (operands, cotangents, {}))[2]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        carry = (operands, cotangents, zeros)
        operands, cotangents, results = jax.lax.fori_loop(0, count, step, carry)
        results |= {f"output {n}": operands[name] for n, name in enumerate(forth)}
        return results | {f"gradient of {x}": y for x, y in zip(back, cotangents, strict=False)}

    def compile(self, choice: Choice, shapes: tuple[Named, tuple] | None = None) -> Callable:
        """The compiled loop of a candidate, for the problem's shapes or others."""

        def run(operands: Named, cotangents: tuple, count: Array) -> Named:
            with Choices(), on_one_device():
                return self.loop(choice, operands, cotangents, count)

        count = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(run).lower(*(shapes or self.shapes), count).compile()

    def compile_exact(self) -> Callable:
        """The compiled reference: "xla" in float64, for the examples that are compared."""
        shapes = jax.eval_shape(_select_examples, *self.shapes)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float64), shapes)
            return self.compile(XLA, wide)


def _select_examples(operands: Named, cotangents: tuple) -> tuple[Named, tuple]:
    """Selects the operands and cotangents of the examples that are compared."""
    few = {name: _ends(x) if name in dispatch.DATA else x for name, x in operands.items()}
    return few, tuple(map(_ends, cotangents))


def _ends(x: Array) -> Array:
    """The first and the last examples, which are compared."""
    return x if len(x) <= 2 * ENDS else jnp.concatenate([x[:ENDS], x[-ENDS:]])


class Trial:
    """Random operands of a problem, and the exact results of the examples that are compared.

    Args:
        problem: the call.
        exact: from `Problem.compile_exact`.
        plain: the compiled candidate "xla".
    """

    def __init__(self, problem: Problem, exact: Callable, plain: Callable) -> None:
        keys = iter(jax.random.split(jax.random.key(0), 100))

        def draw(x: Any) -> Array:
            return jax.random.normal(next(keys), x.shape, jnp.float32).astype(x.dtype)

        operands, cotangents = jax.tree.map(draw, problem.shapes)
        middle = slice(ENDS, -ENDS)  # without gradients, so that sums over examples compare
        self.arguments = operands, tuple(x.at[middle].set(0) for x in cotangents)
        self.dtype = next(iter(dispatch.select_data(operands).values())).dtype
        few = _select_examples(*self.arguments)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: np.asarray(x, np.float64), few)
            self.exact = jax.tree.map(np.asarray, exact(*wide, np.int32(1)))
        self.plain = self.errors(self.run(plain, 1))

    def run(self, program: Callable, count: int) -> Named:
        """The results of a compiled candidate after `count` steps, by name."""
        return jax.block_until_ready(program(*self.arguments, np.int32(count)))

    def errors(self, results: Named) -> dict[str, float]:
        """Error of each result."""
        few = {x: y if y.shape == self.exact[x].shape else _ends(y) for x, y in results.items()}
        return {name: error(x, self.exact[name]) for name, x in few.items()}

    def fault(self, program: Callable) -> str | None:
        """The fault of a compiled candidate: too large an error, or two runs that differ."""
        results, again = self.run(program, 1), self.run(program, 1)
        for name, deviation in self.errors(results).items():
            gradient = name.startswith("gradient")
            allowed = allowed_error(self.plain[name], self.dtype, gradient=gradient)
            if not deviation <= allowed:
                return f"its {name} is off by {deviation:.2g}, {allowed:.2g} are allowed"
            if not jnp.array_equal(results[name], again[name], equal_nan=True):
                return f"its {name} differs between two equal runs"
        return None

    def time(self, program: Callable) -> float:
        """Median microseconds of one step of a compiled candidate."""

        def time_run(count: int) -> float:
            start = time.perf_counter()
            self.run(program, count)
            return time.perf_counter() - start

        # The difference excludes the fixed time of a run.
        step = (time_run(4) - time_run(1)) / 3
        count = int(np.clip(RUN_S / max(step, 1e-9), 3, MOST_STEPS))
        return 1e6 * statistics.median(time_run(count) for _ in range(RUNS)) / count


def _compile_all(problems: list[Problem], seconds: float) -> dict[Problem, Programs]:
    """The programs of all problems with more than one candidate, compiled or given up."""
    candidates = {x: some for x in problems if len(some := x.candidates()) > 1}
    tasks = [(x, y) for x, some in candidates.items() for y in (EXACT, *some)]
    tasks.sort(key=lambda task: bool(task[1].tile))  # implementations before other tiles of any
    precision, target = jax.config.jax_default_matmul_precision, jax.config.jax_default_device

    def compile_one(problem: Problem, choice: Choice) -> Callable:
        with jax.default_matmul_precision(precision), jax.default_device(target):
            return problem.compile_exact() if choice == EXACT else problem.compile(choice)

    pool = concurrent.futures.ThreadPoolExecutor(max(4, os.cpu_count() or 1))
    try:
        futures = {task: pool.submit(compile_one, *task) for task in tasks}
        concurrent.futures.wait(futures.values(), COMPILING * seconds)
    finally:  # also where a signal ends the wait
        pool.shutdown(cancel_futures=True)
    return {x: {y: futures[x, y] for y in (EXACT, *some)} for x, some in candidates.items()}


def _measure(problem: Problem, programs: Programs, deadline: float) -> Measured:
    """Compares and times all candidates of a problem; no times without those of "xla"."""
    times: dict[Choice, float] = {}
    left_out: dict[str, str] = {}
    exact, trial = programs.pop(EXACT), None
    for choice, program in programs.items():
        if time.monotonic() > deadline or exact.cancelled() or program.cancelled():
            left_out[choice.name] = NO_TIME
            continue
        try:
            trial = trial or Trial(problem, exact.result(), programs[XLA].result())
            if choice != XLA and (fault := trial.fault(program.result())):
                left_out[choice.name] = f"is wrong: {fault}"
            else:
                times[choice] = trial.time(program.result())
        except Exception as error:  # whatever a compiler or a kernel raises
            text = textwrap.shorten(str(error), 160, placeholder="...")
            left_out[choice.name] = f"fails: {type(error).__name__}: {text}"
    default = Choice(problem.call.default)
    chosen = min(times, key=times.get, default=default)
    noise = default in times and WORTH * times[default] <= times[chosen]
    if noise or left_out.get(default.name) == NO_TIME:
        chosen = default
    by_name = {choice.name: round(time, 3) for choice, time in times.items()}
    return Measured(chosen, default.name, by_name, left_out)
