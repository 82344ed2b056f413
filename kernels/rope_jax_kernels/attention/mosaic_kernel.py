"""The forward kernel of `mosaic`: global attention for Hopper, with the rotation inside.

A program owns one head and a tile of queries, 64 for each of its warpgroups, of a few examples one after the other. The copy engine
(TMA) brings queries, keys and values from where the projection left them, and fills with zeros what lies past the last token. Keys
come in stages of 64 for each warpgroup: each warpgroup turns its share, in registers, and puts it back for all to multiply with. Turned
queries stay in registers. Logits, online softmax (Dao et al., arXiv 2205.14135) and sums are float32.

While a stage is worked on, the engine brings the next one, be it of the same example or of the next.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from rope_jax_kernels.attention.tiles import split
from rope_jax_kernels.attention.triton_kernels import LOG2E, MASKED, Task, cos_sin

ROWS = 64  # of a tile: of the matrix instructions of one warpgroup
WIDEST = 64  # channels of a piece of a row, 128 bytes: the widest swizzle of shared memory
MOST_GROUPS = {32: 4, 64: 4, 128: 2}  # warpgroups of a program, by head dimension: a multiprocessor has 65,536 registers
# Interpreted warpgroups are threads that are compiled when they start. They wait for ever where other parts of the compiled program that
# they belong to hold all threads of the machine; with one, there is no such thread.
MOST_INTERPRETED = 1
MULTIPROCESSORS = 132  # of an H100 or H200
MOST_ITEMS = 8  # examples of one program
TILE, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a task is cut. Static.

    Attributes:
        groups: warpgroups of a program.
        tiles: of queries, `groups` times 64 each; as many stages of keys.
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
    """As many warpgroups as registers allow, each key being turned once for all of them, unless much of their work lies past the end.

    Programs take as many examples as keep all multiprocessors equally busy, with half an example's time for starting.
    """
    blocks = pl.cdiv(task.tokens, ROWS)
    most = MOST_INTERPRETED if task.interpret else MOST_GROUPS[task.head_dim]
    padded = {n: pl.cdiv(blocks, n) * n for n in range(1, most + 1)}
    groups = max(n for n, total in padded.items() if 8 * total <= 9 * min(padded.values()))
    tiles = padded[groups] // groups
    waves = lambda items: pl.cdiv(task.heads * tiles * pl.cdiv(batch, items), MULTIPROCESSORS)
    items = min(range(1, min(MOST_ITEMS, batch) + 1), key=lambda n: waves(n) * (n + 0.5))
    width = min(WIDEST, task.head_dim)
    return Plan(groups, tiles, blocks, items, min(2, items * tiles), task.head_dim // width, width)


def buffer(task: Task, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for tiles, [..., 64, width], as two views of the same bytes: as the copy engine knows them, and as the matrix units.

    Both hold rows one after the other and swizzle them alike. But the engine would cut the array in memory as its view is cut, and takes
    no number of tokens that eight rows do not divide.
    """
    if task.interpret:
        return plgpu.SMEM(shape, dtype)
    swizzle = plgpu.SwizzleTransform(shape[-1] * dtype.itemsize)
    tiling = plgpu.TilingTransform((8, shape[-1]))
    return plgpu.RefUnion(plgpu.SMEM(shape, dtype, transforms=(swizzle,)), plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle)))


def logits_of(task: Task, q: Array, k_ref: Any) -> Array:
    """Products of turned queries [64, D] and the turned keys of one block, pieces [P, 64, width]; float32 [64, 64]."""
    pieces, _, width = k_ref.shape
    if task.interpret:  # which has no matrix instruction with an operand in registers
        keys = [k_ref[i].T for i in range(pieces)]
        return jnp.dot(q, jnp.concatenate(keys, axis=0), preferred_element_type=jnp.float32)

    def multiply(total: Any) -> Array:
        for i in range(pieces):
            plgpu.wgmma(total, q[:, i * width : (i + 1) * width], k_ref.at[i].transpose((1, 0)))
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, ROWS), jnp.float32))


def add_values(task: Task, out: list[Array], weights: Array, v_ref: Any) -> list[Array]:
    """Adds weights [64, 64] times the values of one block to the pieces of the output."""
    if task.interpret:
        return [x + jnp.dot(weights, v_ref[i], preferred_element_type=jnp.float32) for i, x in enumerate(out)]

    def multiply(totals: list) -> None:
        for i, total in enumerate(totals):
            plgpu.wgmma(total, weights, v_ref.at[i])

    return pl.run_state(multiply)([plgpu.ACC.init(x) for x in out])


