"""The programs of the attention kernels, which `triton` launches.

A row of D channels is held in pieces, because arrays in registers can be split but not joined:
first and second members of the pairs that turn, and the other channels. A product over channels is
the sum of the pieces' products.
"""

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention.arithmetic import (
    LOG2E,
    MASKED,
    dot,
    exp2,
    fma,
    keep,
    negative,
)
from rope_jax_kernels.attention.kernel import Operands
from rope_jax_kernels.attention.slots import Slots, padded_size
from rope_jax_kernels.attention.task import Launch, Task


@dataclasses.dataclass(frozen=True)
class Columns:
    """Channels of one piece, padded to a power of two, and a mask of those inside, None for all."""

    channel: Int[Array, " C"]
    inside: Bool[Array, " C"] | None

    @classmethod
    def first(cls, channel: Int[Array, " C"], count: int) -> "Columns":
        """The first `count` of these channels."""
        (size,) = channel.shape
        inside = None if count == size else jnp.arange(size, dtype=jnp.int32) < count
        return cls(channel, inside)

    def mask(self, slots: Slots) -> Bool[Array, "slots C"]:
        """Mask of the numbers that exist in the rows of a tile or block."""
        exists = jnp.broadcast_to(slots.exists[:, None], (slots.exists.size, self.channel.size))
        return exists if self.inside is None else exists & self.inside[None, :]


def row_pieces(task: Task) -> list[Columns]:
    """The pieces of a row: both members of the pairs that turn, and other channels, if any."""
    runs = []
    if task.pairs:
        pair = jnp.arange(padded_size(task.pairs), dtype=jnp.int32)
        members = (pair, task.pairs + pair) if task.pairing == "half" else (2 * pair, 2 * pair + 1)
        runs = [Columns.first(member, task.pairs) for member in members]
    unturned = task.head_dim - 2 * task.pairs
    if unturned:
        column = jnp.arange(padded_size(unturned), dtype=jnp.int32)
        runs.append(Columns.first(2 * task.pairs + column, unturned))
    return runs


def whole_row(task: Task) -> Columns:
    """All channels as one piece."""
    column = jnp.arange(padded_size(task.head_dim), dtype=jnp.int32)
    return Columns.first(column, task.head_dim)


def load(
    ref: Any, item: Int[Array, ""], slots: Slots, head: Int[Array, ""], columns: Columns
) -> Float[Array, "slots C"]:
    """Loads a piece of the rows of a tile or block, with zeros for missing tokens."""
    place = ref.at[item, slots.token[:, None], head, columns.channel[None, :]]
    return plt.load(place, mask=columns.mask(slots), other=0)


def store(
    ref: Any,
    item: Int[Array, ""],
    slots: Slots,
    head: Int[Array, ""],
    columns: Columns,
    value: Float[Array, "slots C"],
) -> None:
    """Writes a piece, rounded once."""
    place = ref.at[item, slots.token[:, None], head, columns.channel[None, :]]
    plt.store(place, value.astype(ref.dtype), mask=columns.mask(slots))


