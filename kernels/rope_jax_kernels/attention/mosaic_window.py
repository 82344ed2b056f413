"""Attention inside windows by Pallas kernels for Mosaic GPU on Hopper, forward and backward.

A program owns one head and one place of a window on the map, of several successive examples.
Forward, their cosines, sines and, with one tile, the bias stay in registers. The copy engine (TMA)
loads the boxes of the window (`window_boxes`) directly from the projection, started by one warp
alone: the others would issue the instructions of the copies, too. Each warpgroup owns a tile of 64
slots, as queries and as keys; most windows of up to 64 tokens have one. What a query does not see,
also past the end of the map, is part of the bias.

Backward, a warpgroup computes weights and gradients of logits of its queries and one tile of keys
at a time, each warpgroup another one, and leaves them in shared memory to the owner of these keys.

While one example is computed, the engine loads the next and writes the previous one.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention import mosaic_kernel
from rope_jax_kernels.attention.arithmetic import LOG2E, MASKED
from rope_jax_kernels.attention.kernel import Needs, Operands, tables
from rope_jax_kernels.attention.mosaic_kernel import (
    ROW,
    ROWS,
    TILE,
    add_products,
    join,
    load_rows,
    row_products,
    store_rows,
    turn,
)
from rope_jax_kernels.attention.mosaic_launch import (
    buffer,
    in_sets,
    program_grid,
    swizzle_transforms,
)
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.attention.window_boxes import Box, WindowBoxes, make_boxes
from rope_jax_kernels.device import vary_alike
from rope_jax_kernels.mosaic import repeat, store

STAGES = 2  # examples in shared memory: one is computed while the next is loaded
MOST_ITEMS_BACKWARD = 16  # examples of one program, which writes sums of gradients
opaque = jax.lax.optimization_barrier


@dataclasses.dataclass(frozen=True)
class Plan:
    """The programs of a task. Static.

    Attributes:
        boxes: of the windows.
        tiles: of 64 slots of a window.
        groups: warpgroups of a program: one for each tile, unless interpreted.
        items: examples of one program.
        chunks: programs of a window in one set of examples that share their tables.
    """

    boxes: WindowBoxes
    tiles: int
    groups: int
    items: int
    chunks: int

    @property
    def slots(self) -> int:
        """Slots of a window."""
        return self.tiles * ROWS


def plan(task: Task, batch: int, sets: int, most_items: int = mosaic_kernel.MOST_ITEMS) -> Plan:
    """The plan for `batch` examples in `sets` that share their tables."""
    boxes = make_boxes(task.pattern, task.places, task.head_dim)
    tiles = boxes.tiles
    most = mosaic_kernel.MOST_INTERPRETED if task.interpret else tiles
    groups = max(n for n in range(1, most + 1) if tiles % n == 0)
    programs, in_set = task.heads * boxes.count * sets, batch // sets
    items = mosaic_kernel.items_per_program(programs, in_set, most_items)
    return Plan(boxes, tiles, groups, items, pl.cdiv(in_set, items))


def forward(
    task: Task, operands: Operands
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N windows slots"]]:
    """`Kernel.forward`; lse is by slot, for `backward`."""
    arrays, turning, bias = operands
    terms = make_tables(task, tables(turning), bias, queries=False)
    run = functools.partial(launch_forward, task)
    return in_sets(run, arrays, tuple(x[None] for x in terms))


def backward(task: Task, needs: Needs, operands: Operands) -> tuple[tuple, tuple, Array | None]:
    """The backward pass of `Kernel`."""
    (*data, lse, out), turning, bias = operands
    terms = tuple(x[None] for x in make_tables(task, turning[:2], bias, queries=True))
    run = functools.partial(launch_backward, task, needs)
    results = in_sets(run, (*data, out, lse), terms, apart=needs.freqs or needs.bias)
    count = 1 if task.packed else 3
    gradients, sums = results[:count], [x.sum((0, 1, 2)) for x in results[count:]]
    partial, boxes = (), make_boxes(task.pattern, task.places, task.head_dim)
    if needs.freqs:
        coords = turning[2].astype(jnp.float32)[_tokens(boxes)]
        by_axis = jnp.einsum("sa,nsr->nar", coords, sums[-1], precision="highest")
        partial = (by_axis[None, None],)
    return gradients, partial, boxes.fold(sums[0]) if needs.bias else None


def make_tables(task: Task, turns: tuple, bias: tuple, *, queries: bool) -> tuple:
    """Cosines and sines [N or 1, slots, 2 R], if any, and the bias [kinds, N or 1, slots, slots].

    The bias is in units of log 2; see `WindowBoxes.masked_bias`.
    """
    boxes = make_boxes(task.pattern, task.places, task.head_dim)
    # Higher than what masks a pair, whatever the bias is.
    table = [jnp.maximum(x.astype(jnp.float32) * LOG2E, MASKED / 2) for x in bias]
    added = boxes.masked_bias(*(table or [None]), float(MASKED), queries=queries)
    return *(jnp.concatenate(x, axis=2)[:, _tokens(boxes)] for x in [turns] if x), added


def _tokens(boxes: WindowBoxes) -> np.ndarray:
    """A token of the window for each slot; any where there is none."""
    h, w = boxes.window.size
    return np.minimum(boxes.tokens(), h * w - 1)


def maps(task: Task, plan: Plan, arrays: tuple) -> list[Float[Array, "B H W _ D"]]:
    """Arrays [B, T, _, D] as maps, padded in interpret mode, which has no copies beyond the end."""
    shaped = [x.reshape(x.shape[0], *task.places, *x.shape[2:]) for x in arrays]
    if not task.interpret:
        return shaped
    sizes = _interpreted_grid(plan)
    missing = [(0, n - m) for n, m in zip(sizes, task.places, strict=True)]
    return [jnp.pad(x, ((0, 0), *missing, (0, 0), (0, 0))) for x in shaped]


def _interpreted_grid(plan: Plan) -> tuple[int, int]:
    """(H, W) of maps in interpret mode: of whole windows, and of the row below that copies read."""
    height, width = plan.boxes.padded
    return height + max(box.rows_read - box.size[0] for box in plan.boxes.boxes()), width


def outputs_of(task: Task, plan: Plan, batch: int, heads: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape of a map that a kernel writes."""
    grid = _interpreted_grid(plan) if task.interpret else task.places
    return jax.ShapeDtypeStruct((batch, *grid, heads, task.head_dim), dtype)


