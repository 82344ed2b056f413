"""Trains and evaluates from one config file: `python -m rope_jax.main --config=configs/digits.py --workdir=runs/digits`.

The same command resumes a run that was interrupted, and says so when there is nothing left to do. Exit status: 0 when the run is complete,
or was stopped by Ctrl-C or SIGTERM and is saved; 1 when it failed; 2 when the command or the config cannot be.
"""

import pathlib
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from rope_jax import train
from rope_jax.config import ConfigError, resolve

_CONFIG = config_flags.DEFINE_config_file("config", None, "recipe, with arguments behind a colon: configs/digits.py:position=rope2d")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder for checkpoints, metrics, results and pictures; made when it is not there")


def _parse_flags(arguments: list[str]) -> list[str]:
    """Like absl's own, but every mistake ends in one line."""
    try:
        rest = flags.FLAGS(arguments)
        if len(rest) > 1:
            raise ConfigError(f"unexpected argument {rest[1]!r}; settings are written --config.key=value")
        for flag, example in (("config", "configs/digits.py"), ("workdir", "runs/digits")):
            if flags.FLAGS[flag].value is None:
                raise ConfigError(f"--{flag} is missing, for example --{flag}={example}")
        if flags.FLAGS["verbosity"].using_default_value:
            flags.FLAGS.verbosity = logging.WARNING  # absl would choose INFO, at which orbax tells of every file
        return rest
    except (flags.Error, ConfigError, ValueError, TypeError, AttributeError, KeyError, OSError, SyntaxError) as error:
        _stop(2, str(error.args[0] if isinstance(error, KeyError) else error))


def _main(_: list[str]) -> None:
    try:
        train.train(resolve(_CONFIG.value), pathlib.Path(_WORKDIR.value))
    except ConfigError as error:
        _stop(2, str(error))
    except train.NonFinite as error:
        _stop(1, str(error))
    except train.Interrupted as signal:
        print(f"stopped by {signal}; what was reached is saved in {_WORKDIR.value}: run the same command to go on")


def _stop(status: int, message: str) -> None:
    print(f"rope_jax: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    app.run(_main, flags_parser=_parse_flags)
