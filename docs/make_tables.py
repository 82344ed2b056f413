"""Writes the tables of the documentation: `python -m docs.make_tables`, or `make tables`.

In README.md, kernels/README.md and docs/*.md, the text between `<!-- table: NAME -->` and
`<!-- end -->` is replaced. A name in TABLES inserts the text that its function returns; any other
is a benchmark or experiment, whose newest results are shown. After the name, `part=fashion` chooses
results with this setting, `number=1` the second table of each, and `rows=TEXT` the rows that match
this regular expression.

A result is a table if it has `columns` (headers), `rows` (lists of texts and numbers) and perhaps a
`note` for the line below; one with several tables has them in a list, `tables`.
"""

import ast
import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from benchmarks._runner import Result
from docs.paper_tables import papers
from docs.results import ROOT, newest, origin, read_results
from docs.scheme_options import scheme_options
from rope_jax.analysis.costs import scheme_costs
from rope_jax.commands import positions
from rope_jax.commands.weights import scores
from rope_jax.names.text import markdown_table
from rope_jax.weights import ReleasedWeights, list_weights

FILES = [ROOT / "README.md", ROOT / "kernels/README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def cell(value: str | float) -> str:
    """A cell of a table: numbers are rounded to three digits, but not counts.

    >>> [cell(x) for x in ("as it is", 1024, 12345.6, 0.012345)]
    ['as it is', '1,024', '12,300', '0.0123']
    """
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{float(f'{value:.3g}'):,.10g}"


def render(result: Result, number: str | None = None, rows: str = "") -> str:
    """Renders the tables of a result, or one of them, with their notes and their origin."""
    tables, texts = result.get("tables", [result]), []
    for table in tables if number is None else [tables[int(number)]]:
        cells = [list(map(cell, row)) for row in table["rows"]]
        kept = [row for row in cells if re.search(rows, " | ".join(row))]
        texts += [markdown_table(table["columns"], kept), f"{table.get('note', '')}\n"]
    return "\n".join([*texts[:-1], f"{texts[-1].strip()} {origin(result)}.\n".lstrip()])


def result_tables(name: str, results: Sequence[Result], options: Mapping[str, str]) -> str:
    """The tables of the newest results of a benchmark or experiment.

    Options are the `number` of a table, a pattern of its `rows`, and settings of the results.
    """
    settings = {key: value for key, value in options.items() if key not in ("number", "rows")}
    number, rows = options.get("number"), options.get("rows", "")
    texts = [render(result, number, rows) for result in newest(results, name, settings)]
    return "\n".join(texts) or f"No result yet: `python -m benchmarks {name}`.\n"


def recipe(name: str) -> str:
    """The docstring of a recipe."""
    return f"{ast.get_docstring(ast.parse((ROOT / f'configs/{name}.py').read_text()))}\n"


def commands() -> str:
    """Benchmarks, with the first sentence of their docstrings."""
    rows = []
    for path in sorted(ROOT.glob("benchmarks/[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())).split("\n\n")[0]
        rows.append([f"`python -m benchmarks {path.stem}`", text.replace("\n", " ")])
    return markdown_table(["command", "measures"], rows)


COSTLY = ("ape", "lape(ape)", "rpb", "cpb", "alibi2d", "rope2d", "rope_mixed", "axial_rope")


def costs() -> str:
    """Parameters and operations of schemes in whole models, counted from their definitions."""
    rows = []
    for model in ("deit3_s16", "swin_t"):
        for position, cost in zip(COSTLY, scheme_costs(model, COSTLY, 224), strict=True):
            percentage = 100 * cost.operations / cost.multiply_adds
            operations = f"{cost.operations / 1e6:.1f} million ({percentage:.2f} %)"
            rows.append([f"`{model}`", f"`{position}`", cell(cost.parameters), operations])
    return markdown_table(["model", "scheme", "parameters", "operations"], rows)


def weights() -> str:
    """The default weights of every model, position and head, and the number of others."""
    groups: dict[tuple[str, str], list[ReleasedWeights]] = {}
    for listed in list_weights():
        model = f"`{listed.model}`" + (f" with head {listed.head}" if listed.head else "")
        groups.setdefault((model, f"`{listed.position}`"), []).append(listed)
    header = ["model", "position", "default weights", "published, %", "others"]
    rows = [
        [*key, f"`{first.tag}`", scores(first), len(others) or ""]
        for key, (first, *others) in groups.items()
    ]
    return markdown_table(header, [list(map(cell, row)) for row in rows])


def schemes() -> str:
    """The schemes, as `rope_jax positions` lists them."""
    rows = [(f"`{name}`", *cells) for name, *cells in positions.rows()]
    return markdown_table(positions.HEADER, rows)


TABLES: dict[str, Callable[..., str]] = {
    "weights": weights,
    "schemes": schemes,
    "scheme_options": scheme_options,
    "recipe": recipe,
    "papers": papers,
    "costs": costs,
    "commands": commands,
}


def fill(text: str, results: Sequence[Result]) -> str:
    """Replaces every marked table in a text."""

    def table(block: re.Match) -> str:
        name, *words = shlex.split(block[2])
        options = dict(word.split("=", 1) for word in words)
        content = (
            TABLES[name](**options) if name in TABLES else result_tables(name, results, options)
        )
        return f"{block[1]}{content}{block[3]}"

    return BLOCK.sub(table, text)


def main() -> None:
    """Writes the tables that have changed."""
    results = read_results()
    for path in FILES:
        old = path.read_text()
        if (new := fill(old, results)) != old:
            path.write_text(new)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
