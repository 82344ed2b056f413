"""What the pages on papers show: the recipes' docstrings, what was measured, and how to cite."""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from benchmarks._runner import Result
from docs.evidence import claims_table
from docs.results import ROOT, newest, no_result, origin
from experiments._claims import Claim, judge
from experiments._claims import claims as claims_of
from experiments._parts import PARTS


class Paper(NamedTuple):
    """A paper, the recipe that trains its models, and its claims that are tested here.

    Attributes:
        title: of the section.
        recipe: name of a file in `configs/`.
        about: whether a claim is one of this paper about these models.
        parts: those of the experiment `evidence` that can test the claims.
    """

    title: str
    recipe: str
    about: Callable[[Claim], bool]
    parts: tuple[str, ...]


def _of(source: str, *backbones: str) -> Callable[[Claim], bool]:
    """Claims of a source, if backbones are given about these."""
    return lambda claim: (
        claim.source.startswith(source) and (not backbones or claim.better[0] in backbones)
    )


_SMALL = ("fashion", "tiny_imagenet")
PAPERS = [
    Paper("Axial RoPE, Kane's thesis", "thesis", _of("thesis"), _SMALL),
    Paper(
        "RoPE-ViT, Heo et al.: ViT",
        "deit3",
        _of("Heo", "vit"),
        ("fashion", "fashion_crops", "tiny_imagenet"),
    ),
    Paper("RoPE-ViT, Heo et al.: Swin", "swin", _of("Heo", "swin"), ("tiny_imagenet",)),
    Paper("LaPE, Yu et al.: ImageNet", "lape", _of("LaPE, inner", "vit"), _SMALL),
    Paper("LaPE, Yu et al.: CIFAR", "cct", _of("LaPE, CIFAR"), ("cifar10",)),
    Paper("Cross-Axis Transformer", "cat", _of("CAT"), ("fashion",)),
]


def papers(results: Sequence[Result]) -> str:
    """A section for each paper: its recipe's docstring, and what was measured here."""
    sections = []
    for paper in PAPERS:
        path = ROOT / "configs" / f"{paper.recipe}.py"
        text = ast.get_docstring(ast.parse(path.read_text()))
        found = "\n".join(measured(paper, part, results) for part in paper.parts)
        sections.append(f"## {paper.title}\n\n{text}\n\n### Measured here\n\n{found}")
    return "\n".join(sections)


def measured(paper: Paper, part: str, results: Sequence[Result]) -> str:
    """The outcome of a paper's claims in the runs of a part."""
    result = newest(results, "evidence", part=part)
    if result is None:
        return f"Part `{part}`: {no_result(f'experiments evidence {part}')}"
    if not any(judge(claim, result["runs"]) for claim in claims_of(part) if paper.about(claim)):
        return f"Part `{part}`: none of these models has two seeds yet.\n"
    table = claims_table(part, result, paper.about)
    return f"Part `{part}`, {PARTS[part].about}, {origin(result)}:\n\n{table}"


def citation(results: Sequence[Result]) -> str:
    """CITATION.cff in BibTeX."""
    del results
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    entries = [bibtex("rope_jax", "software", cff)]
    for reference in cff["references"]:
        key = f"{reference['authors'][0]['family-names'].lower()}{reference['year']}"
        entries.append(bibtex(key, reference["type"], reference))
    return "```bibtex\n" + "\n".join(entries) + "```\n"


def bibtex(key: str, kind: str, about: Mapping[str, Any]) -> str:
    """A reference of a CFF file in BibTeX; "article" or another kind, which becomes a note.

    >>> about = {"title": "A", "year": 2024, "authors": [{"family-names": "B", "given-names": "C"}]}
    >>> print(bibtex("b2024", "article", about), end="")
    @article{b2024,
      title = {{A}},
      author = {B, C},
      year = {2024},
    }
    """

    def name(author: Mapping[str, str]) -> str:
        if "name" in author:
            others = author["name"] == "and others"
            return "others" if others else f"{{{author['name']}}}"
        return ", ".join(author[part] for part in ("family-names", "given-names") if part in author)

    article = kind == "article"
    version = f"version {about['version']}" if "version" in about else None
    note = [
        None if article else kind.capitalize(),
        about.get("institution", {}).get("name"),
        version,
    ]
    fields = {
        "title": f"{{{about['title']}}}",
        "author": " and ".join(map(name, about["authors"])),
        "year": about.get("year"),
        "note": ", ".join(filter(None, note)),
        "url": about.get("url"),
    }
    lines = [f"  {field} = {{{value}}},\n" for field, value in fields.items() if value]
    return f"@{kind if article else 'misc'}{{{key},\n{''.join(lines)}}}\n"
