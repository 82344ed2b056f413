"""Attention as Pallas-Triton kernels, with the rotation inside.

q, k and v are read directly from the projection and rotated in registers, by tables of cosines and
sines that XLA computes before (`kernel.tables`).

A program computes a tile of queries of one head and one example, or of a small window several
examples, over the blocks of keys that `tiles` lists, with an online softmax (FlashAttention, arXiv
2205.14135). `plans` has the sizes of programs. Rotated queries and keys are rounded once, to the
data's dtype; logits and softmax are float32.

Backward, if a tile holds all queries that attend to its keys (windows of up to 64 tokens), one
kernel computes all gradients. Otherwise one loops over keys (dq) and one over queries (dk, dv).
There are no atomics, so results are deterministic. The gradient of the frequencies is computed from
the rotated queries and keys and their gradients, which are then in registers. That of a bias needs
a separate kernel, unless a window is one block, heads are narrow and maps are small
(`_closed_backward`): then a program adds up the gradients of logits of several examples.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.attention.kernel import (
    Kernel,
    Needs,
    Operands,
    refusal_of_call,
    tables,
)
from rope_jax_kernels.attention.patterns import Neighborhood, Pattern
from rope_jax_kernels.attention.plans import bias_groups, plan, with_examples
from rope_jax_kernels.attention.task import Launch, Task
from rope_jax_kernels.attention.triton_kernels import (
    bias_kernel,
    closed_kernel,
    forward_kernel,
    key_kernel,
    query_kernel,
)
from rope_jax_kernels.rotation import Rotation

HEAD_DIMS = (16, 128)  # smallest and largest
# Most neighbours along one axis. A tile is at least half as long, and has at most 64 queries then.
NEIGHBORS = 16
SUMS = 4096  # most gradients of a bias that programs add up: 64 MiB for windows of 7


def run(
    kernel: Callable,
    launch: Launch,
    grid: tuple,
    outputs: tuple,
    *operands: Any,
    aliases: dict[int, int] | None = None,
) -> tuple:
    """Launches a kernel that takes trees of operands and of these outputs; returns the outputs."""
    return pl.pallas_call(
        functools.partial(kernel, launch=launch),
        grid=grid,
        out_shape=outputs,
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=launch.task.interpret,
        name=f"attention_{kernel.__name__}",
    )(*operands)


def forward(
    task: Task, operands: Operands
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """`Kernel.forward`."""
    (q, *_), rotation, bias = operands
    turning = tables(rotation)
    batch, tokens = q.shape[:2]
    launch = plan(task, q.dtype.itemsize, "forward", batch)
    out = (batch, tokens, task.heads, task.head_dim), q.dtype
    outputs = device.shapes_like(q, out, ((batch, task.heads, tokens), jnp.float32))
    by_slot = tuple(map(launch.tiles.by_slot, bias))
    operands = Operands(operands.data, turning, by_slot)
    return run(forward_kernel, launch, launch.grid(batch), outputs, operands)


def backward(task: Task, needs: Needs, operands: Operands) -> tuple[tuple, tuple, Array | None]:
    """The backward pass of `Kernel`, by one to three kernels."""
    q = operands.data[0]
    launch = plan(task, q.dtype.itemsize, "queries", q.shape[0])
    compute = _closed_backward if launch.closed else _open_backward
    gradients, partial, dbias = compute(launch, operands, needs)
    if needs.bias and dbias is None:
        dbias = _bias_gradient(task, operands)
    return gradients, partial, dbias


def _closed_backward(
    launch: Launch, operands: Operands, needs: Needs
) -> tuple[tuple, tuple, Array | None]:
    """Gradients of the data, partial ones of the frequencies, and that of the bias, by one kernel.

    None for the bias where it is not needed, a window has several blocks, or its sums would need
    too many registers or, for a map of many windows, too much memory.
    """
    task, tiles, q = launch.task, launch.tiles, operands.data[0]
    batch = q.shape[0]
    many = with_examples(launch, batch, batch)
    heads, *groups = many.grid(batch)
    fits = task.head_dim <= 32 and heads * math.prod(groups) <= SUMS
    summed = needs.bias and tiles.blocks == 1 and fits
    launch = many if summed else launch
    total = (*groups, heads, tiles.columns, tiles.rows), jnp.float32
    outputs = (
        device.shapes_like(q, *[(q.shape, q.dtype)] * (1 if task.packed else 3)),
        device.shapes_like(q, total) if summed else (),
        _sums(launch, operands, needs),
    )
    by_key = operands._replace(bias=tuple(tiles.by_slot(x).mT for x in operands.bias))
    gradients, totals, partial = run(closed_kernel, launch, launch.grid(batch), outputs, by_key)
    dbias = tiles.fold(totals[0].sum((0, 1)).mT) if summed else None
    return gradients, partial, dbias


def _open_backward(launch: Launch, operands: Operands, needs: Needs) -> tuple[tuple, tuple, None]:
    """`_closed_backward` with two kernels, without the gradient of the bias."""
    task, (*inputs, _), q = launch.task, operands.data, operands.data[0]
    batch, lse = q.shape[0], inputs[-1]
    q_shape, lse_shape = device.shapes_like(q, (q.shape, q.dtype), (lse.shape, jnp.float32))
    outputs = q_shape, lse_shape, _sums(launch, operands, needs)
    by_query = operands._replace(bias=tuple(map(launch.tiles.by_slot, operands.bias)))
    dq, delta, by_queries = run(query_kernel, launch, launch.grid(batch), outputs, by_query)
    launch = plan(task, q.dtype.itemsize, "keys", batch)
    launch = dataclasses.replace(launch, tiles=launch.tiles.transpose())
    outputs = (q_shape,) * (1 if task.packed else 2), _sums(launch, operands, needs)
    by_slot = tuple(launch.tiles.by_slot(x).mT for x in operands.bias)
    by_key = Operands((*inputs, delta), operands.turning, by_slot)
    # The packed gradient, the last operand, is written in place.
    written = (dq,) if task.packed else ()
    aliases = {len(jax.tree.leaves(by_key)): 0} if task.packed else {}
    gradients, by_keys = run(
        key_kernel, launch, launch.grid(batch), outputs, by_key, written, aliases=aliases
    )
    return gradients if task.packed else (dq, *gradients), (*by_queries, *by_keys), None


def _sums(launch: Launch, operands: Operands, needs: Needs) -> tuple:
    """The output of partial gradients of the frequencies, if they are needed."""
    if not needs.freqs:
        return ()
    q, (cos, _, coords) = operands.data[0], operands.turning
    tile_shape = launch.task.heads, coords.shape[1], cos.shape[2]
    _, tiles, groups = launch.grid(q.shape[0])
    return device.shapes_like(q, ((groups, tiles, *tile_shape), jnp.float32))


def _bias_gradient(task: Task, operands: Operands) -> Float[Array, "N entries"]:
    """The gradient of the bias, by a separate kernel."""
    q = operands.data[0]
    launch = plan(task, q.dtype.itemsize, "bias", q.shape[0])
    tiles = launch.tiles
    parts = tiles.tiles // tiles.repeats
    groups = bias_groups(launch, q.shape[0] * tiles.repeats)
    shape = groups, task.heads, parts * tiles.rows, tiles.blocks * tiles.columns
    outputs = device.shapes_like(q, (shape, jnp.float32))
    grid = (task.heads, parts * tiles.blocks, groups)
    by_query = operands._replace(bias=tuple(map(tiles.by_slot, operands.bias)))
    (partial,) = run(bias_kernel, launch, grid, outputs, by_query)
    return tiles.fold(partial.sum(0))


KERNEL = Kernel("triton", forward)
attention, attention_qkv = KERNEL.attention, KERNEL.attention_qkv


def refusal(
    arrays: dict[str, Any],
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "..."] | None,
    scale: Any,
) -> str | None:
    """The reason why these kernels cannot serve a call with these arguments, or None."""
    if reason := refusal_of_call(arrays, rotation, bias, scale):
        return reason
    smallest, largest = HEAD_DIMS
    head_dim = next(iter(arrays.values())).shape[-1]
    if not smallest <= head_dim <= largest:
        return f"the head dimension is {head_dim}; {smallest} to {largest} are served"
    if isinstance(pattern, Neighborhood) and max(pattern.size) > NEIGHBORS:
        return f"the neighbourhood is {pattern.size}; up to ({NEIGHBORS}, {NEIGHBORS}) are served"
    return device.refusal()
