"""Common base of the attention kernels of `mosaic`: programs, shared memory, rows in registers.

A program owns one head and one place of the tokens (a tile or a window) of several successive
examples. Tokens are in blocks of 64 slots, one for each row of a warpgroup's matrix instructions.
The copy engine (TMA) loads them directly from the projection. One warp starts the copies, so that
the others do not issue their instructions.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention.slots import ROWS
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.device import MULTIPROCESSORS, vary_alike
from rope_jax_kernels.mosaic import select_shared

# Interpreted warpgroups are threads that are compiled when they start. They deadlock if other parts
# of the program hold all threads of the machine; with one warpgroup there is no such thread.
MOST_INTERPRETED = 1
MOST_ITEMS = 8  # examples of one program
MOST_SUMS = 2**24  # numbers (64 MiB) that programs write besides outputs, or those of one chunk
TILE, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
opaque = jax.lax.optimization_barrier  # hides from the compiler that an index is the same again


@dataclasses.dataclass(frozen=True)
class Plan:
    """The programs of a kernel; base of the plans of all patterns. Static.

    Attributes:
        groups: warpgroups of a program.
        programs: tiles or windows of an example, each of which takes a program for each head.
        sets: number of sets; examples of a set share their tables.
        in_set: examples of a set.
        items: most examples of a program.
    """

    groups: int
    programs: int
    sets: int
    in_set: int
    items: int

    @property
    def chunks(self) -> int:
        """Programs of one head and tile in one set, each for some of its examples."""
        return pl.cdiv(self.in_set, self.items)

    def sums(self, task: Task, *shape: int) -> jax.ShapeDtypeStruct:
        """Shape of the sums over each program's examples; see `Program.select_program`."""
        lead = self.sets, self.chunks, self.programs, task.heads
        return jax.ShapeDtypeStruct((*lead, *shape), jnp.float32)


