"""The page on papers: every recipe with published accuracies, every claim that is tested."""

import ast
import doctest
import pathlib
import re

from docs import papers
from experiments._claims import claims
from experiments._parts import PARTS
from tests.docs.test_tables import evidence_result

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def sections(results):
    """The text on each paper, by its title."""
    parts = re.split(r"^## ", papers.papers(results), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part for part in parts}


def test_every_recipe_with_published_accuracies_has_a_section():
    texts = {
        path.stem: ast.get_docstring(ast.parse(path.read_text())) for path in CONFIGS.glob("*.py")
    }
    published = {name for name, text in texts.items() if text and "Expected top-1" in text}
    assert {paper.recipe for paper in papers.PAPERS} == published
    for paper, section in zip(papers.PAPERS, sections([]).values(), strict=True):
        assert texts[paper.recipe] in section
        assert section.count("No result yet") == len(paper.parts)


def test_every_claim_about_a_recipes_models_is_in_one_section():
    for part in PARTS:
        for claim in claims(part):
            about = [paper for paper in papers.PAPERS if paper.about(claim) and part in paper.parts]
            assert len(about) <= 1, claim
            backbone = claim.better[0]
            if backbone in ("vit", "swin", "cat") and not claim.source.startswith("LaPE"):
                assert len(about) == 1, (part, claim)


def test_results_stand_in_the_section_of_their_paper():
    found = sections([evidence_result()])
    thesis, heo = found["Axial RoPE, Kane's thesis"], found["RoPE-ViT, Heo et al.: ViT"]
    assert "| `vit` with `rpb` above `vit` with `none` | thesis, table 4.1 | +10.0 ± 0.0" in thesis
    assert "`rope2d` above `vit` with `ape` | Heo et al., figure 4 | 16 px: -10.0 ± 0.0" in heo
    assert "thesis, table" not in heo
    assert "none of these models has two seeds yet" in found["LaPE, Yu et al.: ImageNet"]


def test_examples():
    assert doctest.testmod(papers).attempted > 0
    assert doctest.testmod(papers).failed == 0


def test_the_citation_has_all_references():
    text = papers.citation([])
    assert [line.split("{")[0] for line in text.splitlines() if line.startswith("@")] == [
        "@misc",
        "@misc",
        "@article",
        "@article",
        "@article",
    ]
    assert "author = {Erickson, Lily}" in text
    assert "author = {Heo, Byeongho and Park, Song and Han, Dongyoon and Yun, Sangdoo}" in text
    assert "author = {Yu, Runyi and others}" in text
    assert "author = {{The rope_jax authors}}" in text
