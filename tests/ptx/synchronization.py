"""Instructions for the order of threads, of copies and of the proxies of memory.

PTX ISA, section 9.7.13 (parallel synchronization and communication), and branches and exits.
"""

import numpy as np

from tests.ptx.machine import MBarrier
from tests.ptx.program import Kind, address, executes, instruction, read, write_all


@instruction("ret", "exit", kind=Kind.EXIT)
def _exit(x, program):
    """The thread ends; barriers do not wait for it."""


@instruction("bar.sync", "barrier.sync", "barrier.cta.sync", kind=Kind.BARRIER)
def _bar_sync(x, program):
    """Waits at barrier a until n threads, or all of the block, are there; orders their memory."""
    number = program.read(x.operands[0], "u32")
    count = program.read(x.operands[1] if len(x.operands) > 1 else "0", "u32")
    return lambda m: [np.broadcast_to(read(m), m.lanes) for read in (number, count)]


@instruction("bar.warp.sync")
def _bar_warp_sync(x, program):
    """Waits for the lanes of a mask of the warp, here all; orders their memory."""
    if int(x.operands[0], 0) not in (-1, 0xFFFFFFFF):
        raise NotImplementedError(f"a mask, {x}")
    return lambda m, on: m.order.synchronize(m.whole(on))


@executes("elect.sync", results=write_all(0))
def _elect(m, on, x, results):
    """The predicate p of d|p is true for one lane of those that take part, whose number is d."""
    first = np.repeat(m.mask(on).reshape(-1, 32).argmax(axis=1), 32)
    for put, values in zip(results, (first.astype(np.uint32), m.lane == first), strict=True):
        put(m, on, values)


@instruction("fence.proxy.async")
def _fence_proxy(x, program):
    """Makes writes that come before it visible to matrix units and the copy engine."""
    return lambda m, on: m.shared.fence(np.unique(m.warp[m.mask(on)]))


@instruction("griddepcontrol", "prefetch", "fence.mbarrier_init", "fence.acq_rel", "membar", "nop")
@instruction("fence.proxy.tensormap", "setmaxnreg", "nanosleep", "mbarrier.inval")
def _nothing(x, program):
    """Concerns other launches, clusters, caches, time or registers, which are not modelled."""
    return lambda m, on: None


@executes("mbarrier.init", address=address(0), count=read(1, "u32"))
def _mbarrier_init(m, on, x, address, count):
    """Makes an mbarrier whose phases expect n arrivals."""
    lanes, numbers = np.flatnonzero(m.mask(on)), np.broadcast_to(count(m), m.lanes)
    for lane, place in zip(lanes, address(m, on), strict=True):
        warp, others = m.warp[lane], [p for block, p in m.mbarriers if block == m.local[lane]]
        key = int(m.local[lane]), int(place)
        old = m.mbarriers.get(key)
        column = old.column if old else m.order.column_of_mbarrier(len(others))
        known = np.zeros(m.order.knows.shape[1], np.int32)
        maker = warp, m.order.clock[warp]
        barrier = MBarrier(int(numbers[lane]), column, maker, known)
        barrier.ticks = old.ticks if old else 0
        m.mbarriers[key] = barrier


def after_address(i, default):
    """The operand i places after the address, which may follow a result."""

    def find(x, program):
        rest = x.operands[[y[0] for y in x.operands].index("[") :]
        return program.address(rest[0]) if i == 0 else program.read([*rest, default][i], "u32")

    return find


@executes("mbarrier.arrive", address=after_address(0, ""), count=after_address(1, "1"))
def _mbarrier_arrive(m, on, x, address, count):
    """Arrives n times, once by default; .expect_tx adds n bytes that the phase waits for."""
    on, expects = m.mask(on), "expect_tx" in x.parts
    numbers, all_lanes = np.broadcast_to(count(m), m.lanes), on.reshape(-1, 32).all(axis=1)
    for lane, place in zip(np.flatnonzero(on), address(m, on), strict=True):
        warp = m.warp[lane]
        barrier = m.mbarrier(m.local[lane], int(place), np.array([warp]))
        if barrier is not None:
            barrier.bytes += int(numbers[lane]) if expects else 0
            known = m.order.release(warp, all_lanes=all_lanes[warp])
            barrier.arrive(1 if expects else int(numbers[lane]), known)
            m.report(barrier.pending < 0, "more arrivals at an mbarrier than its phase expects")
            m.turned |= barrier.turns()
    m.order.clock[np.unique(m.warp[on])] += 1  # an arrival does not cover what follows


@executes(
    "mbarrier.try_wait.parity",
    "mbarrier.test_wait.parity",
    kind=Kind.WAIT,
    results=write_all(0),
    address=address(1),
    parity=read(2, "u32"),
)
def _mbarrier_wait(m, on, x, results, address, parity):
    """Waits for the end of the phase of parity b; the loop around it is left at once."""
    done, lanes = np.zeros(m.lanes, bool), np.flatnonzero(on)
    keys = [m.local[lanes], address(m, on), np.broadcast_to(parity(m), m.lanes)[lanes]]
    keys = np.stack(keys, axis=1).astype(np.int64)
    for local, place, bit in np.unique(keys, axis=0):
        some = lanes[(keys == (local, place, bit)).all(axis=1)]
        barrier = m.mbarrier(int(local), int(place), np.unique(m.warp[some]))
        if barrier is not None and barrier.phases % 2 != bit:
            done[some] = True
            if barrier.published is not None:
                m.order.acquire(np.unique(m.warp[some]), barrier.published)
    results[0](m, done, np.True_)
    return done