def tokens_of(task: Task, x: Float[Array, "B H W N D"]) -> Float[Array, "B T N D"]:
    """The tokens of a map that a kernel has written."""
    height, width = task.places
    return x[:, :height, :width].reshape(x.shape[0], task.tokens, *x.shape[3:])


def launch_forward(task: Task, arrays: tuple, terms: tuple) -> tuple[Array, Array]:
    """The output and lse, for `in_sets`."""
    dtype, batch = arrays[0].dtype, arrays[0].shape[0]
    cut = plan(task, batch, terms[-1].shape[0])
    scratch = [
        buffer(task, (STAGES, 3, cut.slots, task.head_dim), dtype),
        buffer(task, (1, cut.slots, task.head_dim), dtype),
        plgpu.Barrier(num_arrivals=3 * copies(task, cut), num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=cut.groups),
    ]
    outputs = [
        outputs_of(task, cut, batch, task.heads, dtype),
        jax.ShapeDtypeStruct((batch, task.heads, cut.boxes.count, cut.slots), jnp.float32),
    ]
    program = functools.partial(Forward, task=task, plan=cut)
    out, lse = launch(program, "attention_mosaic_window", arrays, terms, (), outputs, scratch)
    return tokens_of(task, out), lse


def launch_backward(task: Task, needs: Needs, arrays: tuple, terms: tuple) -> tuple[Array, ...]:
    """The gradients of the data, and partial sums of those of the bias by slot and the angles.

    For `in_sets`; the sums are [S, chunks, windows, N, slots, slots] and [.., slots, R].
    """
    *arrays, lse = arrays
    dtype, batch, sets = arrays[0].dtype, lse.shape[0], terms[-1].shape[0]
    cut = plan(task, batch, sets, MOST_ITEMS_BACKWARD)
    where = sets, cut.chunks, cut.boxes.count, task.heads, cut.slots
    heads = [3 * task.heads] if task.packed else [task.heads] * 3
    outputs = [outputs_of(task, cut, batch, n, dtype) for n in heads]
    outputs += [
        jax.ShapeDtypeStruct((*where, size), jnp.float32)
        for size, needed in ((cut.slots, needs.bias), (task.pairs, needs.freqs))
        if needed
    ]
    transforms = swizzle_transforms(task.head_dim, dtype, tiled=True)  # as of the other operands
    transforms = () if task.interpret else transforms
    scratch = [
        buffer(task, (STAGES, 5, cut.slots, task.head_dim), dtype),
        plgpu.Barrier(num_arrivals=5 * copies(task, cut) + 1, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=cut.groups),
        plgpu.SMEM((STAGES, cut.slots), jnp.float32),
        plgpu.SMEM((2, cut.tiles, ROWS, ROWS), dtype, transforms=transforms),
    ]
    name = "attention_mosaic_window_backward"
    program = functools.partial(Backward, needs=needs, task=task, plan=cut)
    results = launch(program, name, tuple(arrays), terms, (lse,), outputs, scratch)
    return *(tokens_of(task, x) for x in results[: len(heads)]), *results[len(heads) :]


