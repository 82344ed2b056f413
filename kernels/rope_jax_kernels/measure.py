"""One candidate for one call: compiled, compared with the exact result, and timed.

A program computes a call (and the wanted gradients) `count` times in one compiled loop, so that
launches from Python are not timed, and one run with count 1 gives the results to compare.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from rope_jax_kernels import dispatch
from rope_jax_kernels.accuracy import allowed_error, error
from rope_jax_kernels.calls import FORWARD, Arrays, Call, arrays_of, wanted_of
from rope_jax_kernels.choices import Choice, Choices, with_tile

DATA = ("q", "k", "v", "qkv", "x")  # arguments whose first axis is the batch
PERIOD = 1_000_003  # random numbers, repeated; a prime, so that no two examples are equal
ENDS = 4  # examples at either end of the batch whose results are compared
RUN_S = 0.01  # of one timed run
RUNS = 5
MOST_STEPS = 1000  # of one run
FAR = 2.0  # slower than this times the best: timed once

Results = dict[str, jax.Array]


def on_one_device() -> Any:
    """A context of calls that XLA need not partition, as each of several devices makes them."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=target)
    return jax.sharding.use_abstract_mesh(mesh)


class Wrong(Exception):
    """A candidate computes something else."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call in one direction.

    Attributes:
        call: what was traced.
        direction: see `calls.direction`.
    """

    call: Call
    direction: str

    @functools.cached_property
    def arrays(self) -> Arrays:
        """Shapes of the operands."""
        return arrays_of(self.call.arguments)

    @property
    def wanted(self) -> list[int]:
        """Positions of the operands whose gradients are wanted."""
        names = wanted_of(self.direction)
        return [i for i, name in enumerate(self.arrays.names) if name in names]

    @property
    def data(self) -> list[int]:
        """Positions of the operands with a batch axis, in the order of a rotation's outputs."""
        return [self.arrays.names.index(name) for name in DATA if name in self.arrays.names]

    @property
    def dtype(self) -> Any:
        """Of the data."""
        return self.arrays.values[self.data[0]].dtype

    @property
    def weight(self) -> int:
        """Estimate of the time that a program spends in this call: its bytes, times its count."""
        return self.call.directions[self.direction] * sum(
            x.size * x.dtype.itemsize for x in self.arrays.values
        )

    def candidates(self) -> list[Choice]:
        """ "xla", the default, and all that do not refuse, with their planned and other tiles."""
        op, found = self.call.op, [Choice("xla"), Choice(self.call.default)]

        def find(*operands: jax.Array) -> None:
            arguments = self.arrays.put(operands)
            for name in dispatch.IMPLEMENTATIONS[op]:
                if dispatch.refusal(op, name, arguments) is None:
                    found.append(Choice(name))
                    module = dispatch.module_of(op, name)
                    tiles = getattr(module, "other_tiles", lambda *_: [])
                    found.extend(
                        Choice(name, tile) for tile in tiles(self.direction != FORWARD, arguments)
                    )

        with on_one_device():
            jax.eval_shape(find, *self.arrays.values)
        return list(dict.fromkeys(found))

    def step(self, choice: Choice, operands: tuple, cotangents: tuple) -> tuple[tuple, tuple]:
        """Outputs and wanted gradients, by one candidate."""

        def outputs(*some: jax.Array) -> tuple:
            own = dict(zip(self.wanted, some, strict=True))
            arguments = self.arrays.put([own.get(i, x) for i, x in enumerate(operands)])
            with with_tile(choice.tile):
                out = dispatch.run(self.call.op, choice.implementation, arguments)
            return out if isinstance(out, tuple) else (out,)

        if not self.wanted:
            return outputs(), ()
        out, pull = jax.vjp(outputs, *[operands[i] for i in self.wanted])
        return out, pull(cotangents)

    def outputs(self, operands: Sequence) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the outputs."""
        forward = Problem(self.call, FORWARD)
        return jax.eval_shape(lambda *x: forward.step(Choice("xla"), x, ())[0], *operands)

    def loop(self, choice: Choice, operands: tuple, cotangents: tuple, count: Any) -> Results:
        """`count` steps by one candidate, each after the one before; results of the last one.

        If the outputs are like the data, as those of rotations, they are the data of the next step,
        and so for their gradients: a kernel in place then needs no copy, as in a model.
        """
        shapes = self.outputs(operands), tuple(operands[i] for i in self.wanted)
        described = [(x.shape, x.dtype) for x in shapes[0]]
        chained = described == [(operands[i].shape, operands[i].dtype) for i in self.data]
        turning_back = chained and set(self.data) <= set(self.wanted)
        others = [n for n, i in enumerate(self.wanted) if not (turning_back and i in self.data)]
        at = {i: n for n, i in enumerate(self.wanted)}

        def body(_: Any, carry: tuple) -> tuple:
            operands, cotangents, _, _ = jax.lax.optimization_barrier(carry)
            out, gradients = self.step(choice, operands, cotangents)
            if chained:
                own = dict(zip(self.data, out, strict=True))
                operands = tuple(own.get(i, x) for i, x in enumerate(operands))
            if turning_back:
                cotangents = tuple(gradients[at[i]] for i in self.data)
            rest = tuple(gradients[n] for n in others)
            return operands, cotangents, () if chained else out, rest

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        rest = tuple(zeros[1][n] for n in others)
        carry = (operands, cotangents, () if chained else zeros[0], rest)
        operands, cotangents, out, rest = jax.lax.fori_loop(0, count, body, carry)
        out = tuple(operands[i] for i in self.data) if chained else out
        results = {f"output {n}": x for n, x in enumerate(out)}
        by_place = {self.wanted[n]: x for n, x in zip(others, rest, strict=True)}
        if turning_back:
            by_place |= dict(zip(self.data, cotangents, strict=True))
        return results | {f"gradient of {self.arrays.names[i]}": by_place[i] for i in self.wanted}

    def shapes(self) -> tuple[tuple, tuple]:
        """Shapes of the operands and, if gradients are wanted, of the cotangents."""
        operands = self.arrays.values
        return operands, self.outputs(operands) if self.wanted else ()

    def compile(self, choice: Choice, shapes: tuple[tuple, tuple] | None = None) -> Callable:
        """The compiled loop of a candidate, for these shapes or those given."""

        def run(operands: tuple, cotangents: tuple, count: jax.Array) -> Results:
            with Choices(), on_one_device():
                return self.loop(choice, operands, cotangents, count)

        count = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(run).lower(*(shapes or self.shapes()), count).compile()


@dataclasses.dataclass
class Sample:
    """Random operands of a problem, and what the results of a candidate are compared with.

    Attributes:
        problem: the call.
        operands, cotangents: for timing.
        checked: cotangents for comparisons, zero but for the examples `rows`.
        rows: the first and the last examples.
        exact: exact results of these examples.
        plain: error of "xla" in each of them.
    """

    problem: Problem
    operands: tuple
    cotangents: tuple
    checked: tuple
    rows: np.ndarray
    exact: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    plain: dict[str, float] = dataclasses.field(default_factory=dict)

    def compare(self, run: Callable) -> Results:
        """The results of a compiled candidate for comparison, by name."""
        return jax.block_until_ready(run(self.operands, self.checked, np.int32(1)))

    def kept(self, results: Results, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The results of some examples, and the gradients of what all share."""
        shared = {f"gradient of {name}" for name in self.problem.arrays.names if name not in DATA}
        return {name: np.asarray(x if name in shared else x[rows]) for name, x in results.items()}

    def errors(self, results: Results) -> dict[str, float]:
        """Error of each result."""
        kept = self.kept(results, self.rows)
        return {name: error(kept[name], exact) for name, exact in self.exact.items()}


