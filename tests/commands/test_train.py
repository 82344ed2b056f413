"""The command `python -m rope_jax.main`: its flags, exit statuses, messages and signals."""

import dataclasses
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import jax
import pytest

from rope_jax.commands import exits, train
from rope_jax.config import ConfigError, resolve
from rope_jax.data import BadImages, BadSet
from rope_jax.system.files import SaveFailed
from rope_jax.training.checkpoint import NonFinite
from rope_jax.training.signals import Interrupted
from tests.faults.attacks import ENDLESS, expect_saved, start
from tests.refusals import expect_refusal

ROOT = pathlib.Path(__file__).parents[2]


def interruption(name, *, saved, alone=False):
    error = Interrupted(name)
    error.saved, error.alone = saved, alone
    return error


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ConfigError("a mistake\n in two lines"), 2, "rope_jax: a mistake in two lines\n"),
        (NonFinite("step 3"), 1, "rope_jax: step 3\n"),
        (SaveFailed("disk full"), 1, "rope_jax: disk full\n"),
        (interruption("SIGTERM", saved=False), 143, "before there was anything to save\n"),
        (interruption("SIGTERM", saved=True, alone=True), 143, "without saving"),
        (RuntimeError("a bug"), 1, "RuntimeError: a bug\n"),
        (BadImages("image 3 is truncated"), 1, "3 is truncated; `python -m rope_jax.data.verify`"),
        (BadSet("2 of 6 images cannot be used"), 1, "rope_jax: 2 of 6 images cannot be used\n"),
        (MemoryError("Unable to allocate 9 TiB"), 1, "9 TiB); use a smaller --config.batch_size"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand a trace"),
            1,
            "Out of memory); use a smaller --config.batch_size",
        ),
    ],
)
def test_exit_statuses(error, status, words, capsys):
    with pytest.raises(SystemExit) as caught, exits.exit_statuses("a", distributed=False):
        raise error
    assert caught.value.code == status
    assert words in capsys.readouterr().err


def test_lost_processes_end_the_others(monkeypatch, capsys):
    monkeypatch.setattr(exits, "_LAST_WORDS", 0)
    with pytest.raises(SystemExit) as caught, exits.exit_statuses("a", distributed=True):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset")
    assert caught.value.code == 1
    assert "another process was lost" in capsys.readouterr().err


def test_a_saved_stop_is_not_a_failure(capsys):
    with exits.exit_statuses("runs/x", distributed=False):
        raise interruption("SIGINT", saved=True)
    message = "stopped by SIGINT; saved in runs/x: run the same command to resume\n"
    assert capsys.readouterr().out == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.batch_sise=3"], "batch_sise is not a setting; did you mean 'batch_size'"),
        (["--confg=x"], "unexpected argument '--confg=x'; settings are written --config.key=value"),
        (["--epochs=3"], "unexpected argument '--epochs=3'; use --config.epochs"),
        (["--batch-size=3"], "; use --config.batch_size"),
        (["--model=deit_s16"], "; use --config.model.name"),
        (["--config.optim.lr=0.1"], "lr"),
        (["--config.data.img_size=9"], "; use --config.data.image_size"),
        (["batch_size=3"], "argument 'batch_size=3'; use --config.batch_size or"),
        (["--config.epochs"], "--config.epochs must be a number above 0, not ''"),
        (["--config.batch_size=3.5"], "--config.batch_size must be a whole number"),
        (["--config.data=1"], "--config.data is not a setting"),
        (["--noconfig.epochs"], "unexpected argument '--noconfig.epochs'; settings are written"),
        (["--noconfig.tensorboard=True"], "unexpected argument '--noconfig.tensorboard=True'"),
        (["--mode=test"], "--mode: invalid choice: 'test'"),
        (["--workdir="], "--workdir: must be a path, not ''"),
        (["--heartbeat=1"], "--heartbeat: must be a whole number of at least 2, not 1"),
        (["--strict_restore=maybe"], "--strict_restore: must be True or False, not 'maybe'"),
    ],
)
def test_wrong_flags_are_refused(arguments, message, capsys):
    with expect_refusal(capsys, message):
        train.parse(["--config=digits", "--workdir=runs/x", *arguments])