class Turner:
    """The rotation of a kernel's rows, from refs (cos, sin) [N or 1, T, R] or ().

    Where the frequencies need a gradient, (cos, sin, coords), with coords [T, A].
    """

    def __init__(self, task: Task, refs: tuple, head: Int[Array, ""]):
        self.task, self.columns = task, row_pieces(task)
        self.tables, self.coords = refs[:2], refs[2:]
        self.head = head if refs and refs[0].shape[0] > 1 else 0

    def turns(self, slots: Slots) -> list[Float[Array, "slots R"]]:
        """Cosine and sine of the slots' angles; empty without rotation."""
        mask = self.columns[0].mask(slots)
        pair = jnp.arange(mask.shape[1], dtype=jnp.int32)
        return [
            plt.load(ref.at[self.head, slots.coord[:, None], pair[None, :]], mask=mask, other=0)
            for ref in self.tables
        ]

    def load(
        self, ref: Any, item: Int[Array, ""], slots: Slots, head: Int[Array, ""]
    ) -> list[Array]:
        """Loads rows of queries or keys in pieces, and turns them."""
        pieces = [load(ref, item, slots, head, columns) for columns in self.columns]
        if self.tables:
            (cos, sin), dtype = self.turns(slots), pieces[0].dtype
            a, b = (piece.astype(jnp.float32) for piece in pieces[:2])
            turned = fma(self.task, a, cos, negative(b) * sin), fma(self.task, b, cos, a * sin)
            pieces[:2] = [x.astype(dtype) for x in turned]
        return pieces

    def store_back(
        self,
        ref: Any,
        item: Int[Array, ""],
        slots: Slots,
        head: Int[Array, ""],
        pieces: list[Array],
    ) -> None:
        """Turns the gradient of turned rows back and writes it."""
        if self.tables:
            (cos, sin), (a, b) = self.turns(slots), pieces[:2]
            turned = fma(self.task, a, cos, b * sin), fma(self.task, b, cos, negative(a) * sin)
            pieces = [*turned, *pieces[2:]]
        for columns, piece in zip(self.columns, pieces, strict=True):
            store(ref, item, slots, head, columns, piece)

    def gradient(self, slots: Slots, turned: list[Array], gradients: list[Array]) -> list[Array]:
        """The rows' contribution to the gradient of the frequencies, [R] for each axis.

        Computed from the turned rows and their gradients; empty where it is not needed.
        """
        if not self.coords:
            return []
        (a, b), (da, db) = (x.astype(jnp.float32) for x in turned[:2]), gradients[:2]
        dtheta = fma(self.task, db, a, negative(da) * b)
        (coords,), sums = self.coords, []
        for axis in range(coords.shape[1]):
            place = coords.at[slots.coord, axis]
            along = plt.load(place, mask=slots.exists, other=0).astype(jnp.float32)
            sums.append(jnp.sum(along[:, None] * dtheta, axis=0))
        return sums

    def no_gradient(self) -> list[Array]:
        """Zeros of the shapes of `gradient`; empty where that is not needed."""
        axes = self.coords[0].shape[1] if self.coords else 0
        return [jnp.zeros(self.columns[0].channel.shape, jnp.float32)] * axes


class Queries(NamedTuple):
    """A tile or block of queries.

    Attributes:
        slots: their tokens.
        q: turned, in pieces.
        dout: the output's gradient; None in the forward pass, like lse and delta.
        lse: infinite for a missing query, whose weights then are 0.
        delta: the sum over channels of the output times its gradient.
    """

    slots: Slots
    q: list[Array]
    dout: Float[Array, "slots D"] | None = None
    lse: Float[Array, " slots"] | None = None
    delta: Float[Array, " slots"] | None = None


class Keys(NamedTuple):
    """A tile or block of keys: their tokens, the turned keys in pieces, and their values."""

    slots: Slots
    k: list[Array]
    v: Float[Array, "slots D"]


def compute_logits(
    launch: Launch,
    queries: Queries,
    keys: Keys,
    bias: tuple,
    head: Int[Array, ""],
    *,
    by_key: bool = False,
) -> tuple:
    """Logits, -inf for pairs that are not allowed, and the positive factor to units of log 2.

    The factor is left to the multiply-add that subtracts their maximum. Logits of missing queries
    are arbitrary. With `by_key`, keys are in rows, also of the bias.
    """
    task, tiles = launch.task, launch.tiles
    q_slots, k_slots = queries.slots, keys.slots
    if bias:  # before the products: Triton then computes the softmax in their layout
        rows, columns = (k_slots, q_slots) if by_key else (q_slots, k_slots)
        bias_tile = plt.load(bias[0].at[head, rows.line[:, None], columns.line[None, :]])
    products = [
        dot(b, a, (1, 1)) if by_key else dot(a, b, (1, 1))
        for a, b in zip(queries.q, keys.k, strict=True)
    ]
    # Not `sum`, which begins with an addition of 0.
    logits, unit = functools.reduce(operator.add, products), np.float32(1)
    if bias:
        logits, unit = fma(task, logits, task.scale, bias_tile.astype(jnp.float32)), LOG2E
    elif task.scale > 0:
        unit = np.float32(task.scale * LOG2E)
    else:
        logits *= np.float32(task.scale * LOG2E)
    sees = tiles.sees(q_slots, k_slots)
    sees = sees.T if by_key else sees
    return jnp.where(sees, logits, -np.float32(np.inf)), unit


def over_blocks(count: int, body: Any, carry: Any) -> Any:
    """A loop over blocks, unrolled if there is only one."""
    return body(jnp.int32(0), carry) if count == 1 else jax.lax.fori_loop(0, count, body, carry)


