"""The papers' claims about accuracies, and what the runs of the experiment `evidence` show.

A claim is about the difference of two models in accuracy, in points, computed for each seed. With
the 95 % interval of its mean over seeds (Student's t), a claim of being above is

    shown      if the interval lies above zero,
    refuted    if it lies below zero,
    not shown  otherwise.

A claim of being as good is judged in the same way with -MARGIN in place of zero.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from experiments._parts import FRACTIONS, INNER, PARTS, Model, Part
from rope_jax.analysis.intervals import student

MARGIN = 0.5  # points
_PART = "thesis, table 4.3: a part of the channels is enough"
_SHARE = "thesis, tables 4.2 and 4.3: heads may share angles"
Table = dict[str, Any]  # columns and rows of text, and perhaps a note


@dataclasses.dataclass(frozen=True)
class Claim:
    """A paper's claim about the accuracies of two models.

    Attributes:
        source: paper, and its table or figure.
        better: the model that is claimed to be better, or as good.
        worse: the model that it is compared with.
        resolution: side in pixels; None for the training resolution.
        margin: points that `better` may lack if it is claimed to be as good; 0 if it is claimed to
            be above.
    """

    source: str
    better: Model
    worse: Model
    resolution: int | None = None
    margin: float = 0.0


def claims(name: str) -> Iterator[Claim]:
    """Yields the claims that the runs of a part can test."""
    models = set(PARTS[name].models)
    return (x for x in _paper_claims(PARTS[name], name) if {x.better, x.worse} <= models)


def _paper_claims(part: Part, name: str) -> Iterator[Claim]:
    """Yields all claims about the backbones of a part, also about models that it lacks."""
    smaller, larger = part.smaller, part.larger
    sides = (*smaller, None, *larger)
    for backbone in dict.fromkeys(backbone for backbone, _ in part.models):
        has_fractions = (backbone, FRACTIONS[1]) in part.models
        axial = FRACTIONS[1] if has_fractions else "axial_rope"
        # Heo et al.'s figure 4 compares with APE on ViT, figure 5 with RPB on Swin.
        figure, table = (5, "rpb") if backbone in ("swin", "nat") else (4, "ape")
        sums = "Heo et al., figure 6 and table 5"
        lape = "LaPE, CIFAR-10" if name == "cifar10" else "LaPE, inner embeddings of DeiT-Ti"
        comparisons = [
            ("thesis, table 4.1", "rpb", "none", (None,)),
            ("thesis, table 4.1", axial, "rpb", (None,)),
            *((_PART, fraction, FRACTIONS[0], (None,)) for fraction in FRACTIONS[1:]),
            (_SHARE, "axial_rope(shared=True)", axial, (None,)),
            (f"Heo et al., figure {figure}", "rope2d", table, (*smaller, *larger)),
            (f"Heo et al., figure {figure}", "rope_mixed", table, (*smaller, *larger)),
            (f"Heo et al., figure {figure}", "rope_mixed", "rope2d", sides),
            (sums, "rope_mixed+ape", "rope_mixed", smaller),
            (sums, "rope_mixed", "rope_mixed+ape", larger),
            ("Heo et al., figure 6", "rope_mixed", "rope_mixed+rpb", sides if figure == 5 else ()),
            *((lape, f"lape({inner})", inner, (None,)) for inner in INNER),
        ]
        for source, better, worse, at in comparisons:
            margin = MARGIN if source in (_PART, _SHARE) else 0.0
            for side in at:
                yield Claim(source, (backbone, better), (backbone, worse), side, margin)
    yield Claim("CAT, table 1", ("cat", None), ("cat_vit", None))
    yield Claim("CAT, table 4", ("cat", None), ("cat_no_imprint", None))


def accuracies(
    runs: Sequence[dict[str, Any]], backbone: str, position: str | None, resolution: int | None
) -> dict[int, float]:
    """Top-1 accuracy of a model in percent, by seed; None is the training resolution."""
    values = {}
    for run in runs:
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
        verdict: "shown", "refuted" or "not shown".
    """

    difference: float
    half_width: float
    verdict: str

    def __str__(self) -> str:
        return f"{self.difference:+.1f} ± {self.half_width:.1f}, {self.verdict}"


def judge(claim: Claim, runs: Sequence[dict[str, Any]], least: int) -> Verdict | None:
    """Judges a claim by the seeds that both models have; None for fewer than `least` seeds."""
    better = accuracies(runs, *claim.better, claim.resolution)
    worse = accuracies(runs, *claim.worse, claim.resolution)
    seeds = sorted(better.keys() & worse.keys())
    if len(seeds) < least:
        return None
    mean, half = student([better[seed] - worse[seed] for seed in seeds])
    above = mean + claim.margin
    verdict = "shown" if above > half else "refuted" if above < -half else "not shown"
    return Verdict(mean, half, verdict)


def sides(claim: Claim) -> str:
    """Formats the comparison of a claim in Markdown."""
    (backbone, position), (other, plain) = claim.better, claim.worse
    better = f"`{backbone}`" + (f" with `{position}`" if position else "")
    worse = f"`{other}`" + (f" with `{plain}`" if plain else "")
    where = "" if claim.resolution is None else f" at {claim.resolution} px"
    return f"{better} {'as good as' if claim.margin else 'above'} {worse}{where}"


def spread(values: Sequence[float], sign: str = "") -> str:
    """Formats mean and 95 % interval; the sign may be "+".

    >>> spread([1.0, 3.0])
    '2.0 ± 12.7'
    """
    mean, half = student(values)
    return f"{mean:{sign}.1f}" + (f" ± {half:.1f}" if len(values) > 1 else "")


def accuracy_table(models: Sequence[Model], runs: Sequence[dict[str, Any]]) -> Table:
    """Accuracies of the models that have runs, the most accurate first."""
    others = sorted({row["resolution"][0] for run in runs for row in run["eval"][1:]})
    sizes = {run["backbone"]: run["eval"][0]["resolution"][0] for run in runs}
    trained = {model: list(accuracies(runs, *model, None).values()) for model in models}
    done = [model for model in models if trained[model]]
    rows = []
    for model in sorted(done, key=lambda x: statistics.mean(trained[x]), reverse=True):
        backbone, position = model
        by_side = [list(accuracies(runs, *model, side).values()) for side in others]
        names = [f"`{backbone}`", f"`{position}`" if position else "its own"]
        best = f"{spread(trained[model])} ({sizes[backbone]} px)"
        cells = [spread(values) if values else "" for values in by_side]
        rows.append([*names, str(len(trained[model])), best, *cells])
    columns = ["backbone", "position", "seeds", "as trained", *(f"{side} px" for side in others)]
    note = "Top-1 accuracy (%), mean and 95 % interval over seeds."
    return {"columns": columns, "rows": rows, "note": note}


def claims_table(part: str, runs: Sequence[dict[str, Any]], seeds: int) -> Table:
    """Verdict on every claim that a part can test, one row for claims that differ only in size.

    A claim has no verdict until all seeds have finished.
    """
    rows = []
    without_size = lambda claim: dataclasses.replace(claim, resolution=None)
    for claim, group in itertools.groupby(claims(part), without_size):
        cells = []
        for variant in group:
            side = f"{variant.resolution} px" if variant.resolution else "as trained"
            cells.append(f"{side}: {judge(variant, runs, seeds) or 'not finished'}")
        rows.append([sides(claim), claim.source, "<br>".join(cells)])
    columns = ["claim", "source", "difference and verdict"]
    note = "Differences in points of top-1 accuracy, with 95 % intervals over seeds."
    return {"columns": columns, "rows": rows, "note": note}
