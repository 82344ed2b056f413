"""Flags, one-line errors and exit statuses of `python -m rope_jax.main`."""

import contextlib
import dataclasses
import io
import multiprocessing
import os
import pathlib
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags, logging
from flax import nnx

from rope_jax.arguments import command_name
from rope_jax.config import (
    Config,
    ConfigError,
    list_recipes,
    recipe_path,
    setting_called,
    settings_help,
)
from rope_jax.data import BadImages, BadSet
from rope_jax.data.workers import DeadWorker
from rope_jax.files import SaveFailed
from rope_jax.restore import create
from rope_jax.training.signals import Interrupted
from rope_jax.workdir.checkpoint import NonFinite

# Seconds. When the first process ends, jax aborts the others, which may have an error to print.
_LAST_WORDS = 2
_BAD_IMAGES = (
    "`python -m rope_jax.data.verify` lists all that cannot be used, and "
    "--config.data.bad_images=skip goes on without them"
)
_LESS_MEMORY = "use a smaller --config.batch_size (or more --config.accumulate), model or image"
_OTHERS = ("rope_mixed", "rope2d", "ape", "none")  # schemes to try next
# How errors of XLA's runtime begin: the code of an absl::Status.
_STATUS = re.compile(r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")
_REQUIRED = {"config": "digits", "workdir": "runs/digits"}


def parse_flags(arguments: list[str]) -> list[str]:
    """Parses absl's flags; every mistake ends in one line and status 2."""
    if {"-h", "-help", "--help", "--config.help"} & set(arguments):
        keep_going_unread()
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
        name = words.partition(" ")[0]
        hint = setting_called(name)
        _stop(2, f"there is no such setting: {f'{name}; {hint}' if hint else words}")
    except flags.UnrecognizedFlagError as error:
        hint = setting_called(error.flagname)
        _stop(2, f"there is no flag --{error.flagname}; {hint}" if hint else str(error))
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
    except (NonFinite, SaveFailed, DeadWorker, BadSet) as error:
        _stop(1, str(error), at_once=distributed)
    except BadImages as error:
        _stop(1, f"{error}; {_BAD_IMAGES}", at_once=distributed)
    except MemoryError as error:
        _stop(1, f"there is too little memory ({error}); {_LESS_MEMORY}", at_once=distributed)
    except Interrupted as error:
        if error.alone:
            status = 128 + signal.Signals[str(error)]
            message = f"stopped by {error} without saving, as other processes wait for this one: "
            message += "the same command goes on from the newest checkpoint"
            _stop(status, message, at_once=True)
        if not error.saved:
            status = 128 + signal.Signals[str(error)]
            message = f"stopped by {error} before there was anything to save"
            _stop(status, message, at_once=distributed)
        print(f"stopped by {error}; saved in {workdir}: run the same command to go on")
    except KeyboardInterrupt:  # before the run handles signals
        _stop(130, "stopped before anything had begun", at_once=distributed)
    except Exception as error:
        if not _of_runtime(error):
            traceback.print_exc()
            _exit(1, at_once=distributed)
        first_line = str(error).strip().partition("\n")[0]
        if "RESOURCE_EXHAUSTED" in first_line:
            _stop(
                1,
                f"the device has too little memory ({first_line[:200]}); {_LESS_MEMORY}",
                at_once=distributed,
            )
        if not distributed:
            traceback.print_exc()
            _exit(1, at_once=distributed)
        _stop(
            1,
            "the connection to another process is lost; most likely that process has ended, and "
            "its own output has the reason. The same command goes on from the newest checkpoint "
            f"({first_line[:200]})",
            at_once=True,
        )


def _of_runtime(error: Exception) -> bool:
    """Whether an error is of XLA's runtime, which jax also raises as ValueError with its status.

    So does tensorstore with errors of files, which have its specification of the array.

    >>> _of_runtime(ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"))
    True
    >>> _of_runtime(ValueError("UNKNOWN: Input/output error [tensorstore_spec='...']"))
    False
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return True
    words = str(error)
    return (
        isinstance(error, ValueError) and bool(_STATUS.match(words)) and "tensorstore" not in words
    )


@contextlib.contextmanager
def ended_soon(seconds: float) -> Iterator[None]:
    """Bounds the time that the process takes to end after this context.

    A thread that reads from a file system which does not answer, or a process that was stopped,
    would delay the end for ever. What is left is then killed; the exit status stays.
    """
    status = 0
    try:
        yield
    except SystemExit as error:
        status = error.code
        raise
    finally:
        threading.Thread(target=_end_after, args=(seconds, status), daemon=True).start()


def _end_after(seconds: float, status: int) -> None:
    time.sleep(seconds)
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    os._exit(status)


class _Unread(io.FileIO):
    """A descriptor whose errors are ignored: a closed terminal, a pipe that nobody reads."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def keep_going_unread() -> None:
    """Keeps the standard output and error from stopping the run: what they lose is in its files.

    After `| head` has ended, the terminal was closed, or the disk of a log is full, every print
    would raise an error.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):  # none, or no descriptor
            stream.flush()
            binary = io.BufferedWriter(_Unread(os.dup(stream.fileno()), "w"))
            lines = name == "stderr" or stream.line_buffering
            text = io.TextIOWrapper(
                binary,
                stream.encoding,
                "backslashreplace",
                line_buffering=lines,
                write_through=stream.write_through,
            )
            setattr(sys, name, text)


def _stop(status: int, message: str, *, at_once: bool = False) -> None:
    print(f"rope_jax: {' '.join(message.split())}", file=sys.stderr)
    _exit(status, at_once=at_once)


def _exit(status: int, *, at_once: bool) -> None:
    if at_once:  # a normal exit would wait for the other processes
        sys.stderr.flush()
        time.sleep(_LAST_WORDS)
        os._exit(status)
    sys.exit(status)


def next_command(config: Config, workdir: pathlib.Path) -> str | None:
    """This command with another scheme, in a folder beside this one.

    None if there is no other, or if the run started from weights, which have their own scheme.
    """
    if config.init_from is not None:
        return None
    for other in _OTHERS:
        model = dataclasses.replace(config.model, position=other)
        with contextlib.suppress(ConfigError):
            if other != config.model.position:
                nnx.eval_shape(lambda m=model: create(dataclasses.replace(config, model=m)))
                break
    else:
        return None
    dropped = ("--workdir=", "--config.model.position=", "--resume_override=")
    kept = [word for word in sys.argv[1:] if not word.startswith(dropped)]
    inside = sys.executable.startswith(os.getcwd())
    python = os.path.relpath(sys.executable) if inside else "python"
    command = command_name("rope_jax.main").replace("python", python, 1)
    words = [*kept, f"--config.model.position={other}", f"--workdir={workdir}_{other}"]
    return f"{command} {shlex.join(words)}"
