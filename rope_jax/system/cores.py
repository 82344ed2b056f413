"""The processor cores and the memory of this process."""

import contextlib
import ctypes
import functools
import os
import pathlib
from collections.abc import Iterator

# Parameters of glibc's mallopt: their numbers in malloc.h, and values in order of preference. Older
# glibc has no higher threshold than 32 MiB for memory that is mapped.
_MALLOPT = {
    "MMAP_THRESHOLD": (-3, (2**30, 2**25)),
    "TRIM_THRESHOLD": (-1, (2**31 - 1,)),
    # Heaps of threads have at most 64 MiB: larger blocks would be mapped, and returned when freed.
    "ARENA_MAX": (-8, (1,)),
}
_CPU = pathlib.Path("/proc/cpuinfo")
_LIMITS = pathlib.Path("/sys/fs/cgroup")
_OWN_GROUPS = pathlib.Path("/proc/self/cgroup")


def cores() -> int:
    """Processor cores that this process may use: its affinity, and the limit of its container.

    >>> cores() >= 1
    True
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min([allowed or 1, *_limits()]))


@functools.cache
def multiplies_bfloat16() -> bool:
    """True if the CPU has instructions for products in bfloat16; False if Linux cannot tell."""
    with contextlib.suppress(OSError):
        return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_CPU.read_text().split())
    return False


def _limits() -> Iterator[int]:
    """The cores that Linux grants to the control groups of this process."""
    groups = {pathlib.PurePosixPath("/")}  # the own group, where a container shows no others
    with contextlib.suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            group = pathlib.PurePosixPath("/", line.rpartition(":")[2])
            groups |= {group, *group.parents}
    for group in groups:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            quota, period = map(int, (_LIMITS / str(group)[1:] / "cpu.max").read_text().split())
            yield -(-quota // period)


def keep_freed_memory() -> bool:
    """Tells glibc to keep the memory that this process frees, instead of returning it to Linux.

    XLA allocates the intermediate arrays of a program anew at each call. Where glibc has returned
    their memory, Linux clears every page again before its next use, a large part of the time of a
    small model's training step. All threads share one heap, and the process may keep as much memory
    as it has had in use. To be called before jax's devices, whose threads it is about, are started.

    Returns:
        True if it was done; False without glibc, and where one of its variables (MALLOC_...,
        GLIBC_TUNABLES) is set.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # macOS and musl; Windows
        return False
    return all(
        any(mallopt(number, value) == 1 for value in values) for number, values in _MALLOPT.values()
    )
