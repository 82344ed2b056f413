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

import dataclasses
import os
import pathlib
import signal
import sys

import jax
from absl import app, flags
from ml_collections import config_flags

from rope_jax.commands.process import (
    ended_at_once,
    exit_statuses,
    keep_going_unread,
    next_command,
    parse_flags,
)
from rope_jax.config import blame, resolve
from rope_jax.runs import run
from rope_jax.system.compilation import keep_compiled
from rope_jax.system.processes import join
from rope_jax.system.sharding import share, start_devices

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "recipe by name or file, with its arguments: digits:position=rope2d"
)
_MODE = flags.DEFINE_enum(
    "mode", "train", ["train", "evaluate"], "evaluate: only evaluate the newest checkpoint"
)
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run; created if missing")
_STRICT = flags.DEFINE_bool("strict_restore", False, "stop at a damaged checkpoint")
_OVERRIDE = flags.DEFINE_list(
    "resume_override", [], "settings that may differ from the resumed run's: seed,batch_size"
)
_PLUGINS = flags.DEFINE_multi_string(
    "plugins", [], "module that registers schemes, models or image sources; repeatable"
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "one of several processes, see docs/many_devices.md"
)
_HEARTBEAT = flags.DEFINE_integer(
    "heartbeat", 60, "seconds after which a silent process counts as dead", 2
)
flags.mark_flags_as_required(["config", "workdir"])
_JOIN = flags.DEFINE_integer("join_timeout", 120, "seconds to wait for all processes to join", 1)


def main(_: list[str]) -> None:
    """Trains or evaluates, as the flags specify."""
    with exit_statuses(_WORKDIR.value, distributed=_DISTRIBUTED.value):
        config, workdir = resolve(_CONFIG.value), pathlib.Path(_WORKDIR.value)
        config = dataclasses.replace(config, plugins=(*config.plugins, *_PLUGINS.value))
        keep_compiled()
        if _DISTRIBUTED.value:
            with blame("--distributed"):
                join(_HEARTBEAT.value, _JOIN.value)
            if share()[0] > 0:  # the first process prints; all print warnings and errors
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        with blame("JAX_PLATFORMS"):
            start_devices()
        action = {"train": run.train, "evaluate": run.evaluate_newest}[_MODE.value]
        action(config, workdir, strict_restore=_STRICT.value, resume_override=_OVERRIDE.value)
        if _MODE.value == "train" and (following := next_command(config, workdir)):
            print(f"try next: {following}")
    if _DISTRIBUTED.value:
        jax.distributed.shutdown()  # once all have come here


def command() -> None:
    """Parses `sys.argv`, calls `main`, and ends the process."""

    def run_and_end(arguments: list[str]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, until the run handles it
        with ended_at_once():
            main(arguments)

    keep_going_unread()
    app.run(run_and_end, flags_parser=parse_flags)
