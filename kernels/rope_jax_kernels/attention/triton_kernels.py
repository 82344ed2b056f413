"""The programs of the attention kernels, which `triton` launches.

A row of D channels is held in pieces, because arrays in registers can be split but not joined:
first and second members of the pairs that turn, and the rest. A product over channels is the sum
of the pieces' products.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention.patterns import Neighborhood, Pattern
from rope_jax_kernels.attention.tiles import Slots, Tiles, padded_size
from rope_jax_kernels.rotation import Pairing

LOG2E = np.float32(np.log2(np.e))
# The logit of a masked pair; finite, so that rows without any key stay finite.
MASKED = np.float32(-1e30)


@dataclasses.dataclass(frozen=True)
class Task:
    """One attention problem. Static.

    Attributes:
        pattern: which tokens attend to which.
        places: shape of the tokens of one example, (L,) or (H, W).
        heads, head_dim: N and D.
        packed: whether q, k and v are one array [B, T, 3 * N, D] or three [B, T, N, D].
        pairs: R, 0 without rotation.
        pairing: which channels turn together.
        scale: of the logits.
        interpret: whether to run in interpret mode.
        implementation: of the forward kernel, "triton" or "mosaic"; the backward kernels are
            Triton's.
        biased: whether there is a bias.
        tile: measured sizes of the kernels' tiles by part, see `triton.plan`; () for its own.
    """

    pattern: Pattern
    places: tuple[int, ...]
    heads: int
    head_dim: int
    packed: bool
    pairs: int
    pairing: Pairing
    scale: float
    interpret: bool
    implementation: str = "triton"
    biased: bool = False
    tile: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of one example, T."""
        return int(np.prod(self.places))

    def offsets(self) -> tuple[int, int, int]:
        """First heads of q, k and v."""
        return (0, self.heads, 2 * self.heads) if self.packed else (0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A task, its tiles, and the warps and pipeline stages of a program. Static."""

    task: Task
    tiles: Tiles
    warps: int
    stages: int = 1

    @property
    def closed(self) -> bool:
        """Whether a tile holds all queries that attend to its keys."""
        return (
            not isinstance(self.task.pattern, Neighborhood)
            and self.tiles.tiles == self.tiles.repeats
        )


@dataclasses.dataclass(frozen=True)
class Columns:
    """Channels of one piece, padded to a power of two, and which of them exist: None if all do."""

    channel: Int[Array, " C"]
    inside: Bool[Array, " C"] | None

    @classmethod
    def of(cls, channel: Int[Array, " C"], count: int) -> "Columns":
        """The first `count` of these channels."""
        (size,) = channel.shape
        inside = None if count == size else jnp.arange(size, dtype=jnp.int32) < count
        return cls(channel, inside)

    def mask(self, slots: Slots) -> Bool[Array, "slots C"]:
        """Which numbers of the rows of a tile or block exist."""
        exists = jnp.broadcast_to(slots.exists[:, None], (slots.exists.size, self.channel.size))
        return exists if self.inside is None else exists & self.inside[None, :]


def pieces_of(task: Task) -> list[Columns]:
    """The pieces of a row: both members of the pairs that turn, and the rest, if there are any."""
    runs = []
    if task.pairs:
        pair = jnp.arange(padded_size(task.pairs), dtype=jnp.int32)
        members = (pair, task.pairs + pair) if task.pairing == "half" else (2 * pair, 2 * pair + 1)
        runs = [Columns.of(member, task.pairs) for member in members]
    rest = task.head_dim - 2 * task.pairs
    if rest:
        column = jnp.arange(padded_size(rest), dtype=jnp.int32)
        runs.append(Columns.of(2 * task.pairs + column, rest))
    return runs


def whole_row(task: Task) -> Columns:
    """All channels as one piece."""
    column = jnp.arange(padded_size(task.head_dim), dtype=jnp.int32)
    return Columns.of(column, task.head_dim)


def load(
    ref: Any, item: Int[Array, ""], slots: Slots, head: Int[Array, ""], columns: Columns
) -> Float[Array, "slots C"]:
    """A piece of the rows of a tile or block, with zeros for missing tokens."""
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


def _round(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    return jnp.floor(x + np.float32(0.5))


def cos_sin(
    theta: Float[Array, "*n"], nearest: Callable[[Array], Array] = _round
) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """Cosine and sine of float32 radians, within 2e-7 of the exact values up to 10^4 radians.

    The compiler's own are two functions of twice the length, with a branch for huge angles that
    keeps an array in local memory. Here the nearest multiple of pi/2 is subtracted in three parts
    whose products are exact (Cody and Waite), and the polynomials are those of Cephes.

    Args:
        theta: radians.
        nearest: rounds to whole numbers, by an operation that the backend has.
    """
    turns = nearest(theta * np.float32(2 / np.pi))
    r = (
        theta
        - turns * np.float32(1.5703125)
        - turns * np.float32(4.837512969970703125e-4)
        - turns * np.float32(7.549789948768648e-8)
    )
    square = r * r
    sin = r + r * square * (
        np.float32(-1.6666654611e-1)
        + square * (np.float32(8.3321608736e-3) + square * np.float32(-1.9515295891e-4))
    )
    even = np.float32(4.166664568298827e-2) + square * (
        np.float32(-1.388731625493765e-3) + square * np.float32(2.443315711809948e-5)
    )
    cos = 1 - np.float32(0.5) * square + square * square * even
    quarter = turns.astype(jnp.int32) & 3
    odd = (quarter & 1) != 0
    cos, sin = jnp.where(odd, sin, cos), jnp.where(odd, cos, sin)
    return jnp.where((quarter == 1) | (quarter == 2), -cos, cos), jnp.where(quarter >= 2, -sin, sin)


class Turner:
    """The rotation of a kernel's rows, from refs (cos, sin) [N or 1, T, R] or ().

    Where the gradient of the frequencies is wanted, (cos, sin, coords), with coords [T, A].
    """

    def __init__(self, task: Task, refs: tuple, head: Int[Array, ""]):
        self.task, self.columns = task, pieces_of(task)
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
        """The pieces of rows of queries or keys, turned."""
        pieces = [load(ref, item, slots, head, columns) for columns in self.columns]
        if self.tables:
            (cos, sin), dtype = self.turns(slots), pieces[0].dtype
            a, b = (piece.astype(jnp.float32) for piece in pieces[:2])
            turned = fma(self.task, a, cos, -b * sin), fma(self.task, b, cos, a * sin)
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
            turned = fma(self.task, a, cos, b * sin), fma(self.task, b, cos, -a * sin)
            pieces = [*turned, *pieces[2:]]
        for columns, piece in zip(self.columns, pieces, strict=True):
            store(ref, item, slots, head, columns, piece)

    def gradient(self, slots: Slots, turned: list[Array], gradients: list[Array]) -> list[Array]:
        """The rows' contribution to the gradient of the frequencies, [R] for each axis.

        Computed from the turned rows and their gradients.
        """
        (a, b), (da, db) = (x.astype(jnp.float32) for x in turned[:2]), gradients[:2]
        dtheta = fma(self.task, db, a, -da * b)
        (coords,) = self.coords
        return [
            jnp.sum(self._along(coords, axis, slots)[:, None] * dtheta, axis=0)
            for axis in range(coords.shape[1])
        ]

    def no_gradient(self) -> list[Array]:
        """Zeros of the shapes of `gradient`; empty where that is not wanted."""
        axes = self.coords[0].shape[1] if self.coords else 0
        return [jnp.zeros(self.columns[0].channel.shape, jnp.float32)] * axes

    @staticmethod
    def _along(coords: Any, axis: int, slots: Slots) -> Float[Array, " slots"]:
        """One coordinate of each slot, float32."""
        place = coords.at[slots.coord, axis]
        return plt.load(place, mask=slots.exists, other=0).astype(jnp.float32)


def dot(
    a: Float[Array, "_ _"], b: Float[Array, "_ _"], contract: tuple[int, int]
) -> Float[Array, "_ _"]:
    """The matrix product over one axis of each, in float32 (not rounded to TF32)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def fma(task: Task, a: Any, b: Any, c: Any) -> Float[Array, "*n"]:
    """a * b + c, rounded once; the compiler would keep two instructions. Float32, broadcast."""
    if task.interpret:
        return a * b + c
    (result,) = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=jnp.broadcast_arrays(*(jnp.asarray(x, jnp.float32) for x in (a, b, c))),
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[
            jax.ShapeDtypeStruct(jnp.broadcast_shapes(*map(jnp.shape, (a, b, c))), jnp.float32)
        ],
    )
    return result


