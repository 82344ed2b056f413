"""Which accesses of the warps of a block are ordered, by vector clocks, and what is reported.

Every warp counts ticks: one more after each synchronisation. A warp knows, of each other warp of
its block, the last tick whose accesses precede what it does now. An mbarrier takes part like a warp
whose ticks are its phases, for what the copy engine writes. (FastTrack, PLDI 2009; its threads are
warps here. Lanes of a warp are ordered by `bar.warp.sync` and wider barriers only.)
"""

import collections

import numpy as np

COPY = np.iinfo(np.int32).max  # tick of a write under way: nobody knows it
LDMATRIX, STMATRIX, SEVERAL = 32, 33, -2  # in place of a lane: whole warps, and different lanes


class Findings(collections.Counter):
    """Errors of a kernel, each with the number of times; `first` has the details of the first."""

    def __init__(self):
        super().__init__()
        self.first = {}

    def add(self, wrong, what: str, where: str, detail: str = ""):
        """Adds an error if anything is wrong, by a truth value or an array of them."""
        if np.any(wrong):
            key = f"{what}, at {where}"
            self.first.setdefault(key, detail)
            self[key] += 1

    def __str__(self):
        lines = [f"{key} ({n} times) {self.first[key]}".rstrip() for key, n in self.items()]
        return "\n".join(lines) or "nothing was found"


class Order:
    """The clocks of the warps of several blocks that run together.

    Attributes:
        clock: [warps of all blocks], the tick of each.
        knows: [warps of all blocks, warps of a block, then mbarriers], the last tick of each that
            precedes what the warp does now; of the warp itself, for its other lanes.
    """

    def __init__(self, blocks: int, warps: int):
        self.warps = warps
        self.clock = np.ones(blocks * warps, np.int32)
        self.knows = np.zeros((blocks * warps, warps + 8), np.int32)

    def column_of_mbarrier(self, index: int) -> int:
        """The column of `knows` of an mbarrier; there are as many as needed."""
        column = self.warps + index
        if column >= self.knows.shape[1]:
            self.knows = np.concatenate([self.knows, 0 * self.knows], axis=1)
        return column

    def synchronize(self, warps: np.ndarray):
        """The lanes of each of these warps know of each other."""
        self.knows[warps, warps % self.warps] = self.clock[warps]
        self.clock[warps] += 1

    def meet(self, warps: np.ndarray):
        """These warps of one block, and their lanes, know of each other."""
        self.synchronize(warps)
        self.knows[warps] = self.knows[warps].max(axis=0)

    def release(self, warp: int, *, all_lanes: bool) -> np.ndarray:
        """What a warp, or a part of its lanes, passes on with an arrival at an mbarrier.

        What other lanes did since the last synchronisation of the warp is not covered by an arrival
        of some; what they do themselves is taken to be.
        """
        known = self.knows[warp].copy()
        if all_lanes:
            known[warp % self.warps] = self.clock[warp]
        return known

    def acquire(self, warps: np.ndarray, known: np.ndarray):
        """These warps have waited for what knows `known`."""
        own = self.knows[warps, warps % self.warps]
        self.knows[warps, : len(known)] = np.maximum(self.knows[warps, : len(known)], known)
        self.knows[warps, warps % self.warps] = own


class Shadow:
    """Who has last written and read each granule, and whether anyone has written it.

    The arguments `warp` (of all blocks) and `lane` have the shape of `granules`.
    """

    def __init__(self, granules: int, warps: int):
        self.written = np.zeros(granules, bool)
        self.writer = np.zeros(granules, np.int16)  # a column of `Order.knows`
        self.write_tick, self.write_lane = np.zeros(granules, np.int32), np.zeros(granules, np.int8)
        self.read_tick = np.zeros((granules, warps), np.int32)
        self.read_lane = np.zeros((granules, warps), np.int8)

    def unordered_write(self, order, granules, warp, lane) -> np.ndarray:
        """Where the last write does not precede an access."""
        writer, tick = self.writer[granules], self.write_tick[granules]
        own = (writer == warp % order.warps) & (self.write_lane[granules] == lane) & (tick < COPY)
        return (tick > order.knows[warp, writer]) & ~own

    def unordered_read(self, order, granules, warp, lane) -> np.ndarray:
        """Where some read does not precede a write."""
        late = self.read_tick[granules] > order.knows[warp][..., : order.warps]
        own = np.arange(order.warps) == (warp % order.warps)[..., None]
        same = own & (self.read_lane[granules] == np.asarray(lane)[..., None])
        return (late & ~same).any(axis=-1)

    def note_read(self, order, granules, warp, lane):
        place, tick = (granules, warp % order.warps), order.clock[warp]
        again = (self.read_tick[place] == tick) & (self.read_lane[place] != lane)
        self.read_lane[place] = np.where(again, SEVERAL, lane)
        clash = (self.read_lane[place] != lane) & ~again  # of lanes that read now
        self.read_lane[granules[clash], (warp % order.warps)[clash]] = SEVERAL
        self.read_tick[place] = tick

    def note_write(self, order, granules, warp, lane):
        self.written[granules] = True
        self.writer[granules], self.write_lane[granules] = warp % order.warps, lane
        self.write_tick[granules] = order.clock[warp]
