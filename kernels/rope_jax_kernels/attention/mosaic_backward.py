"""The backward kernel of `mosaic`: all gradients of global attention over few tokens, for Hopper.

A program owns one head of several successive examples. All its tokens are in shared memory, loaded
by the copy engine with zeros past the last token. Queries and keys are turned there once, by tables
of cosines and sines as in `triton`: computing them here, three times for each token, would cost as
many instructions as the softmax.

Each warpgroup owns 64 keys and keeps the gradients of these and of their values in registers, while
all loop over blocks of 64 queries. The gradients of a block's logits go through shared memory to
the warpgroup that owns these tokens as queries, so that no product is computed twice: five for each
pair of blocks. Logits are transposed, keys by queries, because weights and gradients of logits then
are operands of the next products as they leave the matrix units.

While a block is computed, the engine writes the gradients of earlier ones, and reads those of the
next example's output.

Registers are what limits the kernel: 128 for each of 512 threads, of which the sums take 64. So
rows are in pieces of 32 channels, which lets products take 32 queries at a time, and numbers that
pass `opaque` hide from the compiler that addresses are the same in each round of a loop; otherwise
it would keep them all.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention import mosaic_kernel
from rope_jax_kernels.attention.arithmetic import LOG2E
from rope_jax_kernels.attention.mosaic_kernel import (
    COLUMN,
    MOST_GROUPS,
    ROWS,
    TILE,
    add_products,
    join,
    load_rows,
    product,
    store_rows,
)
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.mosaic import repeat, store

WIDTH = 32  # channels of a piece, and queries of a step
CHUNK = 8  # pairs that turn at a time: more would need more registers
SLOTS = 2  # for gradients of logits: one block of queries is written while another is read
opaque = jax.lax.optimization_barrier


def serves(task: Task) -> bool:
    """True if a program can hold a head's tokens: 256, or 128 in heads of 128."""
    return task.tokens <= ROWS * MOST_GROUPS[task.head_dim]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The programs of a task. Static.

    Attributes:
        blocks: of 64 tokens.
        groups: warpgroups of a program: one for each block, unless interpreted.
        items: examples of one program.
        chunks: programs of a head in one set of examples that turn alike.
        pieces: of a row of channels.
    """

    blocks: int
    groups: int
    items: int
    chunks: int
    pieces: int

    @property
    def blocks_per_group(self) -> int:
        """Blocks that a warpgroup owns."""
        return self.blocks // self.groups


def plan(task: Task, batch: int, sets: int) -> Plan:
    """The plan for `batch` examples in `sets` that turn alike."""
    blocks = pl.cdiv(task.tokens, ROWS)
    most = mosaic_kernel.MOST_INTERPRETED if task.interpret else blocks
    groups = max(n for n in range(1, most + 1) if blocks % n == 0)
    items = mosaic_kernel.items_per_program(task.heads * sets, batch // sets)
    return Plan(blocks, groups, items, pl.cdiv(batch // sets, items), task.head_dim // WIDTH)


class Program:
    """One warpgroup of one program: its gradients.

    Args:
        refs: q, k and v [B, L, N or 3 N, D]; the output's gradient and the output [B, L, N, D];
            lse [B, N, >= 64 blocks]; where q and k turn, cosines and sines of their angles
            [S, N or 1, 64 blocks, 2 R], the b-th of S sets turning the b-th part of the examples.
            Then the gradients of q, k and v, [B, L, N, D], or one array [B, L, 3 N, D]; where
            summed, the gradient of the angles, [S, chunks, N, 64 blocks, R]. Then shared memory
            and barriers.
        task: the problem.
        plan: its programs.
        rotated: whether q and k turn.
        summed: whether to sum the gradient of the angles.
    """

    def __init__(self, refs: tuple, *, task: Task, plan: Plan, rotated: bool, summed: bool):
        take = iter(refs).__next__
        self.task, self.plan = task, plan
        self.sources = [take() for _ in range(5)]
        self.lse = take()
        self.table = take() if rotated else None
        targets = [take() for _ in range(1 if task.packed else 3)]
        self.targets = targets * 3 if task.packed else targets
        self.sums = take() if summed else None
        # Of q, k, v, the output's gradient, the output: for the copy engine and the matrix units.
        buffers = [take() for _ in range(4)]
        shared = (take(), take()) if task.interpret else take()
        self.dlogits, buffers = shared[0], [*buffers, shared[1] if task.interpret else shared[1:]]
        self.rows = [(ref, ref) if task.interpret else tuple(ref) for ref in buffers]
        self.held_lse, self.delta, self.ready, self.meeting = (take() for _ in range(4))
        self.group = jax.lax.axis_index("group")
        # Programs that run together touch neighbouring memory: heads run fastest.
        rest, self.head = divide(jax.lax.axis_index("program"), task.heads)
        sets = self.table.shape[0] if rotated else 1
        self.set, self.chunk = divide(rest, plan.chunks) if sets > 1 else (0, rest)
        in_set = self.sources[0].shape[0] // sets
        self.first = self.set * in_set + self.chunk * plan.items
        self.items = jnp.minimum(plan.items, in_set - self.chunk * plan.items)

    def own_blocks(self) -> list[Array]:
        """The blocks of this warpgroup."""
        first = opaque(self.group * self.plan.blocks_per_group)
        return [first + i for i in range(self.plan.blocks_per_group)]

    def place(self, operand: int, item: Array, block: Array, piece: int) -> tuple:
        """A piece of a block in q, k, v, the output's gradient or the output (0 to 4)."""
        head = opaque(self.head) + (*self.task.offsets(), 0, 0)[operand]
        return item, pl.ds(block * ROWS, ROWS), head, pl.ds(piece * WIDTH, WIDTH)

    def fetch(self, operand: int, i: Array | int, block: Array) -> None:
        """Starts the copy of a block of rows of the i-th example."""
        for piece in range(self.plan.pieces):
            source = self.sources[operand].at[self.place(operand, self.first + i, block, piece)]
            slot = self.rows[operand][0].at[block, piece]
            plgpu.copy_gmem_to_smem(source, slot, self.ready.at[block])

    def fetch_gradient(self, i: Array | int, block: Array) -> None:
        """Starts the copies of the output's gradient and lse."""
        self.fetch(3, i, block)
        source = self.lse.at[self.first + i, self.head, pl.ds(block * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(source, self.held_lse.at[block], self.ready.at[block])

    def write(self, operand: int, i: Array, block: Array, x: Float[Array, "64 D"]) -> None:
        """Replaces the rows of q, k or v by their gradient and starts copying it out."""
        store_rows(self.rows[operand][1].at[block], x)
        plgpu.commit_smem()
        for piece in range(self.plan.pieces):
            target = self.targets[operand].at[self.place(operand, self.first + i, block, piece)]
            plgpu.copy_smem_to_gmem(self.rows[operand][0].at[block, piece], target)

    def meet(self) -> None:
        """Waits for all warpgroups, which then see what the others wrote to shared memory."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.meeting)
        plgpu.barrier_wait(self.meeting)

    def turns(self, block: Array, pair: int) -> list[Float[Array, "64 8"]]:
        """Cosine and sine of the angles of a block's tokens, from the pair on."""
        head, tokens = self.head if self.table.shape[1] > 1 else 0, pl.ds(block * ROWS, ROWS)
        places = [(self.set, head, tokens, pl.ds(i, CHUNK)) for i in (pair, self.task.pairs + pair)]
        return [plgpu.load(self.table.at[x], layout=TILE, optimized=False) for x in places]

    def turn(
        self, rows: list[Float[Array, "64 D"]], block: Array, *, back: bool = False
    ) -> list[Float[Array, "64 D"]]:
        """Turns rows of a block (or turns them back) and rounds them once, to the data's dtype."""
        pairs, dtype = self.task.pairs, self.sources[0].dtype
        members = [([], []) for _ in rows]
        for pair in range(0, pairs, CHUNK):
            cos, sin = self.turns(block, pair)
            sin = -sin if back else sin
            for x, (first, second) in zip(rows, members, strict=True):
                a, b = (
                    x[:, start : start + CHUNK].astype(jnp.float32)
                    for start in (pair, pairs + pair)
                )
                first.append((a * cos - b * sin).astype(dtype))
                second.append((b * cos + a * sin).astype(dtype))
        if 2 * pairs < self.task.head_dim:
            for x, (_, second) in zip(rows, members, strict=True):
                second.append(x[:, 2 * pairs :].astype(dtype))
        return [join([*first, *second]) for first, second in members]

    def add_angles(
        self, operand: int, block: Array, gradient: Float[Array, "64 D"], *, begins: Any
    ) -> None:
        """Adds the gradient of a block's angles to this program's sums, or starts the sums.

        Computed from the turned queries or keys (0 or 1) and their gradient. No two threads add to
        the same number.
        """
        for pair in range(0, self.task.pairs, CHUNK) if self.sums is not None else ():
            block = opaque(block)
            members = []
            for first in (pair, self.task.pairs + pair):
                piece, start = divmod(first, WIDTH)
                x = plgpu.load(self.rows[operand][1].at[block, piece], layout=TILE)
                x = x[:, start : start + CHUNK].astype(jnp.float32)
                members.append((x, gradient[:, first : first + CHUNK]))
            (a, da), (b, db) = members
            place = (pl.ds(block * ROWS, ROWS), pl.ds(pair, CHUNK))
            total = self.sums.at[self.set, self.chunk, self.head, *place]
            before = plgpu.load(total, layout=TILE, optimized=False)
            total_now = jnp.where(begins, 0, before) + (db * a - da * b)
            store(total, total_now, interpret=self.task.interpret)

    def prepare(self, block: Array) -> None:
        """Computes delta of a block's queries, and turns its queries and keys."""
        out, dout = (
            load_rows(self.rows[operand][1].at[block]).astype(jnp.float32) for operand in (4, 3)
        )
        self.delta.at[block][...] = jnp.sum(out * dout, axis=1)
        if self.table is not None:
            turned = self.turn(
                [load_rows(self.rows[operand][1].at[block]) for operand in (0, 1)], block
            )
            for operand, x in enumerate(turned):
                store_rows(self.rows[operand][1].at[block], x)

    def products(
        self, pairs: list[tuple[int, int]], keys: Array, queries: Array, half: Any
    ) -> list[Float[Array, "64 32"]]:
        """Products of a block of keys (values) with half a block of queries (their gradient)."""
        views = [(self.rows[a][1].at[keys], self.rows[b][1].at[queries]) for a, b in pairs]
        if self.task.interpret:
            return [
                sum(product(a[i], b[i, half].T) for i in range(self.plan.pieces)) for a, b in views
            ]

        def multiply(*totals: Any) -> list[Array]:
            for total, (a, b) in zip(totals, views, strict=True):
                for i in range(self.plan.pieces):
                    plgpu.wgmma(total, a.at[i], b.at[i, half].transpose((1, 0)))
            return [total[...] for total in totals]

        return pl.run_scoped(multiply, *[plgpu.ACC((ROWS, WIDTH), jnp.float32)] * len(pairs))

    def query_products(self, slot: Array) -> Float[Array, "64 D"]:
        """Gradients of the logits of a block of queries times all keys."""

        def body(block: Array, sums: list[Array]) -> list[Array]:
            dlogits = self.dlogits.at[slot, block].transpose((1, 0))
            (sums,) = add_products(self.task, [sums], [(dlogits, self.rows[1][1].at[block])])
            return sums

        return join(repeat(self.plan.blocks, body, self.zeros()))

    def zeros(self) -> list[Float[Array, "64 32"]]:
        """The pieces of a sum before its first term."""
        zero = plgpu.layout_cast(jnp.zeros((ROWS, WIDTH), jnp.float32), TILE)
        return [zero] * self.plan.pieces

    def step(self, queries: Array, slot: Array, keys: Array, sums: list) -> list:
        """Adds the part of a block of queries to the gradients of a block of keys and values.

        Writes the gradients of the logits for those of the queries.
        """
        dtype = self.sources[0].dtype

        def body(number: Array, sums: list) -> list:
            half, here = pl.ds(number * WIDTH, WIDTH), opaque(keys)

            def spread_by_query(ref: Any) -> Float[Array, "64 32"]:
                x = plgpu.load(ref.at[queries, half], layout=COLUMN, optimized=False)
                return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (ROWS, WIDTH), (1,)), TILE)

            logits, dweights = self.products([(1, 0), (2, 3)], here, queries, half)
            logits = logits * np.float32(self.task.scale * LOG2E) - spread_by_query(self.held_lse)
            if self.task.tokens % ROWS:
                # For keys past the last token, which are zeros, any weight will do whose product
                # with delta is finite. All other weights are at most one.
                logits = jnp.minimum(logits, 0)
            weights = jnp.exp2(logits)
            dlogits = (weights * (dweights - spread_by_query(self.delta))).astype(dtype)
            dout, q = (self.rows[operand][1].at[queries] for operand in (3, 0))
            terms = [(weights.astype(dtype), dout), (dlogits, q)]
            sums = add_products(self.task, sums, terms, half)
            self.dlogits.at[slot, here, :, half][...] = dlogits
            return sums

        return repeat(ROWS // WIDTH, body, sums)

    def finish_queries(self, i: Array, block: Array, slot: Array) -> None:
        """Writes the gradient of a block of queries; refills what is no longer read."""
        block = opaque(block)
        dq = self.query_products(slot) * np.float32(self.task.scale)
        self.add_angles(0, block, dq, begins=i == 0)
        self.write(0, i, block, *self.turn([dq], block, back=True))

        @pl.when(i + 1 < self.items)
        def _next() -> None:
            self.fetch_gradient(i + 1, block)

    def example(self, i: Array) -> None:
        """Computes all gradients of the i-th example."""
        for block in range(self.plan.blocks):
            plgpu.barrier_wait(self.ready.at[block])
        for block in self.own_blocks():
            self.prepare(block)
        self.meet()

        def body(queries: Array, carry: list) -> list:
            _, slot = divide(queries, SLOTS)
            carry = [
                self.step(queries, slot, keys, sums)
                for keys, sums in zip(self.own_blocks(), carry, strict=True)
            ]
            self.meet()
            owner, _ = divide(queries, self.plan.blocks_per_group)
            pl.when(owner == self.group)(functools.partial(self.finish_queries, i, queries, slot))
            return carry

        carry = [[self.zeros(), self.zeros()] for _ in self.own_blocks()]
        if self.plan.blocks == 1:
            carry = body(jnp.int32(0), carry)
        else:
            carry = repeat(self.plan.blocks, body, carry)
        self.meet()  # the keys have been read
        for block, (dv, dk) in zip(self.own_blocks(), carry, strict=True):
            self.write(2, i, block, join(dv).astype(self.sources[2].dtype))
            dk = join(dk) * np.float32(self.task.scale)
            self.add_angles(1, block, dk, begins=False)
            self.write(1, i, block, *self.turn([dk], block, back=True))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(i + 1 < self.items)
        def _next() -> None:
            for block in self.own_blocks():
                for operand in (0, 1, 2, 4):
                    self.fetch(operand, i + 1, block)

    def run(self) -> None:
        """Computes all examples of the program."""
        for block in self.own_blocks():
            for operand in (0, 1, 2, 4):
                self.fetch(operand, 0, block)
            self.fetch_gradient(0, block)

        @pl.loop(0, self.items)
        def _example(i: Array) -> None:
            self.example(i)

        plgpu.wait_smem_to_gmem(0)
