"""Measuring on this device which implementation and which tile serve each call best.

A candidate must first be right: within the tolerances of the tests of "xla" in float64, equal bits
in two runs, and examples independent of one another. One that is wrong, crashes, does not compile
or does not end is left out. What is fastest of the others is chosen.
"""

import collections
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from rope_jax_kernels import device
from rope_jax_kernels.calls import Call
from rope_jax_kernels.choices import Choice, Choices, Measured
from rope_jax_kernels.measure import (
    Problem,
    Wrong,
    check,
    compile_exact,
    sample,
    time_of,
)

COMPILING = 0.7  # largest share of the time in which programs are compiled
WORTH = 0.98  # of the default's time; what is not faster than that is noise
NO_CALLS = (
    "nothing to tune: no call was recorded. Calls with a named implementation, and those that XLA "
    "may partition over several devices, are not"
)
ENDLESS, NOT_MEASURED = "does not end", "is not measured"
ALIVE_S = 10.0  # in which a device must answer after a candidate that failed


def tune(
    calls: Iterable[Call],
    *,
    seconds: float = 60.0,
    limit_s: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = device.say,
) -> Choices:
    """Measures calls on the current device, in the directions in which they were traced.

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
        seconds: for everything. The calls that take longest come first; those that are left keep
            their defaults, and candidates that are left are not chosen.
        limit_s: seconds in which a candidate must have been compared and timed.
        clock: seconds, for the timing of candidates.
        say: takes one sentence about what is left out, and why.

    Returns:
        The choices, of calls for which there was more than one candidate.
    """
    choices, calls = Choices(device.kind()), list(calls)
    if reason := nothing_to_tune() or (None if calls else NO_CALLS):
        say(reason)
        return choices
    start, reports = time.monotonic(), _Reports(say)
    until = start + seconds
    problems = [Problem(call, name) for call in calls for name in call.directions]
    problems.sort(key=lambda problem: -problem.weight)
    candidates = {problem: problem.candidates() for problem in problems}
    open_problems = [problem for problem in problems if len(candidates[problem]) > 1]
    programs = _compile_all(open_problems, candidates, start + COMPILING * seconds)
    left = 0
    for problem in open_problems:
        if time.monotonic() > until:
            left += 1
            continue
        attempt = functools.partial(_attempt, limit_s, until)
        measured, stuck = _measure(problem, candidates[problem], programs, attempt, clock, reports)
        if measured is not None:
            choices.calls.setdefault(problem.call.key, {})[problem.direction] = measured
        if stuck is not None:
            say(f"{stuck}; tuning ends here, and the calls that are left keep their defaults")
            break
    if left:
        say(
            f"{left} of {len(open_problems)} calls were not measured within {seconds:g} s and keep "
            "their defaults"
        )
    return choices


def nothing_to_tune() -> str | None:
    """Why nothing can be measured on the current device; None if kernels run on it."""
    if device.is_gpu() or device.interpreted():
        return None
    return (
        f'nothing to tune: kernels need a GPU, and this is {device.kind()}; "xla" serves every call'
    )


