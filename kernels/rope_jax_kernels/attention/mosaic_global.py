"""Global attention by a kernel for Mosaic GPU on Hopper, with the rotation inside: forward.

A program owns one head and a tile of queries, 64 for each of its warpgroups, of several successive
examples. The copy engine loads queries, keys and values with zeros past the last token. Keys are
loaded in stages of 64 for each warpgroup: each warpgroup turns its part in registers and stores it
for all the others. Turned queries stay in registers, and so do the cosines and sines of few pairs,
which with one stage are those of the keys, too. Logits, online softmax (FlashAttention, arXiv
2205.14135) and sums are float32.

While one stage is computed, the engine loads the next, of the same example or the next one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention import kernel, mosaic_program
from rope_jax_kernels.attention.arithmetic import LOG2E, MASKED
from rope_jax_kernels.attention.kernel import Operands
from rope_jax_kernels.attention.mosaic_program import (
    ROW,
    ROWS,
    TILE,
    Program,
    add_products,
    buffer,
    divide_examples,
    join,
    launch,
    load_rows,
    opaque,
    row_products,
    slice_block,
    spread,
    store_rows,
    turn,
    turning_table,
    zeros,
)
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.mosaic import in_sets, repeat

WIDEST = 64  # channels of a piece of a row, 128 bytes: the widest swizzle of shared memory
# Most warpgroups of a program, by head dimension: a multiprocessor has 65,536 registers.
MOST_GROUPS = {32: 4, 64: 4, 128: 2}
KEPT_PAIRS = 16  # most whose cosines and sines stay in registers from one example to the next


@dataclasses.dataclass(frozen=True)
class Plan(mosaic_program.Plan):
    """The programs of a task, one for each tile of queries. Static.

    There are as many stages of keys as tiles.

    Attributes:
        blocks: of 64 keys.
        slots: stages in shared memory at a time.
        width: of a piece of a row of channels.
    """

    blocks: int
    slots: int
    width: int


def plan(task: Task, batch: int, sets: int = 1) -> Plan:
    """The plan for `batch` examples in `sets` that turn alike.

    As many warpgroups as registers allow, because each key is turned once for all of them, unless
    much of their work would be past the last token.
    """
    blocks = pl.cdiv(task.tokens, ROWS)
    most = mosaic_program.MOST_INTERPRETED if task.interpret else MOST_GROUPS[task.head_dim]
    padded = {n: pl.cdiv(blocks, n) * n for n in range(1, most + 1)}
    groups = max(n for n, total in padded.items() if 8 * total <= 9 * min(padded.values()))
    tiles = padded[groups] // groups
    examples = divide_examples(task, tiles, batch, sets)
    slots, width = min(2, examples["items"] * tiles), min(WIDEST, task.head_dim)
    return Plan(groups, **examples, blocks=blocks, slots=slots, width=width)


def forward(
    task: Task, operands: Operands
) -> tuple[Float[Array, "B L N D"], Float[Array, "B N _"]]:
    """`Kernel.forward`; lse has room for whole tiles of tokens."""
    cut = plan(task, 1)  # of any batch: the tiles are the same
    tokens = tokens_of_blocks(task, cut.programs * cut.groups)
    table = turning_table(kernel.tables(operands.turning), tokens)
    return in_sets(functools.partial(launch_forward, task), operands.data, table)


def tokens_of_blocks(task: Task, blocks: int) -> Int[np.ndarray, " slots"]:
    """A token for each slot of these blocks; any after the last one."""
    return np.minimum(np.arange(blocks * ROWS), task.tokens - 1)


def launch_forward(task: Task, arrays: tuple, table: tuple, sets: int) -> tuple[Array, ...]:
    """The output and lse, for `in_sets`."""
    batch, dtype = arrays[0].shape[0], arrays[0].dtype
    cut = plan(task, batch, sets)
    groups, slots, pieces = cut.groups, cut.slots, task.head_dim // cut.width
    counts = [(groups,), (slots, groups), (slots, groups), (groups,)]  # q, k, v and the output
    scratch = [
        *(buffer(task, (*count, pieces, ROWS, cut.width), dtype) for count in counts),
        plgpu.Barrier(num_arrivals=pieces, num_barriers=groups),
        plgpu.Barrier(num_arrivals=pieces, num_barriers=(slots, groups)),
        plgpu.Barrier(num_arrivals=groups * pieces, num_barriers=slots),
        plgpu.Barrier(num_arrivals=groups),
    ]
    outputs = [
        jax.ShapeDtypeStruct((batch, task.tokens, task.heads, task.head_dim), dtype),
        jax.ShapeDtypeStruct((batch, task.heads, cut.programs * groups * ROWS), jnp.float32),
    ]
    operands = arrays, table, outputs, scratch
    return launch(Forward, "attention_mosaic", task, cut, *operands, synchronized=True)


class Forward(Program):
    """The output [B, L, N, D] and lse [B, N, tiles of 64] of q, k and v [B, L, N or 3 N, D]."""

    plan: Plan

    def __init__(self, refs: tuple, task: Task, plan: Plan):
        super().__init__(refs, task, plan, sources=3)
        take = self.take
        self.out, self.lse = take(), take()
        self.q, self.k, self.v, self.result = (self.take_memory() for _ in range(4))
        self.q_ready, self.k_ready, self.v_ready, self.meeting = (take() for _ in range(4))
        self.block = self.place * self.plan.groups + self.group  # of queries

    def parts(self, ref: Any, i: Array | int, block: Array, head: Array) -> list[Any]:
        """The pieces of a block of tokens of the i-th example in an array."""
        width = self.plan.width
        return [
            ref.at[self.first + i, slice_block(block), head, pl.ds(start, width)]
            for start in range(0, self.task.head_dim, width)
        ]

    def fetch(self, operand: int, i: Array | int, block: Array, slot: Any, ready: Any) -> None:
        """Starts the copy of a block of queries, keys or values (0, 1, 2)."""
        head = self.head + self.task.offsets()[operand]
        for number, part in enumerate(self.parts(self.sources[operand], i, block, head)):
            plgpu.copy_gmem_to_smem(part, slot.at[number], ready)

    def fetch_queries(self, i: Array | int) -> None:
        """Starts the copies of this warpgroup's queries of the i-th example."""
        slot, ready = self.q[0].at[self.group], self.q_ready.at[self.group]
        self.by_one_warp(0, lambda: self.fetch(0, i, self.block, slot, ready))

    def fetch_keys(self, step: Array | int) -> None:
        """Starts the copies of this warpgroup's part of a stage of keys and values.

        Steps count the stages of all examples.
        """
        i, stage = divide(step, self.plan.programs)
        place = divide(step, self.plan.slots)[1], self.group
        block = stage * self.plan.groups + self.group

        def copies() -> None:
            self.fetch(1, i, block, self.k[0].at[place], self.k_ready.at[place])
            self.fetch(2, i, block, self.v[0].at[place], self.v_ready.at[place[0]])

        self.by_one_warp(1, copies)

    def turn_keys(self, step: Array, turns: tuple[Array, Array] | None) -> None:
        """Turns this warpgroup's part of a stage by its angles, and waits for the others."""
        slot = divide(step, self.plan.slots)[1]
        if turns is not None:
            plgpu.barrier_wait(self.k_ready.at[slot, self.group])
            keys = self.k[1].at[slot, self.group]
            store_rows(keys, turn(load_rows(keys), turns, self.dtype))
        else:  # the keys are multiplied as the engine loaded them, also for the others
            for group in range(self.plan.groups):
                plgpu.barrier_wait(self.k_ready.at[slot, group])
        self.meet()
        following = step - 1 + self.plan.slots
        # All warpgroups have finished the previous stage.
        more = (step > 0) & (following < self.items * self.plan.programs)
        pl.when(more)(lambda: self.fetch_keys(following))

    def attend(
        self, q: Array, step: Array, block: Array, carry: tuple, *, last: bool = False
    ) -> tuple:
        """Adds a block of keys of a stage, perhaps the last one, to the online softmax."""
        top, total, out = carry
        place = divide(step, self.plan.slots)[1], divide(block, self.plan.groups)[1]
        (logits,) = row_products(self.task, [(q, self.k[1].at[place])])
        logits *= np.float32(self.task.scale * LOG2E)
        if last:
            key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=TILE)
            logits = jnp.where(key < self.task.tokens % ROWS, logits, MASKED)
        higher = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - spread(higher, ROWS))
        shrink = jnp.exp2(top - higher)
        total = total * shrink + jnp.sum(weights, axis=1)
        out = [x * spread(shrink, self.plan.width) for x in out]
        terms = [(weights.astype(q.dtype), self.v[1].at[place])]
        (out,) = add_products(self.task, [out], terms)
        return higher, total, out

    def attend_stage(self, q: Array, stage: Array | int, step: Array, carry: tuple) -> tuple:
        """Adds the whole blocks of a stage of turned keys to the online softmax."""
        plgpu.barrier_wait(self.v_ready.at[divide(step, self.plan.slots)[1]])
        first = stage * self.plan.groups
        count = jnp.minimum(self.plan.groups, self.task.tokens // ROWS - first)
        return repeat(count, lambda i, carry: self.attend(q, step, first + i, carry), carry)

    def example(self, i: Array, turns: tuple[Array, Array] | None) -> None:
        """Computes the i-th example; `turns` of the queries, or None to load them."""
        stages, queries = self.plan.programs, self.q[1].at[self.group]
        plgpu.barrier_wait(self.q_ready.at[self.group])
        turns = turns or self.turns(slice_block(opaque(self.block)))
        q = turn(load_rows(queries), turns, self.dtype)

        plgpu.commit_smem()  # the reads are done before the engine writes there
        pl.when(i + 1 < self.items)(lambda: self.fetch_queries(i + 1))
        full = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)
        out = [zeros(self.plan.width) for _ in range(0, self.task.head_dim, self.plan.width)]
        carry = full(MASKED), full(0), out

        def body(stage: Array, carry: tuple) -> tuple:
            step = i * stages + stage
            keys = stage * self.plan.groups + self.group
            self.turn_keys(step, turns if stages == 1 else self.turns(slice_block(keys)))
            return self.attend_stage(q, stage, step, carry)

        carry = body(jnp.int32(0), carry) if stages == 1 else repeat(stages, body, carry)
        if self.task.tokens % ROWS:
            block, step = jnp.int32(self.plan.blocks - 1), (i + 1) * stages - 1
            carry = self.attend(q, step, block, carry, last=True)
        top, total, out = carry
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the previous example
        out = join([x * spread(1 / total, self.plan.width) for x in out])
        store_rows(self.result[1].at[self.group], out.astype(self.dtype))
        plgpu.commit_smem()
        self.by_one_warp(2, lambda: self.finish(i))
        if self.task.tokens % ROWS:  # missing queries weigh nothing in the backward pass
            query = opaque(self.block * ROWS)
            query += plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
            exists = query < self.task.tokens
            top = jnp.where(exists, top, np.float32(np.inf))
            total = jnp.where(exists, total, np.float32(1))
        lse = top + jnp.log2(total)
        self.lse.at[self.first + i, self.head, slice_block(self.block)][...] = lse

    def finish(self, i: Array) -> None:
        """Starts copying the output of the i-th example."""
        for number, part in enumerate(self.parts(self.out, i, self.block, self.head)):
            plgpu.copy_smem_to_gmem(self.result[0].at[self.group, number], part)

    def run(self) -> None:
        """Computes all examples of the program."""
        self.fetch_queries(0)
        for step in range(self.plan.slots):
            more = step < self.items * self.plan.programs
            pl.when(more)(functools.partial(self.fetch_keys, jnp.int32(step)))
        turns = self.turns(slice_block(self.block)) if self.task.pairs <= KEPT_PAIRS else None
        pl.loop(0, self.items)(lambda i: self.example(i, turns))
        plgpu.wait_smem_to_gmem(0)
