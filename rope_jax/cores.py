"""The processor cores of this process, and the devices that training makes of them on a CPU.

XLA's threads divide large matrix products among the cores, but not the small operations of a small
model. With one device a core every operation is divided, as each device has its part of the batch.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

# Images of a step on each device. With fewer, the update of the parameters, which every device
# computes, and the sums of gradients would cost what is gained.
LEAST = 16
# Devices at most, as each holds the parameters and the state of the optimiser.
MOST = 8
_LIMITS = pathlib.Path("/sys/fs/cgroup")
_OWN_GROUPS = pathlib.Path("/proc/self/cgroup")


def cores() -> int:
    """Processor cores that this process may use: its affinity, and the limit of its container.

    >>> cores() >= 1
    True
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min([allowed or 1, *_limits()]))


def _limits() -> Iterator[int]:
    """The cores that Linux grants to the control groups of this process, of version 2 or 1."""
    groups = {pathlib.PurePosixPath("/")}  # the own group, where a container shows no others
    with contextlib.suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            group = pathlib.PurePosixPath("/", line.rpartition(":")[2])
            groups |= {group, *group.parents}
    for group in groups:
        inside = str(group).lstrip("/")
        for files in (
            [_LIMITS / inside / "cpu.max"],
            [_LIMITS / "cpu" / inside / f"cpu.cfs_{name}_us" for name in ("quota", "period")],
        ):
            with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
                quota, period = map(int, " ".join(file.read_text() for file in files).split())
                if quota > 0 and period > 0:
                    yield -(-quota // period)


def devices_for(images: int, available: int, *, fsdp: int = 1) -> int:
    """The devices over which a step is divided by default, on a CPU.

    >>> devices_for(128, 2), devices_for(128, 6), devices_for(1024, 64), devices_for(24, 2)
    (2, 4, 8, 1)

    Args:
        images: in a step, or in each of the parts that it computes one after the other.
        available: cores.
        fsdp: devices over which parameters are divided; the result is a multiple of this.

    Returns:
        The largest number up to `MOST` that divides the images into parts of at least `LEAST`; 1
        without any.
    """
    most = min(available, MOST, images // LEAST)
    return max((n for n in range(fsdp, most + 1, fsdp) if images % n == 0), default=1)
