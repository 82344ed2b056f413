"""Checks the links inside a built site: `python -m docs.check_links build/docs`.

Every link to a page or file must lead to one, and every #fragment to an element of that page.
"""

import html.parser
import pathlib
import sys
import urllib.parse
from collections.abc import Sequence


class Page(html.parser.HTMLParser):
    """The links and the ids of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes the ids and the links of a tag."""
        values = dict(attrs)
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag != "link" or values.get("rel") == "stylesheet":
            self.links += [values[name] for name in ("href", "src") if values.get(name)]


def broken(root: pathlib.Path) -> list[str]:
    """Links of the pages in a folder that lead nowhere, as "page: link"."""
    pages = {path: Page(path.read_text()) for path in sorted(root.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path.parent / urllib.parse.unquote(parts.path) if parts.path else path
            target = target.resolve()
            missing_part = target in pages and parts.fragment not in {*pages[target].ids, ""}
            if not target.is_file() or missing_part:
                found.append(f"{path.relative_to(root)}: {link}")
    return found


def main(argv: Sequence[str]) -> None:
    """Prints the broken links of a site; any is an error."""
    root = pathlib.Path(argv[0]).resolve()
    if found := broken(root):
        sys.exit("links that lead nowhere:\n" + "\n".join(found))
    print(f"{sum(1 for _ in root.rglob('*.html'))} pages, all links inside lead somewhere")


if __name__ == "__main__":
    main(sys.argv[1:])
