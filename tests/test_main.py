"""The command `python -m rope_jax.main`: its flags, exit statuses, messages and signals."""

import io
import json
import os
import pathlib
import queue
import shlex
import signal
import subprocess
import sys
import time

import jax
import pytest
from absl.testing import flagsaver

from rope_jax import command
from rope_jax.config import ConfigError, resolve
from rope_jax.data import BadImages, BadSet
from rope_jax.files import SaveFailed, locked
from rope_jax.training import loop
from rope_jax.training.signals import Interrupted
from rope_jax.workdir.checkpoint import NonFinite
from rope_jax.workdir.metrics import read_metrics
from tests import devices as cpu
from tests.faults.processes import Run

ROOT = pathlib.Path(__file__).parents[1]
SMALL = [
    "--config.model.options=depth=1,width=16,heads=1",
    "--config.log_every=1",
    "--config.eval.resolutions=((4, 6),)",
]


def stopped_by(name, *, saved):
    error = Interrupted(name)
    error.saved = saved
    return error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("a mistake\n in two lines"), 2, "rope_jax: a mistake in two lines\n"),
        (NonFinite("step 3"), 1, "rope_jax: step 3\n"),
        (SaveFailed("disk full"), 1, "rope_jax: disk full\n"),
        (
            stopped_by("SIGTERM", saved=False),
            143,
            "rope_jax: stopped by SIGTERM before there was anything to save\n",
        ),
        (KeyboardInterrupt(), 130, "rope_jax: stopped before anything had begun\n"),
        (RuntimeError("a bug"), 1, "RuntimeError: a bug\n"),
        (
            BadImages("image 3 of set (a/1.jpg) cannot be used: it is truncated"),
            1,
            "rope_jax: image 3 of set (a/1.jpg) cannot be used: it is truncated; "
            "`python -m rope_jax.data.verify` lists all that cannot be used, and "
            "--config.data.bad_images=skip goes on without them\n",
        ),
        (BadSet("2 of 6 images cannot be used"), 1, "rope_jax: 2 of 6 images cannot be used\n"),
        (
            MemoryError("Unable to allocate 9 TiB"),
            1,
            "rope_jax: there is too little memory (Unable to allocate 9 TiB); use a smaller "
            "--config.batch_size (or more --config.accumulate), model or image\n",
        ),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
            1,
            "rope_jax: the device has too little memory (RESOURCE_EXHAUSTED: Out of memory "
            "allocating 9 bytes.); use a smaller --config.batch_size (or more --config.accumulate)"
            ", model or image\n",
        ),
    ],
)
def test_exit_statuses(error, status, message, capsys):
    with pytest.raises(SystemExit) as caught, command.exit_statuses("runs/x", distributed=False):
        raise error
    assert caught.value.code == status
    assert capsys.readouterr().err.endswith(message)


def test_a_saved_stop_is_no_failure(capsys):
    with command.exit_statuses("runs/x", distributed=False):
        raise stopped_by("SIGINT", saved=True)
    told = "stopped by SIGINT; saved in runs/x: run the same command to go on\n"
    assert capsys.readouterr().out == told


def test_one_of_several_processes_ends_at_once(monkeypatch, capsys):
    """A normal exit would wait for the others."""
    ended = []
    monkeypatch.setattr(command, "_LAST_WORDS", 0)
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(SystemExit), command.exit_statuses("runs/x", distributed=True):
        raise ConfigError("a mistake")
    assert ended == [2]