def test_flags_have_several_spellings():
    options, _ = train.parse(["--config=digits", "--workdir=x"])
    assert (options.strict_restore, options.distributed) == (False, False)
    words = ["-config", "digits", "--workdir", "runs/x", "--resume_override=seed,batch_size"]
    words += ["--plugins=one", "--plugins=two", "--distributed=true", "--strict_restore"]
    words += ["--config.data.path=/a b", "--config.epochs", "3", "--config.tensorboard"]
    words += ["--noconfig.data.allow_empty", "--config.optim.clip_norm=None"]
    options, config = train.parse(words)
    assert (options.config, options.workdir) == ("digits", pathlib.Path("runs/x"))
    assert config.plugins == ("one", "two")
    assert (options.resume_override, options.plugins) == ("seed,batch_size", ["one", "two"])
    assert (options.strict_restore, options.distributed) == (True, True)
    assert (config.epochs, config.tensorboard, config.data.allow_empty) == (3.0, True, False)
    assert (config.data.path, config.optim.clip_norm) == ("/a b", None)
    assert not train.parse([*words, "--nostrict_restore"])[0].strict_restore


def test_the_next_command_keeps_the_arguments(monkeypatch):
    arguments = ["--config=configs/digits.py:position=none,seed=3", "--workdir=runs/a"]
    arguments += ["--config.model.position=ape", "--resume_override=seed", "--config.epochs=2.0"]
    monkeypatch.setattr(sys, "argv", ["main.py", *arguments])
    config = resolve({"model": {"position": "rope_mixed", "options": "depth=1"}})
    words = shlex.split(train.next_command(config, pathlib.Path("runs/a")))
    assert words[1:3] == ["-m", "rope_jax.main"]
    assert words[3:] == [
        "--config=configs/digits.py:position=none,seed=3",
        "--config.epochs=2.0",
        "--config.model.position=rope2d",
        "--workdir=runs/a_rope2d",
    ]
    from_weights = dataclasses.replace(config, init_from="weights.npz")
    assert train.next_command(from_weights, pathlib.Path("runs/a")) is None


@pytest.mark.parametrize(
    ("options", "other"),
    [("depth=1,width=8,heads=2", "rope_mixed"), ("depth=1,width=6,heads=1", "ape")],
)
def test_the_next_command_has_a_scheme_that_fits_the_model(options, other, monkeypatch):
    """Rotations along two axes need heads of a multiple of 4 channels."""
    monkeypatch.setattr(sys, "argv", ["main.py", "--config=x.py", "--workdir=runs/a"])
    config = resolve({"model": {"position": "none", "options": options}})
    assert train.next_command(config, pathlib.Path("runs/a")).endswith(f"--workdir=runs/a_{other}")


@pytest.mark.process
def test_missing_devices_are_reported_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rope_jax.main", "--config=digits", f"--workdir={tmp_path}/run"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert re.match("rope_jax: jax has no device.* JAX_PLATFORMS=cpu", line), line


@pytest.mark.process
def test_ctrl_c_during_imports_is_one_line(tmp_path):
    # Python may lose an interrupt between two imports; this one arrives within one.
    slow = "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    (tmp_path / "flax.py").write_text(slow)
    with subprocess.Popen(
        [sys.executable, "-m", "rope_jax", "train", f"--workdir={tmp_path}/run"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == 130
    assert errors == "rope_jax: stopped by Ctrl-C\n"


@pytest.mark.process
def test_ctrl_c_saves_and_the_same_command_resumes(tmp_path):
    for mark, number in (("\nstep ", signal.SIGINT), ("\nfound step", signal.SIGTERM)):
        process = start(tmp_path, ENDLESS)
        process.wait_for(mark)
        process.send(number)
        expect_saved(tmp_path, [process])
        assert f"stopped by {number.name}; saved in" in process.read_output()
