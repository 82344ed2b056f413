"""Random numbers of single examples: a function of (seed, epoch, example, stream).

Only the raw output of Philox is used, which NumPy guarantees to be stable across versions (unlike
its distributions), so that a resumed run draws the same numbers.
"""

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Annotated

import numpy as np
from jaxtyping import Int, UInt64

from rope_jax.names.options import Range, convert

_LARGEST_EPOCH = 1 << 20  # for more examples, numbers are drawn one by one


def epoch_draws(seed: int, epoch: int, count: int, stream: str) -> UInt64[np.ndarray, " count"]:
    """Uniform 64-bit numbers, one for each example of an epoch.

    >>> epoch_draws(1, 2, 2, "order").tolist()
    [6152314207982085954, 14131925135209654431]

    Args:
        seed: 0 to 2**64 - 1.
        epoch: 0 to 2**64 - 1.
        count: examples in an epoch.
        stream: purpose of the numbers; streams with different names are independent.

    Returns:
        uint64 [count], read-only.

    Raises:
        ValueError: for a seed out of range.
    """
    return _cached_draws(seed, count)(epoch, stream)


@functools.lru_cache(maxsize=64)
def _cached_draws(seed: int, count: int) -> Callable[[int, str], UInt64[np.ndarray, " count"]]:
    """`epoch_draws` of a seed, with a cache for a few streams of the last two epochs."""

    @functools.lru_cache(maxsize=16)
    def draw_epoch(epoch: int, stream: str) -> np.ndarray:
        draws = _generator(seed, epoch, stream).random_raw(count)
        draws.setflags(write=False)
        return draws

    return draw_epoch


def example_draws(
    seed: int,
    epochs: Int[np.ndarray, " b"],
    examples: Int[np.ndarray, " b"],
    count: int,
    stream: str,
) -> UInt64[np.ndarray, " b"]:
    """The numbers of some examples, `epoch_draws(seed, epoch, count, stream)[example]` of each.

    Args:
        seed: 0 to 2**64 - 1.
        epochs: integers [b].
        examples: integers [b], 0 to count - 1.
        count: examples in an epoch.
        stream: purpose of the numbers.

    Raises:
        ValueError: for a seed out of range.
    """
    draws = np.empty(len(examples), np.uint64)
    if count > _LARGEST_EPOCH:
        generator = _generator(seed, 0, "")
        state, last_word = generator.state, zlib.crc32(stream.encode())
        for k, (epoch, example) in enumerate(zip(epochs, examples, strict=True)):
            block, place = divmod(int(example), 4)  # Philox produces four numbers per count
            state["state"]["key"][1] = epoch
            state["state"]["counter"][:] = (block, 0, 0, last_word)
            generator.state = state  # creating a generator would take three times as long
            draws[k] = generator.random_raw(4)[place]
        return draws
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        draws[in_epoch] = epoch_draws(seed, epoch, count, stream)[examples[in_epoch]]
    return draws


def _generator(seed: int, epoch: int, stream: str) -> np.random.Philox:
    convert(seed, Annotated[int, Range(low=0, below=2**64)], "seed")
    # Philox counts in the first word of its counter: streams with other last words never overlap.
    counter = np.array([0, 0, 0, zlib.crc32(stream.encode())], np.uint64)
    return np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=counter)


def uniform(draw: int) -> Iterator[float]:
    """Numbers in [0, 1) derived from one draw (SplitMix64: Steele et al., OOPSLA 2014)."""
    mask = 2**64 - 1
    while True:
        draw = (draw + 0x9E3779B97F4A7C15) & mask
        mixed = ((draw ^ (draw >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        yield ((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53


def scale_draws(draws: UInt64[np.ndarray, " B"], count: int) -> Int[np.ndarray, " B"]:
    """Integers 0 to count - 1 from 32-bit numbers, without a division."""
    return (draws * np.uint64(count) >> np.uint64(32)).astype(np.int64)
