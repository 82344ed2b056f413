"""Command lines: ranges of numbers, and parsers whose help lists types, ranges and defaults."""

import argparse
import dataclasses
import pathlib
import sys

from rope_jax import plugins


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a setting allows.

    >>> print(Range(low=0, below=1))
    at least 0 and below 1
    >>> 1 in Range(low=0, below=1)
    False

    Attributes:
        low, high: inclusive bounds, if any.
        above, below: exclusive bounds, if any.
    """

    low: int | float | None = None
    high: int | float | None = None
    above: int | float | None = None
    below: int | float | None = None

    def __contains__(self, number: int | float) -> bool:
        return not (
            (self.low is not None and number < self.low)
            or (self.high is not None and number > self.high)
            or (self.above is not None and number <= self.above)
            or (self.below is not None and number >= self.below)
        )

    def __str__(self) -> str:
        bounds = {
            "at least": self.low,
            "above": self.above,
            "at most": self.high,
            "below": self.below,
        }
        return " and ".join(
            f"{word} {bound}" for word, bound in bounds.items() if bound is not None
        )


class Number:
    """The type of an argument that is a number within a range, for `ArgumentParser.add_argument`.

    >>> Number(int, low=1)("3")
    3
    >>> print(Number(float, above=0))
    a number, above 0
    """

    def __init__(self, kind: type[int] | type[float], **bounds: int | float):
        """Takes int or float, and the bounds of `Range`."""
        self._kind, self._range = kind, Range(**bounds)

    def __call__(self, text: str) -> int | float:
        """The number; the parser adds the argument's name to an error."""
        try:
            number = self._kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be {self}") from None
        if number not in self._range:
            raise argparse.ArgumentTypeError(f"{text} is out of range; it must be {self._range}")
        return number

    def __str__(self) -> str:
        name = {int: "a whole number", float: "a number"}[self._kind]
        return ", ".join(filter(None, (name, str(self._range))))


class _Help(argparse.RawDescriptionHelpFormatter):
    """Adds the type, the range and the default to the help of each argument."""

    def _get_help_string(self, action: argparse.Action) -> str:
        facts = []
        if action.nargs != 0 and action.choices is None:  # flags and choices show their values
            kinds = {None: "text", pathlib.Path: "a path"}
            facts.append(kinds.get(action.type, str(action.type)))
        if action.default not in (None, False, "", argparse.SUPPRESS):
            is_list = isinstance(action.default, list)
            facts.append(f"default: {' '.join(action.default) if is_list else action.default}")
        added = f" ({'; '.join(facts)})" if facts else ""
        return f"{action.help or ''}{added}".replace("%", "%%").strip()


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a command, `python -m MODULE` or a sub-command of `rope_jax`.

    >>> command_parser("rope_jax.evaluate", "Accuracy of a model.").prog
    'python -m rope_jax.evaluate'

    Args:
        module: of the command.
        description: shown by `--help`, with its own line breaks.
    """
    name = command_name(module)
    return _with_plugins(
        argparse.ArgumentParser(prog=name, description=description, formatter_class=_Help)
    )


class _LoadPlugin(argparse.Action):
    """Imports the module that the argument names."""

    def __call__(self, parser, namespace, values, option_string=None):
        try:
            plugins.load([values])
        except ValueError as error:
            parser.error(str(error))


def _with_plugins(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --plugins."""
    parser.add_argument(
        "--plugins",
        action=_LoadPlugin,
        default=argparse.SUPPRESS,
        metavar="MODULE",
        help="import your schemes, models and sources, see rope_jax.plugins; repeatable",
    )
    plugins.load_installed()
    return parser


def command_name(module: str) -> str:
    """What the user typed to start the command: "python -m MODULE", or "rope_jax evaluate"."""
    return sys.argv[0] if sys.argv[0].startswith("rope_jax ") else f"python -m {module}"


def add_command(
    commands: argparse._SubParsersAction, name: str, text: str | None
) -> argparse.ArgumentParser:
    """Adds a sub-command with the same form of help to `ArgumentParser.add_subparsers()`."""
    return _with_plugins(
        commands.add_parser(name, help=text, description=text, formatter_class=_Help)
    )