def compile_exact(problem: Problem) -> Callable:
    """The compiled reference: "xla" in float64, for the first and last examples."""
    operands, cotangents = problem.shapes()
    rows = len(_ends(operands[problem.data[0]].shape[0]))

    def few(x: Any, has_batch: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]) if has_batch else x.shape, jnp.float64)

    with jax.enable_x64(True):
        wide = tuple(few(x, i in problem.data) for i, x in enumerate(operands))
        return problem.compile(Choice("xla"), (wide, tuple(few(x, True) for x in cotangents)))


def _ends(batch: int) -> np.ndarray:
    """The examples that are compared."""
    return np.unique(np.r_[: min(ENDS, batch), max(0, batch - ENDS) : batch])


def sample(problem: Problem, exact: Callable, plain: Callable) -> Sample:
    """Draws operands, and computes what candidates are compared with.

    Args:
        problem: the call.
        exact: from `compile_exact`.
        plain: the compiled candidate "xla".
    """
    draws = np.random.default_rng(0).standard_normal(PERIOD, np.float32)

    def draw(seed: int, x: Any) -> np.ndarray:
        return np.resize(np.roll(draws, 1009 * seed).astype(x.dtype), x.shape)

    shapes, outputs = problem.shapes()
    operands = [draw(i, x) for i, x in enumerate(shapes)]
    cotangents = [draw(len(shapes) + i, x) for i, x in enumerate(outputs)]
    rows = _ends(shapes[problem.data[0]].shape[0])
    checked = [np.zeros_like(x) for x in cotangents]
    for zeros, x in zip(checked, cotangents, strict=True):
        zeros[rows] = x[rows]
    put = lambda some: tuple(jax.device_put(x) for x in some)
    found = Sample(problem, put(operands), put(cotangents), put(checked), rows)
    with jax.enable_x64(True):
        few = [x[rows] if i in problem.data else x for i, x in enumerate(operands)]
        wide = [
            tuple(x.astype(np.float64) for x in some) for some in (few, [x[rows] for x in checked])
        ]
        found.exact = {name: np.asarray(x) for name, x in exact(*wide, np.int32(1)).items()}
    found.plain = found.errors(found.compare(plain))
    return found