def divide_examples(
    task: Task, programs: int, batch: int, sets: int, most: int = MOST_ITEMS, sums: int = 0
) -> dict[str, int]:
    """The fields of a `Plan` except `groups`.

    Examples of a program are chosen to keep all multiprocessors equally busy, counting half an
    example's time for start-up.

    Args:
        task: the problem.
        programs: of an example and a head.
        batch, sets: examples, and sets of them.
        most: examples of a program, unless all `sums` together would be more than `MOST_SUMS`.
        sums: numbers that each program adds up over its examples and writes.
    """
    in_set, per_item = batch // sets, task.heads * programs * sets

    def cost(items: int) -> float:
        return pl.cdiv(per_item * pl.cdiv(in_set, items), MULTIPROCESSORS) * (items + 0.5)

    items = min(range(1, min(most, in_set) + 1), key=cost)
    if sums:
        items = max(items, pl.cdiv(in_set, max(1, MOST_SUMS // (per_item * sums))))
    return {"programs": programs, "sets": sets, "in_set": in_set, "items": items}


def most_groups(task: Task, blocks: int) -> int:
    """Most warpgroups that divide these blocks evenly: one for each, unless interpreted."""
    most = MOST_INTERPRETED if task.interpret else blocks
    return max(n for n in range(1, most + 1) if blocks % n == 0)


def turning_table(
    turning: tuple, tokens: Int[Array | np.ndarray, "*slots"]
) -> tuple[Float[Array, "1 heads *slots _"]] | tuple[()]:
    """Cosines and sines of one set, side by side, for the token of each slot.

    Programs read them through the L2 cache.

    Args:
        turning: cosines and sines by token, as `kernel.tables` has them, or (); what follows them
            is ignored.
        tokens: of the slots; any where there is none.
    """
    return tuple(jnp.concatenate(x, axis=2)[None, :, tokens] for x in [turning[:2]] if x)


def sum_freqs_gradient(
    sums: Float[Array, "S chunks programs N slots R"],
    coords: Float[Array, "T A"],
    tokens: Int[Array | np.ndarray, "#programs slots"],
) -> Float[Array, "1 1 N A R"]:
    """The gradient of freqs.

    Args:
        sums: gradients of the angles of slots, which must be 0 where there is no token.
        coords: of the rotation.
        tokens: of the slots.
    """
    along = coords.astype(jnp.float32)[tokens]
    by_slot = along[:, None, :, :, None] * sums.sum((0, 1))[:, :, :, None]
    return by_slot.sum((0, 2))[None, None]


def launch(
    program: Callable[[tuple, Task, Any], "Program"],
    name: str,
    task: Task,
    plan: Plan,
    arrays: tuple,
    tables: tuple,
    outputs: list,
    scratch: list,
    *,
    synchronized: bool = False,
) -> tuple[Array, ...]:
    """Runs a kernel on the grid of its plan.

    Args:
        program: makes a `Program` of the kernel's refs, the task and the plan.
        name: of the kernel.
        task: the problem.
        plan: its programs.
        arrays: operands whose first axis is the batch.
        tables: the other operands.
        outputs: shapes of its results.
        scratch: its shared memory and barriers.
        synchronized: whether the compiler orders the accesses of a warpgroup to shared memory;
            otherwise `plgpu.commit_smem` does, where the program has it.
    """
    run = plgpu.kernel(
        lambda *refs: program(refs, task, plan).run(),
        out_type=outputs,
        scratch_types=scratch,
        grid=(task.heads * plan.programs * plan.sets * plan.chunks,),
        grid_names=("program",),
        num_threads=plan.groups,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=not synchronized,
        ),
        interpret=plgpu.InterpretGPUParams() if task.interpret else None,
        kernel_name=name,
    )
    # The results do not vary over manual mesh axes, whatever the types of the outputs say.
    return vary_alike(arrays, tuple(run(*arrays, *tables)))[1]


def buffer(task: Task, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for tiles [..., 64, width], as views for the copy engine and the matrix units.

    Both views hold rows one after the other and swizzle them alike. They are two because the engine
    divides the array in memory as its view is tiled, which needs a number of tokens that eight rows
    divide.
    """
    if task.interpret:
        return plgpu.SMEM(shape, dtype)
    return plgpu.RefUnion(
        *(
            plgpu.SMEM(shape, dtype, transforms=swizzle_transforms(shape[-1], dtype, tiled=tiled))
            for tiled in (False, True)
        )
    )


def swizzle_transforms(width: int, dtype: Any, *, tiled: bool) -> tuple:
    """Transforms of shared memory for rows of pieces of `width`."""
    swizzle = plgpu.SwizzleTransform(width * dtype.itemsize)
    return (plgpu.TilingTransform((8, width)), swizzle) if tiled else (swizzle,)


class Program(abc.ABC):
    """One warpgroup of one program; base of the classes of all kernels.

    Args:
        refs: arrays whose first axis is the batch; where queries and keys turn, their
            `turning_table`, the b-th of S sets for the b-th part of the examples; then what a
            subclass takes: other tables, results, shared memory and barriers.
        task: the problem.
        plan: its programs.
        sources: number of arrays whose first axis is the batch.

    Attributes:
        take: returns the next ref.
        meeting: a barrier of all warpgroups, which the subclass takes.
        first, items: the first example of the program, and how many it has.
    """

    meeting: Any

    def __init__(self, refs: tuple, task: Task, plan: Plan, *, sources: int):
        self.take = iter(refs).__next__
        self.task, self.plan = task, plan
        self.sources = [self.take() for _ in range(sources)]
        self.table = self.take() if task.pairs else None
        self.dtype = self.sources[0].dtype
        self.group = jax.lax.axis_index("group")
        # Programs that run together touch neighbouring memory: heads run fastest.
        rest, self.head = divide(jax.lax.axis_index("program"), task.heads)
        rest, self.place = divide(rest, plan.programs)
        self.set, self.chunk = divide(rest, plan.chunks) if plan.sets > 1 else (0, rest)
        self.first = self.set * plan.in_set + self.chunk * plan.items
        self.items = jnp.minimum(plan.items, plan.in_set - self.chunk * plan.items)

    @abc.abstractmethod
    def run(self) -> None:
        """Computes all examples of the program."""

    def take_memory(self) -> tuple[Any, ...]:
        """The views of the next shared memory, up to three: first that for the copy engine."""
        ref = self.take()
        return (ref,) * 3 if self.task.interpret else tuple(ref)

    def own_blocks(self, blocks: int) -> list[Array]:
        """The blocks of this warpgroup."""
        count = blocks // self.plan.groups
        return [self.group * count + i for i in range(count)]

    def by_one_warp(self, number: int, start: Callable[[], None], *, once: bool = False) -> None:
        """Starts copies by one warp of each warpgroup, or `once` by one of a program.

        By all warps where `jax.shard_map` tracks what varies: Mosaic GPU cannot separate warps
        there.
        """
        if once and self.plan.groups > 1:
            pl.when(self.group == 0)(lambda: self.by_one_warp(number, start))
        elif self.task.interpret or jax.typeof(self.sources[0]).manual_axis_type.varying:
            start()
        else:
            plgpu.warp_map(lambda warp: pl.when(warp == number)(start))

    def meet(self) -> None:
        """Waits for all warpgroups, which then see what the others wrote to shared memory."""
        plgpu.commit_smem()
        if self.plan.groups > 1:
            plgpu.barrier_arrive(self.meeting)
            plgpu.barrier_wait(self.meeting)

    def select_program(self, ref: Any) -> Any:
        """The part of this program in an array of `Plan.sums`."""
        return ref.at[self.set, self.chunk, self.place, self.head]

    def select_shared(self, ref: Any, axis: int) -> tuple[Array | int, Array | int]:
        """The indices of this set (axis 0) and head in a table that sets and heads may share."""
        return select_shared(self.set, ref.shape[0]), select_shared(self.head, ref.shape[axis])

    def turns(
        self, *slots: Any, first: int = 0, pairs: int | None = None
    ) -> tuple[Array, Array] | None:
        """Cosines and sines, [64, pairs], of angles of 64 slots of the table, from a pair on."""
        if self.table is None:
            return None
        place = *self.select_shared(self.table, 1), *slots
        cos, sin = (
            plgpu.load(
                self.table.at[*place, pl.ds(x, pairs or self.task.pairs)],
                layout=TILE,
                optimized=False,
            )
            for x in (first, first + self.task.pairs)
        )
        return cos, sin


def slice_block(block: Array | int) -> Any:
    """The slice of a block of 64 slots."""
    return pl.ds(block * ROWS, ROWS)


def zeros(columns: int, dtype: Any = jnp.float32) -> Float[Array, "64 _"]:
    """Rows of zeros, such as a sum before its first term."""
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), dtype), TILE)


def spread(x: Float[Array, " n"], columns: int, dim: int = 0) -> Float[Array, "64 _"]:
    """Repeats numbers of rows (dim 0) or columns (1)."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (ROWS, columns), (dim,)), TILE)


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
    x: Float[Array, "64 D"],
    angles: tuple[Array, Array] | None,
    dtype: Any,
    *,
    back: bool = False,
) -> Float[Array, "64 D"]:
    """Turns rows by the cosines and sines [64, R] of their angles, or back; rounds them once."""
    if angles is None:
        return x.astype(dtype)
    cos, sin = angles
    sin, pairs = -sin if back else sin, cos.shape[1]
    a, b = (x[:, first : first + pairs].astype(jnp.float32) for first in (0, pairs))
    turned = [(a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)]
    others = [x[:, 2 * pairs :].astype(dtype)] if 2 * pairs < x.shape[1] else []
    return join([*turned, *others])


def angle_gradient(
    x: Float[Array, "64 D"], gradient: Float[Array, "64 D"], pairs: int
) -> Float[Array, "64 R"]:
    """The gradient of the angles of turned rows, from these and their gradient."""
    a, b = (x[:, first : first + pairs].astype(jnp.float32) for first in (0, pairs))
    return gradient[:, pairs : 2 * pairs] * a - gradient[:, :pairs] * b


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