class Program:
    """One warpgroup of one program: where it is, what it reads, and where it puts it."""

    def __init__(self, refs: tuple, *, task: Task, plan: Plan, rotated: bool):
        take = iter(refs).__next__
        views = lambda ref: (ref, ref) if task.interpret else tuple(ref)
        self.task, self.plan = task, plan
        self.sources = [take() for _ in range(3)]
        self.coords, self.freqs = (take(), take()) if rotated else (None, None)
        self.out, self.lse = take(), take()
        self.q, self.k, self.v, self.result = (views(take()) for _ in range(4))
        self.places = [take() for _ in range(2 * rotated)]  # coordinates of queries and of keys
        self.q_ready, self.k_ready, self.v_ready, self.turned = (take() for _ in range(4))
        self.group = jax.lax.axis_index("group")
        # Programs that run together touch neighbouring memory: heads run fastest.
        rest, self.head = split(jax.lax.axis_index("program"), task.heads)
        chunk, tile = split(rest, plan.tiles)
        self.first = chunk * plan.items
        self.token = (tile * plan.groups + self.group) * ROWS  # the first query
        self.items = jnp.minimum(plan.items, self.sources[0].shape[0] - self.first)

    def fetch(self, source: int, item: Array, token: Array, slot: Any, ready: Any) -> None:
        """Asks for a tile of queries, keys or values (0, 1, 2)."""
        head = self.head + self.task.offsets()[source]
        for i in range(self.plan.pieces):
            place = (item, pl.ds(token, ROWS), head, pl.ds(i * self.plan.width, self.plan.width))
            plgpu.copy_gmem_to_smem(self.sources[source].at[place], slot.at[i], ready)

    def fetch_coords(self, item: Array, token: Array, which: int, place: tuple, ready: Any) -> None:
        """Asks for the coordinates of a tile of queries or keys (0, 1), if they turn."""
        if self.coords is None:
            return
        slot = self.places[which].at[place]
        sets, axes = self.freqs.shape[0], self.freqs.shape[2]
        if sets > 1:
            token = split(item, self.sources[0].shape[0] // sets)[0] * self.task.tokens + token
        if self.task.interpret:
            plgpu.copy_gmem_to_smem(self.coords.at[pl.ds(token, ROWS)], slot, ready)
        else:
            # As one long row, because the engine refuses rows that are no multiple of 16 bytes. What it reads after the last token, zeros
            # or those of the next set, turns nothing that is kept.
            for i in range(axes):
                part = pl.ds(token * axes + i * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(self.coords.at[part], slot.at[pl.ds(i * ROWS, ROWS)], ready)

    def fetch_queries(self, i: Array | int) -> None:
        """Asks for this warpgroup's queries of the i-th example."""
        ready = self.q_ready.at[self.group]
        self.fetch(0, self.first + i, self.token, self.q[0].at[self.group], ready)
        if self.plan.tiles > 1:
            self.fetch_coords(self.first + i, self.token, 0, (self.group,), ready)

    def fetch_keys(self, step: Array | int) -> None:
        """Asks for this warpgroup's share of a stage of keys and values; steps count stages of all examples."""
        i, stage = split(step, self.plan.tiles)
        slot = split(step, self.plan.slots)[1]
        token, ready = (stage * self.plan.groups + self.group) * ROWS, self.k_ready.at[slot, self.group]
        self.fetch(1, self.first + i, token, self.k[0].at[slot, self.group], ready)
        self.fetch_coords(self.first + i, token, 1, (slot, self.group), ready)
        self.fetch(2, self.first + i, token, self.v[0].at[slot, self.group], self.v_ready.at[slot])

    def angles(self, item: Array, which: int, place: tuple) -> tuple[Array, Array] | None:
        """Cosine and sine, [64, R], of the angles of a tile whose coordinates are there."""
        if self.coords is None:
            return None
        sets, heads, axes, pairs = self.freqs.shape
        the_set = split(item, self.sources[0].shape[0] // sets)[0] if sets > 1 else 0
        slot = self.places[which].at[place]
        slot = slot if self.task.interpret else slot.reshape(ROWS, axes)
        spread = lambda x, dim: plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (ROWS, pairs), (dim,)), TILE)
        theta = None
        for axis in range(axes):
            along = plgpu.load(slot.at[:, axis], layout=ROW, optimized=False)
            freq = plgpu.load(self.freqs.at[the_set, self.head if heads > 1 else 0, axis], layout=COLUMN, optimized=False)
            term = spread(along, 0) * spread(freq, 1)
            theta = term if theta is None else theta + term
        return cos_sin(theta, nearest=lambda x: jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN))

    def load_turned(self, ref: Any, angles: tuple | None) -> Array:
        """The rows of a tile of queries or keys [P, 64, width] as one array [64, D], turned and rounded once."""
        x = [plgpu.load(ref.at[i], layout=TILE) for i in range(self.plan.pieces)]
        x = x[0] if len(x) == 1 else jnp.concatenate(x, axis=1)
        if angles is None:
            return x
        (cos, sin), pairs = angles, self.task.pairs
        a, b = (x[:, first : first + pairs].astype(jnp.float32) for first in (0, pairs))
        turned = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
        rest = [x[:, 2 * pairs :]] if 2 * pairs < self.task.head_dim else []
        return jnp.concatenate([*turned, *rest], axis=1)

    def store(self, ref: Any, x: Array) -> None:
        """Writes rows [64, D] to a tile."""
        width = self.plan.width
        for i in range(self.plan.pieces):
            ref.at[i][...] = x[:, i * width : (i + 1) * width]

    def turn_keys(self, item: Array, step: Array) -> tuple[Array, Array] | None:
        """Turns this warpgroup's share of a stage and waits for the others'; returns the angles."""
        slot = split(step, self.plan.slots)[1]
        if self.coords is not None:
            plgpu.barrier_wait(self.k_ready.at[slot, self.group])
        else:  # what is multiplied is what the engine brought, also to the others
            for group in range(self.plan.groups):
                plgpu.barrier_wait(self.k_ready.at[slot, group])
        angles = self.angles(item, 1, (slot, self.group))
        if angles is not None:
            keys = self.k[1].at[slot, self.group]
            self.store(keys, self.load_turned(keys, angles))
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.turned)
        plgpu.barrier_wait(self.turned)
        following = step - 1 + self.plan.slots

        # All are done with the stage before this one.
        @pl.when((step > 0) & (following < self.items * self.plan.tiles))
        def _refill() -> None:
            self.fetch_keys(following)

        return angles

    def attend(self, q: Array, slot: Array, place: Array, block: Array, carry: tuple) -> tuple:
        """Takes in the block-th block of keys, which is at a place of a slot."""
        top, total, out = carry
        logits = logits_of(self.task, q, self.k[1].at[slot, place]) * np.float32(self.task.scale * LOG2E)
        if self.task.tokens % ROWS:
            key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=TILE)
            logits = jnp.where(key < self.task.tokens - block * ROWS, logits, MASKED)
        higher = jnp.maximum(top, jnp.max(logits, axis=1))
        spread = lambda x, like: jax.lax.broadcast_in_dim(x, like.shape, (0,))
        weights = jnp.exp2(logits - spread(higher, logits))
        shrink = jnp.exp2(top - higher)
        total = total * shrink + jnp.sum(weights, axis=1)
        out = add_values(self.task, [x * spread(shrink, x) for x in out], weights.astype(q.dtype), self.v[1].at[slot, place])
        return higher, total, out

    def attend_stage(self, q: Array, stage: Array | int, step: Array, carry: tuple) -> tuple:
        """Takes in a stage of turned keys and its values."""
        slot, groups = split(step, self.plan.slots)[1], self.plan.groups
        plgpu.barrier_wait(self.v_ready.at[slot])
        body = lambda place, carry: self.attend(q, slot, place, stage * groups + place, carry)
        if groups == 1:
            return body(jnp.int32(0), carry)
        return jax.lax.fori_loop(jnp.int32(0), jnp.minimum(groups, self.plan.blocks - stage * groups), body, carry)

    def attend_example(self, i: Array) -> None:
        """Attention of this warpgroup's queries of the i-th example."""
        item, tiles = self.first + i, self.plan.tiles
        queries = self.q[1].at[self.group]
        plgpu.barrier_wait(self.q_ready.at[self.group])
        if tiles > 1:
            q = self.load_turned(queries, self.angles(item, 0, (self.group,)))
        else:
            q = self.load_turned(queries, self.turn_keys(item, i))  # the same tokens

        @pl.when(i + 1 < self.items)
        def _next() -> None:
            plgpu.commit_smem()  # what was read is read before the engine writes there
            self.fetch_queries(i + 1)

        full = lambda shape, value, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
        out = [full((ROWS, self.plan.width), 0, TILE) for _ in range(self.plan.pieces)]
        carry = full((ROWS,), MASKED, ROW), full((ROWS,), 0, ROW), out

        def stage_of(stage: Array, carry: tuple) -> tuple:
            step = i * tiles + stage
            self.turn_keys(item, step)
            return self.attend_stage(q, stage, step, carry)

        carry = self.attend_stage(q, 0, i, carry) if tiles == 1 else jax.lax.fori_loop(np.int32(0), np.int32(tiles), stage_of, carry)
        top, total, out = carry
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the example before
        spread = jax.lax.broadcast_in_dim(1 / total, out[0].shape, (0,))
        for piece, x in enumerate(out):
            self.result[1].at[self.group, piece][...] = (x * spread).astype(q.dtype)
        plgpu.commit_smem()
        for piece in range(self.plan.pieces):
            place = (item, pl.ds(self.token, ROWS), self.head, pl.ds(piece * self.plan.width, self.plan.width))
            plgpu.copy_smem_to_gmem(self.result[0].at[self.group, piece], self.out.at[place])
        self.lse.at[item, self.head, pl.ds(self.token, ROWS)][...] = top + jnp.log2(total)

    def run(self) -> None:
        """All examples of the program."""
        self.fetch_queries(0)
        for step in range(self.plan.slots):
            pl.when(step < self.items * self.plan.tiles)(functools.partial(self.fetch_keys, jnp.int32(step)))

        @pl.loop(0, self.items)
        def _example(i: Array) -> None:
            self.attend_example(i)

        plgpu.wait_smem_to_gmem(0)