def check(sample: Sample, run: Callable) -> None:
    """Requires that a compiled candidate is right.

    Raises:
        Wrong: its error is too large, two equal runs differ, or an example changes with others.
    """
    results = sample.compare(run)
    for name, found in sample.errors(results).items():
        allowed = allowed_error(
            sample.plain[name], sample.problem.dtype, gradient=name.startswith("gradient")
        )
        if not found <= allowed:
            raise Wrong(f"its {name} is off by {found:.2g}, {allowed:.2g} are allowed")
    again = sample.compare(run)
    for name, x in results.items():
        if not bool(_same_bits(x, again[name])):
            raise Wrong(f"its {name} differs between two equal runs")
    _check_independence(sample, run, results)


def _check_independence(sample: Sample, run: Callable, results: Results) -> None:
    """Requires that examples beside those that are filled with NaN do not change."""
    batch = sample.operands[sample.problem.data[0]].shape[0]
    rows = sample.rows if len(sample.rows) < batch else np.arange(batch // 2)
    if not len(rows):
        return
    filled = np.ones(batch, bool)
    filled[rows] = False
    operands = tuple(
        _fill(x, filled) if i in sample.problem.data else x for i, x in enumerate(sample.operands)
    )
    beside = jax.block_until_ready(run(operands, sample.checked, np.int32(1)))
    before, after = (sample.kept(x, rows) for x in (results, beside))
    for name in before:
        of_examples = name.removeprefix("gradient of ") in DATA or name.startswith("output")
        if of_examples and before[name].tobytes() != after[name].tobytes():
            raise Wrong(f"its {name} changes if other examples are NaN")


@jax.jit
def _same_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    bits = lambda x: jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jnp.array_equal(bits(x), bits(y))


@jax.jit
def _fill(x: jax.Array, filled: jax.Array) -> jax.Array:
    """NaN in the examples that `filled` names."""
    return jnp.where(filled.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x).astype(x.dtype)


def time_of(
    sample: Sample, run: Callable, clock: Callable[[], float], best: float = float("inf")
) -> float:
    """Median microseconds of one step of a compiled candidate, measured once if far from the best.

    Args:
        sample: operands.
        run: the compiled candidate.
        clock: seconds.
        best: microseconds of the fastest candidate so far.
    """

    def timed(count: int) -> float:
        start = clock()
        jax.block_until_ready(run(sample.operands, sample.cotangents, np.int32(count)))
        return clock() - start

    # Without the time that a run takes however short it is.
    step = (timed(4) - timed(1)) / 3
    count = int(np.clip(RUN_S / max(step, 1e-9), 3, MOST_STEPS))
    times = [1e6 * timed(count) / count]
    while len(times) < RUNS and times[0] <= FAR * best:
        times.append(1e6 * timed(count) / count)
    return statistics.median(times)