def copies(task: Task, plan: Plan) -> int:
    """Copies of one array's part of a window."""
    boxes = plan.boxes.boxes()
    return sum(box.rows_read for box in boxes) if task.interpret else len(boxes)


def launch(
    program: functools.partial,
    name: str,
    arrays: tuple,
    terms: tuple,
    others: tuple,
    outputs: list,
    scratch: list,
) -> tuple[Array, ...]:
    """Runs `Program`s of tokens' arrays [B, T, _, D], tables of S sets, and other arrays."""
    task, plan = program.keywords["task"], program.keywords["plan"]
    size = task.heads * plan.boxes.count * plan.chunks * terms[-1].shape[0]
    run = program_grid(program, name, outputs, scratch, size, synchronized=False)
    return vary_alike(arrays, tuple(run(*maps(task, plan, arrays), *terms, *others)))[1]


class Program(abc.ABC):
    """One warpgroup of one program.

    Args:
        refs: maps [B, H, W, N or 3 N, D]; where queries and keys turn, cosines and sines
            [S, N or 1, slots, 2 R]; the bias [S, kinds, N or 1, slots, slots], the b-th of S sets
            for the b-th part of the examples; what a subclass adds; then its results; shared memory
            for maps and barriers; and what a subclass adds.
        sources: how many maps are read.
        task: the problem.
        plan: its programs.
    """

    def __init__(self, refs: tuple, *, sources: int, task: Task, plan: Plan):
        self.refs = take = iter(refs)
        self.task, self.plan = task, plan
        self.sources = [next(take) for _ in range(sources)]
        self.table = next(take) if task.pairs else None
        self.bias = next(take)
        self.group = jax.lax.axis_index("group")
        # Programs that run together touch neighbouring memory: heads run fastest.
        rest, self.head = divide(jax.lax.axis_index("program"), task.heads)
        down, across = plan.boxes.windows
        rest, self.window = divide(rest, down * across)
        self.set, self.chunk = divide(rest, plan.chunks)
        in_set = self.sources[0].shape[0] // self.bias.shape[0]
        self.first = self.set * in_set + self.chunk * plan.items
        self.items = jnp.minimum(plan.items, in_set - self.chunk * plan.items)
        self.row, self.column = divide(self.window, across)
        self.last = self.row == down - 1, self.column == across - 1

    def take_memory(self) -> tuple[Any, Any]:
        """The next shared memory: for the copy engine and for the matrix units, see `buffer`."""
        ref = next(self.refs)
        return (ref, ref) if self.task.interpret else tuple(ref)

    @property
    def dtype(self) -> Any:
        """The dtype of the data."""
        return self.sources[0].dtype

    def own_tiles(self) -> list[Array]:
        """The tiles of this warpgroup."""
        count = self.plan.tiles // self.plan.groups
        return [self.group * count + i for i in range(count)]

    def rows(self, held: Any, tile: Array | int) -> Any:
        """A tile of slots of an array [1, slots, D] in shared memory."""
        return held.at[:, pl.ds(tile * ROWS, ROWS)]

    def begins(self, box: Box) -> tuple[Array, Array]:
        """The first row and column of a box on the map."""
        boxes, places = self.plan.boxes, []
        for axis, index in enumerate((self.row, self.column)):
            size, shift = boxes.window.size[axis], boxes.window.shift[axis]
            place = index * size + (box.place[axis] + shift)
            if box.carried[axis]:
                place = jnp.where(self.last[axis], place - boxes.padded[axis], place)
            places.append(place)
        return places[0], places[1]

    def boxes_of(self, array: Any, item: Array, head: Array, *, read: bool) -> list[tuple]:
        """The parts of a map and their slots, as (ref, first slot, shape), to be read or written.

        Interpret mode has no reshaped refs: one row of a box at a time.
        """
        parts, channels = [], pl.ds(0, self.task.head_dim)
        for box in self.plan.boxes.boxes():
            row, column = self.begins(box)
            rows, columns = box.rows_read if read else box.size[0], box.size[1]
            step = 1 if self.task.interpret else rows
            for i in range(0, rows, step):
                down = row + i if self.task.interpret else pl.ds(row, rows)
                part = array.at[item, down, pl.ds(column, columns), head, channels]
                shape = (step, columns, self.task.head_dim)
                parts.append((part, box.slot + i * columns, shape))
        return parts

    def slots_of(self, held: Any, first: int, shape: tuple[int, int, int]) -> Any:
        """The slots of a part of a map [slots, D], in its shape."""
        rows, columns, _ = shape
        ref = held.at[pl.ds(first, rows * columns)]
        return ref if self.task.interpret else ref.reshape(shape)

    def by_one_warp(self, number: int, start: Callable[[], None]) -> None:
        """Starts copies by one warp of the first warpgroup.

        By all its warps, each of which issues their instructions, where `jax.shard_map` tracks what
        varies: Mosaic GPU cannot separate warps there.
        """
        together = self.task.interpret or jax.typeof(self.sources[0]).manual_axis_type.varying
        alone = lambda warp: pl.when(warp == number)(start)
        run = start if together else functools.partial(plgpu.warp_map, alone)
        return run() if self.plan.groups == 1 else pl.when(self.group == 0)(run)

    def fetch(self, item: Array, held: Any, ready: Any, heads: tuple) -> None:
        """Starts the copies of the window of all maps, at these heads."""
        for operand, (source, head) in enumerate(zip(self.sources, heads, strict=True)):
            for part, first, shape in self.boxes_of(source, item, head, read=True):
                slots = self.slots_of(held.at[operand], first, shape)
                plgpu.copy_gmem_to_smem(part, slots, ready)

    def send(self, held: Any, target: Any, item: Array, head: Array) -> None:
        """Starts the copies of the window to a map."""
        for part, first, shape in self.boxes_of(target, item, head, read=False):
            plgpu.copy_smem_to_gmem(self.slots_of(held, first, shape), part, commit_group=False)

    @abc.abstractmethod
    def start(self, i: Array | int) -> None:
        """Starts the copies of the i-th example."""

    def are_filled(self, tile: Array) -> Bool[Array, "64 D"]:
        """Which slots of a tile copies fill."""
        slot = tile * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        spans = [(x.slot, x.rows_read * x.size[1]) for x in self.plan.boxes.boxes()]
        filled = [(slot >= first) & (slot < first + size) for first, size in spans]
        filled = functools.reduce(jnp.logical_or, filled)
        return jax.lax.broadcast_in_dim(filled, (ROWS, self.task.head_dim), (0,))

    def start_next(self, i: Array) -> None:
        """Starts the copies of the example after the i-th, if there is one."""
        pl.when(i + 1 < self.items)(lambda: self.start(i + 1))

    def clear(self, held: Any) -> None:
        """Zeroes a warpgroup's slots: those without a token take part in products, weighing 0."""
        stages, operands, _, _ = held.shape
        zeros = jnp.zeros((ROWS, self.task.head_dim), self.dtype)
        zeros = plgpu.layout_cast(zeros, TILE)
        for stage in range(stages):
            for operand in range(operands):
                for tile in self.own_tiles():
                    store_rows(self.rows(held.at[stage, pl.ds(operand, 1)], tile), zeros)

    def meet(self) -> None:
        """Waits for all warpgroups, which then see what the others wrote to shared memory."""
        plgpu.commit_smem()
        if self.plan.groups > 1:
            plgpu.barrier_arrive(self.meeting)
            plgpu.barrier_wait(self.meeting)

    def turns(self, tile: Array) -> tuple[Array, Array] | None:
        """Cosines and sines, [64, R], of the angles of a tile's tokens."""
        if self.table is None:
            return None
        head, pairs = self.head if self.table.shape[1] > 1 else 0, self.task.pairs
        places = [(self.set, head, pl.ds(tile * ROWS, ROWS), pl.ds(i, pairs)) for i in (0, pairs)]
        cos, sin = (plgpu.load(self.table.at[x], layout=TILE, optimized=False) for x in places)
        return cos, sin

    def load_bias(self, tile: Array | int, keys: Any) -> Float[Array, "64 keys"]:
        """The bias of a tile of queries and a slice of keys, with the mask."""
        windows, (rows, columns) = self.plan.boxes.windows, self.plan.boxes.kinds
        row = jnp.maximum(self.row - (windows[0] - rows), 0)
        kind = row * columns + jnp.maximum(self.column - (windows[1] - columns), 0)
        head = self.head if self.bias.shape[2] > 1 else 0
        place = pl.ds(tile * ROWS, ROWS), keys
        return plgpu.load(self.bias.at[self.set, kind, head, *place], layout=TILE, optimized=False)


