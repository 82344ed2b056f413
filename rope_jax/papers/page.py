"""The pages of `rope_jax reproduce`: one for each paper, with published numbers beside ours."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rope_jax.analysis.page import anchor, paragraph, picture, table, to_html
from rope_jax.names.text import size_text

Result = Mapping[str, Any]  # an artifact of results.json
_HIDDEN = {"dataset", "quantity", "batch_size", "task"}


def write_pages(results: Mapping[str, Any], folder: pathlib.Path, papers: Sequence[Any]) -> None:
    """Writes PAPER.html for each paper of the results, and index.html with links to all."""
    links = []
    for paper in papers:
        sections = {}
        for artifact in paper.artifacts:
            result = results["artifacts"].get(artifact.id)
            if result is None:
                continue
            heading = f"{artifact.name[0].upper()}{artifact.name[1:].replace('_', ' ')}"
            heading += f": {artifact.title}"
            sections[heading] = artifact_blocks(result, results["scale"], folder)
            claims = [claim["verdict"] for claim in result["claims"]]
            counts = ", ".join(f"{claims.count(word)} {word}" for word in dict.fromkeys(claims))
            link = f"[{paper.title}, {heading}]({paper.name}.html#{anchor(heading)})"
            links.append((link, progress(result), counts))
        if sections:
            text = to_html(f"{paper.title}: reproduced at scale {results['scale']}", sections)
            (folder / f"{paper.name}.html").write_text(text)
    title = f"Four papers, reproduced at scale {results['scale']}"
    index = table(("table or figure", "numbers of ours", "claims"), links)
    (folder / "index.html").write_text(to_html(title, {"Tables and figures": [index]}))


def progress(result: Result) -> str:
    """The number of an artifact's cells that have a number of ours.

    >>> progress({"cells": [{"ours": None}, {"ours": "0.05"}]})
    '1 of 2'
    """
    cells = result["cells"]
    return f"{sum(cell['ours'] is not None for cell in cells)} of {len(cells)}"


_STAND_INS = (
    "At this scale one small model stands in for all sizes of a family, and other images for the "
    "papers': compare schemes, not numbers with the published ones."
)


def artifact_blocks(result: Result, scale: str, folder: pathlib.Path) -> list[str]:
    """Text, tables, pictures and claims of an artifact."""
    small = scale in ("smoke", "small") and result["protocol"]
    blocks = [paragraph(text) for text in (small and _STAND_INS, result["note"]) if text]
    blocks += [picture(folder / name, result["title"]) for name in result["files"]]
    blocks += [table(*rows) for rows in tables(result, scale)]
    notes = dict.fromkeys(
        cell["note"] for cell in result["cells"] if cell["note"] and cell["note"] != "differs"
    )
    if notes:
        blocks.append(paragraph(f"Notes: {'; '.join(notes)}."))
    if result["protocol"]:
        blocks.append(paragraph(f"Ours: {'; '.join(result['protocol'])}."))
    if result["claims"]:
        rows = [claim_row(claim) for claim in result["claims"]]
        blocks.append(table(("claim", "verdict", "difference", "seeds"), rows))
    return blocks


def claim_row(claim: Mapping[str, Any]) -> tuple[str, ...]:
    """A verdict as the cells of a row."""
    late = " (after the fact)" if claim["after_the_fact"] else ""
    difference = "-"
    if claim["difference"] is not None:
        low, high = claim["interval"]
        difference = f"{claim['difference']:+.3g} [{low:+.3g}, {high:+.3g}]"
    seeds = ", ".join(map(str, claim["seeds"]))
    return claim["claim"], claim["verdict"] + late, difference, seeds


def tables(result: Result, scale: str) -> list[tuple[list[str], list[list[str]]]]:
    """The tables of an artifact: settings, and numbers with the columns of the paper.

    Numbers of other images than the paper's are in a table of their own.
    """
    settings = [cell for cell in result["cells"] if "setting" in cell["key"]]
    numbers = [cell for cell in result["cells"] if "setting" not in cell["key"]]
    made = [_settings(settings)] if settings else []
    for what in ["both"] if scale in ("released", "full") else ["ours", "published"]:
        shown = [cell for cell in numbers if what == "both" or cell[what] is not None]
        if shown:
            made.append(_pivot(numbers, result["columns"], what))
    return made


def _settings(cells: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(name for cell in cells for name in cell["key"]))
    rows = [
        [
            *(str(cell["key"].get(name, "")) for name in names),
            cell["published"],
            f"**{cell['ours']}**" if cell["note"] == "differs" else cell["ours"] or "-",
        ]
        for cell in cells
    ]
    return [*names, "published", "ours (bold: differs)"], rows


def _pivot(
    cells: Sequence[Mapping[str, Any]], columns: str, what: str
) -> tuple[list[str], list[list[str]]]:
    words = {"ours": "ours", "published": "published", "both": "ours; published"}[what]
    count = lambda name: len({cell["key"].get(name) for cell in cells})
    varied = [name for name in ("dataset", "quantity", "task", "counted") if count(name) > 1]
    rows: dict[str, dict[str, str]] = {}
    names, headers = {}, {}
    for cell in cells:
        key = {k: v for k, v in cell["key"].items() if k not in _HIDDEN or k in varied}
        column = _word(key.pop(columns, "")) if columns in key else ""
        extra = [_word(key.pop(name)) for name in varied if name in key]
        header = ", ".join(filter(None, [column, *extra])) or words
        headers[header] = None
        if len({str(c["key"].get("resolution")) for c in cells}) == 1:
            key.pop("resolution", None)
        names |= dict.fromkeys(key)
        row = rows.setdefault(json.dumps(key, sort_keys=True), {"key": key})
        row[header] = _text(cell, what)
    lines = [
        [*(_word(row["key"].get(name, "")) for name in names), *(row.get(h, "") for h in headers)]
        for row in rows.values()
    ]
    first, *others = [*names, *headers]
    return [f"{first} ({words})", *others], lines


def _word(value: Any) -> str:
    if isinstance(value, list):
        return size_text(value) if value[0] != value[1] else f"{value[0]} px"
    return str(value)


def _text(cell: Mapping[str, Any], what: str) -> str:
    ours, published = _ours(cell["ours"]), _number(cell["published"])
    if what == "both":
        return f"{ours}; {published}"
    return ours if what == "ours" else published


def _ours(value: Any) -> str:
    if not isinstance(value, dict):
        return value or "-"
    text = _number(value["mean"]) if value["mean"] is not None else "drawn"
    if value["interval"] is None:
        return text
    return f"{text} [{', '.join(map(_number, value['interval']))}]"


def _number(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