def forward_kernel(*refs: Any, task: Task, plan: Plan, rotated: bool) -> None:
    """The output and lse of one program.

    Args:
        *refs: q, k and v [B, L, N or 3 N, D]; where q and k turn, coords [S * L * A] ([S * L, A] interpreted) and freqs
            [S, N or 1, A, R], the b-th of S sets turning the b-th part of the examples; then the output [B, L, N, D] and lse
            [B, N, tiles of 64]; then shared memory and barriers.
        task: what is to be computed.
        plan: how it is cut.
        rotated: whether q and k turn.
    """
    Program(refs, task=task, plan=plan, rotated=rotated).run()


def forward(task: Task, arrays: tuple, rotation: tuple) -> tuple[Array, Array]:
    """The output [B, L, N, D] and lse [B, N, >= L] of q, k, v [B, L, heads, D], by (coords [L, A], freqs [N or 1, A, R]) or ()."""
    return forward_sets(task, 1, arrays, tuple(x[None] for x in rotation))


def forward_sets(task: Task, sets: int, arrays: tuple, rotation: tuple) -> tuple[Array, Array]:
    """`forward` with as many rotations [S, ...], of as many parts of the examples."""

    @jax.custom_batching.custom_vmap
    def run(arrays: tuple, rotation: tuple) -> tuple[Array, Array]:
        return launch(task, arrays, rotation)

    @run.def_vmap
    def _run_batched(size: int, is_batched: Any, arrays: tuple, rotation: tuple) -> tuple[tuple, tuple]:
        wide = lambda some, batched: [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(some, batched, strict=True)]
        merged = lambda some: tuple(x.reshape(-1, *x.shape[2:]) for x in some)
        of_arrays, of_rotation = is_batched
        if any(of_rotation) or sets > 1:
            rotation = merged(wide(rotation, of_rotation))
        out = forward_sets(task, len(rotation) and rotation[0].shape[0], merged(wide(arrays, of_arrays)), rotation)
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in out), (True, True)

    return run(arrays, rotation)