class Forward(Program):
    """The output [B, H, W, N, D] and lse [B, N, windows, slots] of q, k and v."""

    def __init__(self, refs: tuple, **terms: Any):
        super().__init__(refs, sources=3, **terms)
        self.out, self.lse = next(self.refs), next(self.refs)
        self.held, self.result = self.take_memory(), self.take_memory()
        self.ready, self.meeting = self.refs

    def start(self, i: Array | int) -> None:
        """Starts the copies of the i-th example."""
        stage = divide(jnp.int32(i), STAGES)[1]
        heads = tuple(self.head + offset for offset in self.task.offsets())
        target = self.held[0].at[stage], self.ready.at[stage]
        self.by_one_warp(0, lambda: self.fetch(self.first + i, *target, heads))

    def finish(self, i: Array) -> None:
        """Starts copying the output of the i-th example."""
        self.send(self.result[0].at[0], self.out, self.first + i, self.head)
        plgpu.commit_smem_to_gmem_group()

    def attend(
        self, q: Array, held: Any, bias: Array | None, tile: Array
    ) -> tuple[Float[Array, "64 D"], Float[Array, " 64"]]:
        """The output and lse of a tile of queries."""
        spread = lambda x, like: jax.lax.broadcast_in_dim(x, like.shape, (0,))

        def add(block: Any, carry: tuple | None) -> tuple:
            """Adds a tile of keys to the online softmax, or begins it."""
            k, v = (self.rows(held.at[pl.ds(i, 1)], block) for i in (1, 2))
            keys = pl.ds(block * ROWS, ROWS)
            (logits,) = row_products(self.task, [(q, k)])
            added = self.load_bias(opaque(tile), keys) if bias is None else bias
            logits = logits * np.float32(self.task.scale * LOG2E) + added
            top = jnp.max(logits, axis=1)
            out = plgpu.layout_cast(jnp.zeros(q.shape, jnp.float32), TILE)
            if carry is not None:
                top = jnp.maximum(top, carry[0])
            weights = jnp.exp2(logits - spread(top, logits))
            total = jnp.sum(weights, axis=1)
            if carry is not None:
                shrink = jnp.exp2(carry[0] - top)
                total, out = total + carry[1] * shrink, carry[2] * spread(shrink, out)
            ((out,),) = add_products(self.task, [[out]], [(weights.astype(self.dtype), v)])
            return top, total, out

        carry = add(0, None)
        if self.plan.tiles > 1:
            carry = repeat(self.plan.tiles - 1, lambda i, carry: add(i + 1, carry), carry)
        top, total, out = carry
        return (out * spread(1 / total, out)).astype(self.dtype), top + jnp.log2(total)

    def example(self, i: Array, turns: list, bias: Array | None) -> None:
        """Computes the window of the i-th example."""
        stage = divide(i, STAGES)[1]
        held, tiles = self.held[1].at[stage], self.own_tiles()
        plgpu.barrier_wait(self.ready.at[stage])
        queries = []
        for tile, angles in zip(tiles, turns, strict=True):
            q, k = (self.rows(held.at[pl.ds(operand, 1)], tile) for operand in (0, 1))
            queries.append(turn(load_rows(q), angles, self.dtype))
            if angles is not None:
                store_rows(k, turn(load_rows(k), angles, self.dtype))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the previous example
        self.meet()
        self.start_next(i)
        for tile, q in zip(tiles, queries, strict=True):
            out, lse = self.attend(q, held, bias, tile)
            store_rows(self.rows(self.result[1], tile), out)
            place = pl.ds(tile * ROWS, ROWS)
            self.lse.at[self.first + i, self.head, self.window, place][...] = lse
        self.meet()
        self.by_one_warp(1, lambda: self.finish(i))

    def run(self) -> None:
        """Computes all examples of the program."""
        self.clear(self.held[1])
        self.meet()
        self.start(0)
        turns = [self.turns(tile) for tile in self.own_tiles()]
        bias = self.load_bias(0, pl.ds(0, ROWS)) if self.plan.tiles == 1 else None
        pl.loop(0, self.items)(lambda i: self.example(i, turns, bias))
        plgpu.wait_smem_to_gmem(0)


