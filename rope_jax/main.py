"""Trains and evaluates from one config file: `python -m rope_jax.main --config=configs/digits.py --workdir=runs/digits`.

The same command resumes a run that was interrupted, and says so when there is nothing left to do. Exit status: 0 when the run is complete,
or was stopped by Ctrl-C or SIGTERM and is saved; 1 when it failed; 2 when the command or the config cannot be; 130 when Ctrl-C came before
anything could be saved. A second Ctrl-C ends the process at once.
"""

import os
import pathlib
import shlex
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from rope_jax import train
from rope_jax.config import Config, ConfigError, resolve, split_assignments

_CONFIG = config_flags.DEFINE_config_file("config", None, "recipe, with arguments behind a colon: configs/digits.py:position=rope2d")
_MODE = flags.DEFINE_enum("mode", "train", ["train", "evaluate"], "train and evaluate, or only evaluate the newest checkpoint of workdir")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder for checkpoints, metrics, results and pictures; made when it is not there")


def _parse_flags(arguments: list[str]) -> list[str]:
    """Like absl's own, but every mistake ends in one line."""
    try:
        rest = flags.FLAGS(arguments)
        if len(rest) > 1:
            raise ConfigError(f"unexpected argument {rest[1]!r}; settings are written --config.key=value")
        for flag, example in ((_CONFIG, "configs/digits.py"), (_WORKDIR, "runs/digits")):
            if flag.value is None:
                raise ConfigError(f"--{flag.name} is missing, for example --{flag.name}={example}")
        _CONFIG.value.keys()  # a recipe that could not be loaded says so only when it is looked at
        if flags.FLAGS["verbosity"].using_default_value:
            flags.FLAGS.verbosity = logging.WARNING  # absl would choose INFO, at which orbax tells of every file
        return rest
    except (KeyError, AttributeError) as error:  # ml_collections: a key that the config does not have
        _stop(2, "there is no such setting: " + str(error).replace("\\n", " ").replace("\\'", "").strip("'\""))
    except (flags.Error, ConfigError, ValueError, TypeError, OSError, SyntaxError) as error:
        _stop(2, str(error))


def _main(_: list[str]) -> None:
    run = {"train": train.train, "evaluate": train.evaluate_newest}[_MODE.value]
    try:
        config = resolve(_CONFIG.value)
        run(config, pathlib.Path(_WORKDIR.value))
        if _MODE.value == "train":
            print(_what_next(config))
    except ConfigError as error:
        _stop(2, str(error))
    except train.NonFinite as error:
        _stop(1, str(error))
    except train.Interrupted as signal:
        print(f"stopped by {signal}; what was reached is saved in {_WORKDIR.value}: run the same command to go on")
    except KeyboardInterrupt:
        _stop(130, f"stopped at once; {_WORKDIR.value} holds what was saved before, and the same command goes on from there")


def _what_next(config: Config) -> str:
    """This command with another scheme, in a folder beside this one."""
    other = "rope_mixed" if config.model.position != "rope_mixed" else "axial_rope"
    recipe, _, arguments = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    kept = [f"{key}={value}" for key, value in split_assignments(arguments, "recipe argument") if key != "position"]
    given = [a for a in sys.argv[1:] if not a.startswith(("--config=", "--workdir=", "--config.model.position="))]
    python = os.path.relpath(sys.executable) if sys.executable.startswith(os.getcwd()) else "python"
    workdir = pathlib.Path(_WORKDIR.value)
    words = [
        f"--config={recipe}:{','.join([f'position={other}', *kept])}",
        f"--workdir={workdir.parent / (workdir.name + '_' + other)}",
        *given,
    ]
    return f"try next: {python} -m rope_jax.main {shlex.join(words)}"


def _stop(status: int, message: str) -> None:
    print(f"rope_jax: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    app.run(_main, flags_parser=_parse_flags)
