"""Pages of text, tables and pictures, rendered as HTML and as Markdown.

The HTML page embeds its pictures; the Markdown page links to the files in the same folder.
"""

import base64
import dataclasses
import html
import pathlib
import re
from collections.abc import Mapping, Sequence

from rope_jax.text import markdown_table

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
img { max-width: 100%; height: auto; } figure { margin: 1rem 0; }
figcaption { color: #555; font-size: 0.9rem; }
table { border-collapse: collapse; font-size: 0.9rem; width: 100%; }
th, td { padding: 0.3rem 0.5rem; border-bottom: 1px solid #ddd; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
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


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str

    def html(self) -> str:
        return f"<p>{html.escape(self.text)}</p>"

    def markdown(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Table:
    """A table: a header and rows of cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.header)
        body = [_row_html(self.header, row) for row in self.rows]
        lines = [f"<thead><tr>{head}</tr></thead>", "<tbody>", *body, "</tbody>"]
        return "\n".join(["<table>", *lines, "</table>"])

    def markdown(self) -> str:
        rows = [[cell.replace("|", "/") for cell in row] for row in self.rows]
        return markdown_table(self.header, rows).rstrip()


def _row_html(header: Sequence[str], cells: Sequence[str]) -> str:
    found = ""
    for name, cell in zip(header, cells, strict=True):
        number = re.fullmatch(r"([+-]?[\d.]+) (\[.*\])", cell)  # its interval has its own line
        value = html.escape(number[1] if number else cell)
        small = f"<small>{html.escape(number[2])}</small>" if number else ""
        found += f'<td data-column="{html.escape(name, quote=True)}"><div>{value}{small}</div></td>'
    return f"<tr>{found}</tr>"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG file with a caption."""

    path: pathlib.Path
    caption: str

    def html(self) -> str:
        data = base64.b64encode(self.path.read_bytes()).decode()
        caption = html.escape(self.caption, quote=True)
        image = f'<img src="data:image/png;base64,{data}" alt="{caption}">'
        return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"

    def markdown(self) -> str:
        return f"![{self.caption}]({self.path.name})"


Block = Text | Table | Picture


def to_html(title: str, sections: Mapping[str, Sequence[Block]]) -> str:
    """Renders a self-contained HTML page; `sections` maps headings to blocks."""
    lines = []
    for heading, blocks in sections.items():
        lines += [f"<h2>{html.escape(heading)}</h2>", *(block.html() for block in blocks)]
    return _PAGE.format(title=html.escape(title), style=_STYLE, body="\n".join(lines))


def to_markdown(title: str, sections: Mapping[str, Sequence[Block]]) -> str:
    """Renders a Markdown page; `sections` maps headings to blocks."""
    lines = [f"# {title}"]
    for heading, blocks in sections.items():
        lines += [f"## {heading}", *(block.markdown() for block in blocks)]
    return "\n\n".join(lines) + "\n"