def over_examples(
    launch: Launch, batch: int, body: Callable[[Int[Array, ""], Any], Any], carry: Any
) -> Any:
    """carry = body(item, carry) for each example of a program."""
    first = pl.program_id(2) * launch.each
    if launch.each == 1:
        return body(first, carry)
    rounds = jnp.minimum(launch.each, batch - first) if batch % launch.each else launch.each
    return jax.lax.fori_loop(0, rounds, lambda i, carry: body(first + i, carry), carry)


def forward_kernel(operands: Operands, out_ref: Any, lse_ref: Any, *, launch: Launch) -> None:
    """One tile of queries, of several examples: the output and lse."""
    (q_ref, k_ref, v_ref), turning, bias = operands
    task, tiles = launch.task, launch.tiles
    head, tile = pl.program_id(0), pl.program_id(1)
    q_head, k_head, v_head = (head + offset for offset in task.offsets())
    turner, row = Turner(task, turning, head), whole_row(task)
    q_slots = tiles.tile(tile)

    def attend(item: Int[Array, ""], nothing: tuple) -> tuple:
        queries = Queries(q_slots, turner.load(q_ref, item, q_slots, q_head))

        def step(block: Int[Array, ""], carry: tuple) -> tuple:
            top, total, out = carry
            k_slots = tiles.block(tile, block)
            k = turner.load(k_ref, item, k_slots, k_head)
            v = load(v_ref, item, k_slots, v_head, row)
            logits, unit = compute_logits(launch, queries, Keys(k_slots, k, v), bias, head)
            higher = jnp.maximum(top, unit * jnp.max(logits, axis=1))
            weights = exp2(task, fma(task, logits, unit, negative(higher)[:, None]))
            shrink = exp2(task, top - higher)
            out = out * shrink[:, None] + dot(weights.astype(v.dtype), v, (1, 0))
            return higher, total * shrink + jnp.sum(weights, axis=1), out

        rows = q_slots.token.shape[0]
        start = (
            jnp.full((rows,), MASKED),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, row.channel.shape[0]), jnp.float32),
        )
        top, total, out = over_blocks(tiles.blocks, step, start)
        total = jnp.where(total == 0, 1, total)  # 0 where a bias leaves a query no key
        store(out_ref, item, q_slots, head, row, out * (1 / total)[:, None])
        plt.store(lse_ref.at[item, head, q_slots.token], top + jnp.log2(total), mask=q_slots.exists)
        return nothing

    over_examples(launch, q_ref.shape[0], attend, ())


