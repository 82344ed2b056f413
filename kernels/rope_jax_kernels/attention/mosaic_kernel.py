"""The forward kernel of `mosaic`: global attention for Hopper, with the rotation inside.

A program owns one head and a tile of queries, 64 for each of its warpgroups, of several successive
examples. The copy engine (TMA) loads queries, keys and values directly from the projection, with
zeros past the last token. Keys are loaded in stages of 64 for each warpgroup: each warpgroup turns
its part in registers and stores it for all the others. Turned queries stay in registers. Logits,
online softmax (FlashAttention, arXiv 2205.14135) and sums are float32.

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
from jaxtyping import Array, Float

from rope_jax_kernels import mosaic
from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention.arithmetic import LOG2E, MASKED
from rope_jax_kernels.attention.slots import ROWS
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.device import MULTIPROCESSORS

WIDEST = 64  # channels of a piece of a row, 128 bytes: the widest swizzle of shared memory
# Most warpgroups of a program, by head dimension: a multiprocessor has 65,536 registers.
MOST_GROUPS = {32: 4, 64: 4, 128: 2}
# Interpreted warpgroups are threads that are compiled when they start. They deadlock if other parts
# of the program hold all threads of the machine; with one warpgroup there is no such thread.
MOST_INTERPRETED = 1
MOST_ITEMS = 8  # examples of one program
MOST_SUMS = 2**24  # numbers (64 MiB) that programs write besides outputs, or those of one chunk
TILE, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tiles and programs of a task. Static.

    Attributes:
        groups: warpgroups of a program.
        tiles: of queries, `groups` times 64 each; there are as many stages of keys.
        blocks: of 64 keys.
        items: examples of one program.
        slots: stages in shared memory at a time.
        pieces, width: of a row of channels.
    """

    groups: int
    tiles: int
    blocks: int
    items: int
    slots: int
    pieces: int
    width: int