def exp2(task: Task, x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """2 to the power x in one instruction; results under 2^-126 are 0."""
    if task.interpret:
        return jnp.exp2(x)
    (result,) = plt.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def logits_of(
    launch: Launch,
    q: list[Array],
    k: list[Array],
    q_slots: Slots,
    k_slots: Slots,
    bias: tuple,
    head: Int[Array, ""],
) -> tuple:
    """Logits, -inf for pairs that are not allowed, and the positive factor to units of log 2.

    The factor is left to the multiply-add that subtracts their maximum. Rows of missing queries
    have any finite logits.
    """
    task, tiles = launch.task, launch.tiles
    logits, unit = sum(dot(a, b, (1, 1)) for a, b in zip(q, k, strict=True)), 1.0
    if task.scale > 0 and not bias:
        unit = task.scale * LOG2E
    else:
        logits *= np.float32(task.scale * LOG2E)
    if bias:
        entry = tiles.entry(q_slots, k_slots)
        mask = q_slots.exists[:, None] & k_slots.exists[None, :]
        added = plt.load(bias[0].at[head, entry], mask=mask, other=0)
        logits = fma(task, added.astype(jnp.float32), LOG2E, logits)
    return jnp.where(tiles.sees(q_slots, k_slots), logits, -np.float32(np.inf)), np.float32(unit)


def over_blocks(count: int, body: Any, carry: Any) -> Any:
    """A loop over blocks, unrolled if there is only one."""
    return body(jnp.int32(0), carry) if count == 1 else jax.lax.fori_loop(0, count, body, carry)


def forward_kernel(*refs: Any, launch: Launch, rotated: int, biased: int) -> None:
    """One tile of queries: the output and lse."""
    (q_ref, k_ref, v_ref), refs = refs[:3], refs[3:]
    turning, refs = refs[:rotated], refs[rotated:]
    bias, (out_ref, lse_ref) = refs[:biased], refs[biased:]
    task, tiles = launch.task, launch.tiles
    head, tile, item = (pl.program_id(axis) for axis in range(3))
    q_head, k_head, v_head = (head + offset for offset in task.offsets())
    turner, row = Turner(task, turning, head), whole_row(task)
    q_slots = tiles.tile(tile)
    q = turner.load(q_ref, item, q_slots, q_head)

    def step(block: Int[Array, ""], carry: tuple) -> tuple:
        top, total, out = carry
        k_slots = tiles.block(tile, block)
        k = turner.load(k_ref, item, k_slots, k_head)
        v = load(v_ref, item, k_slots, v_head, row)
        logits, unit = logits_of(launch, q, k, q_slots, k_slots, bias, head)
        higher = jnp.maximum(top, unit * jnp.max(logits, axis=1))
        weights = exp2(task, fma(task, logits, unit, -higher[:, None]))
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
    total = jnp.where(q_slots.exists, total, 1)
    store(out_ref, item, q_slots, head, row, out * (1 / total)[:, None])
    plt.store(lse_ref.at[item, head, q_slots.token], top + jnp.log2(total), mask=q_slots.exists)


class Backward:
    """The operands of a backward kernel, and the gradients of one block of logits.

    Operands are q, k, v, the output's gradient, lse, then the output or delta (for each query the
    sum over channels of the output times its gradient), then those of `Turner` and the bias.
    """

    def __init__(self, refs: tuple, *, launch: Launch, rotated: int, biased: int):
        self.launch, self.tiles, self.task = launch, launch.tiles, launch.task
        self.q, self.k, self.v, self.dout, self.lse, self.out_or_delta = refs[:6]
        turning, refs = refs[6 : 6 + rotated], refs[6 + rotated :]
        self.bias, self.targets = refs[:biased], refs[biased:]
        self.head, self.tile, self.item = (pl.program_id(axis) for axis in range(3))
        self.q_head, self.k_head, self.v_head = (
            self.head + offset for offset in self.task.offsets()
        )
        self.turner, self.row = Turner(self.task, turning, self.head), whole_row(self.task)

    def queries(self, slots: Slots) -> tuple:
        """(turned q, gradient of the output) of a tile or block."""
        q = self.turner.load(self.q, self.item, slots, self.q_head)
        return q, load(self.dout, self.item, slots, self.head, self.row)

    def keys(self, slots: Slots) -> tuple:
        """(turned k, v) of a tile or block."""
        k = self.turner.load(self.k, self.item, slots, self.k_head)
        return k, load(self.v, self.item, slots, self.v_head, self.row)

    def of_query(self, ref: Any, slots: Slots) -> Float[Array, " slots"]:
        """One number of each query, lse or delta."""
        return plt.load(ref.at[self.item, self.head, slots.token], mask=slots.exists, other=0)

    def delta(self, slots: Slots, dout: Float[Array, "slots D"]) -> Float[Array, " slots"]:
        """Delta of each query, from the output."""
        out = load(self.out_or_delta, self.item, slots, self.head, self.row)
        return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=1)

    def of_logits(
        self,
        q: list,
        dout: Array,
        k: list,
        v: Array,
        q_slots: Slots,
        k_slots: Slots,
        lse: Array,
        delta: Array,
    ) -> tuple:
        """(weights, gradient of the scaled logits), float32 [queries, keys]."""
        logits, unit = logits_of(self.launch, q, k, q_slots, k_slots, self.bias, self.head)
        weights = exp2(self.task, fma(self.task, logits, unit, -lse[:, None]))
        return weights, weights * (dot(dout, v, (1, 1)) - delta[:, None])

    def zeros(self, slots: Slots) -> list[Array]:
        """Zeros for the gradients of rows, one array for each piece."""
        return [
            jnp.zeros((slots.token.shape[0], columns.channel.shape[0]), jnp.float32)
            for columns in self.turner.columns
        ]

    def scaled(self, pieces: list[Array]) -> list[Array]:
        """Gradients of rows, from products with the gradients of scaled logits.

        Scaling these first would make them subnormal in float16.
        """
        return [piece * np.float32(self.task.scale) for piece in pieces]

    def finish(self, sums: list[Array]) -> None:
        """Writes this program's part of the gradient of the frequencies."""
        pair = jnp.arange(padded_size(self.task.pairs), dtype=jnp.int32)
        for axis, total in enumerate(sums):
            plt.store(
                self.targets[-1].at[self.item, self.tile, self.head, axis, pair],
                total,
                mask=pair < self.task.pairs,
            )


