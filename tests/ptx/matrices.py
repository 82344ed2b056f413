"""Matrix products: mma of a warp, and wgmma of a warpgroup (four warps).

PTX ISA, sections 9.7.14 and 9.7.15. Products of 16-bit numbers are summed in float32.
"""

import dataclasses
import re

import numpy as np

from tests.ptx.arithmetic import widen
from tests.ptx.movement import put_columns, read_columns, swizzle
from tests.ptx.order import LDMATRIX
from tests.ptx.parse import elements
from tests.ptx.program import (
    Kind,
    executes,
    instruction,
    number,
    read_all,
    sources_of,
    write_all,
)

K = 16  # the inner dimension of the products here


def to_float32(words, kind):
    """float32 of 16-bit words that are bfloat16 or float16."""
    if kind not in ("bf16", "f16"):
        raise NotImplementedError(f"matrices of {kind}")
    return widen(words) if kind == "bf16" else words.view(np.float16).astype(np.float32)


def fragment(lanes, count):
    """Row and column [lanes, count] of the accumulators of `lanes` lanes.

    Four lanes hold eight columns of a row, a warp 16 rows. (PTX ISA, figures of the fragments of
    mma.m16n8k16 and of wgmma's D.)
    """
    lane, i = np.arange(lanes)[:, None], np.arange(count)[None, :]
    row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (i // 2 % 2)
    return row, 2 * (lane % 4) + i % 2 + 8 * (i // 4)


def gather_factor(registers, kind):
    """A [groups, rows, 16] from registers [groups, lanes, 4] of two numbers each."""
    groups, lanes, _ = registers.shape
    numbers = to_float32(np.ascontiguousarray(registers).view("u2"), kind)  # [groups, lanes, 8]
    factor = np.zeros((groups, lanes // 2, K), np.float32)
    row, column = fragment(lanes, 8)
    factor[:, row, column] = numbers
    return factor


LANE, ELEMENT = np.arange(32)[:, None], np.arange(4)[None, :]
PLACES_OF_B = 2 * (LANE % 4) + ELEMENT % 2 + 8 * (ELEMENT // 2), LANE // 4 + 0 * ELEMENT


@executes(
    "mma.sync.aligned.m16n8k16.row.col.f32",
    puts=write_all(0),
    a=read_all(1, "u32"),
    b=read_all(2, "u32"),
    c=read_all(3, "u32"),
)
def _mma(m, on, x, puts, a, b, c):
    """D = A B + C: A [16, 16] in four registers, B [16, 8] in two, C and D [16, 8] in four."""
    warps = m.whole(on)
    on, kind = m.lanes_of(warps), x.parts[-3]
    of_a, of_b, of_c = (read_columns(m, on, y).reshape(len(warps), 32, -1) for y in (a, b, c))
    B = np.zeros((len(warps), K, 8), np.float32)
    B[:, *PLACES_OF_B] = to_float32(np.ascontiguousarray(of_b).view("u2"), kind)
    row, column = fragment(32, 4)
    D = (gather_factor(of_a, kind) @ B)[:, row, column] + of_c.view(np.float32)
    put_columns(m, on, puts, D.reshape(-1, 4))


@dataclasses.dataclass
class Product:
    """A wgmma under way: granules that it reads, its results, and registers of its factor."""

    granules: list
    results: set[str]
    sources: set[str]


SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}  # code in a descriptor -> bytes


def read_matrix(m, warps, descriptors, rows, across, kind):
    """A matrix [groups, rows, 16] in shared memory for warps [groups, n], and its granules.

    A descriptor (PTX ISA, "matrix descriptor") holds, in units of 16 bytes, where the matrix starts
    and two distances. Rows are contiguous in K or, if `across`, columns are.
    """
    fields = [(descriptors >> shift & 0x3FFF).astype(np.int64) << 4 for shift in (0, 16, 32)]
    start, leading, stride = (x[:, None, None] for x in fields)
    (code,) = np.unique(descriptors >> np.uint64(62))  # alike in all blocks
    width = SWIZZLES[int(code)]
    row, column = np.arange(rows)[:, None], np.arange(K)[None, :]
    if across:  # tiles of width / 2 rows and eight columns
        far = row // (width // 2) * leading + column // 8 * stride
        address = start + far + column % 8 * width + 2 * (row % (width // 2))
    elif width == 16:  # tiles of eight rows and columns
        address = start + row // 8 * stride + column // 8 * leading + row % 8 * 16 + column % 8 * 2
    else:  # tiles of eight rows
        address = start + row // 8 * stride + row % 8 * width + 2 * column
    address = swizzle(address, width).reshape(len(warps), -1)
    local = np.repeat(warps[:, 0] // m.order.warps, address.shape[1])
    place, good = m.shared.places(address.ravel(), 2, local, m.where)
    if not good.all():
        return np.full((len(warps), rows, K), np.nan, np.float32), []
    granules = place.reshape(len(warps), -1) // 2
    every = []
    for group, some in zip(warps, granules, strict=True):
        for warp in group:
            of_warp = np.full(some.shape, warp), np.full(some.shape, LDMATRIX)
            m.shared.check_read(some, *of_warp, m.where, "a matrix product")
        every.append(m.shared.begin_reading(some, *of_warp, m.where, "a matrix product"))
    return to_float32(np.stack(every), kind).reshape(len(warps), rows, K), granules


def under_way(m, group):
    return m.products.setdefault(int(group), [[]])


@executes("wgmma.fence", kind=Kind.WAIT)
def _wgmma_fence(m, on, x):
    """Orders changes of registers before the products that follow, once the warpgroup is there."""
    whole = (on | ~m.live).reshape(-1, 128).all(axis=1)
    m.fenced[whole] = m.steps
    return on & np.repeat(whole, 128)


@executes("wgmma.commit_group")
def _wgmma_commit(m, on, x):
    """The products since the last one form a group."""
    for group in m.whole(on, 128):
        under_way(m, group).append([])


@executes("wgmma.wait_group", kept=number(0))
def _wgmma_wait(m, on, x, kept):
    """Waits until at most n groups are under way."""
    for group in m.whole(on, 128):
        groups = under_way(m, group)
        while len(groups) - 1 > kept:
            for granules in (y for product in groups.pop(0) for y in product.granules):
                m.shared.end_reading(granules, np.arange(4 * group, 4 * group + 4), LDMATRIX)


@instruction("wgmma.mma_async.sync.aligned")
def _wgmma(x, program):
    """D = A B, plus D where a predicate is true: A [64, 16], B [16, N], D [64, N] in registers.

    A is in registers as that of mma or, like B, described by a matrix descriptor. D is written at
    once here, and the factors are read; what is touched before the wait is reported.
    """
    columns, kind = int(re.match(r"m64n(\d+)k16", x.parts[4])[1]), x.parts[-1]
    names = elements(x.operands[0])
    in_registers = x.operands[1][0] == "{"
    a = [program.read(y, "u32" if in_registers else "u64") for y in elements(x.operands[1])]
    b, accumulates, *scales = x.operands[2:]
    b, accumulates = program.read(b, "u64"), program.read(accumulates, "pred")
    if scales[:2] != ["1", "1"]:
        raise NotImplementedError(f"negated factors, {x}")
    across = [y == "1" for y in scales[2:]]
    puts, olds = [program.write(y) for y in names], [program.read(y, "f32") for y in names]
    used = set(names) | sources_of(x)

    def step(m, on):
        groups = m.whole(on, 128)
        on, n, warps = m.lanes_of(groups, 128), len(groups), 4 * groups[:, None] + np.arange(4)
        for name in used & m.changed.keys():
            m.report(
                (m.changed[name] > m.fenced)[groups],
                "registers of wgmma have changed since wgmma.fence",
                name,
            )
        B, granules = read_matrix(m, warps, column(m, on, b), columns, across[-1:] == [True], kind)
        both = [granules]
        if in_registers:
            A = gather_factor(read_columns(m, on, a).reshape(n, 128, 4), kind)
        else:
            A, granules = read_matrix(m, warps, column(m, on, a[0]), 64, across[0], kind)
            both.append(granules)
        row, place = fragment(128, len(names))
        D = (A @ B.swapaxes(1, 2))[:, row, place]
        old = read_columns(m, on, olds).reshape(D.shape)
        adds = np.broadcast_to(accumulates(m), m.lanes)[on].reshape(n, 128, 1)
        put_columns(m, on, puts, np.where(adds, D + old, D).reshape(-1, len(names)))
        for i, group in enumerate(groups):
            some = [y[i] for y in both if len(y)]
            under_way(m, group)[-1].append(Product(some, set(names), sources_of(x)))

    def column(m, on, read):
        """A descriptor, which all lanes of a warpgroup share."""
        values = np.broadcast_to(read(m), m.lanes)[on].reshape(-1, 128)
        m.report(
            (values != values[:, :1]), "lanes of a warpgroup have different matrix descriptors"
        )
        return values[:, 0]

    return step