class Backward:
    """The operands of a backward kernel, and the gradients of one block of logits.

    The data are q, k, v, the output's gradient, lse, and the output or delta.
    """

    def __init__(self, operands: Operands, launch: Launch):
        self.launch, self.tiles, self.task = launch, launch.tiles, launch.task
        data, turning, self.bias = operands
        self.q, self.k, self.v, self.dout, self.lse, self.out_or_delta = data
        self.head, self.tile = pl.program_id(0), pl.program_id(1)
        self.q_head, self.k_head, self.v_head = (
            self.head + offset for offset in self.task.offsets()
        )
        self.turner, self.row = Turner(self.task, turning, self.head), whole_row(self.task)

    def for_example(self, item: Int[Array, ""]) -> "Backward":
        """A copy of these operands for one example."""
        example = copy.copy(self)
        example.item = item
        return example

    def queries(self, slots: Slots) -> Queries:
        """Loads a tile or block of queries, without their sums."""
        q = self.turner.load(self.q, self.item, slots, self.q_head)
        return Queries(slots, q, load(self.dout, self.item, slots, self.head, self.row))

    def with_sums(self, queries: Queries, *, delta: bool = False) -> Queries:
        """The queries with lse, and with delta, which is read or computed from the output."""
        slots = queries.slots
        lse = self.load_per_query(self.lse, slots, np.inf)
        if delta:
            return queries._replace(lse=lse, delta=self.load_per_query(self.out_or_delta, slots))
        out = load(self.out_or_delta, self.item, slots, self.head, self.row)
        product = out.astype(jnp.float32) * queries.dout.astype(jnp.float32)
        return queries._replace(lse=lse, delta=jnp.sum(product, axis=1))

    def keys(self, slots: Slots) -> Keys:
        """Loads a tile or block of keys."""
        k = self.turner.load(self.k, self.item, slots, self.k_head)
        return Keys(slots, k, load(self.v, self.item, slots, self.v_head, self.row))

    def load_per_query(self, ref: Any, slots: Slots, missing: float = 0) -> Float[Array, " slots"]:
        """Loads one number for each query, lse or delta."""
        place = ref.at[self.item, self.head, slots.token]
        return plt.load(place, mask=slots.exists, other=missing)

    def differentiate_logits(self, queries: Queries, keys: Keys, *, by_key: bool = False) -> tuple:
        """(weights, gradient of the scaled logits), float32 [queries, keys].

        With `by_key` [keys, queries].
        """
        terms = queries, keys, self.bias, self.head
        logits, unit = compute_logits(self.launch, *terms, by_key=by_key)
        axis = 0 if by_key else 1
        lse = jnp.expand_dims(negative(queries.lse), axis)
        delta = jnp.expand_dims(queries.delta, axis)
        weights = exp2(self.task, fma(self.task, logits, unit, lse))
        v, dout = keys.v, queries.dout
        dweights = dot(v, dout, (1, 1)) if by_key else dot(dout, v, (1, 1))
        return weights, weights * (dweights - delta)

    def zeros(self, slots: Slots) -> list[Array]:
        """Zeros for the gradients of rows, one array for each piece."""
        return [
            jnp.zeros((slots.token.shape[0], columns.channel.shape[0]), jnp.float32)
            for columns in self.turner.columns
        ]

    def write(self, ref: Any, slots: Slots, head: Int[Array, ""], sums: list[Array]) -> list[Array]:
        """Writes the gradient of rows before their rotation; returns that of the turned rows.

        Sums are products with the gradients of scaled logits. Scaling these first would make them
        subnormal in float16.
        """
        pieces = [piece * np.float32(self.task.scale) for piece in sums]
        self.turner.store_back(ref, self.item, slots, head, pieces)
        return pieces

    def finish(self, sums: tuple, dfreqs: list[Array]) -> None:
        """Writes this program's part of the gradient of the frequencies, where it is needed."""
        pair = jnp.arange(padded_size(self.task.pairs), dtype=jnp.int32)
        for axis, total in enumerate(dfreqs):
            place = sums[0].at[pl.program_id(2), self.tile, self.head, axis, pair]
            plt.store(place, total, mask=pair < self.task.pairs)


def closed_kernel(
    operands: Operands, gradients: tuple, totals: tuple, sums: tuple, *, launch: Launch
) -> None:
    """All gradients of a tile whose queries are all those that attend to its keys.

    Where there is a ref for totals, also the tile's part of the bias' gradient; it has one block
    then.
    """
    b = Backward(operands, launch)
    shape = launch.tiles.columns, launch.tiles.rows
    start = b.turner.no_gradient(), [jnp.zeros(shape, jnp.float32) for _ in totals]
    write_example = functools.partial(write_gradients, b, gradients)
    dfreqs, dbias = over_examples(launch, b.q.shape[0], write_example, start)
    b.finish(sums, dfreqs)
    for ref, total in zip(totals, dbias, strict=True):
        row, column = (jnp.arange(size, dtype=jnp.int32) for size in shape)
        plt.store(ref.at[b.tile, pl.program_id(2), b.head, row[:, None], column[None, :]], total)


def write_gradients(b: Backward, gradients: tuple, item: Int[Array, ""], carry: tuple) -> tuple:
    """Writes the gradients of one example's tile.

    Adds those of the frequencies and, where there is a sum for it, of the logits [keys, queries].
    """
    b, (dfreqs, dbias) = b.for_example(item), carry
    dq_ref, dk_ref, dv_ref = gradients * 3 if b.task.packed else gradients
    queries = b.with_sums(b.queries(b.tiles.tile(b.tile)))
    q_slots, q, dout, *_ = queries

    def step(block: Int[Array, ""], carry: tuple) -> tuple:
        dq, dfreqs, dbias = carry
        keys = b.keys(b.tiles.block(b.tile, block))
        k_slots, k, _ = keys
        weights, dlogits = b.differentiate_logits(queries, keys, by_key=True)
        dbias = add(dbias, [dlogits] * len(dbias))
        weights, dlogits = keep([x.astype(dout.dtype) for x in (weights, dlogits)])
        dv = dot(weights, dout, (1, 0))
        store(dv_ref, b.item, k_slots, b.v_head, b.row, dv)
        sums = [dot(dlogits, piece, (1, 0)) for piece in q]
        dk = b.write(dk_ref, k_slots, b.k_head, sums)
        dfreqs = add(dfreqs, b.turner.gradient(k_slots, k, dk))
        return add(dq, [dot(dlogits, piece, (0, 0)) for piece in k]), dfreqs, dbias

    start = b.zeros(q_slots), dfreqs, dbias
    dq, dfreqs, dbias = over_blocks(b.tiles.blocks, step, start)
    dq = b.write(dq_ref, q_slots, b.q_head, dq)
    return add(dfreqs, b.turner.gradient(q_slots, q, dq)), dbias


