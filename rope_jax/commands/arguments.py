"""Command lines: parsers whose help lists what is allowed, and defaults."""

import argparse
import contextlib
import dataclasses
import inspect
import pathlib
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from rope_jax.config import ConfigError, in_one_line, read_settings, settings_help
from rope_jax.data import BadImages
from rope_jax.data.sources import IN_MEMORY, SOURCES, SPLITS
from rope_jax.data.workers import DeadWorker
from rope_jax.names import plugins
from rope_jax.names.options import CountOrZero, describe, find_options, read
from rope_jax.system.cores import cores
from rope_jax.system.files import SaveFailed
from rope_jax.system.streams import keep_going_unread


@dataclasses.dataclass(frozen=True)
class Argument:
    """The type of an argument that is not plain text, for `ArgumentParser.add_argument`.

    >>> Argument(int)("3"), str(Argument(float | None))
    (3, 'a number, or None')
    >>> Argument(tuple[int, ...])("256,512")
    (256, 512)
    """

    annotation: Any

    def __call__(self, text: str) -> Any:
        """Reads a value, or a tuple of values between commas; the parser names the argument."""
        try:
            parts = typing.get_args(self.annotation)
            if parts[1:] == (...,):  # tuple[X, ...]
                return tuple(read(word, parts[0]) for word in text.split(","))
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
        if action.default not in (None, False, "", [], argparse.SUPPRESS):
            is_list = isinstance(action.default, list | tuple)
            words = map(str, action.default if is_list else [action.default])
            facts.append(f"default: {' '.join(words)}")
        added = f" ({'; '.join(facts)})" if facts else ""
        return f"{action.help or ''}{added}".replace("%", "%%").strip()


def _path(text: str) -> pathlib.Path:
    if not text:  # for example from a shell variable that is not set
        raise argparse.ArgumentTypeError("must be a path, not ''")
    return pathlib.Path(text)


class _LoadPlugin(argparse.Action):
    """Imports the module that the argument names."""

    def __call__(self, parser, namespace, values, option_string=None):
        try:
            plugins.load([values])
        except ValueError as error:
            parser.error(str(error))


class CommandParser(argparse.ArgumentParser):
    """A parser with --plugins, and one line and status 2 for a wrong command.

    Args:
        load_plugins: add --plugins, which imports them at once. False for a command whose processes
            must join first.
        options: of `argparse.ArgumentParser`.
    """

    def __init__(self, *, load_plugins: bool = True, **options: Any):
        super().__init__(formatter_class=Help, **options)
        self.register("type", pathlib.Path, _path)
        if load_plugins:
            self.add_argument(
                "--plugins",
                action=_LoadPlugin,
                default=argparse.SUPPRESS,
                metavar="MODULE",
                help="import your schemes, models and sources, see rope_jax.names.plugins; "
                "repeatable",
            )
            plugins.load_installed()

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        """Parses as `argparse` does; a process that reads `sys.argv` survives a closed output."""
        if args is None:
            keep_going_unread()
        return super().parse_args(args, namespace)

    def parse_with_settings(self, words: list[str] | None) -> tuple[argparse.Namespace, dict]:
        """Parses the arguments of the command, and settings of the form --config.KEY=VALUE.

        `-flag` is read as `--flag`. Flags have no abbreviations: --seed is not short for --seeds.
        """
        self.allow_abbrev = False
        if words is None:
            keep_going_unread(OSError)
            words = sys.argv[1:]
        words = [re.sub(r"^-(?=[a-z]\w)", "--", word) for word in words]
        if "--config.help" in words:
            print(settings_help())
            self.exit()
        flags, setting_words = _separate(words)
        args, unknown = self.parse_known_args(flags)
        try:
            return args, read_settings([*unknown, *setting_words])
        except ConfigError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """Ends the command with its name and the message, on the standard error."""
        self._end(2, " ".join(message.split()))

    def _end(self, status: int, message: str) -> NoReturn:
        self.exit(status, f"{self.prog.removeprefix('python -m ')}: {message}\n")

    @contextlib.contextmanager
    def one_line_errors(self, *, failed: int = 1, extra: str | None = None) -> Iterator[None]:
        """Turns errors into one line; status 2 for a wrong command, `failed` for failed work.

        A missing package is a wrong command, too, if it is installed by the extra `extra`.

        >>> with command_parser("rope_jax.models", None).one_line_errors():
        ...     raise FileNotFoundError("runs/none does not exist")
        Traceback (most recent call last):
        SystemExit: 2
        """
        try:
            yield
        except (SaveFailed, BadImages, DeadWorker) as error:
            self._end(failed, str(error))  # which may list images, one per line
        except (ConfigError, ValueError, OSError) as error:
            self.error(in_one_line(error))
        except ImportError as error:
            if extra is None:
                raise
            self.error(f"{error}: pip install 'rope_jax[{extra}]'")


