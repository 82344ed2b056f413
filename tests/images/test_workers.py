"""Worker processes: equal streams for any number of them, and their end."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rope_jax.data import BadImages, batches, evaluation_batches, load
from rope_jax.data.jobs import run_jobs
from rope_jax.data.workers import DeadWorker
from tests.images.streams import assert_same, take
from tests.images.test_streamed import write_folder

pytest.importorskip("grain", reason="needs grain (the extra `data`)")
pytestmark = pytest.mark.process
OPTIONS = {
    "batch_size": 48,
    "seed": 3,
    "augment": "resized_crop(scale_min=0.3)+flip",
    "start_step": 1,
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    place = tmp_path_factory.mktemp("pictures")
    write_folder(place, classes=[f"{k:02}" for k in range(24)])
    return place


def test_streams_do_not_depend_on_the_number_of_workers(pictures):
    images = load("folder", str(pictures), "train", (12, 12))
    with batches(images, workers=2, **OPTIONS) as stream:
        assert_same(take(6, stream), take(6, batches(images, **OPTIONS)))
    assert not multiprocessing.active_children()
    held_out = load("folder", str(pictures), "test", (12, 12))
    assert_same(
        *(evaluation_batches(held_out, batch_size=20, workers=workers) for workers in (1, 0))
    )
    assert not multiprocessing.active_children()


def test_bad_images_and_killed_workers_are_reported(pictures):
    (pictures / "train" / "00" / "bad.png").write_bytes(b"no image")
    images = load("folder", str(pictures), "train", (12, 12))
    with pytest.raises(BadImages, match=r"\(00/bad.png\) cannot be used"):
        take(3, batches(images, workers=1, **OPTIONS))
    assert not multiprocessing.active_children()
    stream = batches(images, workers=1, bad_images="skip", **OPTIONS)
    next(stream), next(stream)
    assert len(stream.skipped) == 1
    (worker,) = multiprocessing.active_children()
    begun = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(DeadWorker, match=r"exit code -9.*use fewer"):
        list(stream)
    assert time.monotonic() - begun < 10
    assert not multiprocessing.active_children()


def test_a_killed_job_worker_is_reported_with_advice():
    with pytest.raises(DeadWorker, match="use fewer with --workers"):
        list(run_jobs(os._exit, [(9,)], workers=1))
    assert not multiprocessing.active_children()


PROGRAM = """
import signal, sys
from rope_jax.data import batches, load

def main():
    stopped = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    images = load("folder", sys.argv[1], "test", (12, 12))
    stream = batches(images, batch_size=32, seed=0, workers=1)
    next(stream)
    print("ready", flush=True)
    while not stopped:
        next(stream)
    for _ in range(20):  # as a run that was asked to stop
        next(stream)
    print("saved", flush=True)
    sys.stdin.readline()

if __name__ == "__main__":
    main()
"""


def test_workers_survive_signals_but_not_their_parent(pictures, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, tmp_path / "program.py", pictures],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 1
        # Signals go to all of them, as from a terminal or a batch system.
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.killpg(process.pid, number)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "saved\n"
        process.kill()
        process.stdin.close()
        assert "Traceback" not in process.stderr.read()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
