"""Trains and evaluates a recipe.

    python -m rope_jax.main --config=digits --workdir=runs/digits
    python -m rope_jax.main --config=my.py:position=rope2d --config.epochs=30.0 --workdir=runs/my

`--config.help` lists all settings. The same command resumes an interrupted run, and reports when
nothing is left to do. SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGHUP (a closed terminal) save and
stop after the current step; a second one stops at once, except for SIGHUP; SIGUSR2 records a
profile of a few steps. Exit status:

- 0: the run is complete, or was stopped by a signal and saved;
- 1: it failed: a loss that is not finite, a checkpoint that could not be written, a bug;
- 2: the command, the config or the workdir is wrong;
- 128 + signal number (129, 130, 138, 143): stopped without saving: nothing to save, a second
  signal, or one of several processes that waits for images.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import os
import pathlib
import shlex
import signal
import sys
from typing import Annotated

import jax
from flax import nnx

from rope_jax.commands.arguments import Argument, add_switch, command_name, command_parser
from rope_jax.commands.exits import exit_at_once, exit_statuses
from rope_jax.config import (
    Config,
    ConfigError,
    blame,
    list_recipes,
    load_recipe,
    resolve,
    settings_help,
)
from rope_jax.names.notation import items
from rope_jax.names.options import Count, Range
from rope_jax.runs import run
from rope_jax.system.compilation import keep_compiled
from rope_jax.system.processes import join, require_equal_devices
from rope_jax.system.sharding import process_shard, start_devices
from rope_jax.training.setup import create

_OTHERS = ("rope_mixed", "rope2d", "ape", "none")  # schemes to try next


def command() -> None:
    """Trains or evaluates according to `sys.argv`, and ends the process."""
    with contextlib.suppress(RuntimeError, OSError):  # without a standard error
        faulthandler.enable()
    args, config = parse(None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # stops at once until the run handles it
    with exit_at_once():
        with exit_statuses(str(args.workdir), distributed=args.distributed):
            keep_compiled()
            if args.distributed:
                with blame("--distributed"):
                    join(args.heartbeat, args.join_timeout)
                if (
                    process_shard()[0] > 0
                ):  # the first process prints; all print warnings and errors
                    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            with blame("JAX_PLATFORMS"):
                start_devices()
            with blame("--distributed"):
                require_equal_devices()
            run.train(
                config,
                args.workdir,
                mode=args.mode,
                strict_restore=args.strict_restore,
                resume_override=items(args.resume_override),
            )
            if args.mode == "train" and (suggestion := next_command(config, args.workdir)):
                print(f"try next: {suggestion}")
        if args.distributed:
            jax.distributed.shutdown()  # after all processes have reached it


def parse(words: list[str] | None) -> tuple[argparse.Namespace, Config]:
    """Parses the arguments of the command, and resolves the config of the run."""
    parser = command_parser("rope_jax.main", __doc__, load_plugins=False)
    parser.epilog = (
        f"recipes that come with the package:\n    {', '.join(list_recipes())}\n\n"
        f"settings:\n{settings_help()}"
    ).replace("%", "%%")
    add = parser.add_argument
    add(
        "--config",
        required=True,
        help="recipe by name or file, with its arguments: digits:position=rope2d",
    )
    add("--workdir", required=True, type=pathlib.Path, help="folder of the run, made if missing")
    add(
        "--mode",
        choices=("train", "evaluate"),
        default="train",
        help="evaluate: only evaluate the newest checkpoint",
    )
    add_switch(parser, "strict_restore", "stop at a damaged checkpoint")
    add(
        "--resume_override",
        default="",
        metavar="SETTINGS",
        help="settings that may differ from the resumed run's: seed,batch_size",
    )
    add(
        "--plugins",
        action="append",
        default=[],
        metavar="MODULE",
        help="import your schemes, models and sources, see rope_jax.names.plugins; repeatable",
    )
    add_switch(parser, "distributed", "one of several processes, see docs/many_devices.md")
    add(
        "--heartbeat",
        type=Argument(Annotated[int, Range(low=2)]),
        default=60,
        help="seconds after which a silent process counts as dead",
    )
    add(
        "--join_timeout",
        type=Argument(Count),
        default=120,
        help="seconds to wait for all processes to join",
    )
    args, settings = parser.parse_with_settings(words)
    with parser.one_line_errors():
        config = resolve(load_recipe(args.config, settings))
        return args, dataclasses.replace(config, plugins=(*config.plugins, *args.plugins))


def next_command(config: Config, workdir: pathlib.Path) -> str | None:
    """This command with another scheme, in a folder next to this one.

    None if no other scheme is possible, or if the run started from weights, which fix the scheme.
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
