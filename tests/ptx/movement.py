"""Instructions that access memory, and those that exchange values between lanes.

PTX ISA, section 9.7.9 (data movement and conversion), and ldmatrix and stmatrix of 9.7.14.
"""

import functools
import re

import numpy as np

from tests.ptx.memory import GENERIC_LIMIT
from tests.ptx.order import LDMATRIX, STMATRIX
from tests.ptx.parse import elements
from tests.ptx.program import (
    address,
    bits,
    executes,
    instruction,
    number,
    read,
    read_all,
    write_all,
)


def memory_of(x, m, addresses):
    """Shared or global memory; without a name, by the generic address."""
    if "global" in x.parts:
        return m.memory
    is_shared = x.parts[1].startswith("shared") or (addresses < GENERIC_LIMIT).all()
    return m.shared if is_shared else m.memory


def put_columns(m, on, puts, values):
    """Writes values [lanes that are on, registers] to registers."""
    for i, put in enumerate(puts):
        if on is None:
            put(m, None, values[:, i])
        else:
            every = np.zeros(m.lanes, values.dtype)
            every[on] = values[:, i]
            put(m, on, every)


def read_columns(m, on, reads):
    """Registers as values [lanes that are on, registers]."""
    every = np.stack([np.broadcast_to(read(m), m.lanes) for read in reads], axis=1)
    return every if on is None else every[on]


@instruction("ld")
def _ld(x, program):
    """d = memory at an address; .v2 and .v4 read neighbours into a vector; .param a parameter."""
    puts = [program.write(name) for name in elements(x.operands[0])]
    if x.parts[1].startswith("param"):
        name, offset = re.match(r"\[(\w+)(?:\+(\d+))?\]", x.operands[1]).groups()
        if offset:
            raise NotImplementedError(str(x))
        return lambda m, on: puts[0](m, on, np.uint64(m.params[name]))
    size, address = bits(x.kind) // 8, program.address(x.operands[1])
    is_used = bool(program.used.intersection(elements(x.operands[0])))

    def step(m, on):
        place = address(m, on)
        memory, width = memory_of(x, m, place), size * len(puts)
        options = {"is_used": is_used} if memory is m.memory else {}
        data = memory.load(place, width, m.who(on), m.where, **options)
        put_columns(m, on, puts, data.view(f"u{size}"))

    return step


@executes(
    "st",
    address=address(0),
    reads=lambda x, program: [program.read(y, f"u{bits(x.kind)}") for y in elements(x.operands[1])],
)
def _st(m, on, x, address, reads):
    """Memory at an address = a; .v2 and .v4 write a vector to neighbours."""
    place, values = address(m, on), read_columns(m, on, reads)
    values = np.ascontiguousarray(values).view(np.uint8)
    memory_of(x, m, place).store(place, values, m.who(on), m.where)


@executes(
    "cp.async.ca.shared.global",
    "cp.async.cg.shared.global",
    to=address(0),
    source=address(1),
    size=number(2),
    count=lambda x, program: program.read(x.operands[3 if len(x.operands) > 3 else 2], "u32"),
)
def _cp_async(m, on, x, to, source, size, count):
    """Starts a copy of n bytes; with another size, as many are read and the rest are zeros.

    It reads at once, and writes as late as it may: when the thread waits for it.
    """
    lanes = np.flatnonzero(m.mask(on))
    values = np.zeros((len(lanes), size), np.uint8)
    wanted = np.broadcast_to(count(m), m.lanes)[lanes]
    if not np.isin(wanted, (0, size)).all():
        raise NotImplementedError(f"part of a copy, {x}")
    whole = wanted == size
    if whole.any():
        place = source(m, on)[whole]
        values[whole] = m.memory.load(place, size, m.who(lanes[whole]), m.where)
    place, good = m.shared.places(to(m, on), size, m.local[lanes], m.where)
    lanes = lanes[good]
    m.shared.begin_copy(place, size, m.who(lanes), m.where)
    m.copies.append((lanes, m.copy_group[lanes].copy(), place, values[good]))


@executes("cp.async.commit_group")
def _commit_copies(m, on, x):
    """The copies that the thread has started since the last one form a group."""
    m.copy_group[m.mask(on)] += 1


