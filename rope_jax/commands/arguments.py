"""Command lines: parsers whose help lists what is allowed, and defaults."""

import argparse
import dataclasses
import inspect
import pathlib
import re
import sys
import typing
from collections.abc import Callable
from typing import Any

from rope_jax.names import plugins
from rope_jax.names.options import describe, options_of, read


@dataclasses.dataclass(frozen=True)
class Argument:
    """The type of an argument that is not plain text, for `ArgumentParser.add_argument`.

    >>> Argument(int)("3"), str(Argument(float | None))
    (3, 'a number, or None')
    """

    annotation: Any

    def __call__(self, text: str) -> Any:
        """The value; the parser adds the argument's name to an error."""
        try:
            return read(text, self.annotation)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def __str__(self) -> str:
        return describe(self.annotation)


class Help(argparse.RawDescriptionHelpFormatter):
    """Adds the type, the range and the default to the help of each argument."""

    def _get_help_string(self, action: argparse.Action) -> str:
        facts = []
        if action.nargs != 0 and action.choices is None:  # flags and choices show their values
            kinds = {None: "text", pathlib.Path: "a path"}
            facts.append(kinds.get(action.type, str(action.type)))
        if action.default not in (None, False, "", argparse.SUPPRESS):
            is_list = isinstance(action.default, list | tuple)
            words = map(str, action.default if is_list else [action.default])
            facts.append(f"default: {' '.join(words)}")
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
        argparse.ArgumentParser(prog=name, description=description, formatter_class=Help)
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
        commands.add_parser(name, help=text, description=text, formatter_class=Help)
    )


def add_options(parser: argparse.ArgumentParser, function: Callable, dash: str = "_") -> None:
    """Adds the keyword-only parameters of a function, by their annotations and defaults.

    A parameter without a default is required. Its help is the line `name: sentence` of the
    function's docstring.

    Args:
        parser: to add to.
        function: whose parameters become arguments.
        dash: between the words of an argument's name.
    """
    parameters = inspect.signature(function).parameters
    sentences = dict(re.findall(r"^ +(\w+): (.+)$", function.__doc__ or "", re.MULTILINE))
    for name, annotation in options_of(function).items():
        default = parameters[name].default
        given = {"required": True} if default is inspect.Parameter.empty else {"default": default}
        flag, sentence = f"--{name.replace('_', dash)}", sentences.get(name)
        parser.add_argument(flag, help=sentence, **given, **reads(annotation))


def reads(annotation: Any) -> dict[str, Any]:
    """How an argument is read: as a flag, several words, or one; for `add_argument`.

    >>> reads(list[str] | None)["nargs"], reads(bool)
    ('+', {'action': 'store_true'})
    """
    kinds = (annotation, *typing.get_args(annotation))
    if annotation is bool:
        return {"action": "store_true"}
    for kind in kinds:
        if typing.get_origin(kind) is list:
            return reads(*typing.get_args(kind)) | {"nargs": "+"}
    return {"type": pathlib.Path if pathlib.Path in kinds else Argument(annotation)}
