"""Performance goals (`goals.csv`): ratios of two measurements in one process on one GPU."""

import csv
import dataclasses
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rope_jax.text import format_table


@dataclasses.dataclass(frozen=True)
class Goal:
    """A goal for a ratio. Higher is better, unless stated in `what`.

    Attributes:
        name: a letter (K kernels, A attention, M models, T training, S start-up) and a number.
        what: numerator and denominator.
        floor: the minimum for a release.
        goal: a good value.
        moonshot: the best plausible value on the hardware.
        limit: the physical bound, or "".
    """

    name: str
    what: str
    floor: str
    goal: str
    moonshot: str
    limit: str


with pathlib.Path(__file__).with_name("goals.csv").open() as _file:
    GOALS = tuple(Goal(**row) for row in csv.DictReader(_file))


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive values."""
    return math.exp(statistics.fmean(map(math.log, values)))


def spread(values: Sequence[float], value: float | None = None) -> dict[str, Any]:
    """A goal's entry in a result: value (default: geometric mean), minimum, maximum and count."""
    value = geometric_mean(values) if value is None else value
    return {"value": value, "least": min(values), "most": max(values), "count": len(values)}


def goal_table(found: Mapping[str, Mapping[str, Any]], letters: str) -> str:
    """Formats all goals with these letters as a table for the terminal, measured or not.

    Args:
        found: a result's entries by goal name.
        letters: first letters of the goals to list.
    """
    rows = []
    for goal in GOALS:
        if goal.name[0] in letters:
            entry = found.get(goal.name, {})
            figures = [
                f"{entry[key]:.2f}" if key in entry else "-" for key in ("value", "least", "most")
            ]
            figures[0] = figures[0] if entry else "not measured"
            rows.append([goal.name, *figures, goal.floor, goal.goal, goal.moonshot, goal.what])
    return format_table(
        ("goal", "measured", "least", "most", "floor", "goal", "moonshot", "what"), rows
    )
