"""Missing images: a stopped data worker, a file system that does not answer."""

import contextlib
import os
import pathlib
import signal
import threading
import time

import numpy as np
import psutil

from rope_jax.data.sources import Streamed
from tests.faults.attacks import (
    ENDLESS,
    SMALL,
    attack,
    durable,
    expect,
    expect_saved,
    outputs,
    several,
    start,
    wait_for_exit,
)
from tests.faults.attacks.files import write_images

SETTINGS = [
    *(
        setting for setting in SMALL if "eval.resolutions" not in setting
    ),  # a later tuple would not replace it
    ENDLESS,
    "--config.model.options=depth=1,width=16,heads=1,patch_size=4",
    "--config.batch_size=16",
    "--config.checkpoint_every=100000",
    "--config.eval.resolutions=()",
    "--config.data.source=folder",
    "--config.data.image_size=(8, 8)",
    "--config.data.augment=flip",
    "--config.data.on_device=False",
]


def images(folder: pathlib.Path, rng: np.random.Generator) -> str:
    """Writes a small image folder; returns the argument that names it."""
    write_images(folder / "images", rng)
    return f"--config.data.path={folder / 'images'}"


@attack("data workers that are stopped (SIGSTOP), then SIGTERM", tries=3)
def stop_workers(folder, number, rng):
    run = start(folder, images(folder, rng), "--config.data.workers=2", settings=SETTINGS)
    run.wait_for("\nstep ")
    children = psutil.Process(run.pid).children()
    workers = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    expect(len(workers) == 2, f"the workers are {workers}")
    time.sleep(rng.uniform(0, 1))
    try:
        for worker in workers:
            worker.suspend()
        time.sleep(rng.uniform(2, 4))
        run.send(signal.SIGTERM)
        expect_saved(folder, [run])
        expect(not any(worker.is_running() for worker in workers), "a worker is left")
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


IN_PROCESS = "--config.data.workers=0"  # where the test can replace reads
STALLED = "\nthe file system has stopped answering"


def _stall_reads() -> None:
    """Makes the file system stop answering after some images, as a network may."""
    read, remaining = Streamed.example, int(os.environ.get("TEST_READS", "1000000000"))

    def read_or_stall(self, *arguments):
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            os.write(2, STALLED.encode())  # only the first process prints
            threading.Event().wait()
        return read(self, *arguments)

    Streamed.example = read_or_stall


@attack("a file system that stops answering, then SIGTERM", tries=3)
def stall_file_system(folder, number, rng):
    settings = [*SETTINGS, IN_PROCESS, images(folder, rng)]
    reads = {"TEST_READS": str(rng.integers(100, 1000))}
    run = start(folder, settings=settings, environment=reads, prepare=_stall_reads)
    run.wait_for("\nstep ")
    run.wait_for(STALLED)
    time.sleep(rng.uniform(0, 5))
    expect(run.returncode is None, run.read_output()[-3000:])
    run.send(signal.SIGTERM)
    expect_saved(folder, [run])


@attack("images that stop coming in one of two processes, then SIGTERM to both", tries=2, slow=True)
def stall_process(folder, number, rng):
    settings = [*SETTINGS, IN_PROCESS, "--config.checkpoint_every=4", images(folder, rng)]
    settings += ["--distributed", "--heartbeat=10"]
    reads = {"TEST_READS": str(rng.integers(100, 400))}
    no_arguments, environments = [[], []], [{}, reads]
    runs = several.start(
        folder, no_arguments, settings=settings, environments=environments, prepare=_stall_reads
    )
    runs[0].wait_for("\nsaved step 4:")
    runs[1].wait_for(STALLED)
    time.sleep(5)  # the batches that were read before are used
    expect([run.returncode for run in runs] == [None, None], outputs(runs))
    for run in runs:
        run.send(signal.SIGTERM)
    statuses = wait_for_exit(runs)
    expect(0 not in statuses, f"exit statuses {statuses}: {outputs(runs)}")
    expect("without saving" in runs[1].read_output(), outputs(runs))
    expect("Traceback" not in outputs(runs), outputs(runs))
    expect(durable(folder / "run") >= 4, "step 4 was reported as saved")