class _Reports:
    """Says once for each implementation and kind of failure that candidates are left out."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[tuple[str, str]] = set()

    def __call__(self, problem: Problem, choice: Choice, kind: str, reason: str) -> None:
        if (choice.implementation, kind) not in self._said:
            self._said.add((choice.implementation, kind))
            self._say(f"{choice.name} {kind} and is left out of {problem.call.key}: {reason}")


Program = Callable | Exception
EXACT = Choice("exact")  # stands for the program of `compile_exact`


def _compile_all(
    problems: list[Problem], candidates: dict[Problem, list[Choice]], until: float
) -> dict[tuple[Problem, Choice], Program]:
    """Compiled programs, or why there is none, by as many threads as there are processors (or 4).

    What has not been compiled in time is missing. Threads cannot be ended: one that hangs is left
    behind, and does not keep the process from ending.
    """
    tasks = [(p, choice) for p in problems for choice in (EXACT, *candidates[p])]
    # All implementations of all calls come before other tiles of any.
    waiting = collections.deque(sorted(tasks, key=lambda task: bool(task[1].tile)))
    programs: dict[tuple[Problem, Choice], Program] = {}
    total, changed = len(waiting), threading.Condition()

    def work() -> None:
        while time.monotonic() < until:
            try:
                problem, choice = waiting.popleft()
            except IndexError:
                return
            try:
                program = compile_exact(problem) if choice is EXACT else problem.compile(choice)
            except Exception as error:  # whatever a compiler raises
                program = error
            with changed:
                programs[problem, choice] = program
                changed.notify()

    for _ in range(min(total, max(4, os.cpu_count() or 1))):
        _start_thread(work)
    try:
        with changed:
            changed.wait_for(lambda: len(programs) == total, max(0.0, until - time.monotonic()))
            return dict(programs)
    finally:
        waiting.clear()  # also where a signal ends the wait


def _measure(
    problem: Problem,
    candidates: list[Choice],
    programs: dict[tuple[Problem, Choice], Program],
    attempt: Callable[[Callable], tuple[Any, tuple[str, str] | None]],
    clock: Callable[[], float],
    reports: _Reports,
) -> tuple[Measured | None, str | None]:
    """Compares and times all candidates of a problem.

    Args:
        problem: the call.
        candidates: what may serve it.
        programs: from `_compile_all`.
        attempt: `_attempt` with its limits.
        clock: seconds.
        reports: of candidates that are left out.

    Returns:
        What was measured, None if there is nothing to compare with; and why the device no longer
        answers, None if it does.
    """
    plain, exact = programs.get((problem, Choice("xla"))), programs.get((problem, EXACT))
    if not callable(plain) or not callable(exact):
        reason = next((x for x in (plain, exact) if isinstance(x, Exception)), "no time was left")
        reports(problem, Choice("xla"), "is not compiled", _one_line(reason))
        return None, None
    drawn, failure = attempt(lambda _: sample(problem, exact, plain))
    if failure is not None:
        reports(problem, Choice("xla"), *failure)
        return None, _stuck_after(Choice("xla"))
    times, failures, stuck = {}, {}, None
    for choice in candidates:
        program = programs.get((problem, choice))
        best = min(times.values(), default=float("inf"))

        def check_and_time(given_up, choice=choice, program=program, best=best) -> float:
            def run(*operands: Any) -> Any:
                if given_up.is_set():
                    raise TimeoutError  # nobody waits, and others are timed
                return program(*operands)

            if choice != Choice("xla"):
                check(drawn, run)
            return time_of(drawn, run, clock, best)

        if program is None:
            failure = NOT_MEASURED, "no time was left to compile it"
        elif not callable(program):
            failure = "does not compile", _one_line(program)
        else:
            times[choice], failure = attempt(check_and_time)
        if failure is not None:
            times.pop(choice, None)
            failures[choice] = failure
            reports(problem, choice, *failure)
            if stuck := _stuck_after(choice):
                break
    return _chosen(problem, times, failures), stuck


def _stuck_after(choice: Choice) -> str | None:
    """That the device no longer answers after a failure of this candidate; None if it does."""
    return None if device_answers() else f"the device does not answer after {choice.name}"


def _attempt(
    limit_s: float, until: float, work: Callable[[threading.Event], Any]
) -> tuple[Any, tuple[str, str] | None]:
    """The result of the work, and None; or None, and the kind of failure with its reason.

    Args:
        limit_s: seconds in which the work must end.
        until: when it must end at the latest, as `time.monotonic` has it.
        work: see `_within`.
    """
    left = until - time.monotonic()
    outcome = _within(min(limit_s, left), work) if left > 0 else None
    if outcome is None and left < limit_s:
        return None, (NOT_MEASURED, "no time was left to run it")
    if outcome is None:
        return None, (ENDLESS, f"no result within {limit_s:g} s")
    result, error = outcome
    if isinstance(error, Wrong):
        return None, ("is wrong", str(error))
    if error is not None:
        return None, ("crashes", _one_line(error))
    return result, None


def _chosen(
    problem: Problem, times: dict[Choice, float], failures: dict[Choice, tuple[str, str]]
) -> Measured | None:
    """The fastest candidate; the default if that is about as fast or there was no time for it.

    Args:
        problem: the call.
        times: candidate -> microseconds.
        failures: candidate -> kind and reason.

    Returns:
        What was measured; None without any time.
    """
    if not times:
        return None
    default = Choice(problem.call.default)
    fastest = min(times, key=times.get)
    untimed = default not in times and failures.get(default, (NOT_MEASURED,))[0] == NOT_MEASURED
    if untimed or (default in times and WORTH * times[default] <= times[fastest]):
        fastest = default
    by_name = {choice.name: round(time, 3) for choice, time in times.items()}
    left_out = {choice.name: ": ".join(failure) for choice, failure in failures.items()}
    return Measured(fastest, default.name, by_name, left_out)


def device_answers() -> bool:
    """Whether the device still computes, after a candidate that did not end or crashed."""
    outcome = _within(ALIVE_S, lambda _: jax.block_until_ready(jnp.zeros(()) + 1))
    return outcome is not None and outcome[1] is None


def _within(
    limit_s: float, work: Callable[[threading.Event], Any]
) -> tuple[Any, None] | tuple[None, Exception] | None:
    """The work's result and its error, in a thread that is given up after `limit_s` seconds.

    Nothing that the work raises is raised here, so that an exception is one of this thread: a
    signal that ends the program.

    Args:
        limit_s: seconds.
        work: what to compute. Its argument is set when it is given up.

    Returns:
        The result and None, or None and the error; None if there is neither yet.
    """
    done, given_up, outcome = threading.Event(), threading.Event(), []

    def run() -> None:
        try:
            outcome.append((work(given_up), None))
        except Exception as error:  # whatever a kernel raises
            outcome.append((None, error))
        done.set()

    _start_thread(run)
    try:
        return outcome[0] if done.wait(limit_s) else None
    finally:
        given_up.set()


def _start_thread(work: Callable[[], None]) -> None:
    """Runs work in a thread with this one's settings of jax; the process can end before it."""
    default, precision = jax.config.jax_default_device, jax.config.jax_default_matmul_precision
    mesh = jax.sharding.get_abstract_mesh()

    def run() -> None:
        with (
            jax.default_device(default),
            jax.default_matmul_precision(precision),
            jax.sharding.use_abstract_mesh(mesh),
        ):
            work()

    threading.Thread(target=run, daemon=True).start()


def _one_line(error: Any) -> str:
    """The kind and the beginning of an error's message."""
    text = " ".join(str(error).split())
    kind = f"{type(error).__name__}: " if isinstance(error, Exception) else ""
    return kind + (text if len(text) <= 160 else text[:157] + "...")