def test_prints_that_fail_are_no_failures(monkeypatch):
    ours, theirs = os.pipe()
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # no descriptor: as it was
    with open(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        command.keep_going_unread()
    print("read", flush=True)
    assert os.read(ours, 100) == b"read\n"
    os.close(ours)
    for _ in range(2):
        print("lost \ud800", flush=True)  # a surrogate: not even text
    sys.stdout.close()


def test_help_that_nobody_reads_is_no_error(monkeypatch):
    ours, theirs = os.pipe()
    os.close(ours)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with open(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit, match=r"^$"):
            command.parse_flags(["rope_jax.main", "--config.help"])
    sys.stdout.close()


def test_an_end_that_does_not_come_is_made(monkeypatch):
    """A thread that never answers must not keep the process."""
    ended: queue.SimpleQueue = queue.SimpleQueue()
    monkeypatch.setattr(os, "_exit", ended.put)
    with pytest.raises(SystemExit), command.ended_soon(0.05):
        sys.exit(3)
    assert ended.get(timeout=10) == 3
    with command.ended_soon(0.05):
        pass
    assert ended.get(timeout=10) == 0


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
@pytest.mark.parametrize("distributed", [True, False])
def test_a_lost_connection_is_told_as_such(distributed, kind, monkeypatch, capsys):
    monkeypatch.setattr(command, "_LAST_WORDS", 0)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    error = kind("UNKNOWN: Gloo AllGather failed: Connection reset\nmore")
    with (
        pytest.raises(SystemExit) as caught,
        command.exit_statuses("runs/x", distributed=distributed),
    ):
        raise error
    told = capsys.readouterr().err
    assert caught.value.code == 1
    assert ("Traceback" in told) == (not distributed)
    assert ("the connection to another process is lost" in told) == distributed


# ml_collections imports recipes by a method that Python deprecates.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.batch_sise=3"], 'no such setting: batch_sise Did you mean "batch_size"'),
        (["--confg=x"], "Unknown command line flag 'confg'"),
        (["--epochs=3"], "there is no flag --epochs"),
        (["--epochs=3"], "; use --config.epochs"),
        (["--batch-size=3"], "; use --config.batch_size"),
        (["--model=deit_s16"], "there is no flag --model; use --config.model.name"),
        (["--config.optim.lr=0.1"], "lr"),
        (["--config.data.img_size=9"], "; use --config.data.image_size"),
        (["batch_size=3"], "unexpected argument 'batch_size=3'; settings are written --config.key"),
        (["--config=configs/nothing.py"], "configs/nothing.py"),
        (["--workdir="], None),
    ],
)
def test_mistakes_in_flags_are_one_line(arguments, message, capsys, monkeypatch):
    from rope_jax import main  # defines the flags

    given = [main.__name__, f"--config={ROOT}/configs/digits.py", "--workdir=runs/x", *arguments]
    monkeypatch.setattr(sys, "argv", given)  # read by ml_collections
    with flagsaver.flagsaver():
        if message is None:
            assert command.parse_flags(given) == given[:1]
            return
        with pytest.raises(SystemExit) as caught:
            command.parse_flags(given)
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1


def test_the_next_command_keeps_what_was_given(monkeypatch):
    given = ["--config=configs/digits.py:position=none,seed=3", "--workdir=runs/a"]
    given += ["--config.model.position=ape", "--resume_override=seed", "--config.epochs=2.0"]
    monkeypatch.setattr(sys, "argv", ["main.py", *given])
    config = resolve({"model": {"position": "rope_mixed", "options": "depth=1"}})
    words = shlex.split(command.next_command(config, pathlib.Path("runs/a")))
    assert words[1:3] == ["-m", "rope_jax.main"]
    assert words[3:] == [
        "--config=configs/digits.py:position=none,seed=3",
        "--config.epochs=2.0",
        "--config.model.position=rope2d",
        "--workdir=runs/a_rope2d",
    ]


def test_weights_have_one_scheme_so_that_no_other_is_next():
    config = resolve({"model": {"position": "none"}, "init_from": "weights.npz"})
    assert command.next_command(config, pathlib.Path("runs/a")) is None


@pytest.mark.parametrize(
    ("options", "other"),
    [("depth=1,width=8,heads=2", "rope_mixed"), ("depth=1,width=6,heads=1", "ape")],
)
def test_the_next_command_has_a_scheme_that_the_model_takes(options, other, monkeypatch):
    """Rotations along two axes need heads of a multiple of 4 channels."""
    monkeypatch.setattr(sys, "argv", ["main.py", "--config=x.py", "--workdir=runs/a"])
    config = resolve({"model": {"position": "none", "options": options}})
    assert command.next_command(config, pathlib.Path("runs/a")).endswith(
        f"--workdir=runs/a_{other}"
    )


# ml_collections imports recipes by a method that Python deprecates.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_none_can_be_given_where_a_setting_may_be_none(monkeypatch):
    from rope_jax import main

    given = [main.__name__, f"--config={ROOT}/configs/digits.py", "--workdir=runs/x"]
    given += ["--config.optim.clip_norm=None", "--config.ema_decay=0.5", "--config.data.path=None"]
    monkeypatch.setattr(sys, "argv", given)
    with flagsaver.flagsaver():
        command.parse_flags(given)
        config = resolve(main._CONFIG.value)
    assert (config.optim.clip_norm, config.ema_decay, config.data.path) == (None, 0.5, None)


