"""Tensor memory and the matrix products of compute capability 10.0.

PTX ISA, section 9.7.16 (tcgen05). A block has 128 lanes of 512 columns of 32 bits. An address is a
lane, shifted by 16 bits, plus a column. One thread starts products and their signal, an mbarrier.
"""

import numpy as np

from tests.ptx.matrices import K, read_matrix, to_float32
from tests.ptx.movement import put_columns, read_columns
from tests.ptx.order import COPY, Shadow
from tests.ptx.program import address, executes, instruction, number, read, read_all, write_all

LANES, COLUMNS = 128, 512


class TensorMemory:
    """The tensor memory of blocks that run together.

    Attributes:
        columns: of each block that are allocated.
        stores: (warps, cells) of stores that no warp has waited for.
        products: thread -> (cells of the result, granules of the factors) of products under way.
    """

    def __init__(self, m):
        blocks = m.lanes // m.threads
        self.data = np.full(blocks * LANES * COLUMNS, 0xFFFFFFFF, np.uint32)
        self.shadow = Shadow(len(self.data), m.order.warps)
        self.by_product = np.zeros(len(self.data), bool)
        self.columns = np.zeros(blocks, np.int64)
        self.stores, self.products = [], {}

    def cells(self, m, local, lane, column) -> np.ndarray:
        m.report((column >= self.columns[local]), "tensor memory is used that is not allocated")
        return (local * LANES + lane) * COLUMNS + column

    def check(self, m, cells, warp, *, writes):
        """Reports accesses that do not follow those of others."""
        m.report(
            self.shadow.unordered_write(m.order, cells, warp, 0),
            "tensor memory is accessed that another writes",
        )
        m.report(
            writes and self.shadow.unordered_read(m.order, cells, warp, 0 * cells),
            "tensor memory is written that another reads",
        )
        m.report(
            not (writes or self.shadow.written[cells].all()),
            "tensor memory is read that nothing has written",
        )


def memory_of(m) -> TensorMemory:
    m.tensor_memory = m.tensor_memory or TensorMemory(m)
    return m.tensor_memory


@executes("tcgen05.alloc", address=address(0), count=number(1))
def _alloc(m, on, x, address, count):
    """A warp allocates n columns and writes their address to shared memory."""
    memory, lanes = memory_of(m), 32 * m.whole(on)
    first = memory.columns[m.local[lanes]].astype(np.uint32)
    memory.columns[m.local[lanes]] += count
    m.shared.store(address(m, lanes), first[:, None].view(np.uint8), m.who(lanes), m.where)


@executes("tcgen05.dealloc", count=number(1))
def _dealloc(m, on, x, count):
    """A warp frees n columns; all must be free at the end."""
    memory_of(m).columns[m.local[32 * m.whole(on)]] -= count


@instruction("tcgen05.relinquish_alloc_permit", "tcgen05.wait::ld")
def _nothing(x, program):
    """Loads are done at once here."""
    return lambda m, on: None


