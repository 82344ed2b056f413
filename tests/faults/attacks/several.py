"""Several processes of one run: they disagree, cannot find each other, are stopped, or die."""

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence

import numpy as np

import rope_jax
from tests import devices as cpu
from tests.faults.attacks import (
    ENDLESS,
    SMALL,
    attack,
    durable,
    expect,
    expect_end,
    expect_refusal,
    last_logged_step,
    outputs,
    wait_for_exit,
)
from tests.faults.processes import Run

TOGETHER = [*SMALL, "--distributed", "--heartbeat=10"]


def free_address() -> str:
    """An unused address of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def start(
    folder,
    each: Sequence[Sequence[str]],
    *,
    settings: Sequence[str] = TOGETHER,
    environments: Sequence[dict[str, str]] | None = None,
    prepare: Callable[[], None] | None = None,
) -> list[Run]:
    """Starts a run of several processes, each with additional arguments and variables."""
    address, runs = free_address(), []
    for number, arguments in enumerate(each):
        variables = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(len(each)),
            "JAX_PROCESS_ID": str(number),
        }
        all_arguments = [*settings, f"--workdir={folder / 'run'}", *arguments]
        variables |= environments[number] if environments else {}
        log = folder / f"{number}.txt"
        runs.append(Run(all_arguments, log, environment=variables, prepare=prepare))
    return runs


def expect_second_refused(runs: Sequence[Run], words: str) -> None:
    """Expects all processes to end with these words, and the first to name the second."""
    expect_refusal(runs, words)
    expect("process 1" in runs[0].read_output(), f"which process differs? {outputs(runs)}")


DIFFERENCES = [
    (["--config.epochs=2.0"], "--config.epochs is 2.0, not 3.0"),
    (["--config.optim.learning_rate=0.5"], "--config.optim.learning_rate is 0.5"),
    (["--config.seed=3"], "--config.seed is 3, not 0"),
    (["--config.model.options=depth=1,width=32,heads=1"], "--config.model.options"),
    (["--config.checkpoint_every=5"], "--config.checkpoint_every is 5, not 8"),
    (["--mode=evaluate"], "holds no checkpoints"),
    (["--resume_override=seed"], "--resume_override is ['seed'], not []"),
    (["--config.data.source=nothing"], "unknown data source 'nothing'"),
]


@attack("one of two processes has another setting", tries=len(DIFFERENCES))
def other_setting(folder, number, rng):
    arguments, words = DIFFERENCES[number % len(DIFFERENCES)]
    expect_second_refused(start(folder, [[], arguments]), words)


@attack("one of two processes has another workdir", tries=2)
def other_workdir(folder, number, rng):
    runs = start(folder, [[], [f"--workdir={folder / 'other'}"]])
    expect_refusal(runs, "process 1", ".lock (of --workdir) is missing", "that all share")


def _in_own_folder() -> None:
    os.chdir(os.environ["TEST_FOLDER"])


def start_apart(folder, arguments: Sequence[str]) -> list[Run]:
    """Starts two processes of a run in folder/0 and folder/1."""
    folders = [{"TEST_FOLDER": str(folder / process)} for process in "01"]
    return start(folder, [arguments] * 2, environments=folders, prepare=_in_own_folder)


@attack("one of two processes has other images", tries=2)
def other_images(folder, number, rng):
    labels = np.arange(240) % 4
    for process in "01":
        (folder / process).mkdir()
        pixels = rng.integers(0, 256, (240, 8, 8, 3), dtype=np.uint8)
        arrays = {"train_images": pixels, "train_labels": labels}
        arrays |= {"test_images": pixels[:20], "test_labels": labels[:20]}
        np.savez(folder / process / "images.npz", **arrays)
    images = ["--config.data.source=npz", "--config.data.path=images.npz"]
    expect_refusal(start_apart(folder, images), "in process 1 the images of the train split is")


OWN_FILES = [  # of the second process, arguments of both, message of both
    ({"mine.py": "ONE = 2"}, ["--plugins=mine"], "the source of the plug-in mine is"),
    ({}, ["--config.init_from=w.safetensors"], "there is no such file"),
    ({"run/checkpoints/4/manifest.json": "{}"}, ["--config.init_from=run"], "is ['4'], not ['3']"),
]


@attack("one of two processes has another plug-in or weights", tries=len(OWN_FILES))
def other_files(folder, number, rng):
    files, arguments, words = OWN_FILES[number % len(OWN_FILES)]
    first = {"mine.py": "ONE = 1", "run/checkpoints/3/manifest.json": "{}"}
    for process, texts in enumerate((first, {"log": ""} | files)):
        for name, text in texts.items():
            path = folder / str(process) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    model = rope_jax.create_model("vit_digits", position="rope_mixed", depth=1, width=16, heads=1)
    rope_jax.save_pretrained(model, folder / "0" / "w.safetensors")
    expect_second_refused(start_apart(folder, arguments), words)


@attack("one of two processes has another number of devices")
def other_devices(folder, number, rng):
    runs = start(folder, [[], []], environments=[cpu.environment(1), cpu.environment(2)])
    expect_refusal(runs, "process 0 has 1, process 1 has 2")


SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


@attack("a signal to one of two fresh processes", tries=len(SIGNALS))
def signal_to_one(folder, number, rng):
    runs = start(folder, [[ENDLESS, "--config.checkpoint_every=100000"]] * 2)
    runs[0].wait_for(f"\nstep {rng.integers(1, 30):5d}/")
    runs[rng.integers(2)].send(SIGNALS[number % len(SIGNALS)])
    expect_end(runs)
    logged = last_logged_step(folder / "run")
    expect(durable(folder / "run") == logged, f"step {logged} was not saved: {outputs(runs)}")


@attack("the death of one of two processes", tries=6)
def death_of_one(folder, number, rng):
    runs = start(folder, [[ENDLESS]] * 2)
    runs[0].wait_for("\nsaved step 8:")
    time.sleep(rng.uniform(0, 2))
    victim = number % 2
    runs[victim].kill()
    begun, survivor = time.monotonic(), runs[1 - victim]
    statuses = wait_for_exit(runs)
    seconds, output = time.monotonic() - begun, survivor.read_output()
    expect(0 not in statuses, f"exit statuses {statuses}: {outputs(runs)}")
    expect(seconds < 30, f"{seconds} s until the other process ended")
    expect("learning_rate" not in output, f"the death is told as divergence: {output[-2000:]}")
    expect("another process" in output or "another task died" in output, output[-2000:])
    expect(durable(folder / "run") >= 8, "step 8 was reported as saved")


UNREACHABLE = [
    ({"JAX_COORDINATOR_ADDRESS": "nobody.invalid:1234"}, "have joined at nobody.invalid:1234"),
    ({}, "not all processes have joined at 127.0.0.1:"),
    ({"JAX_PROCESS_ID": "0"}, "not all processes have joined at 127.0.0.1:"),
    ({"JAX_COORDINATOR_ADDRESS": "localhost"}, "JAX_COORDINATOR_ADDRESS=host:port"),
    ({"JAX_PROCESS_ID": "2"}, "process_id=2, num_processes=2"),
    ({"JAX_NUM_PROCESSES": "two"}, "'two'"),
]


@attack("a first process that cannot be reached, or an impossible address", tries=len(UNREACHABLE))
def nobody_to_join(folder, number, rng):
    variables, words = UNREACHABLE[number % len(UNREACHABLE)]
    variables = {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"} | variables
    (run,) = start(folder, [["--join_timeout=5"]], environments=[variables])
    expect_refusal([run], words)


@attack("a port that another program uses", tries=2)
def occupy_port(folder, number, rng):
    with socket.create_server(("0.0.0.0", 0)) as used:
        address = f"localhost:{used.getsockname()[1]}"
        (run,) = start(folder, [[]], environments=[{"JAX_COORDINATOR_ADDRESS": address}])
        expect_refusal(
            [run], "already in use", "JAX_COORDINATOR_ADDRESS=host:port, with a free port"
        )


DIVIDED = ["--config.model.options=depth=1,width=128,heads=1", "--config.mesh.fsdp=2"]
TWELVE_STEPS = "--config.epochs=1.0"


def _over_quota() -> None:
    """Limits files of the process that TEST_LIMITED names to 50 kB."""
    if os.environ["JAX_PROCESS_ID"] == os.environ["TEST_LIMITED"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))


@attack("one of two processes cannot write its part of a checkpoint", tries=2)
def unwritten_part(folder, number, rng):
    variables = [{"TEST_LIMITED": str(1 - number % 2)}] * 2
    arguments = [[*DIVIDED, TWELVE_STEPS]] * 2
    runs = start(folder, arguments, environments=variables, prepare=_over_quota)
    begun = runs[0].wait_for("\nstep 12/")
    expect_end(runs, status=1)
    seconds = time.monotonic() - begun
    for run in runs:  # orbax and tensorstore may print before and after
        message = "\nrope_jax: step 12 could not be saved in "
        expect(
            message in run.read_output() and "File too large" in run.read_output(), outputs(runs)
        )
    expect(seconds < 30, f"{seconds} s until both ended")
