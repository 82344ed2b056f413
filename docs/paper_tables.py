"""The tables and figures of a paper, for `docs/papers.md`; see `docs.make_tables`."""

import pathlib
from collections.abc import Iterator, Sequence

from rope_jax.names.text import markdown_table
from rope_jax.papers import published
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
    if isinstance(artifact, Curves | Settings):
        return sum(cell["published"] is not None for cell in artifact.cells(LABS[1]))
    return len(artifact.printed) if isinstance(artifact, Table) else 0  # some would be measured


def _claims(artifact: Artifact) -> Iterator[str]:
    """The claims in words, with the number of models that each is about."""
    runs = artifact.runs(LABS[1])
    for claim in artifact.claims:
        models = [run for run, _ in claim.pairs(runs)]
        words = claim.words(models[0]).replace(f", {models[0].model}", "")
        yield f"{words} ({len(models)} models)" if len(models) > 1 else words
