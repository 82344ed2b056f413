"""Attention inside windows by Pallas kernels for Mosaic GPU on Hopper: forward.

A program owns one head and one place of a window on the map, of several successive examples.
Forward, their cosines, sines and, with one tile, the bias stay in registers. The copy engine (TMA)
loads the boxes of the window (`window_boxes`) directly from the projection, started by one warp
alone: the others would issue the instructions of the copies, too. Each warpgroup owns a tile of 64
slots, as queries and as keys; most windows of up to 64 tokens have one. What a query does not see,
also past the end of the map, is part of the bias.

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
from jaxtyping import Array, Float

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention import mosaic_kernel
from rope_jax_kernels.attention.arithmetic import LOG2E, MASKED, bounded_bias
from rope_jax_kernels.attention.kernel import Operands, tables
from rope_jax_kernels.attention.mosaic_kernel import (
    ROWS,
    TILE,
    add_products,
    load_rows,
    row_products,
    store_rows,
    turn,
)
from rope_jax_kernels.attention.mosaic_launch import (
    buffer,
    in_sets,
    program_grid,
)
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.attention.window_boxes import Box, WindowBoxes, make_boxes
from rope_jax_kernels.device import vary_alike
from rope_jax_kernels.mosaic import repeat, start_in_one_warp

STAGES = 2  # examples in shared memory: one is computed while the next is loaded
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


def plan(
    task: Task,
    batch: int,
    sets: int,
    *,
    most_items: int = mosaic_kernel.MOST_ITEMS,
    sums: int = 0,
) -> Plan:
    """The plan for `batch` examples in `sets` that share their tables.

    Args:
        task: the problem.
        batch, sets: numbers of examples, and of sets.
        most_items, sums: of one program, as in `items_per_program`.
    """
    boxes = make_boxes(task.pattern, task.places, task.head_dim)
    tiles = boxes.tiles
    most = mosaic_kernel.MOST_INTERPRETED if task.interpret else tiles
    groups = max(n for n in range(1, most + 1) if tiles % n == 0)
    programs, in_set = task.heads * boxes.count * sets, batch // sets
    items = mosaic_kernel.items_per_program(programs, in_set, most_items, sums)
    return Plan(boxes, tiles, groups, items, pl.cdiv(in_set, items))


def forward(
    task: Task, operands: Operands
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N windows slots"]]:
    """`Kernel.forward`; lse is by slot, for `backward`."""
    arrays, turning, bias = operands
    terms = make_tables(task, tables(turning), bias, queries=False)
    run = functools.partial(launch_forward, task)
    return in_sets(run, arrays, tuple(x[None] for x in terms))


def make_tables(task: Task, turns: tuple, bias: tuple, *, queries: bool) -> tuple:
    """Cosines and sines [N or 1, slots, 2 R], if any, and the bias [kinds, N or 1, slots, slots].

    The bias is in units of log 2; see `WindowBoxes.masked_bias`.
    """
    boxes = make_boxes(task.pattern, task.places, task.head_dim)
    (table,) = [bounded_bias(x) for x in bias] or [None]
    added = boxes.masked_bias(table, float(MASKED), queries=queries)
    return *(jnp.concatenate(x, axis=2)[:, token_of_slots(boxes)] for x in [turns] if x), added


def token_of_slots(boxes: WindowBoxes) -> np.ndarray:
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
        """Starts copies by one warp of the first warpgroup."""
        if self.task.interpret:
            return start()
        run = functools.partial(start_in_one_warp, number, start, self.sources[0])
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