def accessed(m, on, x, address, count, split):
    """The cells [lanes, count] of a load or store.

    32x32b: thread i accesses lane i and consecutive columns. 16x32bx2: lane i % 16, from a column
    on that is `split` higher for the upper half of the threads. A warp has a quarter of the lanes.
    """
    place, thread, halves = address(m, on), m.lane[on], "16x32bx2" in x.parts
    lane = (place >> 16) + (thread % 16 if halves else thread)
    other = lane // 32 != m.warp[on] % m.order.warps % 4
    m.report(other, "a warp accesses lanes of another in tensor memory")
    first = (place & 0xFFFF) + (split * (thread // 16) if halves else 0)
    column = first[:, None] + np.arange(count)
    return memory_of(m).cells(m, m.local[on][:, None], lane[:, None], column)


@executes(
    "tcgen05.ld.sync.aligned",
    puts=write_all(0),
    address=address(1),
    split=number(2),
)
def _ld(m, on, x, puts, address, split):
    """Loads registers from tensor memory."""
    on, memory = m.lanes_of(m.whole(on)), memory_of(m)
    place = accessed(m, on, x, address, len(puts), split)
    warp = np.broadcast_to(m.warp[on][:, None], place.shape)
    memory.check(m, place, warp, writes=False)
    memory.shadow.note_read(m.order, place, warp, 0 * place)
    put_columns(m, on, puts, memory.data[place])


@executes(
    "tcgen05.st.sync.aligned",
    address=address(0),
    reads=read_all(-1, "u32"),
    split=lambda x, program: int(x.operands[1]) if x.operands[2:] else 0,
)
def _st(m, on, x, address, reads, split):
    """Stores registers to tensor memory, where they are only after tcgen05.wait::st."""
    on, memory = m.lanes_of(m.whole(on)), memory_of(m)
    place = accessed(m, on, x, address, len(reads), split)
    warp = np.broadcast_to(m.warp[on][:, None], place.shape)
    memory.check(m, place, warp, writes=True)
    memory.shadow.note_write(m.order, place, warp, 0)
    memory.shadow.write_tick[place], memory.by_product[place] = COPY, False
    memory.data[place] = read_columns(m, on, reads)
    memory.stores.append((warp, place))


@executes("tcgen05.wait::st")
def _wait_st(m, on, x):
    """Waits for the stores of the warp."""
    memory, warps = memory_of(m), m.whole(on)
    for warp, place in memory.stores:
        done = place[np.isin(warp, warps)]
        memory.shadow.write_tick[done] = m.order.clock[warp[np.isin(warp, warps)]]
    kept = [(warp, ~np.isin(warp, warps), place) for warp, place in memory.stores]
    memory.stores = [(warp[y], place[y]) for warp, y, place in kept if y.any()]


@executes(
    "tcgen05.mma.cta_group::1.kind::f16",
    result=address(0),
    a=lambda x, program: (address(1) if x.operands[1][0] == "[" else read(1, "u64"))(x, program),
    b=read(2, "u64"),
    description=read(3, "u32"),
    accumulates=read(4, "pred"),
)
def _mma(m, on, x, result, a, b, description, accumulates):
    """D = A B, plus D where a predicate is true, with D [M, N] in tensor memory.

    A [M, 16] is there, too, or, like B, in shared memory. An instruction descriptor has M, N, types
    and transpositions. M is 128, or 64, of which each warp has 16 rows in its first lanes.
    """
    memory = memory_of(m)
    for thread in np.flatnonzero(m.mask(on)):
        at, local, warp = np.array([thread]), m.local[[thread]], m.warp[[thread]]
        value = lambda read, at=at: np.broadcast_to(read(m), m.lanes)[at]
        code = int(value(description)[0])
        if code >> 4 & 3 != 1 or code >> 13 & 3:
            raise NotImplementedError(f"the instruction descriptor {code:#x}, {x}")
        rows, columns = 16 * (code >> 24 & 31), 8 * (code >> 17 & 63)
        kind, row = "bf16" if code >> 7 & 7 else "f16", np.arange(rows)
        lane = row if rows == 128 else row // 16 * 32 + row % 16

        def cells(address, count, at=at, lane=lane, local=local):
            (place,) = address(m, at)
            column = (place & 0xFFFF) + np.arange(count)
            return memory.cells(m, local, (place >> 16) + lane[:, None], column)

        B, granules = read_matrix(m, warp[:, None], value(b), columns, code >> 16 & 1, kind)
        factors = [*granules]
        if x.operands[1][0] == "[":
            place = cells(a, K // 2)
            memory.check(m, place, np.broadcast_to(warp, place.shape), writes=False)
            A = to_float32(memory.data[place].view(np.uint16), kind)
        else:
            (A,), granules = read_matrix(m, warp[:, None], value(a), rows, code >> 15 & 1, kind)
            factors += [*granules]
        place, adds = cells(result, columns), bool(value(accumulates)[0])
        earlier = memory.by_product[place] & (memory.shadow.write_tick[place] == COPY)
        memory.check(m, place[~earlier], np.broadcast_to(warp, place[~earlier].shape), writes=True)
        unwritten = adds & ~memory.shadow.written[place]
        m.report(unwritten, "tensor memory is read that nothing has written")
        D = A @ B[0].T + (memory.data[place].view(np.float32) if adds else 0)
        memory.data[place] = D.astype(np.float32).view(np.uint32)
        memory.shadow.note_write(m.order, place, np.broadcast_to(warp, place.shape), 0)
        memory.shadow.write_tick[place], memory.by_product[place] = COPY, True
        memory.products.setdefault(thread, []).append((place, factors))


@executes("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster", address=address(0))
def _commit(m, on, x, address):
    """An mbarrier gets an arrival when the products that the thread has started are complete."""
    memory = memory_of(m)
    for thread in np.flatnonzero(m.mask(on)):
        at, warp = np.array([thread]), m.warp[thread]
        barrier = m.mbarrier(m.local[thread], int(address(m, at)[0]), m.warp[at])
        products, known = memory.products.pop(thread, []), m.order.release(warp, all_lanes=True)
        m.order.clock[warp] += 1

        def complete(barrier=barrier, products=products, known=known, warp=warp):
            barrier.arrive(1, known)
            tick = known[warp % m.order.warps]
            for cells, factors in products:
                memory.shadow.writer[cells] = barrier.column
                memory.shadow.write_tick[cells] = barrier.ticks + 1
                for granules in factors:
                    np.add.at(m.shared.busy, granules, -1)
                    m.shared.shadow.read_tick[granules, warp % m.order.warps] = tick
            return barrier

        if barrier is not None:
            m.arriving.append(complete)
