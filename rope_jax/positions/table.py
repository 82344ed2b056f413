"""What the schemes say of themselves, as a table."""

from collections.abc import Callable

from rope_jax.positions.scheme import ACTS, RESOLUTION, SCHEMES

HEADER = ("scheme", "formula", "acts", "on another map", "source")


def written(name: str) -> str:
    """How a scheme is written with its default options: `lape(ape)` for one that wraps another."""
    return f"{name}(ape)" if name == "lape" else name


def rows(extra: Callable[[str], str] | None = None) -> list[tuple[str, ...]]:
    """A row of `HEADER` for each scheme, sorted by name; `extra` makes one more cell of what is `written`."""
    found = []
    for name, cls in sorted(SCHEMES.items()):
        row = (written(name), cls.equation, ACTS[cls.acts], RESOLUTION[cls.resolution], cls.paper)
        found.append(row if extra is None else (*row, extra(written(name))))
    return found


def markdown() -> str:
    """The table of the README."""
    cells = [HEADER, ("---",) * len(HEADER), *((f"`{name}`", *rest) for name, *rest in rows())]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def plain(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """A table for a terminal: columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return "".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in (header, *lines)
    )
