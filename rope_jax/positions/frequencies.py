"""Frequency ladders of rotary schemes, and how their values are laid out over heads, axes and pairs. All in NumPy, float64."""

import numpy as np


def deal(heads: int, pairs: int) -> np.ndarray:
    """Rungs of one ladder of heads * pairs equal steps in [0, 1), dealt out to the heads in turn: [heads, pairs].

    Each head spans the whole ladder at stride `heads`, with a small offset of its own (HDiT `AxialRoPE`; the saw-tooth of the
    thesis' figure C.1). Heads that share their frequencies are dealt as one head.
    """
    return np.arange(heads * pairs).reshape(pairs, heads).T / (heads * pairs)


def decay(rungs: np.ndarray, base: float) -> np.ndarray:
    """Exponential decay base**-rung: from 1 down towards 1 / base (RoFormer; base 100 in 2-D RoPE)."""
    return base**-rungs


def pixel(rungs: np.ndarray) -> np.ndarray:
    """Equal steps from pi to 5 pi, both included (`freqs_for="pixel"` of lucidrains' rotary-embedding-torch, with its max_freq of 10)."""
    return np.pi * (1 + 4 * rungs * rungs.size / max(rungs.size - 1, 1))


# The "bounded logarithmic" ladder of the thesis, in the three forms in which its sources give it, and what it is compared with.
AXIAL_GENERATORS = {
    "hdit": lambda rungs: np.pi * 10**rungs,  # pi .. 10 pi: the code that the thesis follows, and its section 3.3
    "eq35": lambda rungs: 10**rungs,  # 1 .. 10: its equation 3.5
    "table31": lambda rungs: np.pi ** (rungs * np.log(10)),  # 1 .. 13.96: its table 3.1
    "exponential": lambda rungs: decay(rungs, 100.0),
    "pixel": pixel,
}


def two_axes(ladder: np.ndarray, axis_order: str, *, alternate: bool = False) -> np.ndarray:
    """Uses a ladder [N, M] once per axis: [N, 2, 2M].

    The first M pairs turn with the first axis of "yx" or "xy", the others with the second; or, `alternate`, every other pair does.
    """
    heads, rungs = ladder.shape
    freqs = np.zeros((heads, 2, 2 * rungs))
    for place, axis in enumerate(axis_order):
        pairs = slice(place, None, 2) if alternate else slice(place * rungs, (place + 1) * rungs)
        freqs[:, "yx".index(axis), pairs] = ladder
    return freqs
