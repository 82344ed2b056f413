"""Cases of `speed`: rotations at the 300 sizes of Kane's thesis (table A.1)."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from benchmarks._timing import Case, Maker, copies_beyond_cache, torch_on_gpu
from rope_jax.analysis import speed
from rope_jax.analysis.timing import compile_loop
from rope_jax_kernels import rotate_by_angles

# Dtypes of features and angles: bfloat16 in place of the thesis' float16.
PRECISIONS = {
    name: tuple(dtype.replace("float16", "bfloat16") for dtype in dtypes)
    for name, dtypes in speed.PRECISIONS.items()
}
DIRECTIONS = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A rotation of half of the channels, or its gradient.

    Each head and token has its own angles, so the features are [B, 1, N*H*W, C].
    """

    size: speed.Size
    precision: str = "16-32"
    direction: str = "forward"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the features."""
        batch, heads, side, channels = self.size
        return batch, 1, heads * side**2, channels

    @property
    def moved_bytes(self) -> int:
        """Bytes that a rotation in place moves: half of the channels twice, theta once."""
        features, theta = (jnp.dtype(name).itemsize for name in PRECISIONS[self.precision])
        batch, _, rows, channels = self.shape
        return rows * (batch * channels * features + channels // 4 * theta)


def make_step(problem: Problem, form: str) -> Callable:
    """Returns a function of (features, *angles): the rotation, or its gradient."""
    if form == "xla":  # backward in the same form: autodiff would add two padded halves
        back = lambda x, cos, sin: speed.rotate_by_tables(x, cos, -sin)
        return speed.rotate_by_tables if problem.direction == "forward" else back
    forward = functools.partial(rotate_by_angles, layout="BNLD", implementation=form)

    def backward(x: jax.Array, theta: jax.Array) -> jax.Array:
        return jax.vjp(lambda y: forward(y, theta), x)[1](x)[0]

    return forward if problem.direction == "forward" else backward


def operands(problem: Problem, form: str, copies: int) -> tuple:
    """Returns `copies` features, and the angles of `make_step`: theta, or cosines and sines."""
    return speed.rotation_operands(
        problem.size, PRECISIONS[problem.precision], tables=form == "xla", copies=copies
    )


def sizes(*, small: bool = False) -> Iterator[Case]:
    """Rotations in all precisions and directions, with cold caches where they can be."""
    parts = speed.rotation_sizes(small), PRECISIONS, DIRECTIONS
    for size, precision, direction in itertools.product(*parts):
        problem = Problem(size, precision, direction)
        feature_bytes = math.prod(problem.shape) * jnp.dtype(PRECISIONS[precision][0]).itemsize
        copies = copies_beyond_cache(feature_bytes)
        makers: dict[str, Maker] = {
            form: functools.partial(
                compile_loop,
                make_step(problem, form),
                functools.partial(operands, problem, form, copies),
                in_place=True,
            )
            for form in ("xla", "triton")
        }
        # Sizes of models only, because torch compiles for each size.
        if problem == Problem((*size[:2], 14, 64)) and torch_on_gpu():
            from benchmarks import _torch

            _, *tables = operands(problem, "xla", 1)
            arguments = functools.partial(operands, problem, "xla", copies)
            makers["torch"] = _torch.rotation(arguments, tables)
        batch, heads, side, channels = size
        name = f"{batch} x {heads} x {side}x{side} x {channels}"
        yield Case(f"rotation, {precision}, {direction}", name, makers, problem.moved_bytes)