def plan(task: Task, batch: int) -> Plan:
    """The plan for a task.

    As many warpgroups as registers allow, because each key is turned once for all of them, unless
    much of their work would be past the last token.
    """
    blocks = pl.cdiv(task.tokens, ROWS)
    most = MOST_INTERPRETED if task.interpret else MOST_GROUPS[task.head_dim]
    padded = {n: pl.cdiv(blocks, n) * n for n in range(1, most + 1)}
    groups = max(n for n, total in padded.items() if 8 * total <= 9 * min(padded.values()))
    tiles = padded[groups] // groups
    items = items_per_program(task.heads * tiles, batch)
    width = min(WIDEST, task.head_dim)
    return Plan(groups, tiles, blocks, items, min(2, items * tiles), task.head_dim // width, width)


def items_per_program(programs: int, batch: int, most: int = MOST_ITEMS, sums: int = 0) -> int:
    """Examples of a program, of `programs` that each example needs.

    Chosen to keep all multiprocessors equally busy, counting half an example's time for start-up.

    Args:
        programs: see above.
        batch: examples.
        most: examples of a program, unless all `sums` together would be more than `MOST_SUMS`.
        sums: numbers that each program adds up over its examples and writes.
    """

    def cost(items: int) -> float:
        return pl.cdiv(programs * pl.cdiv(batch, items), MULTIPROCESSORS) * (items + 0.5)

    items = min(range(1, min(most, batch) + 1), key=cost)
    return max(items, pl.cdiv(batch, max(1, MOST_SUMS // (programs * sums)))) if sums else items


def join(pieces: list[Float[Array, "64 _"]]) -> Float[Array, "64 _"]:
    """Joins pieces of rows side by side."""
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


def load_rows(ref: Any) -> Float[Array, "64 D"]:
    """Loads the rows of a tile of pieces [P, 64, width], for the matrix units."""
    return join([plgpu.load(ref.at[i], layout=TILE) for i in range(ref.shape[0])])


def store_rows(ref: Any, x: Float[Array, "64 D"]) -> None:
    """Writes rows to a tile of pieces [P, 64, width]."""
    pieces, _, width = ref.shape
    for i in range(pieces):
        ref.at[i][...] = x[:, i * width : (i + 1) * width]


def product(a: Float[Array, "_ _"], b: Float[Array, "_ _"]) -> Float[Array, "_ _"]:
    """The result of a matrix instruction, for interpret mode."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def turn(
    x: Float[Array, "64 D"], angles: tuple[Array, Array] | None, dtype: Any
) -> Float[Array, "64 D"]:
    """Turns rows by the cosines and sines [64, R] of their angles, and rounds them once."""
    if angles is None:
        return x.astype(dtype)
    cos, sin = angles
    pairs = cos.shape[1]
    a, b = (x[:, first : first + pairs].astype(jnp.float32) for first in (0, pairs))
    turned = [(a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)]
    others = [x[:, 2 * pairs :].astype(dtype)] if 2 * pairs < x.shape[1] else []
    return join([*turned, *others])


def row_products(
    task: Task, terms: list[tuple[Float[Array, "64 D"], Any]]
) -> list[Float[Array, "64 keys"]]:
    """Products of rows in registers with those of one block in pieces [P, keys, width], each."""
    if task.interpret:  # interpret mode has no matrix instruction with an operand in registers
        return [product(a, join([b[i] for i in range(b.shape[0])]).T) for a, b in terms]

    def multiply(*totals: Any) -> list[Array]:
        for total, (a, b) in zip(totals, terms, strict=True):
            pieces, _, width = b.shape
            for i in range(pieces):
                plgpu.wgmma(total, a[:, i * width : (i + 1) * width], b.at[i].transpose((1, 0)))
        return [total[...] for total in totals]

    totals = [plgpu.ACC((ROWS, b.shape[1]), jnp.float32) for _, b in terms]
    return pl.run_scoped(multiply, *totals)


def add_products(
    task: Task, sums: list[list[Array]], terms: list[tuple[Any, Any]], rows: Any = slice(None)
) -> list[list[Float[Array, "64 width"]]]:
    """Adds the product of a term to each sum.

    Args:
        task: the problem.
        sums: each in pieces [64, width].
        terms: (a, b), where a [64, _] is in registers or a ref, and b a ref of pieces of rows.
        rows: of b, which are multiplied.
    """
    if task.interpret:
        return [
            [x + product(a[...], b[i, rows]) for i, x in enumerate(pieces)]
            for pieces, (a, b) in zip(sums, terms, strict=True)
        ]

    def multiply(totals: list) -> None:
        for pieces, (a, b) in zip(totals, terms, strict=True):
            for i, total in enumerate(pieces):
                plgpu.wgmma(total, a, b.at[i, rows])

    return pl.run_state(multiply)([[plgpu.ACC.init(x) for x in pieces] for pieces in sums])


class Program:
    """One warpgroup of one program: the output and lse.

    Args:
        refs: q, k and v [B, L, N or 3 N, D]; where q and k turn, coords [S * L * A] ([S * L, A]
            interpreted) and freqs [S, N or 1, A, R], the b-th of S sets turning the b-th part of
            the examples; then the output [B, L, N, D] and lse [B, N, tiles of 64]; then shared
            memory and barriers.
        task: the problem.
        plan: its tiles.
        rotated: whether q and k turn.
    """

    def __init__(self, refs: tuple, *, task: Task, plan: Plan, rotated: bool):
        take = iter(refs).__next__
        self.task, self.plan = task, plan
        self.sources = [take() for _ in range(3)]
        self.coords, self.freqs = (take(), take()) if rotated else (None, None)
        self.out, self.lse = take(), take()
        # Each for the copy engine and for the matrix units, see `buffer`.
        slots = [take() for _ in range(4)]
        views = [(ref, ref) if task.interpret else tuple(ref) for ref in slots]
        self.q, self.k, self.v, self.result = views
        self.places = [take() for _ in range(2 * rotated)]  # coordinates of queries and of keys
        self.q_ready, self.k_ready, self.v_ready, self.turned = (take() for _ in range(4))
        self.group = jax.lax.axis_index("group")
        # Programs that run together touch neighbouring memory: heads run fastest.
        rest, self.head = divide(jax.lax.axis_index("program"), task.heads)
        chunk, tile = divide(rest, plan.tiles)
        self.first = chunk * plan.items
        self.token = (tile * plan.groups + self.group) * ROWS  # the first query
        self.items = jnp.minimum(plan.items, self.sources[0].shape[0] - self.first)

    def fetch(self, source: int, item: Array, token: Array, slot: Any, ready: Any) -> None:
        """Starts the copy of a tile of queries, keys or values (0, 1, 2)."""
        head = self.head + self.task.offsets()[source]
        for i in range(self.plan.pieces):
            place = (item, pl.ds(token, ROWS), head, pl.ds(i * self.plan.width, self.plan.width))
            plgpu.copy_gmem_to_smem(self.sources[source].at[place], slot.at[i], ready)

    def fetch_coords(
        self, item: Array, token: Array, operand: int, place: tuple, ready: Any
    ) -> None:
        """Starts the copy of the coordinates of a tile of queries or keys (0, 1), if they turn."""
        if self.coords is None:
            return
        slot = self.places[operand].at[place]
        sets, axes = self.freqs.shape[0], self.freqs.shape[2]
        if sets > 1:
            token = divide(item, self.sources[0].shape[0] // sets)[0] * self.task.tokens + token
        if self.task.interpret:
            plgpu.copy_gmem_to_smem(self.coords.at[pl.ds(token, ROWS)], slot, ready)
        else:
            # As one long row, because the engine rejects rows that are not a multiple of 16 bytes.
            # Data read after the last token (zeros or the next set) is discarded.
            for i in range(axes):
                part = pl.ds(token * axes + i * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(self.coords.at[part], slot.at[pl.ds(i * ROWS, ROWS)], ready)

    def fetch_queries(self, i: Array | int) -> None:
        """Starts the copies of this warpgroup's queries of the i-th example."""
        ready = self.q_ready.at[self.group]
        self.fetch(0, self.first + i, self.token, self.q[0].at[self.group], ready)
        if self.plan.tiles > 1:
            self.fetch_coords(self.first + i, self.token, 0, (self.group,), ready)

    def fetch_keys(self, step: Array | int) -> None:
        """Starts the copies of this warpgroup's part of a stage of keys and values.

        Steps count the stages of all examples.
        """
        i, stage = divide(step, self.plan.tiles)
        slot = divide(step, self.plan.slots)[1]
        token, ready = (
            (stage * self.plan.groups + self.group) * ROWS,
            self.k_ready.at[slot, self.group],
        )
        self.fetch(1, self.first + i, token, self.k[0].at[slot, self.group], ready)
        self.fetch_coords(self.first + i, token, 1, (slot, self.group), ready)
        self.fetch(2, self.first + i, token, self.v[0].at[slot, self.group], self.v_ready.at[slot])

    def angles(self, item: Array, operand: int, place: tuple) -> tuple[Array, Array] | None:
        """Cosine and sine, [64, R], of the angles of a tile whose coordinates have been loaded."""
        if self.coords is None:
            return None
        sets, heads, axes, pairs = self.freqs.shape
        set_index = divide(item, self.sources[0].shape[0] // sets)[0] if sets > 1 else 0
        slot = self.places[operand].at[place]
        slot = slot if self.task.interpret else slot.reshape(ROWS, axes)
        place = set_index, self.head if heads > 1 else 0
        theta = mosaic.angles(slot, self.freqs, place, (ROWS, pairs), (TILE, ROW, COLUMN))
        return mosaic.turns(theta)

    def load_and_turn(self, ref: Any, angles: tuple | None) -> Float[Array, "64 D"]:
        """Loads a tile of queries or keys [P, 64, width], turns it and rounds it once."""
        return turn(load_rows(ref), angles, self.q[1].dtype)

    def turn_keys(self, item: Array, step: Array) -> tuple[Array, Array] | None:
        """Turns this warpgroup's part of a stage, waits for the others, and returns the angles."""
        slot = divide(step, self.plan.slots)[1]
        if self.coords is not None:
            plgpu.barrier_wait(self.k_ready.at[slot, self.group])
        else:  # the keys are multiplied as the engine loaded them, also for the others
            for group in range(self.plan.groups):
                plgpu.barrier_wait(self.k_ready.at[slot, group])
        angles = self.angles(item, 1, (slot, self.group))
        if angles is not None:
            keys = self.k[1].at[slot, self.group]
            store_rows(keys, self.load_and_turn(keys, angles))
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.turned)
        plgpu.barrier_wait(self.turned)
        following = step - 1 + self.plan.slots

        # All warpgroups have finished the previous stage.
        @pl.when((step > 0) & (following < self.items * self.plan.tiles))
        def _refill() -> None:
            self.fetch_keys(following)

        return angles

    def attend(self, q: Array, slot: Array, place: Array, block: Array, carry: tuple) -> tuple:
        """Adds the block-th block of keys, at a place of a slot, to the online softmax."""
        top, total, out = carry
        (logits,) = row_products(self.task, [(q, self.k[1].at[slot, place])])
        logits *= np.float32(self.task.scale * LOG2E)
        if self.task.tokens % ROWS:
            key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=TILE)
            logits = jnp.where(key < self.task.tokens - block * ROWS, logits, MASKED)
        higher = jnp.maximum(top, jnp.max(logits, axis=1))

        def spread(x: Array, like: Array) -> Float[Array, "64 _"]:
            return jax.lax.broadcast_in_dim(x, like.shape, (0,))

        weights = jnp.exp2(logits - spread(higher, logits))
        shrink = jnp.exp2(top - higher)
        total = total * shrink + jnp.sum(weights, axis=1)
        out, term = [x * spread(shrink, x) for x in out], weights.astype(q.dtype)
        (out,) = add_products(self.task, [out], [(term, self.v[1].at[slot, place])])
        return higher, total, out

    def attend_stage(self, q: Array, stage: Array | int, step: Array, carry: tuple) -> tuple:
        """Adds a stage of turned keys and its values to the online softmax."""
        slot, groups = divide(step, self.plan.slots)[1], self.plan.groups
        plgpu.barrier_wait(self.v_ready.at[slot])

        def body(place: Array, carry: tuple) -> tuple:
            return self.attend(q, slot, place, stage * groups + place, carry)

        if groups == 1:
            return body(jnp.int32(0), carry)
        count = jnp.minimum(groups, self.plan.blocks - stage * groups)
        return mosaic.repeat(count, body, carry)

    def attend_example(self, i: Array) -> None:
        """Computes the attention of this warpgroup's queries of the i-th example."""
        item, tiles = self.first + i, self.plan.tiles
        queries = self.q[1].at[self.group]
        plgpu.barrier_wait(self.q_ready.at[self.group])
        if tiles > 1:
            q = self.load_and_turn(queries, self.angles(item, 0, (self.group,)))
        else:
            q = self.load_and_turn(queries, self.turn_keys(item, i))  # the same tokens

        @pl.when(i + 1 < self.items)
        def _next() -> None:
            plgpu.commit_smem()  # the reads are done before the engine writes there
            self.fetch_queries(i + 1)

        def full(shape: tuple[int, ...], value: Any, layout: Any) -> Float[Array, "..."]:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        out = [full((ROWS, self.plan.width), 0, TILE) for _ in range(self.plan.pieces)]
        carry = full((ROWS,), MASKED, ROW), full((ROWS,), 0, ROW), out

        def body(stage: Array, carry: tuple) -> tuple:
            step = i * tiles + stage
            self.turn_keys(item, step)
            return self.attend_stage(q, stage, step, carry)

        if tiles == 1:
            carry = self.attend_stage(q, 0, i, carry)
        else:
            carry = mosaic.repeat(tiles, body, carry)
        top, total, out = carry
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the previous example
        spread = jax.lax.broadcast_in_dim(1 / total, out[0].shape, (0,))
        for piece, x in enumerate(out):
            self.result[1].at[self.group, piece][...] = (x * spread).astype(q.dtype)
        plgpu.commit_smem()
        for piece in range(self.plan.pieces):
            channels = pl.ds(piece * self.plan.width, self.plan.width)
            place = (item, pl.ds(self.token, ROWS), self.head, channels)
            plgpu.copy_smem_to_gmem(self.result[0].at[self.group, piece], self.out.at[place])
        if self.task.tokens % ROWS:  # missing queries weigh nothing in the backward pass
            query = jax.lax.optimization_barrier(self.token)
            query += plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
            exists = query < self.task.tokens
            top = jnp.where(exists, top, np.float32(np.inf))
            total = jnp.where(exists, total, np.float32(1))
        lse = top + jnp.log2(total)
        self.lse.at[item, self.head, pl.ds(self.token, ROWS)][...] = lse

    def run(self) -> None:
        """Computes all examples of the program."""
        self.fetch_queries(0)
        for step in range(self.plan.slots):
            pl.when(step < self.items * self.plan.tiles)(
                functools.partial(self.fetch_keys, jnp.int32(step))
            )

        @pl.loop(0, self.items)
        def _example(i: Array) -> None:
            self.attend_example(i)

        plgpu.wait_smem_to_gmem(0)