@pytest.mark.process
def test_a_device_that_is_not_there_is_one_line(tmp_path):
    arguments = ["--config=configs/digits.py", f"--workdir={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, "-m", "rope_jax.main", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("rope_jax: jax has no device")
    assert "JAX_PLATFORMS=cpu" in line
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_ctrl_c_during_imports_is_one_line(tmp_path):
    command = [sys.executable, "-v", "-m", "rope_jax.main", f"--workdir={tmp_path}/run"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("import 'flax"):  # in the middle of the package's imports
                process.send_signal(signal.SIGINT)
                break
        told = process.stderr.read()
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert "rope_jax: stopped by Ctrl-C" in told
    assert "Traceback" not in told


def environment(devices=1):
    return os.environ | cpu.environment(devices)


@pytest.fixture
def forked(tmp_path_factory):
    """The same command in a process that need not import anything; it ends with the test."""
    started = []

    def start(workdir, *settings, devices=1, prepare=None):
        log = tmp_path_factory.mktemp("said") / "log"
        arguments = ["--config=configs/digits.py:epochs=1", f"--workdir={workdir}", *settings]
        flags = cpu.environment(devices)
        started.append(Run(arguments, log, environment=flags, prepare=prepare))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.mark.process
def test_a_mistake_ends_in_one_line(tmp_path, forked):
    done = forked(tmp_path / "run", "--config.model.position=axial_rope(k_rope=16)")
    assert done.wait(300) == 2
    assert "k_rope=16 does not go with head dimension 16" in done.said()
    assert len(done.said().strip().splitlines()) == 1
    assert os.listdir(tmp_path / "run") == [".lock"]


@pytest.mark.process
def test_a_workdir_in_use_is_one_line(tmp_path, forked):
    with locked(tmp_path):
        done = forked(tmp_path)
        assert done.wait(300) == 2
    assert f"{tmp_path} is in use by process {os.getpid()} on" in done.said()
    assert len(done.said().strip().splitlines()) == 1


def _endless_first_step():
    def make_step(setup):
        print("at the first step", flush=True)
        time.sleep(300)

    loop.make_step = make_step


@pytest.mark.process
def test_a_signal_before_the_first_step_is_told_by_the_status(tmp_path, forked):
    stopped = forked(tmp_path, *SMALL, prepare=_endless_first_step)
    stopped.wait_for("\nat the first step")
    stopped.send(signal.SIGTERM)
    assert stopped.wait(120) == 143
    assert "stopped by SIGTERM before there was anything to save" in stopped.said()


@pytest.mark.process
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path, forked):
    settings = [*SMALL, "--config.epochs=400.0"]
    stopped = forked(tmp_path, *settings)
    stopped.wait_for("\nstep ")
    stopped.send(signal.SIGINT)
    assert stopped.wait(120) == 0
    assert "stopped by SIGINT; saved in" in stopped.said()
    (saved,) = (int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert saved >= read_metrics(tmp_path / "metrics.jsonl")[-1]["step"]
    again = forked(tmp_path, *settings)
    again.wait_for("\nfound step")
    again.send(signal.SIGTERM)
    assert again.wait(120) == 0
    assert f"found step {saved}" in again.said()


@pytest.mark.process
def test_a_workdir_that_is_deleted_is_one_line(tmp_path, forked):
    settings = [*SMALL, "--config.epochs=4000.0", "--config.checkpoint_every=20"]
    running = forked(tmp_path / "run", *settings)
    running.wait_for("\nsaved step 20:")
    (tmp_path / "run").rename(tmp_path / "gone")
    assert running.wait(120) == 1
    assert "run was deleted or moved, or another run has" in running.said().splitlines()[-1]
    assert "Traceback" not in running.said()


@pytest.mark.process
def test_one_device_and_eight_give_the_same_curve(tmp_path, forked):
    for devices in (1, 8):
        done = forked(tmp_path / str(devices), *SMALL, "--config.epochs=4.0", devices=devices)
        assert done.wait(300) == 0, done.said()
    one, eight = (
        [line["loss"] for line in read_metrics(tmp_path / str(n) / "metrics.jsonl")] for n in (1, 8)
    )
    assert len(one) == len(eight) == 45
    assert max(abs(a - b) for a, b in zip(one, eight, strict=True)) <= 5e-6
    results = [json.loads((tmp_path / str(n) / "results.json").read_text())["eval"] for n in (1, 8)]
    assert [row["resolution"] for row in results[0]] == [row["resolution"] for row in results[1]]


@pytest.mark.process
def test_the_line_to_try_next_is_a_command_that_runs(tmp_path):
    """Both with an interpreter of their own: `python -m rope_jax.main` as users give it."""
    command = ["python", "-m", "rope_jax.main", "--config=configs/digits.py:position=none,epochs=1"]
    command += [*SMALL, "--config.epochs=0.2", f"--workdir={tmp_path}/run"]
    for position, workdir in (("none", "run"), ("rope_mixed", "run_rope_mixed")):
        done = subprocess.run(
            [sys.executable, *command[1:]],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        config = json.loads((tmp_path / workdir / "config.json").read_text())
        assert config["model"]["position"] == position
        assert (tmp_path / workdir / "results.json").exists()
        (line,) = (text for text in done.stdout.splitlines() if text.startswith("try next: "))
        command = shlex.split(line.removeprefix("try next: "))


@pytest.mark.process
def test_a_batch_that_eight_devices_cannot_share(tmp_path, forked):
    done = forked(tmp_path, *SMALL, "--config.batch_size=100", devices=8)
    assert done.wait(300) == 2
    assert "--config.batch_size=100 cannot be divided over 8 devices; use 96 or 104" in done.said()
