"""The noise that goldens were made with, equal on every machine.

NumPy takes float32 normal values beyond 3.654 from the C library's `log1pf`, whose last bit differs
between libraries (glibc before and from 2.41, musl, macOS): logits would differ by 1e-8. So
`tests/data/parity/tails.npz` holds these values, one in 4,000, as they were when the goldens were
made: `seeds`, `counts` (of the values of each seed), and `values`, one seed after the other.

    python -m tests.parity.noise SEED:COUNT ...

adds those of COUNT values of each SEED, as computed by this machine's C library: call it on the
machine that makes the golden.
"""

import functools
import math
import pathlib
import sys

import numpy as np

FILE = pathlib.Path(__file__).parents[1] / "data" / "parity" / "tails.npz"
FAR = np.float32(3.65)


def noise(seed, shape):
    """Standard normal values, float32; a larger array begins with the values of a smaller one."""
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    far = np.abs(values) > FAR
    count, tails = int(far.sum()), load_tails().get(seed, ())
    if count > len(tails):
        raise ValueError(
            f"{FILE.name} has {len(tails)} of the {count} values beyond {FAR} that seed {seed} "
            f"gives: add them with `python -m tests.parity.noise {seed}:{math.prod(shape)}`"
        )
    if count:
        np.testing.assert_array_max_ulp(values[far], tails[:count], maxulp=4)
        values[far] = tails[:count]
    return values


@functools.cache
def load_tails():
    """The recorded values by seed."""
    with np.load(FILE) as file:
        parts = np.split(file["values"], np.cumsum(file["counts"])[:-1])
        return dict(zip(file["seeds"].tolist(), parts, strict=True))


def main(arguments):
    tails = dict(load_tails()) if FILE.exists() else {}
    for argument in arguments:
        seed, count = map(int, argument.split(":"))
        values = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
        far = values[np.abs(values) > FAR]
        # Recorded values stay, as their goldens may have been made elsewhere.
        tails[seed] = np.concatenate([old := tails.get(seed, far[:0]), far[len(old) :]])
    kept = {seed: values for seed, values in sorted(tails.items()) if len(values)}
    np.savez_compressed(
        FILE,
        seeds=np.array(list(kept), np.int64),
        counts=np.array([len(values) for values in kept.values()]),
        values=np.concatenate(list(kept.values())),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
