"""One candidate for one call: compiled, compared with the exact result, and timed.

A program computes a call (and the wanted gradients) `count` times in one compiled loop, so that
launches from Python are not timed, and one run with count 1 gives the results to compare.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array

from rope_jax_kernels import dispatch
from rope_jax_kernels.accuracy import allowed_error, error
from rope_jax_kernels.calls import Arrays, Call, arrays_of
from rope_jax_kernels.choices import Choice, Choices, with_tile

DATA = ("q", "k", "v", "qkv", "x")  # arguments whose first axis is the batch
# Operation -> the operands whose places its outputs take, as a kernel in place writes them.
IN_PLACE = {"rotate": ("q", "k"), "rotate_qkv": ("qkv",), "rotate_by_angles": ("x",)}
ENDS = 4  # examples at either end of the batch whose results are compared
RUN_S = 0.01  # of one timed run
RUNS = 5
MOST_STEPS = 1000  # of one run

Named = dict[str, Any]  # arrays, or their shapes, by name


def on_one_device() -> Any:
    """A context of calls that XLA need not partition, as each of several devices makes them."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=target)
    return jax.sharding.use_abstract_mesh(mesh)


class Wrong(Exception):
    """A candidate computes something else."""


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A call whose candidates are compared and timed, with the gradients that were taken of it."""

    call: Call

    @functools.cached_property
    def arrays(self) -> Arrays:
        """Shapes of the operands."""
        return arrays_of(self.call.arguments)

    @functools.cached_property
    def shapes(self) -> tuple[Named, tuple]:
        """Shapes of the operands by name, and of the cotangents: one for each output."""
        operands = dict(zip(self.arrays.names, self.arrays.values, strict=True))
        with on_one_device():
            outputs = jax.eval_shape(functools.partial(self.outputs, Choice("xla")), operands)
        return operands, outputs

    def candidates(self) -> list[Choice]:
        """ "xla", the default, and all that do not refuse, with their planned and other tiles."""
        op, found = self.call.op, [Choice("xla"), Choice(self.call.default)]

        def find(*operands: Array) -> None:
            arguments = self.arrays.put(operands)
            for name in dispatch.IMPLEMENTATIONS[op]:
                if dispatch.refusal(op, name, arguments) is None:
                    found.append(Choice(name))
                    module = dispatch.module_of(op, name)
                    tiles = getattr(module, "other_tiles", lambda *_: [])
                    training = bool(self.call.gradients)
                    found.extend(Choice(name, tile) for tile in tiles(training, arguments))

        with on_one_device():
            jax.eval_shape(find, *self.arrays.values)
        return list(dict.fromkeys(found))

    def outputs(self, choice: Choice, operands: Named) -> tuple:
        """The outputs, by one candidate."""
        arguments = self.arrays.put([operands[name] for name in self.arrays.names])
        with with_tile(choice.tile):
            out = dispatch.run(self.call.op, choice.implementation, arguments)
        return out if isinstance(out, tuple) else (out,)

    def step(self, choice: Choice, operands: Named, cotangents: tuple) -> tuple[tuple, Named]:
        """Outputs and wanted gradients, by one candidate."""
        if not self.call.gradients:
            return self.outputs(choice, operands), {}
        wanted = {name: operands[name] for name in sorted(self.call.gradients)}
        out, pull = jax.vjp(lambda some: self.outputs(choice, operands | some), wanted)
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
            out, gradients = self.step(choice, operands, cotangents)
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
        """The compiled loop of a candidate, for these shapes or those given."""

        def run(operands: Named, cotangents: tuple, count: Array) -> Named:
            with Choices(), on_one_device():
                return self.loop(choice, operands, cotangents, count)

        count = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(run).lower(*(shapes or self.shapes), count).compile()

    def compile_exact(self) -> Callable:
        """The compiled reference: "xla" in float64, for the examples that are compared."""
        shapes = jax.eval_shape(_compared, *self.shapes)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float64), shapes)
            return self.compile(Choice("xla"), wide)


def _compared(operands: Named, cotangents: tuple) -> tuple[Named, tuple]:
    """Operands and cotangents of the examples that are compared."""
    few = {name: _ends(x) if name in DATA else x for name, x in operands.items()}
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
        self.dtype = next(x.dtype for name, x in operands.items() if name in DATA)
        few = _compared(*self.arguments)
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

    def check(self, program: Callable) -> None:
        """Requires that a compiled candidate is right.

        Raises:
            Wrong: its error is too large, or two equal runs differ.
        """
        results, again = self.run(program, 1), self.run(program, 1)
        for name, found in self.errors(results).items():
            gradient = name.startswith("gradient")
            allowed = allowed_error(self.plain[name], self.dtype, gradient=gradient)
            if not found <= allowed:
                raise Wrong(f"its {name} is off by {found:.2g}, {allowed:.2g} are allowed")
            if not jnp.array_equal(results[name], again[name], equal_nan=True):
                raise Wrong(f"its {name} differs between two equal runs")

    def time(self, program: Callable) -> float:
        """Median microseconds of one step of a compiled candidate."""

        def timed(count: int) -> float:
            start = time.perf_counter()
            self.run(program, count)
            return time.perf_counter() - start

        # Without the time that a run takes however short it is.
        step = (timed(4) - timed(1)) / 3
        count = int(np.clip(RUN_S / max(step, 1e-9), 3, MOST_STEPS))
        return 1e6 * statistics.median(timed(count) for _ in range(RUNS)) / count