def _separate(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Separates the words of flags from those of settings, whose value may be the next word.

    >>> _separate(["--distributed", "--config.data.path", "a b", "--config=digits"])
    (['--distributed', '--config=digits'], ['--config.data.path', 'a b'])
    """
    flags, settings = [], []
    value_follows = False
    for word in words:
        setting = re.match(r"--(no)?config\.", word) is not None
        (settings if setting or (value_follows and word[:2] != "--") else flags).append(word)
        value_follows = setting and "=" not in word
    return flags, settings


def add_switch(parser: argparse.ArgumentParser, name: str, help: str) -> None:
    """Adds --NAME, --NAME=True or False, and --noNAME."""
    parser.add_argument(
        f"--{name}", nargs="?", const=True, default=False, type=Argument(bool), help=help
    )
    parser.add_argument(
        f"--no{name}", dest=name, action="store_false", default=False, help=argparse.SUPPRESS
    )


def command_parser(
    module: str, description: str | None, *, load_plugins: bool = True
) -> CommandParser:
    """The parser of a command, `python -m MODULE` or a sub-command of `rope_jax`.

    >>> command_parser("rope_jax.evaluate", "Accuracy of a model.").prog
    'python -m rope_jax.evaluate'

    Args:
        module: of the command.
        description: shown by `--help`, with its own line breaks.
        load_plugins: see `CommandParser`.
    """
    return CommandParser(
        prog=command_name(module), description=description, load_plugins=load_plugins
    )


def add_model_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Adds the arguments of `rope_jax.runs.loading.load_model` to a parser.

    Args:
        parser: of a command.
        several: accept several workdirs, or schemes of --model.
    """
    add = parser.add_argument_group("model", "a WORKDIR, or --model and its options").add_argument
    more = "; several, comma-separated" if several else ""
    add("workdir", nargs="*" if several else "?", help="of a run of rope_jax train")
    add("--step", type=Argument(CountOrZero), help="checkpoint step; default: the newest")
    add(
        "--model",
        help="instead of a workdir: a name of rope_jax.list_models(), or a model saved by "
        "rope_jax.save_pretrained",
    )
    add("--position", help=f"scheme of --model{more}; default: the model's own")
    add(
        "--weights",
        help="of a named --model: .safetensors, .npz or .pth file, folder, or hub id; "
        "default: fresh weights",
    )
    add(
        "--pretrained",
        nargs="?",
        const=True,
        metavar="TAG",
        help="published weights of --model and --position, or those with a tag: see `rope_jax "
        "weights`",
    )
    add(
        "--weights_dir",
        help="folder with files of published weights; default: $ROPE_JAX_CACHE/weights",
    )
    add("--source", help="naming convention of --weights, see rope_jax.convert_state_dict")
    add("--head", help="of dense prediction, for --model: upernet(width=512)")
    add("--num_classes", type=Argument(CountOrZero), help="outputs of --model")
    add("--image_size", help="pixels for which --model is created: 224 or 224x320")
    add("--options", default="", help="overrides of --model: depth=6,window_size=8")
    add(
        "--seed",
        type=Argument(CountOrZero),
        help="of fresh weights (default: 0) or of a WORKDIR's (default: first)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="compute dtype of --model; default: float32",
    )


def command_name(module: str) -> str:
    """The command as typed by the user: "python -m MODULE", or "rope_jax evaluate"."""
    return sys.argv[0] if sys.argv[0].startswith("rope_jax ") else f"python -m {module}"


def add_image_set(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the images and the number of processes."""
    add = parser.add_argument
    add(
        "--source",
        required=True,
        choices=sorted(SOURCES.keys() - IN_MEMORY),
        help="form of the images, see rope_jax.data.load",
    )
    add("--path", required=True, help="of the images")
    add(
        "--splits",
        default=",".join(SPLITS),
        help="train, test, or both, separated by a comma",
    )
    add(
        "--workers",
        type=Argument(CountOrZero),
        default=cores(),
        help="processes; by default one per core; 0 for the main process alone",
    )


def add_options(parser: argparse.ArgumentParser, function: Callable, dash: str = "_") -> None:
    """Adds the keyword-only parameters of a function, by their annotations and defaults.

    A parameter without a default is required. Its help is the line `name: sentence` of the
    function's docstring.

    Args:
        parser: to add to.
        function: whose parameters become arguments.
        dash: separates the words of an argument's name.
    """
    parameters = inspect.signature(function).parameters
    sentences = dict(re.findall(r"^ +(\w+): (.+)$", function.__doc__ or "", re.MULTILINE))
    for name, annotation in find_options(function).items():
        default = parameters[name].default
        required = default is inspect.Parameter.empty
        parser.add_argument(
            f"--{name.replace('_', dash)}",
            required=required,
            default=None if required else default,
            help=sentences.get(name),
            **parser_options(annotation),
        )


def parser_options(annotation: Any) -> dict[str, Any]:
    """The options of `add_argument` for an annotation: a flag, several words, or one.

    >>> parser_options(list[str] | None)["nargs"], parser_options(bool)
    ('+', {'action': 'store_true'})
    """
    kinds = (annotation, *typing.get_args(annotation))
    if annotation is bool:
        return {"action": "store_true"}
    for kind in kinds:
        if typing.get_origin(kind) is list:
            return parser_options(*typing.get_args(kind)) | {"nargs": "+"}
    return {"type": pathlib.Path if pathlib.Path in kinds else Argument(annotation)}
