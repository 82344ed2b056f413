"""95 % confidence intervals of accuracies and of their differences."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def percent(fraction: float | None, sign: str = "") -> str:
    """A fraction in percent; a dash for None, where there is nothing to score.

    >>> percent(0.5), percent(0.5, "+"), percent(None)
    ('50.0', '+50.0', '-')
    """
    return "-" if fraction is None else f"{100 * fraction:{sign}.1f}"


class Estimate(NamedTuple):
    """A score, or a difference of two, and its 95 % confidence interval.

    Attributes:
        mean: a fraction.
        low, high: bounds of the interval; NaN where there is none.
    """

    mean: float
    low: float = math.nan
    high: float = math.nan

    def text(self, sign: str = "") -> str:
        """The value in percent, with its interval; `sign` may be "+".

        >>> Estimate(0.5, 0.25, 0.75).text(), Estimate(0.5).text("+")
        ('50.0 [25.0, 75.0]', '+50.0')
        """
        mean, low, high = (percent(number, sign) for number in self)
        return mean if math.isnan(self.low) else f"{mean} [{low}, {high}]"


def wilson(fraction: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a fraction.

    >>> [round(bound, 2) for bound in wilson(0.5, 100)]
    [0.4, 0.6]

    Args:
        fraction: in [0, 1].
        count: number of samples.
    """
    z = 1.959964
    scale = 1 + z * z / count
    middle = (fraction + z * z / (2 * count)) / scale
    half = z / scale * math.sqrt(fraction * (1 - fraction) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def newcombe(fraction: float, count: int, base: float, base_count: int) -> tuple[float, float]:
    """Newcombe's 95 % confidence interval of a difference of independent fractions (method 10).

    >>> [round(bound, 3) for bound in newcombe(56 / 70, 70, 48 / 80, 80)]
    [0.052, 0.334]

    Args:
        fraction, count: in [0, 1], and the number of samples.
        base, base_count: of the fraction that is subtracted.
    """
    (low, high), (base_low, base_high) = wilson(fraction, count), wilson(base, base_count)
    below, above = (
        math.hypot(fraction - low, base_high - base),
        math.hypot(high - fraction, base - base_low),
    )
    return fraction - base - below, fraction - base + above


def student(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval (Student's); NaN for one value.

    >>> [round(number, 2) for number in student([0.4, 0.5, 0.6])]
    [0.5, 0.25]
    """
    from scipy.special import stdtrit

    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return mean, math.nan
    return mean, float(stdtrit(count - 1, 0.975) * np.std(values, ddof=1)) / math.sqrt(count)