def closed_kernel(*refs: Any, launch: Launch, rotated: int, biased: int) -> None:
    """All gradients of a tile whose queries are all those that attend to its keys."""
    b = Backward(refs, launch=launch, rotated=rotated, biased=biased)
    dq_ref, dk_ref, dv_ref = b.targets[:1] * 3 if b.task.packed else b.targets[:3]
    q_slots = b.tiles.tile(b.tile)
    q, dout = b.queries(q_slots)
    lse, delta = b.of_query(b.lse, q_slots), b.delta(q_slots, dout)

    def step(block: Int[Array, ""], carry: tuple) -> tuple:
        dq, sums = carry
        k_slots = b.tiles.block(b.tile, block)
        k, v = b.keys(k_slots)
        weights, dlogits = b.of_logits(q, dout, k, v, q_slots, k_slots, lse, delta)
        store(
            dv_ref, b.item, k_slots, b.v_head, b.row, dot(weights.astype(dout.dtype), dout, (0, 0))
        )
        dlogits = dlogits.astype(dout.dtype)
        dk = b.scaled([dot(dlogits, piece, (0, 0)) for piece in q])
        b.turner.store_back(dk_ref, b.item, k_slots, b.k_head, dk)
        if sums:
            sums = [
                total + new
                for total, new in zip(sums, b.turner.gradient(k_slots, k, dk), strict=True)
            ]
        return [
            total + dot(dlogits, piece, (1, 0)) for total, piece in zip(dq, k, strict=True)
        ], sums

    sums = b.turner.no_gradient()
    dq, sums = over_blocks(b.tiles.blocks, step, (b.zeros(q_slots), sums))
    dq = b.scaled(dq)
    b.turner.store_back(dq_ref, b.item, q_slots, b.q_head, dq)
    if b.turner.coords:
        b.finish(
            [
                total + new
                for total, new in zip(sums, b.turner.gradient(q_slots, q, dq), strict=True)
            ]
        )


