"""Pages of text, tables and pictures as HTML that needs no other file."""

import base64
import html
import pathlib
import re
from collections.abc import Mapping, Sequence

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 75rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
img { max-width: 100%; height: auto; } figure { margin: 1rem 0; }
figcaption { color: #555; font-size: 0.9rem; }
table { border-collapse: collapse; font-size: 0.9rem; width: 100%; }
th, td { padding: 0.3rem 0.5rem; border-bottom: 1px solid #ddd; text-align: left;
  vertical-align: top; }
td { overflow-wrap: anywhere; }  /* not headers, whose words stay whole */
td small { display: block; white-space: nowrap; color: #555; }
@media (max-width: 45rem) {  /* a row becomes a list of its cells, with the names of the columns */
  thead { display: none; }
  table, tbody, tr, td { display: block; }
  tr { border-bottom: 2px solid #999; padding: 0.4rem 0; }
  td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: 0.1rem 0; }
  td::before { content: attr(data-column); color: #555; flex: none; }
  td:first-child { font-weight: bold; }
  td div { text-align: right; }
}
"""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def paragraph(text: str) -> str:
    """A paragraph of text."""
    return f"<p>{html.escape(text)}</p>"


def anchor(heading: str) -> str:
    """The id of a section, "table-4-1" of "Table 4.1: Accuracy"."""
    return re.sub(r"\W+", "-", heading.partition(": ")[0]).lower()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells: **text** is bold, [text](address) a link.

    The interval of a number is on a separate line.
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = [f"<thead><tr>{head}</tr></thead>", "<tbody>"]
    for row in rows:
        cells = [_cell(name, text) for name, text in zip(header, row, strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join(["<table>", *lines, "</tbody>", "</table>"])


def _cell(column: str, text: str) -> str:
    value = html.escape(text)
    if number := re.fullmatch(r"([+-]?[\d.]+) (\[.*\])", value):
        value = f"{number[1]}<small>{number[2]}</small>"
    value = re.sub(r"^\*\*(.*)\*\*$", r"<b>\1</b>", value)
    value = re.sub(r"^\[(.*)\]\((.*)\)$", r'<a href="\2">\1</a>', value)
    return f'<td data-column="{html.escape(column)}"><div>{value}</div></td>'


def picture(path: pathlib.Path, caption: str) -> str:
    """A PNG file with a caption."""
    data, caption = base64.b64encode(path.read_bytes()).decode(), html.escape(caption)
    image = f'<img src="data:image/png;base64,{data}" alt="{caption}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def to_html(title: str, sections: Mapping[str, Sequence[str]]) -> str:
    """The page; `sections` maps headings to paragraphs, tables and pictures, if there are any."""
    lines = []
    for heading, blocks in sections.items():
        if blocks:
            lines += [f'<h2 id="{anchor(heading)}">{html.escape(heading)}</h2>', *blocks]
    return _PAGE.format(title=html.escape(title), style=_STYLE, body="\n".join(lines))
