"""Flags, compilation cache, one-line errors and exit statuses of `python -m rope_jax.main`."""

import contextlib
import os
import pathlib
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator

import jax
from absl import flags, logging

from rope_jax.arguments import command_name
from rope_jax.config import ConfigError, list_recipes, recipe_path, settings_help, with_arguments
from rope_jax.files import SaveFailed, cache_folder
from rope_jax.training.report import NonFinite
from rope_jax.training.signals import Interrupted

_REQUIRED = {"config": "digits", "workdir": "runs/digits"}


def parse_flags(arguments: list[str]) -> list[str]:
    """Parses absl's flags; every mistake ends in one line and status 2."""
    if {"-h", "-help", "--help", "--config.help"} & set(arguments):
        print(_help(settings_only="--config.help" in arguments))
        sys.exit()
    try:
        rest = flags.FLAGS(_with_recipe_path(arguments))
        if len(rest) > 1:
            raise ConfigError(
                f"unexpected argument {rest[1]!r}; settings are written --config.key=value"
            )
        for name, example in _REQUIRED.items():
            if flags.FLAGS[name].value is None:
                raise ConfigError(f"--{name} is missing, for example --{name}={example}")
        flags.FLAGS.config.keys()  # a recipe that fails to load raises only when it is used
        if flags.FLAGS["verbosity"].using_default_value:
            flags.FLAGS.verbosity = logging.WARNING  # at INFO orbax logs every file
        return rest
    except (KeyError, AttributeError) as error:  # ml_collections: an unknown key of the config
        words = str(error).replace("\\n", " ").replace("\\'", "").strip("'\"")
        _stop(2, f"there is no such setting: {words}")
    except (flags.Error, ConfigError, ValueError, TypeError, OSError, SyntaxError) as error:
        _stop(2, str(error))


def _with_recipe_path(arguments: list[str]) -> list[str]:
    """The arguments with the file of a recipe that is given by name."""
    found = list(arguments)
    for number, word in enumerate(arguments):
        if word in ("--config", "-config") and number + 1 < len(arguments):
            found[number + 1] = recipe_path(arguments[number + 1])
        elif word.startswith(("--config=", "-config=")):
            flag, _, recipe = word.partition("=")
            found[number] = f"{flag}={recipe_path(recipe)}"
    return found


def _help(*, settings_only: bool) -> str:
    """The flags of the command, the names of the recipes, and all settings."""
    if settings_only:
        return settings_help()
    module = flags.FLAGS.find_module_defining_flag("workdir")
    lines = [sys.modules[module].__doc__, "flags:"]
    for flag in flags.FLAGS.get_flags_for_module(module):
        default = "" if flag.default in (None, []) else f"; default: {flag.default}"
        lines.append(f"--{flag.name}: {flag.flag_type()}{default}\n    {flag.help}")
    recipes = ["", "recipes that come with the package:", f"    {', '.join(list_recipes())}"]
    return "\n".join([*lines, *recipes, "", "settings:", settings_help()])


def keep_compiled() -> None:
    """Enables jax's persistent compilation cache, in `xla` of the cache folder.

    The environment variables of jax take precedence: JAX_COMPILATION_CACHE_DIR sets another folder,
    JAX_ENABLE_COMPILATION_CACHE=false disables the cache. Without a writable folder there is no
    cache.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = cache_folder() / "xla"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home folder
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))


@contextlib.contextmanager
def exit_statuses(workdir: str, *, distributed: bool) -> Iterator[None]:
    """Turns exceptions into one line and the exit statuses that `rope_jax.main` documents.

    Args:
        workdir: of the run.
        distributed: whether this is one of several processes, which must be notified of its end.
    """
    try:
        yield
    except ConfigError as error:
        _stop(2, str(error), at_once=distributed)
    except (NonFinite, SaveFailed) as error:
        _stop(1, str(error), at_once=distributed)
    except Interrupted as error:
        if not error.saved:
            status = 128 + signal.Signals[str(error)]
            message = f"stopped by {error} before there was anything to save"
            _stop(status, message, at_once=distributed)
        print(f"stopped by {error}; saved in {workdir}: run the same command to go on")
    except KeyboardInterrupt:  # before the run handles signals
        _stop(130, "stopped before anything had begun", at_once=distributed)
    except Exception:
        traceback.print_exc()
        _exit(1, at_once=distributed)


def _stop(status: int, message: str, *, at_once: bool = False) -> None:
    print(f"rope_jax: {' '.join(message.split())}", file=sys.stderr)
    _exit(status, at_once=at_once)


def _exit(status: int, *, at_once: bool) -> None:
    if at_once:  # a normal exit would wait for the other processes
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def next_command(position: str | None, workdir: pathlib.Path) -> str:
    """This command with another scheme, in a folder beside this one."""
    other = "rope_mixed" if position != "rope_mixed" else "none"
    dropped = ("--workdir=", "--config.model.position=", "--resume_override=")
    kept = [_with_position(word, other) for word in sys.argv[1:] if not word.startswith(dropped)]
    inside = sys.executable.startswith(os.getcwd())
    python = os.path.relpath(sys.executable) if inside else "python"
    command = command_name("rope_jax.main").replace("python", python, 1)
    return f"{command} {shlex.join([*kept, f'--workdir={workdir}_{other}'])}"


def _with_position(word: str, position: str) -> str:
    """`--config=RECIPE:position=...` with another position; any other word as it is."""
    if not word.startswith("--config="):
        return word
    return with_arguments(word, position=position)
