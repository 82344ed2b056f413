"""The papers' claims about accuracies, and what the runs of the experiment `evidence` say."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from scipy import stats

from experiments._parts import FRACTIONS, INNER, PARTS, Model, Part


@dataclasses.dataclass(frozen=True)
class Claim:
    """A paper's claim about the accuracies of two models.

    Attributes:
        source: paper, and its table or figure.
        better: the model that is claimed to be better.
        worse: the model that it is compared with.
        resolution: side in pixels; None for the training resolution.
        equal: True if the claim is that the two do not differ.
    """

    source: str
    better: Model
    worse: Model
    resolution: int | None = None
    equal: bool = False


def claims(name: str) -> Iterator[Claim]:
    """Yields the claims that the runs of a part can test."""
    made = set(PARTS[name].models)
    return (x for x in _of_papers(PARTS[name], name) if {x.better, x.worse} <= made)


def _of_papers(part: Part, name: str) -> Iterator[Claim]:
    """Yields all claims about the backbones of a part, also about models that it lacks."""
    smaller, larger = part.smaller, part.larger
    sides = (*smaller, None, *larger)
    for backbone in dict.fromkeys(backbone for backbone, _ in part.models):
        has_fractions = (backbone, FRACTIONS[1]) in part.models
        axial = FRACTIONS[1] if has_fractions else "axial_rope"
        # Heo et al.'s figure 4 compares with APE on ViT, figure 5 with RPB on Swin.
        figure, table = (5, "rpb") if backbone in ("swin", "nat") else (4, "ape")
        part_is_enough = "thesis, table 4.3: a part of the channels is enough"
        share = "thesis, tables 4.2 and 4.3: heads may share angles"
        sums = "Heo et al., figure 6 and table 5"
        lape = "LaPE, CIFAR-10" if name == "cifar10" else "LaPE, inner embeddings of DeiT-Ti"
        comparisons = [
            ("thesis, table 4.1", "rpb", "none", (None,)),
            ("thesis, table 4.1", axial, "rpb", (None,)),
            *((part_is_enough, fraction, FRACTIONS[0], (None,)) for fraction in FRACTIONS[1:]),
            (share, "axial_rope(shared=True)", axial, (None,)),
            (f"Heo et al., figure {figure}", "rope2d", table, (*smaller, *larger)),
            (f"Heo et al., figure {figure}", "rope_mixed", table, (*smaller, *larger)),
            (f"Heo et al., figure {figure}", "rope_mixed", "rope2d", sides),
            (sums, "rope_mixed+ape", "rope_mixed", smaller),
            (sums, "rope_mixed", "rope_mixed+ape", larger),
            ("Heo et al., figure 6", "rope_mixed", "rope_mixed+rpb", sides if figure == 5 else ()),
            *((lape, f"lape({inner})", inner, (None,)) for inner in INNER),
        ]
        for source, better, worse, at in comparisons:
            equal = source in (part_is_enough, share)
            for side in at:
                yield Claim(source, (backbone, better), (backbone, worse), side, equal)
    epochs = "" if name == "cat" else ", there after ten epochs"
    yield Claim(f"CAT, table 1{epochs}", ("cat", None), ("cat_vit", None))
    yield Claim(f"CAT, table 4{epochs}", ("cat", None), ("cat_no_imprint", None))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of the 95 % interval (Student's t); NaN for a single value."""
    if len(values) == 1:
        return values[0], math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), stats.t.ppf(0.975, len(values) - 1) * error


def accuracies(
    found: Sequence[dict[str, Any]], backbone: str, position: str | None, resolution: int | None
) -> dict[int, float]:
    """Top-1 accuracy of a model in per cent, by seed; resolution=None is that of training."""
    values = {}
    for run in found:
        if (run["backbone"], run["position"]) == (backbone, position):
            rows = run["eval"][:1]
            if resolution is not None:
                size = [resolution, resolution]
                rows = [row for row in run["eval"] if row["resolution"] == size]
            if rows:
                values[run["seed"]] = 100 * rows[0]["top1"]
    return values


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a claim.

    Attributes:
        difference: mean difference over seeds, in percentage points.
        half_width: half width of its 95 % interval.
        seeds: number of seeds with which both models were trained.
        verdict: "shown", "not shown", "the opposite", "a difference" or "no difference seen".
    """

    difference: float
    half_width: float
    seeds: int
    verdict: str

    def __str__(self) -> str:
        return f"{self.difference:+.1f} ± {self.half_width:.1f}, {self.verdict}"


def judge(claim: Claim, found: Sequence[dict[str, Any]]) -> Verdict | None:
    """Judges a claim by the seeds that both models have; None for fewer than two seeds."""
    better = accuracies(found, *claim.better, claim.resolution)
    worse = accuracies(found, *claim.worse, claim.resolution)
    seeds = sorted(better.keys() & worse.keys())
    if len(seeds) < 2:
        return None
    mean, half = interval([better[seed] - worse[seed] for seed in seeds])
    if claim.equal:
        verdict = "a difference" if abs(mean) > half else "no difference seen"
    else:
        verdict = "shown" if mean > half else "the opposite" if mean < -half else "not shown"
    return Verdict(mean, half, len(seeds), verdict)


def sides(claim: Claim) -> str:
    """Formats the comparison of a claim in Markdown."""
    (backbone, position), (other, plain) = claim.better, claim.worse
    better = f"`{backbone}`" + (f" with `{position}`" if position else "")
    worse = f"`{other}`" + (f" with `{plain}`" if plain else "")
    where = "" if claim.resolution is None else f" at {claim.resolution} px"
    return f"{better} {'equal to' if claim.equal else 'above'} {worse}{where}"
