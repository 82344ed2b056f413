"""Global and shared memory, and what is checked at every access.

Checked are bounds, alignment, memory that nothing has written, and the order of accesses, for
granules of two bytes, which no kernel here divides.
"""

import numpy as np

from tests.ptx.order import COPY, LDMATRIX, SEVERAL, STMATRIX, Findings, Order, Shadow
from tests.ptx.parse import SHARED_START

ARRAY_BITS = 40  # array i starts at (i + 1) << ARRAY_BITS: no offset leads into another array
GENERIC_LIMIT = 1 << 24  # generic addresses below it are those of shared memory
GRANULE = 2  # bytes
POISON = 0xFF  # of every byte that nothing has written: NaN
NOBODY, SEVERAL_BLOCKS = -1, -2
WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}


def granules_of(place: np.ndarray, size: int) -> np.ndarray:
    """The granules [n, size / 2] of accesses of `size` bytes at `place` [n]."""
    if size < GRANULE:
        raise NotImplementedError("accesses of one byte are narrower than a granule")
    return place[:, None] // GRANULE + np.arange(size // GRANULE)


def gather(data: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """Bytes [n, size]."""
    return data.view(WORDS[size])[place // size].view(np.uint8).reshape(-1, size)


def scatter(data: np.ndarray, place: np.ndarray, values: np.ndarray) -> bool:
    """Writes bytes [n, size]; returns whether values differ where places are equal."""
    size = values.shape[1]
    data.view(WORDS[size])[place // size] = np.ascontiguousarray(values).view(WORDS[size])[:, 0]
    return bool((gather(data, place, size) != values).any())


def spread(granules, *of_access):
    """Values of each access [n], for each of its granules [n, k]."""
    return [np.broadcast_to(np.asarray(x)[..., None], granules.shape) for x in of_access]


class GlobalMemory:
    """The arrays of a launch. No two blocks may touch what one of them writes.

    Args:
        arrays: in order of the kernel's parameters: a name, the array, and the mask of what has
            values, or one for all.
        warps: of a block.
        findings: where errors are reported.
    """

    def __init__(self, arrays: list, warps: int, findings: Findings):
        self.findings, self.arrays, self.starts, size = findings, arrays, [], 0
        for _, array, _ in arrays:
            self.starts.append(size)
            size += -(-array.nbytes // 256) * 256
        self.starts = np.array(self.starts, np.int64)
        self.sizes = np.array([array.nbytes for _, array, _ in arrays], np.int64)
        self.data = np.full(size, POISON, np.uint8)
        self.shadow = Shadow(size // GRANULE, warps)
        self.writing, self.reading = (np.full(size // GRANULE, NOBODY) for _ in range(2))
        for start, (_, array, written) in zip(self.starts, arrays, strict=True):
            if np.any(written):
                self.data[start : start + array.nbytes] = np.ravel(array).view(np.uint8)
                known = np.repeat(np.broadcast_to(written, array.shape), array.itemsize // GRANULE)
                self.shadow.written[start // GRANULE :][: known.size] = known

    def address(self, index: int) -> int:
        return (index + 1) << ARRAY_BITS

    def contents(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """An array, and the mask of its elements that are written."""
        start, array = self.starts[index], self.arrays[index][1]
        value = self.data[start : start + array.nbytes].copy().view(array.dtype)
        known = self.shadow.written[start // GRANULE : (start + array.nbytes) // GRANULE]
        written = known.reshape(value.size, -1).all(axis=1)
        return value.reshape(array.shape), written.reshape(array.shape)

    def _places(self, address, size, what, where):
        """Places of the accesses that are inside of an array and aligned, and which these are."""
        which, offset = (address >> ARRAY_BITS) - 1, address & ((1 << ARRAY_BITS) - 1)
        index = np.clip(which, 0, len(self.arrays) - 1)
        inside = (which == index) & (offset + size <= self.sizes[index])
        distance = offset[~inside][:1] - (offset[~inside][:1] >> ARRAY_BITS - 1 << ARRAY_BITS)
        detail = f"{distance} bytes from the start of an array, number {index[~inside][:1]}"
        self.findings.add(~inside, f"a global {what} is outside of its array", where, detail)
        aligned = address % size == 0
        self.findings.add(~aligned, f"a global {what} is not aligned", where, f"{size} bytes")
        good = inside & aligned
        return self.starts[index[good]] + offset[good], good

    def load(self, address, size: int, who: "Lanes", where: str, *, is_used=True) -> np.ndarray:
        """Bytes [n, size] at addresses [n]; all may be unwritten if they are only selected from."""
        place, good = self._places(address, size, "read", where)
        out, granules = np.full((len(address), size), POISON, np.uint8), granules_of(place, size)
        out[good] = gather(self.data, place, size)
        block, warp = spread(granules, who.block[good], who.warp[good])
        self.findings.add(
            is_used & ~self.shadow.written[granules],
            "a global read of memory that nothing has written",
            where,
        )
        writer, reader = self.writing[granules], self.reading[granules]
        self.findings.add(
            ((writer != NOBODY) & (writer != block)),
            "a block reads what another block writes",
            where,
        )
        raced = self.shadow.unordered_write(who.order, granules, warp, 0) & (writer == block)
        self.findings.add(raced, "a warp reads what another writes in global memory", where)
        alone = (reader == NOBODY) | (reader == block)
        self.reading[granules] = np.where(alone, block, SEVERAL_BLOCKS)
        self.reading[granules[self.reading[granules] != block]] = SEVERAL_BLOCKS
        self.shadow.note_read(who.order, granules, warp, np.zeros(granules.shape, np.int8))
        return out

    def store(self, address: np.ndarray, values: np.ndarray, who: "Lanes", where: str):
        place, good = self._places(address, values.shape[1], "write", where)
        granules = granules_of(place, values.shape[1])
        block, warp = spread(granules, who.block[good], who.warp[good])
        self.findings.add(
            scatter(self.data, place, values[good]),
            "lanes write different values to one place",
            where,
        )
        writer, reader = self.writing[granules], self.reading[granules]
        self.findings.add(
            ((writer != NOBODY) & (writer != block)), "two blocks write one place", where
        )
        self.findings.add(
            ((reader != NOBODY) & (reader != block)),
            "a block writes what another block reads",
            where,
        )
        for unordered, of in (
            (self.shadow.unordered_write, writer),
            (self.shadow.unordered_read, reader),
        ):
            self.findings.add(
                (unordered(who.order, granules, warp, np.zeros_like(warp)) & (of == block)),
                "a warp writes what another accesses in global memory",
                where,
            )
        self.writing[granules] = block
        self.findings.add((self.writing[granules] != block), "two blocks write one place", where)
        self.shadow.note_write(who.order, granules, warp, 0)


class Zeros:
    """In place of `GlobalMemory`, where only the instructions count, and not what they compute."""

    def __init__(self, arrays: list):
        self.arrays = arrays

    address = GlobalMemory.address

    def load(self, address, size, who, where, *, is_used=True):
        return np.zeros((len(address), size), np.uint8)

    def store(self, address, values, who, where):
        """Nothing is kept."""


class Lanes:
    """Who makes an access: of each, its block, place among blocks that run, warp of all, lane."""

    def __init__(self, order: Order, block, local, warp, lane):
        self.order, self.block, self.local, self.warp, self.lane = order, block, local, warp, lane

    def select(self, index) -> "Lanes":
        parts = (self.block, self.local, self.warp, self.lane)
        return Lanes(self.order, *(x[index] for x in parts))


class SharedMemory:
    """The shared memory of blocks that run together, one after the other in one buffer.

    Attributes:
        busy: how many operations of matrix units and the copy engine read each granule.
        unfenced: granules written by threads, without a fence to those units.
    """

    def __init__(self, blocks: int, size: int, order: Order, findings: Findings):
        self.size, self.order, self.findings = size, order, findings
        self.stride = 256 * (size // 256 + 1)
        self.data = np.full(blocks * self.stride, POISON, np.uint8)
        self.shadow = Shadow(len(self.data) // GRANULE, order.warps)
        self.busy = np.zeros(len(self.data) // GRANULE, np.int16)
        self.unfenced = np.zeros(len(self.data) // GRANULE, bool)

    def places(self, address, size, local, where):
        """Places of the accesses that are inside and aligned, and which these are."""
        offset = address - SHARED_START
        good = (offset >= 0) & (offset + size <= self.size) & (address % size == 0)
        detail = f"offset {offset[~good][:1]}, {size} bytes, of {self.size}"
        self.findings.add(~good, "a shared access is outside or not aligned", where, detail)
        return (local * self.stride + offset)[good], good

    def check_read(self, granules, warp, lane, where, who="a thread"):
        self.findings.add(
            ~self.shadow.written[granules],
            f"{who} reads shared memory that nothing has written",
            where,
        )
        self.findings.add(
            self.shadow.unordered_write(self.order, granules, warp, lane),
            f"{who} reads what another writes in shared memory",
            where,
        )

    def check_write(self, granules, warp, lane, where, who="a thread"):
        self.findings.add(
            self.shadow.unordered_read(self.order, granules, warp, lane),
            f"{who} writes what another reads in shared memory",
            where,
        )
        self.findings.add(
            self.shadow.unordered_write(self.order, granules, warp, lane),
            f"{who} writes what another writes in shared memory",
            where,
        )
        self.findings.add(
            self.busy[granules], f"{who} writes what a unit still reads in shared memory", where
        )

    def load(self, address: np.ndarray, size: int, who: Lanes, where: str) -> np.ndarray:
        place, good = self.places(address, size, who.local, where)
        out, granules = np.full((len(address), size), POISON, np.uint8), granules_of(place, size)
        out[good] = gather(self.data, place, size)
        warp, lane = spread(granules, who.warp[good], who.lane[good])
        self.check_read(granules, warp, lane, where)
        self.shadow.note_read(self.order, granules, warp, lane)
        return out

    def store(self, address: np.ndarray, values: np.ndarray, who: Lanes, where: str):
        place, good = self.places(address, values.shape[1], who.local, where)
        granules = granules_of(place, values.shape[1])
        warp, lane = spread(granules, who.warp[good], who.lane[good])
        # All lanes take part in ldmatrix, which therefore precedes a later stmatrix of the warp.
        self.check_write(granules, warp, np.where(lane == STMATRIX, LDMATRIX, lane), where)
        self._write(place, granules, values[good], warp, lane, where)

    def _write(self, place, granules, values, warp, lane, where):
        self.findings.add(
            scatter(self.data, place, values), "lanes write different values to one place", where
        )
        self.shadow.note_write(self.order, granules, warp, lane)
        self.unfenced[granules] = True

    def begin_copy(self, place, size, who: Lanes, where: str):
        """A thread's asynchronous copy (cp.async) will write here until the thread waits for it."""
        granules = granules_of(place, size)
        warp, lane = spread(granules, who.warp, who.lane)
        self.check_write(granules, warp, lane, where)
        self.data.view("u2")[granules] = 0xFFFF
        self.shadow.note_write(self.order, granules, warp, lane)
        self.shadow.write_tick[granules] = COPY

    def end_copy(self, place, values, who: Lanes, where: str):
        granules = granules_of(place, values.shape[1])
        self.findings.add(
            self.busy[granules], "a copy writes what a unit still reads in shared memory", where
        )
        self._write(place, granules, values, *spread(granules, who.warp, who.lane), where)

    def fill(self, granules, values, who: Lanes, column: int, phase: int, where: str):
        """The copy engine writes granules for one thread; a phase of an mbarrier completes it."""
        warp, lane = np.full(granules.shape, who.warp), np.full(granules.shape, who.lane)
        self.check_write(granules, warp, lane, where, "the copy engine")
        self.data.view("u2")[granules] = values
        self.shadow.written[granules], self.unfenced[granules] = True, False
        self.shadow.writer[granules], self.shadow.write_tick[granules] = column, phase
        self.shadow.write_lane[granules] = SEVERAL

    def begin_reading(self, granules, warp, lane, where, who):
        """A matrix unit or the copy engine reads granules; returns their values of 16 bits."""
        self.check_read(granules, warp, lane, where, who)
        self.findings.add(
            self.unfenced[granules],
            f"{who} reads what was written without a fence.proxy.async",
            where,
        )
        np.add.at(self.busy, granules, 1)
        return self.data.view("u2")[granules]

    def end_reading(self, granules, warp, lane):
        """Warps have waited for a unit that reads granules."""
        np.add.at(self.busy, granules, -1)
        for each in np.atleast_1d(warp):
            place = granules, each % self.order.warps
            self.shadow.read_tick[place] = self.order.clock[each]
            self.shadow.read_lane[place] = lane

    def fence(self, warps: np.ndarray):
        """fence.proxy.async by these warps: for all writes that they know of."""
        for block in np.unique(warps // self.order.warps):
            start = block * self.stride // GRANULE
            part = start + np.flatnonzero(self.unfenced[start : start + self.stride // GRANULE])
            writer, tick = self.shadow.writer[part], self.shadow.write_tick[part]
            for warp in warps[warps // self.order.warps == block]:
                own = writer == warp % self.order.warps
                self.unfenced[part[own | (tick <= self.order.knows[warp, writer])]] = False
