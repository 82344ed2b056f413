"""The tables and figures of a paper, for `docs/papers.md`; see `docs.make_tables`."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

from benchmarks.evidence import judge_claim, top1
from docs.results import ROOT
from rope_jax.names.text import markdown_table
from rope_jax.papers import published
from rope_jax.papers.claims import Claim, in_words
from rope_jax.papers.declared import DECLARED
from rope_jax.papers.figures import Curves
from rope_jax.papers.kinds import Artifact
from rope_jax.papers.lab import Lab
from rope_jax.papers.tables import Settings, Table

LABS = [Lab(scale, pathlib.Path("runs/papers")) for scale in ("small", "full")]
HEADER = ["id", "shows", "runs: small", "full", "published", "claims"]


def papers(name: str) -> str:
    """The tables and figures of a paper: their runs, published numbers and claims."""
    (paper,) = [paper for paper in DECLARED if paper.name == name]
    rows = [
        [
            f"`{artifact.id}`",
            artifact.title,
            *_count_runs([artifact]),
            str(_count_published(artifact)),
            "<br>".join(_claims(artifact)),
        ]
        for artifact in paper.artifacts
    ]
    total = sum(cell.artifact.startswith(f"{name}/") for cell in published())
    rows.append([f"`{name}`", "all, each once", *_count_runs(paper.artifacts), str(total), ""])
    return markdown_table(HEADER, rows)


def _count_runs(artifacts: Sequence[Artifact]) -> list[str]:
    """The number of distinct trainings at the scales small and full."""
    counts = []
    for lab in LABS:
        jobs = lab.jobs(run for artifact in artifacts for run in artifact.runs(lab))
        counts.append(str(sum(job.words[0] == "train" for job in jobs)))
    return counts


def _count_published(artifact: Artifact) -> int:
    """The number of cells with a published number or text."""
    if isinstance(artifact, Table):  # whose cells of speed and operations would be measured
        return len(artifact.printed)
    cells = artifact.cells(LABS[1]) if isinstance(artifact, Curves | Settings) else []
    return sum(cell["published"] is not None for cell in cells)


def _claims(artifact: Artifact) -> Iterator[str]:
    """The claims in words, with the number of models that each is about."""
    runs = artifact.runs(LABS[1])
    measured = getattr(artifact, "scores", None) or artifact
    for claim in measured.claims:
        models = [run for run, _ in claim.pairs(runs)]
        words = claim.words(models[0]).replace(f", {models[0].model}", "")
        yield f"{words} ({len(models)} models)" if len(models) > 1 else words


EVIDENCE = "experiments/results/evidence_fashion_cpu.json"
# Claims of the thesis that were judged on these runs after they had been made.
LATE = (
    Claim("axial_rope", "rope2d", at=(32, 40, 48)),
    Claim("axial_rope(k_rope=8)", "rope2d", at=(32, 40, 48)),
    Claim("axial_rope(k_rope=8)", "axial_rope", at=(16, 20, 24, 32, 40, 48)),
)


def late_claims() -> str:
    """Verdicts on claims about runs that were made before, by size."""
    runs = [
        run | {"position": run["position"].replace("(k_rope=2)", "")}  # the default
        for run in json.loads((ROOT / EVIDENCE).read_text())["runs"]
        if run["backbone"] == "vit"
    ]
    sides, rows = LATE[-1].at, []
    for claim in LATE:
        at_side = {side: dataclasses.replace(claim, at=(side,)) for side in claim.at}
        verdicts = {side: judge_claim(one, runs, top1) for side, one in at_side.items()}
        cells = [in_words(verdicts[side]) if side in verdicts else "" for side in sides]
        rows.append([f"`{claim.better}` above `{claim.worse}`", *cells])
    return markdown_table(["claim", *(f"{side} px" for side in sides)], rows)