def add(sums: list[Array], terms: list[Array]) -> list[Array]:
    """Adds a term to each sum."""
    return [total + term for total, term in zip(sums, terms, strict=True)]


def query_kernel(
    operands: Operands, dq_ref: Any, delta_ref: Any, sums: tuple, *, launch: Launch
) -> None:
    """The gradient of a tile of queries, and delta."""
    b = Backward(operands, launch).for_example(pl.program_id(2))
    queries = b.with_sums(b.queries(b.tiles.tile(b.tile)))
    q_slots, q, dout, _, delta = queries
    plt.store(delta_ref.at[b.item, b.head, q_slots.token], delta, mask=q_slots.exists)

    def step(block: Int[Array, ""], dq: list) -> list:
        keys = b.keys(b.tiles.block(b.tile, block))
        dlogits = b.differentiate_logits(queries, keys)[1].astype(dout.dtype)
        return [x + dot(dlogits, piece, (1, 0)) for x, piece in zip(dq, keys.k, strict=True)]

    dq = over_blocks(b.tiles.blocks, step, b.zeros(q_slots))
    dq = b.write(dq_ref, q_slots, b.q_head, dq)
    b.finish(sums, b.turner.gradient(q_slots, q, dq))


def key_kernel(
    operands: Operands, dq: tuple, gradients: tuple, sums: tuple, *, launch: Launch
) -> None:
    """The gradients of a tile of keys and its values, from delta; `launch.tiles` is transposed.

    A packed gradient is an input, with dq in it, and an output.
    """
    b = Backward(operands, launch).for_example(pl.program_id(2))
    dk_ref, dv_ref = gradients * 2 if dq else gradients
    keys = b.keys(b.tiles.tile(b.tile))
    k_slots, k, _ = keys

    def step(block: Int[Array, ""], carry: tuple) -> tuple:
        dk, dv = carry
        queries = b.with_sums(b.queries(b.tiles.block(b.tile, block)), delta=True)
        dout = queries.dout
        weights, dlogits = b.differentiate_logits(queries, keys, by_key=True)
        dlogits = dlogits.astype(dout.dtype)
        dk = [x + dot(dlogits, piece, (1, 0)) for x, piece in zip(dk, queries.q, strict=True)]
        return dk, dv + dot(weights.astype(dout.dtype), dout, (1, 0))

    start = (
        b.zeros(k_slots),
        jnp.zeros((k_slots.token.shape[0], b.row.channel.shape[0]), jnp.float32),
    )
    dk, dv = over_blocks(b.tiles.blocks, step, start)
    dk = b.write(dk_ref, k_slots, b.k_head, dk)
    store(dv_ref, b.item, k_slots, b.v_head, b.row, dv)
    b.finish(sums, b.turner.gradient(k_slots, k, dk))


def bias_kernel(operands: Operands, total_ref: Any, *, launch: Launch) -> None:
    """The gradient of the bias of one pair of tile and block.

    Summed over a group of examples, and over the tiles that share this part of the bias.
    """
    b, tiles = Backward(operands, launch), launch.tiles
    items, groups = b.q.shape[0] * tiles.repeats, total_ref.shape[0]
    parts, each, group = tiles.tiles // tiles.repeats, -(-items // groups), pl.program_id(2)
    part, block = divide(b.tile, tiles.blocks)

    def step(number: Int[Array, ""], total: Array) -> Array:
        work = group * each + number
        item, repeat = divide(jnp.minimum(work, items - 1), tiles.repeats)
        tile, example = repeat * parts + part, b.for_example(item)
        q_slots, k_slots = tiles.tile(tile), tiles.block(tile, block)
        q_slots = q_slots._replace(exists=q_slots.exists & (work < items))
        queries, keys = example.queries(q_slots), example.keys(k_slots)
        return total + example.differentiate_logits(example.with_sums(queries), keys)[1]

    total = jax.lax.fori_loop(0, each, step, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
    row = part * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    column = block * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
    plt.store(total_ref.at[group, b.head, row[:, None], column[None, :]], total)
