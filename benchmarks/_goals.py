"""The project's goals: ratios of two figures from one process on one GPU (`goals.csv`)."""

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
    """A ratio, better the larger it is unless `what` says otherwise.

    Attributes:
        name: its letter is K for kernels, A attention, M models, T training, S start-up.
        what: numerator and denominator.
        floor: the least for a release.
        goal: a good value.
        moonshot: the best that is plausible on the hardware.
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
    """exp of the mean logarithm."""
    return math.exp(statistics.fmean(map(math.log, values)))


def spread(values: Sequence[float], value: float | None = None) -> dict[str, Any]:
    """The entry of a goal in a result: value (default: the geometric mean), least, most, count."""
    value = geometric_mean(values) if value is None else value
    return {"value": value, "least": min(values), "most": max(values), "count": len(values)}


def goal_table(found: Mapping[str, Mapping[str, Any]], letters: str) -> str:
    """A table for the terminal of all goals with these letters, measured or not.

    Args:
        found: goal -> its entry in a result.
        letters: of the goals' names.
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