class Backward(Program):
    """Gradients of q, k and v, from these, the output's gradient, the output and lse.

    Also sums over examples of the gradients of the angles and the bias by slot, where needed.
    """

    def __init__(self, refs: tuple, *, needs: Needs, **terms: Any):
        super().__init__(refs, sources=5, **terms)
        take, task = self.refs, self.task
        self.needs, self.lse = needs, next(take)
        targets = [next(take) for _ in range(1 if task.packed else 3)]
        self.targets = targets * 3 if task.packed else targets
        self.bias_sums = next(take) if needs.bias else None
        self.angle_sums = next(take) if needs.freqs else None
        self.held = self.take_memory()
        self.ready, self.meeting, self.held_lse, self.logits = take

    def start(self, i: Array | int) -> None:
        """Starts the copies of the i-th example."""
        stage, item = divide(jnp.int32(i), STAGES)[1], self.first + i
        heads = tuple(self.head + offset for offset in (*self.task.offsets(), 0, 0))
        ready = self.ready.at[stage]

        def copy() -> None:
            self.fetch(item, self.held[0].at[stage], ready, heads)
            lse = self.lse.at[item, self.head, self.window]
            plgpu.copy_gmem_to_smem(lse, self.held_lse.at[stage], ready)

        self.by_one_warp(0, copy)

    def finish(self, i: Array, stage: Array) -> None:
        """Starts copying the gradients of the i-th example."""
        for operand, offset in enumerate(self.task.offsets()):
            held = self.held[0].at[stage, operand]
            self.send(held, self.targets[operand], self.first + i, self.head + offset)
        plgpu.commit_smem_to_gmem_group()

    def add_angles(self, total: Any, x: Array, gradient: Array) -> Float[Array, "64 R"]:
        """Adds the gradient of the angles, from turned rows and their gradient."""
        pairs = self.task.pairs
        a, b = (x[:, first : first + pairs].astype(jnp.float32) for first in (0, pairs))
        return total + (gradient[:, pairs : 2 * pairs] * a - gradient[:, :pairs] * b)

    def add_bias(
        self, total: Any, gradient: Array, tile: Array | int, keys: Any, begins: Any
    ) -> Any:
        """Adds the gradient of the bias of a tile of queries and a slice of keys.

        In registers if there is a sum, otherwise in memory that only this thread uses.
        """
        if self.bias_sums is None:
            return None
        if total is not None:
            return total + gradient
        place = pl.ds(tile * ROWS, ROWS), keys
        target = self.bias_sums.at[self.set, self.chunk, self.window, self.head, *place]
        before = plgpu.load(target, layout=TILE, optimized=False)
        gradient += jnp.where(begins, 0, before)
        store(target, gradient, interpret=self.task.interpret)
        return total

    def logit_gradients(self, rows: tuple, held: Any, tile: Array | int, keys: Any) -> tuple:
        """Weights of a tile of queries for keys, and the gradients of their logits, [64, keys].

        Args:
            rows: of the queries: turned, their output's gradient, lse and delta.
            held: the maps in shared memory.
            tile: of queries.
            keys: slice of slots.
        """
        q, dout, lse, delta = rows
        width = keys.size
        spread = lambda x: jax.lax.broadcast_in_dim(x, (ROWS, width), (0,))
        k, v = (held.at[pl.ds(operand, 1), keys] for operand in (1, 2))
        logits, dweights = row_products(self.task, [(q, k), (dout, v)])
        # Read for each example: there are no registers for it.
        logits = logits * np.float32(self.task.scale * LOG2E) + self.load_bias(opaque(tile), keys)
        weights = jnp.exp2(logits - spread(lse))
        dlogits = weights * (dweights - spread(delta))
        return weights, dlogits

    def prepare(self, held: Any, stage: Array, tile: Array) -> tuple:
        """Turns queries and keys of a tile; the queries, their output's gradient, lse and delta."""
        refs = [self.rows(held.at[pl.ds(operand, 1)], tile) for operand in (0, 1, 3, 4)]
        q, k, dout, out = (load_rows(ref) for ref in refs)
        delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=1)
        place = self.held_lse.at[stage, pl.ds(tile * ROWS, ROWS)]
        lse = plgpu.load(place, layout=ROW, optimized=False)
        if self.table is not None:
            angles = self.turns(opaque(tile))
            q, k = (turn(x, angles, self.dtype) for x in (q, k))
            for ref, x in zip(refs[:2], (q, k), strict=True):
                store_rows(ref, x)
        return q, dout, lse, delta

    def example(self, i: Array, carry: tuple) -> tuple:
        """Computes the gradients of the i-th example and adds to the sums."""
        angle_sums, bias_sum = carry
        stage = divide(i, STAGES)[1]
        held, tiles, count = self.held[1].at[stage], self.own_tiles(), self.plan.tiles
        plgpu.barrier_wait(self.ready.at[stage])
        rows = [self.prepare(held, stage, tile) for tile in tiles]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the previous example
        self.meet()
        self.start_next(i)
        zero = plgpu.layout_cast(jnp.zeros((ROWS, self.task.head_dim), jnp.float32), TILE)
        sums = [[[zero]] * 3 for _ in tiles]  # the gradients of q, k and v
        width = ROWS if count < 3 else ROWS // 2  # of keys: three warpgroups have fewer registers

        def add(step: Any, sums: list) -> list:
            """Adds the part of a tile of keys to the gradients of each tile of queries."""
            nonlocal bias_sum
            dlogits, added = [], []
            for number, tile in enumerate(tiles):
                block, parts = divide(tile + step, count)[1], []
                q, dout, *others = rows[number]
                if count > 1:  # not kept in registers
                    refs = [self.rows(held.at[pl.ds(operand, 1)], tile) for operand in (0, 3)]
                    q, dout = (load_rows(ref) for ref in refs)
                for first in range(0, ROWS, width):
                    keys = pl.ds(block * ROWS + first, width)
                    weights, gradient = self.logit_gradients((q, dout, *others), held, tile, keys)
                    bias_sum = self.add_bias(bias_sum, gradient, tile, keys, i == 0)
                    parts.append(gradient.astype(self.dtype))
                    for operand, x in enumerate((weights.astype(self.dtype), parts[-1])):
                        self.logits.at[operand, block, :, pl.ds(first, width)][...] = x
                dlogits.append(join(parts))
            self.meet()
            for number, tile in enumerate(tiles):
                block, queries = (divide(tile + n, count)[1] for n in (step, count - step))
                part = lambda operand, tile: self.rows(held.at[pl.ds(operand, 1)], tile)
                by_key = [self.logits.at[operand, tile].transpose((1, 0)) for operand in (1, 0)]
                terms = [
                    (dlogits[number], part(1, block)),
                    (by_key[0], part(0, queries)),
                    (by_key[1], part(3, queries)),
                ]
                added.append(add_products(self.task, sums[number], terms))
            self.meet()
            return added

        sums = add(0, sums) if count == 1 else repeat(count, add, sums)
        for number, tile in enumerate(tiles):
            (dq,), (dk,), (dv,) = sums[number]
            dq, dk = (x * np.float32(self.task.scale) for x in (dq, dk))
            refs = [self.rows(held.at[pl.ds(operand, 1)], tile) for operand in range(3)]
            if self.angle_sums is not None:
                total = self.add_angles(angle_sums[number], load_rows(refs[0]), dq)
                angle_sums[number] = self.add_angles(total, load_rows(refs[1]), dk)
            angles = self.turns(opaque(tile))
            back = None if angles is None else (angles[0], -angles[1])
            filled = self.are_filled(tile)
            for ref, x, angles in zip(refs, (dq, dk, dv), (back, back, None), strict=True):
                # The others stay zeros: a NaN there would reach the stage's next example.
                store_rows(ref, turn(jnp.where(filled, x, zero), angles, self.dtype))
        self.meet()
        self.by_one_warp(1, lambda: self.finish(i, stage))
        return angle_sums, bias_sum

    def run(self) -> None:
        """Computes all examples of the program."""
        self.clear(self.held[1])
        self.meet()
        self.start(0)
        tiles = self.own_tiles()
        zeros = lambda size: plgpu.layout_cast(jnp.zeros((ROWS, size), jnp.float32), TILE)
        angle_sums = [zeros(self.task.pairs) for _ in tiles if self.needs.freqs]
        few = self.plan.tiles == 1 and self.task.head_dim <= 32  # registers for the other sums
        bias_sum = zeros(ROWS) if self.needs.bias and few else None
        angle_sums, bias_sum = repeat(self.items, self.example, (angle_sums, bias_sum))
        where = self.set, self.chunk, self.window, self.head
        if bias_sum is not None:
            store(self.bias_sums.at[where], bias_sum, interpret=self.task.interpret)
        for tile, x in zip(tiles, angle_sums, strict=False):
            target = self.angle_sums.at[*where, pl.ds(tile * ROWS, ROWS)]
            store(target, x, interpret=self.task.interpret)
        plgpu.wait_smem_to_gmem(0)
