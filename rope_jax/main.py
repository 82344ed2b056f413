"""Trains and evaluates from one config file: `python -m rope_jax.main --config=configs/digits.py --workdir=runs/digits`.

The same command resumes a run that was interrupted, and says so when there is nothing left to do. SIGINT (Ctrl-C), SIGTERM and SIGUSR1 end
a run after the step under way and save it; a second one ends the process at once; SIGUSR2 records a profile of a few steps. Exit status:

- 0: the run is complete, or was stopped by a signal and all that it reached is saved;
- 1: it failed: a loss that is not finite, a checkpoint that could not be written, an error of the program;
- 2: the command, the config or the workdir cannot be;
- 128 + the signal's number (130, 138, 143): stopped before there was anything to save, or at once by a second signal.
"""

import os
import pathlib
import shlex
import signal
import sys
import traceback

from absl import app, flags, logging
from ml_collections import config_flags

from rope_jax import sharding, train
from rope_jax.compilation import keep_compiled
from rope_jax.config import Config, ConfigError, blame, resolve, split_assignments
from rope_jax.signals import Interrupted
from rope_jax.workdir import SaveFailed

_CONFIG = config_flags.DEFINE_config_file("config", None, "recipe, with arguments behind a colon: configs/digits.py:position=rope2d")
_MODE = flags.DEFINE_enum("mode", "train", ["train", "evaluate"], "train and evaluate, or only evaluate the newest checkpoint of workdir")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder for checkpoints, metrics, results and pictures; made when it is not there")
_STRICT = flags.DEFINE_bool("strict_restore", False, "stop at a damaged checkpoint instead of going back to the newest one that verifies")
_OVERRIDE = flags.DEFINE_list("resume_override", [], "config fields that may differ from those of the resumed run, as seed,batch_size")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "this process is one of several that train together, see docs/many_devices.md")
_HEARTBEAT = flags.DEFINE_integer("heartbeat", 60, "seconds after which a process that is silent counts as dead, and the others end", 2)


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
        keep_compiled()
        if _DISTRIBUTED.value:
            with blame("--distributed"):
                sharding.join(_HEARTBEAT.value)
            if sharding.share()[0] > 0:
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (one process tells; warnings and errors come from all)
        run(config, pathlib.Path(_WORKDIR.value), strict_restore=_STRICT.value, resume_override=_OVERRIDE.value)
        if _MODE.value == "train":
            print(_what_next(config))
    except ConfigError as error:
        _stop(2, str(error))
    except (train.NonFinite, SaveFailed) as error:
        _stop(1, str(error))
    except Interrupted as error:
        if not error.saved:
            _stop(128 + signal.Signals[str(error)], f"stopped by {error} before there was anything to save")
        print(f"stopped by {error}; what was reached is saved in {_WORKDIR.value}: run the same command to go on")
    except KeyboardInterrupt:  # before `run` takes over
        _stop(130, "stopped at once; nothing had begun")
    except Exception:
        traceback.print_exc()
        _exit(1)


def _what_next(config: Config) -> str:
    """This command with another scheme, in a folder beside this one."""
    other = "rope_mixed" if config.model.position != "rope_mixed" else "axial_rope"
    recipe, _, arguments = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    kept = [f"{key}={value}" for key, value in split_assignments(arguments, "recipe argument") if key != "position"]
    given = [a for a in sys.argv[1:] if not a.startswith(("--config=", "--workdir=", "--config.model.position=", "--resume_override="))]
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
    _exit(status)


def _exit(status: int) -> None:
    """Ends this process; if it is one of several at once, and not when they end, because they must learn of it."""
    if flags.FLAGS.is_parsed() and _DISTRIBUTED.value:
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    app.run(_main, flags_parser=_parse_flags)
