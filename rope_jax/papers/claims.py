"""The papers' claims, and what runs show of them.

A claim is about the difference of two models in a number, computed for each seed that both have.
With the 95 % interval of its mean over seeds (Student's t), a claim of being above is

    shown       if the interval lies above zero,
    refuted     if it lies below zero,
    not shown   otherwise,
    not tested  with fewer than two common seeds.

A claim of being as good is judged in the same way with -MARGIN in place of zero.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rope_jax.analysis.intervals import student
from rope_jax.papers.runs import Run

MARGIN = 0.5  # percentage points
Verdict = dict[str, Any]  # claim, verdict, difference, interval, seeds, after_the_fact
Value = Callable[[Run, int | None], Mapping[int, float]]  # of a run at a test side, by seed


def judge(better: Mapping[int, float], worse: Mapping[int, float], margin: float = 0.0) -> Verdict:
    """The verdict on numbers of two models by seed.

    >>> judge({0: 81.0, 1: 82.0}, {0: 80.0, 1: 80.5})["verdict"]
    'not shown'
    >>> judge({0: 81.0, 1: 82.0}, {0: 80.0, 1: 81.01})["verdict"]
    'shown'
    """
    seeds = sorted(better.keys() & worse.keys())
    if len(seeds) < 2:
        return {"verdict": "not tested", "difference": None, "interval": None, "seeds": seeds}
    mean, half = student([better[seed] - worse[seed] for seed in seeds])
    low, high = mean - half, mean + half
    verdict = "shown" if low > -margin else "refuted" if high < -margin else "not shown"
    return {"verdict": verdict, "difference": mean, "interval": [low, high], "seeds": seeds}


def in_words(verdict: Verdict, digits: int = 1) -> str:
    """Writes a verdict as the difference with its interval, and a word.

    >>> in_words({"verdict": "shown", "difference": 2.0, "interval": [1.5, 2.5]})
    '+2.0 ± 0.5, shown'
    """
    if verdict["interval"] is None:
        return verdict["verdict"]
    low, high = verdict["interval"]
    difference, half = verdict["difference"], (high - low) / 2
    return f"{difference:+.{digits}f} ± {half:.{digits}f}, {verdict['verdict']}"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim that one scheme, model or option is better than another.

    Attributes:
        better, worse: schemes, models or options of a model.
        at: test sides in pixels over which numbers are averaged; none for the training size.
        by: what `better` and `worse` name; runs that differ in it alone are compared.
        margin: what `better` may lack, in the unit of the number; 0 for a claim of being above.
        models: about which the claim is; none for all.
    """

    better: str
    worse: str
    at: Sequence[int] = ()
    by: Literal["position", "model", "options"] = "position"
    margin: float = 0.0
    models: tuple[str, ...] = ()

    def judge(
        self,
        runs: Sequence[Run],
        value: Value,
        after_the_fact: bool,
        *,
        sides: Callable[[Run, Sequence[int]], Sequence[int]] = lambda run, at: at,
        name: Callable[[Run], str] = lambda run: run.model,
    ) -> Iterator[Verdict]:
        """The verdict for each pair of runs.

        Args:
            runs: all runs.
            value: the number of a run at a test side (None: the training size), by seed.
            after_the_fact: whether the runs are older than the claim.
            sides: those of `at` that say something about a run.
            name: of a run's model in words.
        """
        for run, base in self.pairs(runs):
            at = sides(run, self.at)
            numbers = [{}, {}]
            if at or not self.at:
                numbers = [_average(value, one, at or (None,)) for one in (run, base)]
            yield {
                "claim": self.words(run, name),
                **judge(*numbers, self.margin),
                "after_the_fact": after_the_fact,
            }

    def pairs(self, runs: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
        """The runs that are claimed to be better, each with the one that it is compared with."""
        others = {
            "position": ("model", "options", "data"),
            "model": ("data",),
            "options": ("model", "position", "data"),
        }
        same = lambda a, b: all(getattr(a, x) == getattr(b, x) for x in others[self.by])
        for run in runs:
            if getattr(run, self.by) == self.better and run.model in (self.models or (run.model,)):
                for base in runs:
                    if getattr(base, self.by) == self.worse and same(run, base):
                        yield run, base

    def words(self, run: Run, name: Callable[[Run], str] = lambda run: run.model) -> str:
        """The claim in a sentence."""
        relation = "as good as" if self.margin else "above"
        model = "" if self.by == "model" else f", {name(run)}"
        data = "" if run.data == "imagenet" else f" on {run.data}"
        sides = f", at {', '.join(map(str, self.at))} px" if self.at else ""
        names = f"{self.better or 'default'} {relation} {self.worse or 'default'}"
        return f"{names}{model}{data}{sides}"


def _average(value: Value, run: Run, sides: Sequence[int | None]) -> dict[int, float]:
    by_side = [value(run, side) for side in sides]
    seeds = set.intersection(*(set(numbers) for numbers in by_side))
    return {seed: float(np.mean([numbers[seed] for numbers in by_side])) for seed in seeds}


def above(better: str, *worse: str, **options: Any) -> list[Claim]:
    """The claims that one is above each of others."""
    return [Claim(better, base, **options) for base in worse]


def as_good(better: str, worse: str, **options: Any) -> Claim:
    """The claim that one is as good as another, up to MARGIN."""
    return Claim(better, worse, margin=MARGIN, **options)
