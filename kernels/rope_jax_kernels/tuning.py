"""Measuring on this device which implementation and which tile serve each call best.

A candidate must first be right: within the tolerances of the tests of "xla" in float64, and with
equal bits in two runs. One that is wrong, crashes or does not compile is left out. What is fastest
of the others is chosen.
"""

import concurrent.futures
import os
import time
from collections.abc import Callable, Iterable

import jax

from rope_jax_kernels import device
from rope_jax_kernels.calls import Call
from rope_jax_kernels.choices import Choice, Choices, Measured
from rope_jax_kernels.measure import Problem, Trial, Wrong

COMPILING = 0.7  # of the time, after which no further program is compiled
WORTH = 0.98  # of the default's time; what is not faster than that is noise
NO_CALLS = (
    "nothing to tune: no call was recorded. Calls with a named implementation, and those that XLA "
    "may partition over several devices, are not"
)
NO_TIME = "no time was left"
XLA, EXACT = Choice("xla"), Choice("exact")  # the latter stands for `Problem.compile_exact`

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
        seconds: after which nothing else is begun. The calls that take longest come first; those
            that are left keep their defaults, and candidates that are left are not chosen.
        say: takes one sentence about what is left out, and why.

    Returns:
        The choices, of calls for which there was more than one candidate.
    """
    choices, calls = Choices(device.kind()), list(calls)
    if reason := nothing_to_tune() or (None if calls else NO_CALLS):
        say(reason)
        return choices
    until = time.monotonic() + seconds
    all_programs = _compile_all(sorted(map(Problem, calls), key=_weight, reverse=True), seconds)
    measured = {problem: _measure(problem, some, until) for problem, some in all_programs.items()}
    for problem, found in measured.items():
        if found.microseconds:
            choices.calls.setdefault(problem.call.key, {})[problem.call.direction] = found
        for name, reason in found.left_out.items():
            if reason != NO_TIME and " " not in name:  # an implementation, not another tile of one
                say(f"{name} {reason}; it is left out of {problem.call.key}")
    if left := sum(not found.microseconds for found in measured.values()):
        say(f"{left} of {len(measured)} calls were not measured and keep their defaults")
    return choices


def _weight(problem: Problem) -> int:
    """Estimate of the time that a program spends in a call: its bytes, times its count."""
    return problem.call.count * sum(x.size * x.dtype.itemsize for x in problem.arrays.values)


def nothing_to_tune() -> str | None:
    """Why nothing can be measured on the current device; None if kernels run on it."""
    if device.is_gpu() or device.interpreted():
        return None
    return (
        f'nothing to tune: kernels need a GPU, and this is {device.kind()}; "xla" serves every call'
    )


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


def _measure(problem: Problem, programs: Programs, until: float) -> Measured:
    """Compares and times all candidates of a problem; no times without those of "xla"."""
    times: dict[Choice, float] = {}
    left_out: dict[str, str] = {}
    exact, trial = programs.pop(EXACT), None
    for choice, program in programs.items():
        if time.monotonic() > until or exact.cancelled() or program.cancelled():
            left_out[choice.name] = NO_TIME
            continue
        try:
            trial = trial or Trial(problem, exact.result(), programs[XLA].result())
            if choice != XLA:
                trial.check(program.result())
            times[choice] = trial.time(program.result())
        except Exception as error:  # whatever a compiler or a kernel raises
            left_out[choice.name] = _one_line(error)
    default = Choice(problem.call.default)
    chosen = min(times, key=times.get, default=default)
    noise = default in times and WORTH * times[default] <= times[chosen]
    if noise or left_out.get(default.name) == NO_TIME:
        chosen = default
    by_name = {choice.name: round(time, 3) for choice, time in times.items()}
    return Measured(chosen, default.name, by_name, left_out)


def _one_line(error: Exception) -> str:
    """What is wrong with a candidate: the beginning of an error's message."""
    kind = "is wrong" if isinstance(error, Wrong) else f"fails: {type(error).__name__}"
    text = " ".join(str(error).split())
    return f"{kind}: {text if len(text) <= 160 else text[:157] + '...'}"
