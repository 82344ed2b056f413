"""Neighbourhood attention by kernels for Mosaic GPU, with the rotation inside: forward.

A program is one warpgroup. It owns one head and one tile of queries (`neighborhood_boxes`), and
loops over examples. The copy engine (TMA) loads the tile and the box of its keys and values
directly from the projection, with zeros outside of the map, while earlier examples are computed.
Keys are turned in shared memory, once for the whole tile.

With a warpgroup's matrix instructions all queries of a tile would be multiplied with all keys of
the box. So each warp multiplies its 16 queries, by those of Ampere (`mma`), with the rows of keys
that these need: for a kernel of 7, 8 of the 14 rows. The sum of a product begins with a table of
the bias and the mask, which costs no instruction. In heads of 32, up to a kernel of 7, registers
hold all logits of a query at once; otherwise the softmax is online.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxtyping import Array, Float, Int

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention import kernel, mosaic_program, neighborhood_boxes
from rope_jax_kernels.attention.arithmetic import LOG2E, MASKED, bounded_bias
from rope_jax_kernels.attention.kernel import Needs, Operands
from rope_jax_kernels.attention.mosaic_program import (
    ROW,
    TILE,
    divide_examples,
    product,
    slice_block,
    spread,
    swizzle_transforms,
    turn,
    turning_table,
    zeros,
)
from rope_jax_kernels.attention.neighborhood_boxes import (
    FORWARD,
    KEYS,
    ROWS,
    STEP,
    WARPS,
    Boxes,
    Part,
)
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.device import vary_alike
from rope_jax_kernels.mosaic import in_sets, repeat, store

HELD_COLUMNS = 128  # most of the table of bias and mask in registers, of which they take half
# Most rows of keys whose logits are in registers together, by head dimension.
MOST_ROWS = {32: 8, 64: 4}

# Bias in units of log 2 that stands for lower ones. Bias and product are scaled together, by a
# product and a difference that is rounded once, so that their error grows with the bias.
LOWEST = -(2.0**20)


@dataclasses.dataclass(frozen=True)
class Plan(mosaic_program.Plan):
    """The programs of a kernel, each one warpgroup for a tile. Static.

    Attributes:
        part: the kernel.
        boxes: its tiles.
        stages: examples in shared memory at a time.
        held_sums: sums in shared memory.
    """

    part: Part
    boxes: Boxes
    stages: int
    held_sums: int


def forward(
    task: Task, operands: Operands
) -> tuple[Float[Array, "B T N D"], Float[Array, "B H maps W"]]:
    """`Kernel.forward`; lse is a map of each head and class, in units of log 2, for `backward`."""
    tables = make_tables(task, FORWARD, kernel.tables(operands.turning), operands.bias)
    run = functools.partial(launch_forward, task)
    return in_sets(run, operands.data, tables)


def launch_forward(task: Task, arrays: tuple, tables: tuple, sets: int) -> tuple:
    """The output and lse, for `in_sets`."""
    batch, dtype = arrays[0].shape[0], arrays[0].dtype
    out = jax.ShapeDtypeStruct((batch, task.tokens, task.heads, task.head_dim), dtype)
    outputs = [out, map_of_numbers(task, batch)]
    return launch(Forward, FORWARD, task, Needs(False, False), arrays, tables, sets, outputs)


def cut(part: Part, task: Task) -> Boxes:
    """The tiles of a kernel."""
    return neighborhood_boxes.cut(
        part, task.pattern, task.places, task.head_dim, biased=task.biased
    )


def map_of_numbers(task: Task, batch: int) -> jax.ShapeDtypeStruct:
    """A map of lse or delta [B, H, N classes, W].

    The copy engine needs rows of whole 16 bytes. There are so many maps that the next row of one is
    farther than a box is wide: Mosaic GPU would take rows that follow one another for a run of
    bytes, and copy it without stopping at the end of the map.
    """
    dilation = task.pattern.dilation
    height, width = (n // step for n, step in zip(task.places, dilation, strict=True))
    width = -(-width // 4) * 4
    maps = max(task.heads * math.prod(dilation), 1 + cut(KEYS, task).width // width)
    return jax.ShapeDtypeStruct((batch, height, maps, width), jnp.float32)


def make_tables(task: Task, part: Part, turning: tuple, bias: tuple) -> tuple:
    """Tables of one set for the tiles of a kernel.

    `turning_table` of each tile's tokens followed by those of its box, if q and k turn;
    `Boxes.table`, if there is a bias.
    """
    boxes, unit = cut(part, task), task.scale * float(LOG2E)
    tokens = jnp.concatenate(boxes.tokens(), axis=1).reshape(-1, 1 + boxes.blocks, ROWS)
    added = (boxes.table(bounded_bias(x, LOWEST), unit)[None] for x in bias)
    return *turning_table(turning, tokens), *added


def launch(
    program: Callable,
    part: Part,
    task: Task,
    needs: Needs,
    arrays: tuple,
    tables: tuple,
    sets: int,
    outputs: list[jax.ShapeDtypeStruct],
    written: tuple = (),
    held_sums: Sequence[tuple[int, ...]] = (),
) -> tuple:
    """Launches a kernel on a grid of programs, for `in_sets`.

    Args:
        program: the class of its programs.
        part, task: the kernel and the problem.
        needs: of the backward pass; each program adds up the gradients of its angles for freqs.
        arrays: operands [B, T, heads, D] in their order, then maps of numbers.
        tables, sets: as `in_sets` has them.
        outputs: those with examples, like the arrays.
        written: an array like the operands, some of whose heads the kernel replaces.
        held_sums: shapes of other sums of a program over its examples, in shared memory.

    Returns:
        What was written; the outputs; float32 sums [S, chunks, tiles, N, *shape], those of the
        angles last.
    """
    batch, dtype, boxes = arrays[0].shape[0], arrays[0].dtype, cut(part, task)
    sums = [*held_sums, *[(ROWS, task.pairs)] * needs.freqs]
    summed = sum(map(math.prod, sums))
    examples = divide_examples(task, boxes.classes * boxes.tiles, batch, sets, sums=summed)
    stages = min(part.stages(boxes, task.head_dim), examples["items"])
    plan = Plan(1, **examples, part=part, boxes=boxes, stages=stages, held_sums=len(held_sums))
    if not task.biased:
        tables = *tables, boxes.table(None, task.scale)[None]
    tile, box = (boxes.down.tile, boxes.across.tile), (boxes.height, boxes.width)
    of_map = box if part.transposed else tile
    turned = boxes.whole_height if task.pairs else boxes.height, boxes.width
    held = [tile] * len(part.tiles) + [turned] + [box] * (len(part.boxes) - 1)
    scratch = [
        *(rows_buffer(task, (stages, *size), dtype) for size in held),
        *[numbers_buffer(task, (stages, *of_map))] * part.maps,
        *[rows_buffer(task, (1, *tile), dtype)] * part.results,
        *[numbers_buffer(task, (1, *tile))] * part.result_maps,
    ]
    copies = [*held, *[of_map] * part.maps]
    arrivals = sum(rows for rows, _ in copies) if task.interpret else len(copies)
    scratch.append(plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages))
    scratch += [plgpu.SMEM(shape, jnp.float32) for shape in held_sums]
    shapes = [jax.eval_shape(functools.partial(widen, task, boxes), x) for x in outputs]
    shapes += [plan.sums(task, *shape) for shape in sums]
    arrays, tables, written = vary_alike(arrays, tables, written)
    changed = [jax.new_ref(widen(task, boxes, x)) for x in written]
    wide = tuple(widen(task, boxes, x) for x in arrays)
    program, tables = functools.partial(program, needs=needs), (*tables, *changed)
    operands = wide, tables, shapes, scratch
    results = mosaic_program.launch(program, part.name, task, plan, *operands)
    results, summed = results[: len(outputs)], results[len(outputs) :]
    results = [
        narrow(task, boxes, x, like.shape)
        for x, like in zip([*map(jax.freeze, changed), *results], [*written, *outputs], strict=True)
    ]
    return (*results, *summed)


def widen(task: Task, boxes: Boxes, x: Array) -> Array:
    """An array [B, T, heads, D] as the copy engine sees it; maps of numbers stay as they are.

    [B, rows, dy, columns, dx * heads * D] has the classes of a dilation apart, in the five
    dimensions that the engine has at most. Interpret mode has no engine that stops at the end of an
    array: there are zeros after it, which `narrow` removes.
    """
    down, across, (dy, dx) = boxes.down, boxes.across, boxes.dilation
    if x.dtype != jnp.float32:
        x = x.reshape(x.shape[0], down.members, dy, across.members, dx * x.shape[2] * x.shape[3])
    if not task.interpret:
        return x
    room = [(0, 0)] * x.ndim
    room[1] = 0, max(down.tile, boxes.whole_height)
    room[3] = 0, max(across.tile, boxes.width)
    return jnp.pad(x, room)


def narrow(task: Task, boxes: Boxes, x: Array, shape: tuple[int, ...]) -> Array:
    """Undoes `widen` for an array that had this shape."""
    if x.dtype == jnp.float32:
        return x[:, : shape[1], :, : shape[3]]
    return x[:, : boxes.down.members, :, : boxes.across.members].reshape(shape)


def rows_buffer(task: Task, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for boxes [stages, rows, columns] of tokens' channels, and views of it.

    For the copy engine; as blocks of 64 slots, if it has whole ones; and as rows of a box, for the
    matrix units. See `mosaic_program.buffer`.
    """
    stages, rows, columns = shape
    if task.interpret:
        return plgpu.SMEM((*shape, task.head_dim), dtype)
    views = [(shape, False)]
    if rows * columns % ROWS == 0:
        views.append(((stages, rows * columns // ROWS, ROWS), True))
    if columns % STEP == 0:
        views.append((shape, True))
    return plgpu.RefUnion(
        *(
            plgpu.SMEM(
                (*size, task.head_dim),
                dtype,
                transforms=swizzle_transforms(task.head_dim, dtype, tiled=tiled),
            )
            for size, tiled in views
        )
    )


def numbers_buffer(task: Task, shape: tuple[int, ...]) -> Any:
    """Shared memory for boxes [stages, rows, columns] of numbers, also as [stages, slots]."""
    if task.interpret:
        return plgpu.SMEM(shape, jnp.float32)
    flat = shape[0], shape[1] * shape[2]
    return plgpu.RefUnion(*(plgpu.SMEM(x, jnp.float32) for x in (shape, flat)))


def rename(x: Float[Array, "64 _"], old: Any, new: Any) -> Float[Array, "64 _"]:
    """Relabels registers with another layout, which distributes 64 rows alike.

    Mosaic GPU has no such cast between operands and results of its matrix instructions.
    """
    if old.to_mgpu() == new.to_mgpu():
        return x

    @plgpu.inline_mgpu(
        arg_types=(old,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=new)
    )
    def rename(_: Any, value: Any) -> Any:
        layout = new.to_mgpu()
        registers = value.registers.reshape(layout.registers_shape(value.shape))
        return fragmented_array.FragmentedArray(
            _registers=registers, _layout=layout, _is_signed=value.is_signed
        )

    return rename(x)


def number_of_warp() -> Int[Array, ""]:
    """The number of this warp, a scalar that is another one in each."""

    @plgpu.inline_mgpu(
        arg_types=(),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def number(_: Any) -> Any:
        index = arith.remui(
            utils.warp_idx(sync=False), utils.c(WARPS, ir.IntegerType.get_signless(32))
        )
        layout = fragmented_array.WGSplatFragLayout(())
        return fragmented_array.FragmentedArray.splat(index, (), layout, is_signed=True)

    return number()


class Program(mosaic_program.Program):
    """One warpgroup, which is one program; base of the classes of all kernels.

    Args:
        refs: the operands and maps of numbers of `Plan.part`, as `widen` has them; cosines and
            sines, if q and k turn, and the table of bias and mask (`make_tables`); what the kernel
            writes; shared memory and a barrier.
        task, plan: as the base has them.
        needs: of the backward pass.

    Attributes:
        targets: the refs that the kernel writes.
    """

    plan: Plan

    def __init__(self, refs: tuple, task: Task, plan: Plan, needs: Needs):
        part, self.needs = plan.part, needs
        numbers = [*part.tiles, *part.boxes]
        arrays, written = len(numbers) + part.maps, part.results + part.result_maps
        super().__init__(refs, task, plan, sources=arrays)
        take, self.added = self.take, self.take()
        self.boxes = boxes = plan.boxes
        memory = arrays + written + 1 + plan.held_sums
        taken = arrays + (self.table is not None) + 1
        self.targets = [take() for _ in range(len(refs) - memory - taken)]
        self.held = {operand: self.take_memory() for operand in numbers}
        self.held_maps = [self.take_memory() for _ in range(part.maps)]
        self.results = [self.take_memory() for _ in range(written)]
        self.ready = take()
        self.held_sums = [take() for _ in range(plan.held_sums)]
        residues, tile = divide(self.place, boxes.tiles)
        self.residues = divide(residues, boxes.dilation[1])
        down, across = divide(tile, boxes.across.tiles)
        self.kind = boxes.down.kind(down) * len(boxes.across.examples) + boxes.across.kind(across)
        self.start = down * boxes.down.tile, across * boxes.across.tile
        axes = boxes.down, boxes.across
        self.origin = tuple(axis.first(x) for axis, x in zip(axes, self.start, strict=True))
        self.layouts = [
            layout(self.dtype)
            for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
        ]

    # Copies

    def copy(self, ref: Any, held: Any, item: Array, head: Any, ready: Any = None) -> None:
        """Starts the copy of a tile or a box into shared memory or, without a barrier, out of it.

        Interpret mode copies each row by itself, because it has no box of several.
        """
        rows, columns = held.shape[:2]
        y, x = self.start if columns == self.boxes.across.tile else self.origin
        (dy, dx), (class_y, class_x) = self.boxes.dilation, self.residues
        for row in range(rows) if self.task.interpret else [None]:
            down = pl.ds(y, rows) if row is None else y + row
            if len(ref.shape) == 4:
                number = (head * dy + class_y) * dx + class_x
                there = ref.at[item, down, number, pl.ds(x, columns)]
            else:
                width = self.task.head_dim
                channel = (class_x * (ref.shape[-1] // (dx * width)) + head) * width
                there = ref.at[item, down, class_y, pl.ds(x, columns), pl.ds(channel, width)]
            here = held if row is None else held.at[row]
            if ready is None:
                plgpu.copy_smem_to_gmem(here, there)
            else:
                plgpu.copy_gmem_to_smem(there, here, ready)

    def fetch(self, i: Array | int, stage: Array | int) -> None:
        """Starts the copies of the i-th example."""

        def copies() -> None:
            item, ready = self.first + i, self.ready.at[stage]
            offsets = (*self.task.offsets(), 0, 0)
            memory = [(offsets[x], self.held[x]) for x in sorted(self.held)]
            memory += [(0, held) for held in self.held_maps]
            for source, (offset, held) in zip(self.sources, memory, strict=True):
                self.copy(source, held[0].at[stage], item, self.head + offset, ready)

        self.by_one_warp(0, copies)

    def finish(self, i: Array, stage: Array, results: list[tuple[Any, int, Array]]) -> None:
        """Starts copying out (target, first head, values) of the i-th example; fetches another.

        All warps have read what they need of this example.
        """
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the previous example
        for held, (_, _, x) in zip(self.results, results, strict=True):
            ref = held[1].at[0]
            x = x.astype(ref.dtype)
            if self.task.interpret:
                ref[...] = x.reshape(ref.shape)
            elif len(x.shape) == 1:
                ref[...] = x
            else:
                ref.at[0][...] = x
        plgpu.commit_smem()

        def copies() -> None:
            for held, (target, offset, _) in zip(self.results, results, strict=True):
                self.copy(target, held[0].at[0], self.first + i, self.head + offset)

        self.by_one_warp(1, copies)
        following = i + self.plan.stages
        pl.when(following < self.items)(lambda: self.fetch(following, stage))

    # Rows in registers

    def load(self, operand: int, stage: Array, block: int = 0) -> Float[Array, "64 D"]:
        """Loads a tile, or a block of a box."""
        ref = self.held[operand][1].at[stage]
        if not self.task.interpret:
            return plgpu.load(ref.at[block], layout=TILE)
        rows = ROWS // ref.shape[1]
        return ref[pl.ds(block * rows, rows)].reshape(ROWS, -1)

    def load_numbers(self, stage: Array) -> Float[Array, " 64"]:
        """Loads the numbers of a tile's tokens."""
        ref = self.held_maps[0][1].at[stage]
        if self.task.interpret:
            return ref[...].reshape(ROWS)
        return plgpu.load(ref, layout=ROW, optimized=False)

    def turn_tile(self, x: Float[Array, "64 D"], *, back: bool = False) -> Float[Array, "64 D"]:
        """Turns a tile (or turns it back) and rounds it once."""
        return turn(x, self.turns(self.place, 0, slice_block(0)), self.dtype, back=back)

    def turn_box(self, operand: int, stage: Array) -> None:
        """Turns the tokens of a box in shared memory, for all warps."""
        if self.table is None:
            return
        ref = self.held[operand][1].at[stage]
        for block in range(self.boxes.blocks):
            angles = self.turns(self.place, 1 + block, slice_block(0))
            x = turn(self.load(operand, stage, block), angles, self.dtype)
            if self.task.interpret:
                rows = ROWS // ref.shape[1]
                ref[pl.ds(block * rows, rows)] = x.reshape(rows, *ref.shape[1:])
            else:
                ref.at[block][...] = x
        plgpu.commit_smem()

    # Products

    def warps(self) -> list[Array]:
        """The number of the warp; in interpret mode, which has none, those of all."""
        if self.task.interpret:
            return [jnp.int32(warp) for warp in range(WARPS)]
        return [number_of_warp()]

    def sum(self, x: Float[Array, "64 _"]) -> Float[Array, "64 _"]:
        """The initial value of a sum of products."""
        return x if self.task.interpret else rename(x, TILE, self.layouts[2])

    def factor(self, x: Float[Array, "64 _"]) -> Float[Array, "64 _"]:
        """The left operand of products."""
        return x if self.task.interpret else rename(x, TILE, self.layouts[0])

    def total(self, x: Float[Array, "64 _"]) -> Float[Array, "64 _"]:
        """A finished sum of products."""
        return x if self.task.interpret else rename(x, self.layouts[2], TILE)

    def multiply(
        self,
        total: Array,
        factor: Array,
        operand: int,
        stage: Array,
        rows: list[Array],
        *,
        by_token: bool = False,
    ) -> Float[Array, "64 _"]:
        """Adds products with a row of a box, the same number of it for each warp or one of each.

        They are sums over the row's tokens or, `by_token`, a number for each of them.
        """
        ref = self.held[operand][-1].at[stage]
        if self.task.interpret:
            parts = [ref[row].T if by_token else ref[row] for row in rows]
            factors = jnp.split(factor, len(rows))
            return total + jnp.concatenate([*map(product, factors, parts)])
        (row,) = rows
        part = ref.at[row].transpose((1, 0)) if by_token else ref.at[row]
        return plgpu.mma(total, factor, plgpu.load(part, layout=self.layouts[1]))

    def load_added(self, row: Any) -> Float[Array, "64 width"]:
        """A row of the table of bias and mask."""
        set_index, head = self.select_shared(self.added, 2)
        return self.sum(
            plgpu.load(self.added.at[set_index, self.kind, head, row], layout=TILE, optimized=False)
        )

    def starts(self) -> list[Array]:
        """The first row of keys of a warp."""
        return [self.boxes.first_row(self.start[0], warp) for warp in self.warps()]

    def run(self) -> None:
        """Computes all examples of the program."""
        for stage in range(self.plan.stages):
            pl.when(stage < self.items)(functools.partial(self.fetch, stage, stage))
        self.run_examples()
        plgpu.wait_smem_to_gmem(0)

    def run_examples(self) -> None:
        """Computes all examples, and writes the sum of the gradients of their angles.

        Their copies have been started or will be by `finish`.
        """
        angles = zeros(self.task.pairs) if self.needs.freqs else ()
        angles = repeat(self.items, self.example, angles)
        if self.needs.freqs:
            total = self.select_program(self.targets[-1])
            store(total, angles, interpret=self.task.interpret)


class Forward(Program):
    """The output [B, T, N, D] and lse of q, k and v."""

    def __init__(self, refs: tuple, task: Task, plan: Plan, needs: Needs):
        super().__init__(refs, task, plan, needs)
        reach = self.boxes.reach
        most = MOST_ROWS[self.task.head_dim]
        self.rows = max(n for n in range(1, most + 1) if reach % n == 0)
        self.parts, self.warp_starts = reach // self.rows, self.starts()
        # The table of bias and mask stays in registers, if it has few rows.
        kinds = self.added.shape[3]
        held = self.parts == 1 and kinds * self.boxes.width <= HELD_COLUMNS
        self.logit_table = [self.load_added(kind) for kind in range(kinds)] if held else None

    def add_part(self, part: Any, q: Array, stage: Array, carry: tuple | None) -> tuple:
        """Adds some rows of keys to the softmax, which is online if there are several parts."""
        places, logits = [], []
        for i in range(self.rows):
            row = part * self.rows + i
            kind, starts = self.boxes.row_kind(row), [x + row for x in self.warp_starts]
            added = self.logit_table[kind] if self.logit_table else self.load_added(kind)
            logits.append(self.total(self.multiply(added, q, 1, stage, starts, by_token=True)))
            places.append(starts)
        unit, width = np.float32(self.task.scale * LOG2E), self.boxes.width
        top = jnp.max(functools.reduce(jnp.maximum, logits), axis=1) * unit
        if carry is not None:
            before, total, out = carry
            top = jnp.maximum(before, top)
            shrink = jnp.exp2(before - top)
            total, out = total * shrink, self.total(out)
            out = self.sum(out * spread(shrink, self.task.head_dim))
        else:
            total, out = 0, self.sum(zeros(self.task.head_dim))
        weights = [jnp.exp2(x * unit - spread(top, width)) for x in logits]
        total += jnp.sum(functools.reduce(operator.add, weights), axis=1)
        for starts, x in zip(places, weights, strict=True):
            out = self.multiply(out, self.factor(x.astype(self.dtype)), 2, stage, starts)
        return top, total, out

    def example(self, i: Array, angles: tuple) -> tuple:
        """Computes the tile of the i-th example."""
        _, stage = divide(i, self.plan.stages)
        plgpu.barrier_wait(self.ready.at[stage])
        q = self.factor(self.turn_tile(self.load(0, stage)))
        self.turn_box(1, stage)
        if self.parts == 1:
            top, total, out = self.add_part(0, q, stage, None)
        else:
            full = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)
            carry = full(MASKED), full(0), self.sum(zeros(self.task.head_dim))
            body = lambda part, carry: self.add_part(part, q, stage, carry)
            top, total, out = repeat(self.parts, body, carry)
        out = self.total(out) * spread(1 / total, self.task.head_dim)
        lse = top + jnp.log2(total)
        self.finish(i, stage, [(self.targets[0], 0, out), (self.targets[1], 0, lse)])
        return angles
