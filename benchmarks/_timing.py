"""Cases of `speed` and their forms, and the limits of the machine."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable

import jax.numpy as jnp

from rope_jax.analysis.timing import Start, compile_loop, take_turns
from rope_jax_kernels import device

CACHE_BYTES = 256 * 2**20  # more than the last-level cache of any device
# Arrays in one loop. Problems below CACHE_BYTES / 16 are launch-bound and measured hot only.
MOST_COPIES = 16

Maker = Callable[[], Start]  # compiles


@dataclasses.dataclass(frozen=True)
class Case:
    """One computation in several forms.

    Attributes:
        group: its part and kind; ratios are averaged over a group.
        name: its size, unique in the group.
        makers: of each form, by SOFTWARE or SOFTWARE+POSITION; those with one position compute the
            same, the first of them is the reference.
        moved_bytes: bytes that every form has to move; 0 if they are not counted.
    """

    group: str
    name: str
    makers: dict[str, Maker]
    moved_bytes: int = 0


def copies_beyond_cache(size: int) -> int:
    """Number of arrays of `size` bytes that exceed every cache; 1 if that is above MOST_COPIES."""
    copies = -(-CACHE_BYTES // size)
    return copies if copies <= MOST_COPIES else 1


def torch_on_gpu() -> bool:
    """True if torch is installed and finds a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    return importlib.import_module("torch").cuda.is_available()


def machine_limits(turns: int) -> dict[str, float]:
    """Measures the limits of this machine, in this process.

    Returns:
        launch_us, microseconds of a tiny operation; copy_gb_per_s, GB/s of a copy, read plus
        written.
    """
    size = 2**30 if device.is_gpu() else 2**26
    scaled = lambda x: x * 1.0000001  # prevents XLA from removing or merging steps
    ones = lambda *shape: ((jnp.ones(shape),),)
    starts = {
        "copy": compile_loop(scaled, lambda: ones(size // 4), in_place=True),
        "launch_us": compile_loop(scaled, ones, in_place=True),
    }
    figures = take_turns({name: start()[1] for name, start in starts.items()}, turns)
    return {"copy_gb_per_s": 2 * size / figures.pop("copy") / 1e3} | figures