def query_kernel(*refs: Any, launch: Launch, rotated: int, biased: int) -> None:
    """The gradient of a tile of queries, and delta."""
    b = Backward(refs, launch=launch, rotated=rotated, biased=biased)
    dq_ref, delta_ref = b.targets[:2]
    q_slots = b.tiles.tile(b.tile)
    q, dout = b.queries(q_slots)
    lse, delta = b.of_query(b.lse, q_slots), b.delta(q_slots, dout)
    plt.store(delta_ref.at[b.item, b.head, q_slots.token], delta, mask=q_slots.exists)

    def step(block: Int[Array, ""], dq: list) -> list:
        k_slots = b.tiles.block(b.tile, block)
        k, v = b.keys(k_slots)
        _, dlogits = b.of_logits(q, dout, k, v, q_slots, k_slots, lse, delta)
        dlogits = dlogits.astype(dout.dtype)
        return [total + dot(dlogits, piece, (1, 0)) for total, piece in zip(dq, k, strict=True)]

    dq = b.scaled(over_blocks(b.tiles.blocks, step, b.zeros(q_slots)))
    b.turner.store_back(dq_ref, b.item, q_slots, b.q_head, dq)
    if b.turner.coords:
        b.finish(b.turner.gradient(q_slots, q, dq))