@executes("cp.async.wait_group", "cp.async.wait_all", kept=number(0, "-1"))
def _wait_for_copies(m, on, x, kept):
    """Waits until at most n of the thread's groups are under way; without a number, for all."""
    on, left = m.mask(on), []
    for lanes, group, place, values in m.copies:
        done = on[lanes] & (group < m.copy_group[lanes] - kept)
        if done.any():
            m.shared.end_copy(place[done], values[done], m.who(lanes[done]), m.where)
        if not done.all():
            left.append(tuple(y[~done] for y in (lanes, group, place, values)))
    m.copies = left


def swizzle(address, size):
    """Addresses of a tile of rows of `size` bytes whose units of 16 bytes are exchanged.

    PTX ISA, "Swizzling modes": the row, modulo size / 16, is added to the unit without carry; 16
    bytes stand for no exchange.
    """
    return address ^ (address >> 7 & size // 16 - 1) << 4


def bulk_groups(m, on):
    """Groups of copies out of shared memory of each lane, the last not committed."""
    for lane in np.flatnonzero(m.mask(on)):
        yield lane, m.leaving.setdefault(lane, [[]])


@executes("cp.async.bulk.commit_group")
def _commit_bulk(m, on, x):
    """The thread's bulk copies to global memory since the last one form a group."""
    for _, groups in bulk_groups(m, on):
        groups.append([])


@executes("cp.async.bulk.wait_group", kept=number(0))
def _wait_for_bulk(m, on, x, kept):
    """Waits until at most n groups are under way or, with .read, read shared memory."""
    for lane, groups in bulk_groups(m, on):
        while len(groups) - 1 > kept:
            for granules in groups.pop(0):
                m.shared.end_reading(granules, m.warp[lane], m.lane[lane])


def leave(m, lane, granules):
    """The copy engine begins to read shared memory for a lane; returns the bytes."""
    m.leaving.setdefault(lane, [[]])[-1].append(granules)
    who = m.warp[[lane]], m.lane[[lane]]
    warp, lane = (np.broadcast_to(y, granules.shape) for y in who)
    words = m.shared.begin_reading(granules, warp, lane, m.where, "the copy engine")
    return np.ascontiguousarray(words).view(np.uint8)


@executes("cp.async.bulk.global", to=address(0), source=address(1), count=read(2, "u32"))
def _bulk_out(m, on, x, to, source, count):
    """Copies n bytes from shared to global memory; addresses and n are multiples of 16."""
    for lane in np.flatnonzero(m.mask(on)):
        size = int(np.broadcast_to(count(m), m.lanes)[lane])
        steps, at = 16 * np.arange(size // 16), np.array([lane])
        place, target = source(m, at) + steps, to(m, at) + steps
        m.report(size % 16, "a copy is not of a multiple of 16 bytes", f"{size}")
        place, good = m.shared.places(place, 16, m.local[lane], m.where)
        data = leave(m, lane, (place[:, None] // 2 + np.arange(8)).ravel())
        who = m.who(np.full(len(place), lane))
        m.memory.store(target[good], data.reshape(-1, 16), who, m.where)


@instruction("cp.async.bulk.tensor")
def _bulk_tensor(x, program):
    """Copies a box of a tensor map to or from shared memory.

    Coordinates and sizes begin with the innermost dimension. Outside of the tensor, zeros are read
    and nothing is written. A copy into shared memory completes its bytes at an mbarrier.
    """
    inward = x.name.index("shared") < x.name.index("global")
    outside, inside = (x.operands[1], x.operands[0]) if inward else x.operands[:2]
    name, coordinates = re.match(r"\[\s*(\S+?)\s*,\s*\{(.*)\}\s*\]", outside).groups()
    tensor = program.read(name, "u64")
    starts = [program.read(y, "s32") for y in elements(coordinates)]
    address = program.address(inside)
    signal = program.address(x.operands[2]) if inward else None

    def step(m, on):
        for lane in np.flatnonzero(m.mask(on)):
            at = np.array([lane])
            value = lambda read, lane=lane: int(np.broadcast_to(read(m), m.lanes)[lane])
            tensor_map = m.tensors[value(tensor)]
            place = int(address(m, at)[0])
            m.report(place % 128, "a tile in shared memory is not at a multiple of 128 bytes")
            target, within = tensor_map.elements([value(y) for y in starts])
            size = tensor_map.itemsize
            tile = swizzle(place + size * np.arange(len(target)), tensor_map.swizzle)
            tile, good = m.shared.places(tile, size, m.local[lane], m.where)
            target, within = target[good], within[good]
            granules = tile[:, None] // 2 + np.arange(size // 2)
            who = m.who(np.full(np.count_nonzero(within), lane))
            if not inward:
                data = leave(m, lane, granules.ravel()).reshape(-1, size)
                m.memory.store(target[within], data[within], who, m.where)
                continue
            data = np.zeros((len(target), size), np.uint8)
            data[within] = m.memory.load(target[within], size, who, m.where)
            barrier = m.mbarrier(m.local[lane], int(signal(m, at)[0]), m.warp[at])
            if barrier is not None:
                who, phase = m.who(lane), barrier.ticks + 1
                m.shared.fill(granules, data.view("u2"), who, barrier.column, phase, m.where)
                m.arriving.append(functools.partial(barrier.receive, data.size))

    return step


def matrix_rows(m, warps, count, lane):
    """Lanes that have the addresses of rows of matrices, for warps that act as a whole."""
    lanes = (32 * warps[:, None] + np.arange(8 * count)).ravel()
    who = m.who(lanes)
    who.lane = np.full(len(lanes), lane)
    return lanes, who


@executes("ldmatrix.sync.aligned.m8n8", puts=write_all(0), address=address(1))
def _ldmatrix(m, on, x, puts, address):
    """Loads 8 x 8 matrices of 16 bits: lane i has the address of row i of all, 8 of each matrix.

    Register j of lane i holds elements 2 (i % 4) and the next of row i // 4 of matrix j; .trans
    transposes them.
    """
    if not m.program.read_anywhere.intersection(elements(x.operands[0])):
        return
    warps, count = m.whole(on), len(puts)
    lanes, who = matrix_rows(m, warps, count, LDMATRIX)
    rows = m.shared.load(address(m, lanes), 16, who, m.where).view("u2")
    rows = rows.reshape(len(warps), count, 8, 8)
    rows = rows.swapaxes(2, 3) if "trans" in x.parts else rows
    registers = np.ascontiguousarray(rows).view("u4").reshape(len(warps), count, 32)
    put_columns(m, m.lanes_of(warps), puts, np.moveaxis(registers, 1, 2).reshape(-1, count))


@executes("stmatrix.sync.aligned.m8n8", address=address(0), reads=read_all(1, "u32"))
def _stmatrix(m, on, x, address, reads):
    """Stores 8 x 8 matrices of 16 bits, from the registers that ldmatrix would load."""
    warps, count = m.whole(on), len(reads)
    lanes, who = matrix_rows(m, warps, count, STMATRIX)
    registers = read_columns(m, m.lanes_of(warps), reads).reshape(len(warps), 32, count)
    rows = np.ascontiguousarray(np.moveaxis(registers, 2, 1)).view("u2")
    rows = rows.reshape(len(warps), count, 8, 8)
    rows = rows.swapaxes(2, 3) if "trans" in x.parts else rows
    values = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 16)
    m.shared.store(address(m, lanes), values, who, m.where)


@executes("shfl.sync", a=read(1, "u32"), b=read(2, "u32"), c=read(3, "u32"), results=write_all(0))
def _shfl(m, on, x, a, b, c, results):
    """d = a of another lane: lane ^ b (.bfly), b (.idx), lane + b (.down) or lane - b (.up).

    Bits 8 to 12 of c fix bits of the lane, the lowest five bound it; outside, a lane reads itself.
    """
    m.whole(on)
    by, limits = (np.broadcast_to(y(m), m.lanes).astype(np.int64) for y in (b, c))
    fixed = limits >> 8 & 31
    last = m.lane & fixed | limits & 31 & ~fixed
    source = {
        "bfly": m.lane ^ by,
        "idx": m.lane & fixed | by & 31 & ~fixed,
        "down": m.lane + by,
        "up": m.lane - by,
    }[x.parts[2]]
    inside = source >= last if x.parts[2] == "up" else source <= last
    chosen = np.arange(m.lanes) - m.lane + np.where(inside, source, m.lane)
    values = np.broadcast_to(a(m), m.lanes)[chosen]
    for put, value in zip(results, (values, inside), strict=False):
        put(m, on, value)
