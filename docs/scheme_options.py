"""The options of every positional scheme, from the docstrings of their classes."""

import inspect
import re
import textwrap

from rope_jax.positions.rotary import Rotary
from rope_jax.positions.scheme import SCHEMES, Position

SECTION = re.compile(r"\n*^Options[^:\n]*:\n", re.MULTILINE)
OPTION = re.compile(r"^(\w+): ", re.MULTILINE)


def scheme_options() -> str:
    """A section for each scheme: its notation with all defaults, what it does, its options."""
    shared = options_in(Rotary)
    sections = [f"Every rotary scheme has these, too:\n\n{listing(shared)}"]
    for name, cls in sorted(SCHEMES.items()):
        if cls is Position:
            continue
        text = SECTION.split(inspect.getdoc(cls))[0]
        bullets = listing(options_in(cls))
        sections.append(
            "\n\n".join(filter(None, [f"### {name}", notation(name, cls), text, bullets]))
        )
    return "\n\n".join(sections) + "\n"


def notation(name: str, cls: type[Position]) -> str:
    """A scheme with the defaults of its options, as code.

    >>> notation("rope1d", SCHEMES["rope1d"])
    '`rope1d(base=10000, pairing=half, k_rope=1)`'
    """
    inner = ["ape"] * cls.wraps
    options = [
        f"{option.name}={option.default:g}"
        if isinstance(option.default, float)
        else f"{option.name}={option.default}"
        for option in inspect.signature(cls.__init__).parameters.values()
        if option.kind is option.KEYWORD_ONLY and option.name != "rngs"
    ]
    arguments = ", ".join([*inner, *options])
    return f"`{name}({arguments})`" if arguments else f"`{name}`"


def options_in(cls: type) -> dict[str, str]:
    """The descriptions of the options in a class's docstring, each in one line."""
    parts = SECTION.split(inspect.getdoc(cls))
    if len(parts) == 1:
        return {}
    _, *fields = OPTION.split("\n" + textwrap.dedent(parts[1]))
    return {
        name: " ".join(text.split()) for name, text in zip(fields[::2], fields[1::2], strict=True)
    }


def listing(options: dict[str, str]) -> str:
    """Options as a list."""
    return "\n".join(
        textwrap.fill(f"- `{name}`: {text}", 100, subsequent_indent="  ", break_on_hyphens=False)
        for name, text in options.items()
    )