def key_kernel(*refs: Any, launch: Launch, rotated: int, biased: int) -> None:
    """The gradients of a tile of keys and its values; `launch.tiles` is transposed, delta given."""
    b = Backward(refs, launch=launch, rotated=rotated, biased=biased)
    # The packed gradient is an input, with dq in it, and an output.
    targets = b.targets[1:] if b.task.packed else b.targets
    dk_ref, dv_ref = targets[:1] * 2 if b.task.packed else targets[:2]
    k_slots = b.tiles.tile(b.tile)
    k, v = b.keys(k_slots)

    def step(block: Int[Array, ""], carry: tuple) -> tuple:
        dk, dv = carry
        q_slots = b.tiles.block(b.tile, block)
        q, dout = b.queries(q_slots)
        lse, delta = (b.of_query(ref, q_slots) for ref in (b.lse, b.out_or_delta))
        weights, dlogits = b.of_logits(q, dout, k, v, q_slots, k_slots, lse, delta)
        dlogits = dlogits.astype(dout.dtype)
        dk = [total + dot(dlogits, piece, (0, 0)) for total, piece in zip(dk, q, strict=True)]
        return dk, dv + dot(weights.astype(dout.dtype), dout, (0, 0))

    start = (
        b.zeros(k_slots),
        jnp.zeros((k_slots.token.shape[0], b.row.channel.shape[0]), jnp.float32),
    )
    dk, dv = over_blocks(b.tiles.blocks, step, start)
    dk = b.scaled(dk)
    b.turner.store_back(dk_ref, b.item, k_slots, b.k_head, dk)
    store(dv_ref, b.item, k_slots, b.v_head, b.row, dv)
    if b.turner.coords:
        b.finish(b.turner.gradient(k_slots, k, dk))


def bias_kernel(
    *refs: Any, launch: Launch, rotated: int, biased: int, items: int, groups: int
) -> None:
    """The gradient of the bias of one pair of tile and block.

    Summed over a group of examples, and over the tiles that share this part of the bias.
    """
    b, tiles = Backward(refs, launch=launch, rotated=rotated, biased=biased), launch.tiles
    shares, each, group = tiles.tiles // tiles.repeats, -(-items // groups), b.item
    share, block = divide(b.tile, tiles.blocks)

    def step(number: Int[Array, ""], total: Array) -> Array:
        work = group * each + number
        here = copy.copy(b)
        here.item, repeat = divide(jnp.minimum(work, items - 1), tiles.repeats)
        tile = repeat * shares + share
        q_slots, k_slots = tiles.tile(tile), tiles.block(tile, block)
        q_slots = q_slots._replace(exists=q_slots.exists & (work < items))
        (q, dout), (k, v) = here.queries(q_slots), here.keys(k_slots)
        lse, delta = here.of_query(here.lse, q_slots), here.delta(q_slots, dout)
        return total + here.of_logits(q, dout, k, v, q_slots, k_slots, lse, delta)[1]

    total = jax.lax.fori_loop(0, each, step, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
    row = share * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    column = block * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
    plt.store(b.targets[0].at[group, b.head, row[:, None], column[None, :]], total)