def launch(task: Task, arrays: tuple, rotation: tuple) -> tuple[Array, Array]:
    """The output [B, L, N, D] and lse [B, N, >= L] of q, k, v [B, L, heads, D], by coords [S, L, A] and freqs [S, N or 1, A, R]."""
    q = arrays[0]
    batch = q.shape[0]
    cut = plan(task, batch)
    groups, slots = cut.groups, cut.slots
    of_tiles = lambda *count: buffer(task, (*count, cut.pieces, ROWS, cut.width), q.dtype)
    scratch = [of_tiles(groups), of_tiles(slots, groups), of_tiles(slots, groups), of_tiles(groups)]
    copies = 0
    if rotation:
        coords, freqs = (x.astype(jnp.float32) for x in rotation)
        axes = coords.shape[-1]
        copies = 1 if task.interpret else axes
        held = (ROWS, axes) if task.interpret else (ROWS * axes,)
        scratch += [plgpu.SMEM((groups, *held), jnp.float32), plgpu.SMEM((slots, groups, *held), jnp.float32)]
        rotation = (coords.reshape((-1, axes) if task.interpret else -1), freqs)
    scratch += [
        plgpu.Barrier(num_arrivals=cut.pieces + (copies if cut.tiles > 1 else 0), num_barriers=groups),
        plgpu.Barrier(num_arrivals=cut.pieces + copies, num_barriers=(slots, groups)),
        plgpu.Barrier(num_arrivals=groups * cut.pieces, num_barriers=slots),
        plgpu.Barrier(num_arrivals=groups),
    ]
    typed = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    kernel = plgpu.kernel(
        functools.partial(forward_kernel, task=task, plan=cut, rotated=bool(rotation)),
        out_type=[
            typed((batch, task.tokens, task.heads, task.head_dim), q.dtype),
            typed((batch, task.heads, cut.tiles * groups * ROWS), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(task.heads * cut.tiles * pl.cdiv(batch, cut.items),),
        grid_names=("program",),
        num_threads=groups,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        interpret=plgpu.InterpretGPUParams() if task.interpret else None,
        kernel_name="attention_mosaic",
    )
    return tuple(kernel(*arrays, *rotation))
