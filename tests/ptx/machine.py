"""Runs the threads of several blocks as one vector, an instruction at a time.

Threads at different places of the program form groups, of which the one at the lowest place runs,
so that branches come together again. Registers are vectors over all lanes.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tests.ptx.memory import GlobalMemory, Lanes, SharedMemory
from tests.ptx.order import Findings, Order
from tests.ptx.program import Kind, Program, Step

MOST_STEPS = 400_000  # of one machine; a kernel that takes more is reported
UNDEFINED = 0xDEADBEEFDEADBEEF  # in registers that nothing has written


@dataclasses.dataclass
class MBarrier:
    """An mbarrier object (PTX ISA, "mbarrier").

    Attributes:
        count: arrivals of a phase.
        column: of `Order.knows`, where its phases count as ticks.
        maker: the warp that has made it, and its tick.
        pending, bytes: arrivals and bytes that the phase still waits for.
        phases: that are complete; `ticks` also counts those of earlier ones at its address.
        known: what those that arrived know; `published` for those that have waited.
    """

    count: int
    column: int
    maker: tuple[int, int]
    known: np.ndarray
    pending: int = 0
    bytes: int = 0
    phases: int = 0
    ticks: int = 0
    published: np.ndarray | None = None

    def __post_init__(self):
        self.pending = self.count

    def arrive(self, count: int, known: np.ndarray):
        """Arrivals by someone who knows `known`."""
        self.pending -= count
        missing = len(known) - len(self.known)
        self.known = np.maximum(np.pad(self.known, (0, missing)), known)

    def receive(self, size: int) -> "MBarrier":
        """A copy of `size` bytes is complete."""
        self.bytes -= size
        return self

    def turns(self) -> bool:
        """Completes the phase if nothing is missing."""
        if self.pending or self.bytes:
            return False
        self.pending, self.phases, self.ticks = self.count, self.phases + 1, self.ticks + 1
        self.known[self.column] = self.ticks
        self.published = self.known.copy()
        return True


class Machine:
    """Blocks of a launch that run together.

    Args:
        program: of the kernel.
        grid: of the launch.
        threads: of a block.
        shared: bytes of a block's shared memory.
        blocks: numbers of the blocks.
        memory: global memory.
        params: name -> value of the kernel's parameters.
        tensors: address -> tensor map.
        findings: where errors are reported.

    Attributes:
        executed: how often each step was issued, by all warps together.
    """

    def __init__(
        self,
        program: Program,
        grid: tuple[int, ...],
        threads: int,
        shared: int,
        blocks: Sequence[int],
        memory: GlobalMemory,
        params: dict[str, int],
        tensors: dict,
        findings: Findings,
    ):
        self.program, self.memory, self.params, self.tensors = program, memory, params, tensors
        self.findings, self.threads = findings, threads
        self.executed = np.zeros(len(program.steps), np.int64)
        self.lanes = n = threads * len(blocks)
        self.order = Order(len(blocks), threads // 32)
        self.shared = SharedMemory(len(blocks), shared, self.order, findings)
        thread = np.tile(np.arange(threads), len(blocks))
        self.block, self.local = (np.repeat(x, threads) for x in (blocks, np.arange(len(blocks))))
        self.warp, self.lane = np.arange(n) // 32, np.arange(n) % 32
        self._everyone = Lanes(self.order, self.block, self.local, self.warp, self.lane)
        sizes = (*grid, 1, 1)[:3]
        place = np.unravel_index(self.block, sizes[::-1])[::-1]
        self.special = {"%laneid": self.lane, "%warpid": self.warp % self.order.warps}
        for axis, i in zip("xyz", range(3), strict=True):
            self.special |= {
                f"%ctaid.{axis}": place[i],
                f"%nctaid.{axis}": np.full(n, sizes[i]),
                f"%tid.{axis}": thread if i == 0 else 0 * thread,
                f"%ntid.{axis}": np.full(n, threads if i == 0 else 1),
            }
        self._registers = {}
        self.steps, self.where = 0, ""
        self.live = np.ones(n, bool)
        self.groups, self.asleep = {0: self.live.copy()}, {}  # place -> lanes that are there
        # At barriers: which lanes wait, the barrier, how many it needs, and where they go on.
        self.waiting = np.zeros(n, bool)
        self.barrier, self.needed, self.after = (np.zeros(n, np.int64) for _ in range(3))
        self.mbarriers, self.turned = {}, False  # (block, address) -> MBarrier; whether any turned
        self.arriving = []  # functions that complete copies and products, and return the mbarrier
        self.tensor_memory = None
        self.copies, self.copy_group = [], np.zeros(n, np.int64)  # of cp.async, not yet complete
        self.leaving = {}  # lane -> groups of granules that the copy engine is reading
        self.products = {}  # warpgroup -> groups of products under way, the last not committed
        self.changed, self.fenced = {}, np.zeros(max(1, n // 128), np.int64)  # see `touch`

    def register(self, name: str) -> np.ndarray:
        register = self._registers.get(name)
        if register is None:
            width = self.program.kernel.widths[name]
            value = False if width == 1 else UNDEFINED & ((1 << width) - 1)
            dtype = np.bool_ if width == 1 else f"u{width // 8}"
            register = self._registers[name] = np.full(self.lanes, value, dtype)
        return register

    def who(self, on: np.ndarray | None) -> Lanes:
        """The lanes of a mask, or of indices, for accesses to memory."""
        return self._everyone if on is None else self._everyone.select(on)

    def report(self, wrong, what: str, detail: str = ""):
        """Reports an error of the instruction that runs, if anything is wrong."""
        self.findings.add(wrong, what, self.where, detail)

    def mask(self, on: np.ndarray | None) -> np.ndarray:
        return np.ones(self.lanes, bool) if on is None else on

    def whole(self, on: np.ndarray | None, size: int = 32) -> np.ndarray:
        """Warps or, with 128 lanes, warpgroups that take part; part of one is an error."""
        if on is None:
            return np.arange(self.lanes // size)
        on = on.reshape(-1, size)
        every, some = (on | ~self.live.reshape(-1, size)).all(axis=1), on.any(axis=1)
        self.report((some & ~every), f"some lanes of {size} miss an instruction of all")
        return np.flatnonzero(some & every)

    def lanes_of(self, groups: np.ndarray, size: int = 32) -> np.ndarray:
        """The mask of the lanes of warps or warpgroups."""
        return np.repeat(np.isin(np.arange(self.lanes // size), groups), size)

    def run(self):
        """Runs all threads to their end."""
        with np.errstate(all="ignore"):
            while self.groups or self.asleep:
                if not self.groups:
                    self._complete_copies()
                if self.turned:
                    for place, lanes in self.asleep.items():
                        self._join(place, lanes)
                    self.asleep, self.turned = {}, False
                self.report(self.steps > MOST_STEPS, "the kernel does not end")
                self.report(not self.groups, "threads wait for ever")
                if self.steps > MOST_STEPS or not self.groups:
                    return
                place = min(self.groups)
                self._advance(place, self.groups.pop(place))
        copying = any(map(any, self.leaving.values())) or bool(self.copies or self.arriving)
        computing = any(map(any, self.products.values()))
        allocated = self.tensor_memory is not None and self.tensor_memory.columns
        self.report(self.waiting, "threads wait for ever at a barrier")
        self.report(copying, "a block ends while a copy uses its shared memory")
        self.report(computing, "a block ends while a matrix product is under way")
        self.report(allocated, "a block ends with tensor memory allocated")

    def _complete_copies(self):
        """Copies of the engine come as late as they may: when nobody can go on without them."""
        for complete in self.arriving:
            self.turned |= complete().turns()
        self.arriving = []

    def _join(self, place, lanes):
        self.groups[place] = self.groups[place] | lanes if place in self.groups else lanes

    def _advance(self, place, lanes):
        """Runs a group until it meets another or does not go on as one."""
        begin, limit = place, min(self.groups, default=len(self.program.steps))
        everyone, warps = lanes.all(), np.count_nonzero(lanes.reshape(-1, 32).any(axis=1))
        while place < limit:
            step = self.program.steps[place]
            on = None if everyone else lanes
            if step.guard is not None:
                name, negated = step.guard
                on = self.register(name) ^ negated
                on = on if everyone else on & lanes
                on = None if on.all() else on
            self.steps, self.where = self.steps + 1, step.where
            if step.touches is not None:
                self.touch(step, on)
            if step.kind is not Kind.PLAIN:
                self.executed[begin : place + 1] += warps
                self._turn(step, place, lanes, self.mask(on))
                return
            if on is None or on.any():
                step.run(self, on)
            place += 1
        self.executed[begin:place] += warps
        self._join(place, lanes)

    def _turn(self, step, place, lanes, taken):
        """A branch, an exit, a barrier or a wait, by the lanes that take it."""
        if (rest := lanes & ~taken).any():
            self._join(place + 1, rest)
        if not taken.any():
            return
        if step.kind is Kind.BRANCH:
            self._join(step.run, taken)
        elif step.kind is Kind.EXIT:
            self.live &= ~taken
            self._release_barriers()
        elif step.kind is Kind.WAIT:
            taken = taken | self.asleep.pop(place, False)
            done = step.run(self, taken)
            if done.any():
                self._join(place + 1, done)
            if (late := taken & ~done).any():
                self.asleep[place] = self.asleep.get(place, False) | late
        else:
            self.whole(taken)
            self.barrier[taken], self.needed[taken] = (x[taken] for x in step.run(self))
            self.waiting |= taken
            self.after[taken] = place + 1
            self._release_barriers()

    def _release_barriers(self):
        """Lanes whose barrier is complete go on and know of each other."""
        key = self.local * 16 + self.barrier
        done = np.zeros(self.lanes, bool)
        for each in np.unique(key[self.waiting]):
            here = self.waiting & (key == each)
            alive = np.count_nonzero(self.live[self.local == each // 16])
            if np.count_nonzero(here) >= (self.needed[here].max() or alive):
                self.order.meet(np.unique(self.warp[here]))
                done |= here
        self.waiting &= ~done
        for place in np.unique(self.after[done]):
            self._join(int(place), done & (self.after == place))

    def mbarrier(self, local: int, address: int, warps: np.ndarray) -> MBarrier | None:
        """The mbarrier at an address of a block, for warps that use it."""
        found = self.mbarriers.get((local, address))
        self.report(found is None, "an mbarrier is used that nothing has made")
        if found is None:
            return None
        warp, tick = found.maker
        known = self.order.knows[warps, warp % self.order.warps]
        self.report((known < tick)[warps != warp], "a warp uses an mbarrier that another makes")
        return found

    def touch(self, step: Step, on: np.ndarray | None):
        """Another instruction than wgmma accesses its registers.

        They must not be accessed before the wait for the product, nor change after wgmma.fence. A
        move is no change: ptxas gives both registers one place.
        """
        written, read = step.touches
        groups = np.unique(np.flatnonzero(self.mask(on)) // 128)
        for group in groups:
            for product in (x for some in self.products.get(group, ()) for x in some):
                touched = (written | read) & product.results or written & product.sources
                self.report(
                    bool(touched),
                    "registers of a matrix product are accessed before the wait for it",
                )
        for name in written:
            times = self.changed.setdefault(name, np.zeros_like(self.fenced))
            if step.is_move:
                times[groups] = self.changed.get(*read, np.zeros_like(times))[groups]
            else:
                times[groups] = self.steps


def blocks_together(threads: int, total: int, most: int) -> list[range]:
    """Ranges of blocks with at most `most` threads each."""
    each = max(1, most // threads)
    return [range(x, min(total, x + each)) for x in range(0, total, each)]
