"""Cases of `speed`: rotations at the 300 sizes of Kane's thesis (table A.1)."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._timing import (
    Case,
    Maker,
    Timer,
    compile_loop,
    copies_beyond_cache,
    sample,
    torch_on_gpu,
)
from rope_jax_kernels import rotate_by_angles

# Batches, heads, sides and channels.
SIZES = ((1, 16, 32, 64, 128), (1, 3, 4, 6, 8), (56, 28, 14, 7), (32, 64, 128))
SMALL = ((1, 2), (3,), (7,), (32,))
# Dtypes of features and angles.
PRECISIONS = {
    "16-32": ("bfloat16", "float32"),
    "16-16": ("bfloat16", "bfloat16"),
    "32-32": ("float32", "float32"),
}
DIRECTIONS = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A rotation of half of the channels, or its gradient.

    Each head and token has its own angles, so the features are [B, 1, N*H*W, C].
    """

    batch: int
    heads: int
    side: int
    channels: int
    precision: str = "16-32"
    direction: str = "forward"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the features."""
        return self.batch, 1, self.heads * self.side**2, self.channels

    @property
    def moved_bytes(self) -> int:
        """Bytes that a rotation in place moves: half of the channels twice, theta once."""
        features, theta = (jnp.dtype(name).itemsize for name in PRECISIONS[self.precision])
        batch, _, rows, channels = self.shape
        return rows * (batch * channels * features + channels // 4 * theta)


def rotate_by_tables(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The rotation that XLA compiles to the fastest program, with tables [N, L, R].

    Given theta instead of tables, XLA would launch three kernels.
    """
    pairs = cos.shape[-1]
    a, b = x[..., :pairs].astype(cos.dtype), x[..., pairs : 2 * pairs].astype(cos.dtype)
    rotated = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*rotated, x[..., 2 * pairs :]], axis=-1)


def make_step(problem: Problem, form: str) -> Callable:
    """Returns a function of (features, *angles): the rotation, or its gradient."""
    if form == "xla":  # backward in the same form: autodiff would add two padded halves
        back = lambda x, cos, sin: rotate_by_tables(x, cos, -sin)
        return rotate_by_tables if problem.direction == "forward" else back
    kernel = "xla" if form == "eager" else form
    forward = functools.partial(rotate_by_angles, layout="BNLD", implementation=kernel)

    def backward(x: jax.Array, theta: jax.Array) -> jax.Array:
        return jax.vjp(lambda y: forward(y, theta), x)[1](x)[0]

    return forward if problem.direction == "forward" else backward


def operands(problem: Problem, form: str, copies: int) -> tuple:
    """Returns `copies` features, and the angles of `make_step`: theta, or cosines and sines."""
    features, dtype = PRECISIONS[problem.precision]
    _, heads, rows, channels = problem.shape
    pairs = channels // 4
    theta = jnp.linspace(0, 10, heads * rows * pairs).reshape(heads, rows, pairs).astype(dtype)
    exact = theta.astype("float32")
    angles = (jnp.cos(exact), jnp.sin(exact)) if form == "xla" else (theta,)
    return tuple(jnp.full(problem.shape, 1 + n, features) for n in range(copies)), *angles


def eager(problem: Problem) -> tuple[list[np.ndarray], Timer]:
    """Starts the rotation in jax.numpy without jit."""
    (x,), theta = jax.jit(lambda: operands(problem, "eager", 1))()
    step = make_step(problem, "eager")
    results = sample(step(x, theta))

    def measure() -> float:
        begun = time.perf_counter()
        jax.block_until_ready(step(x, theta))
        return 1e6 * (time.perf_counter() - begun)

    return results, measure


def sizes(
    *, directions: Sequence[str] = DIRECTIONS, hot: bool = False, small: bool = False
) -> Iterator[Case]:
    """Rotations in all precisions; with cold caches where they can be, unless `hot`."""
    extents = itertools.product(*(SMALL if small else SIZES))
    for size, precision, direction in itertools.product(extents, PRECISIONS, directions):
        problem = Problem(*size, precision, direction)
        feature_bytes = math.prod(problem.shape) * jnp.dtype(PRECISIONS[precision][0]).itemsize
        copies = 1 if hot else copies_beyond_cache(feature_bytes)
        makers: dict[str, Maker] = {
            form: functools.partial(
                compile_loop,
                make_step(problem, form),
                functools.partial(operands, problem, form, copies),
                problem.moved_bytes,
                in_place=True,
            )
            for form in ("xla", "triton")
        }
        if hot:
            makers["eager"] = lambda problem=problem: functools.partial(eager, problem)
        from_models = problem == Problem(*size[:2], 14, 64)  # the others compile for each size
        if from_models and torch_on_gpu():
            from benchmarks import _torch

            tables = operands(problem, "xla", 0)[1:]
            makers["torch"] = _torch.rotation(problem.shape, tables, copies)
        group = f"rotation, {precision}, {direction}"
        batch, heads, side, channels = size
        name = f"{batch} x {heads} x {side}x{side} x {channels}"
        yield Case(group, name, makers, problem.moved_bytes)
