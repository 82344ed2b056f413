"""Files of a run or of its data that are damaged, exchanged, or not regular files."""

import errno
import itertools
import json
import os
import pathlib
import shutil
import time

import numpy as np
from PIL import Image

from rope_jax.training import integrity
from tests.faults.attacks import (
    ENDLESS,
    SMALL,
    attack,
    durable,
    expect,
    expect_end,
    expect_refusal,
    outputs,
    start,
)
from tests.faults.processes import Run

ONE_EPOCH = [*SMALL, "--config.epochs=1.0"]
STEPS = 12
IMAGES = ["--config.batch_size=4", "--config.data.image_size=8", "--config.data.augment=none"]


def run_to_end(folder: pathlib.Path, *arguments: str) -> Run:
    """Runs in folder/run to the end; it must be complete."""
    run = start(folder, *arguments, settings=ONE_EPOCH)
    expect_end([run])
    return run


def results(folder: pathlib.Path) -> dict:
    """The results of the run in folder/run."""
    return json.loads((folder / "run" / "results.json").read_text())


SIDE_FILES = ("results.json", "metrics.jsonl", "accuracy.png", "config.json")
DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "nested": lambda content: b"[" * 100_000,
}


@attack("a file beside the checkpoints that is cut, emptied or nested", tries=12)
def damage_side_file(folder: pathlib.Path, number: int, rng: np.random.Generator) -> None:
    run_to_end(folder)
    before = results(folder)
    # Their numbers have no common divisor: all pairs come in turn.
    name, kind = SIDE_FILES[number % len(SIDE_FILES)], list(DAMAGES)[number % len(DAMAGES)]
    path = folder / "run" / name
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    run = run_to_end(folder)
    expect("Traceback" not in run.read_output(), f"{kind} {name}: {run.read_output()[-2000:]}")
    expect(results(folder) == before, f"{kind} {name}: other results")
    expect(durable(folder / "run") == STEPS, f"{kind} {name}: the last step is gone")


@attack("a workdir that is deleted, moved or replaced during the run", tries=3)
def remove_workdir(folder: pathlib.Path, number: int, rng: np.random.Generator) -> None:
    run = start(folder, ENDLESS)
    run.wait_for("\nsaved step 8:")
    time.sleep(rng.uniform(0, 0.5))
    workdir, elsewhere = folder / "run", folder / "elsewhere"
    workdir.rename(elsewhere)
    if number % 3 == 0:
        shutil.rmtree(elsewhere)
    elif number % 3 == 2:
        workdir.mkdir()
    # Orbax logs a save in progress before the error.
    expect_end([run], status=1)
    sentence = run.read_output().strip().splitlines()[-1]
    expect(sentence.startswith(f"rope_jax: {workdir} was deleted or moved"), outputs([run]))
    files = [str(path) for path in workdir.rglob("*") if path.is_file()]
    written = [name for name in files if ".writing" not in name]  # of a save in progress
    expect(not written, f"it went on to write {written}")
    if number % 3:
        expect(durable(elsewhere) >= 8, "step 8 was reported as saved")


def _fail_all_reads() -> None:
    """Makes every read of a checkpoint fail, each time with another error."""
    codes = itertools.cycle((errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE))

    def file_sha256(path: pathlib.Path) -> str:
        code = next(codes)
        raise OSError(code, os.strerror(code), str(path))

    integrity.file_sha256 = file_sha256


@attack("reads that fail while a checkpoint is verified", tries=2)
def fail_reads(folder: pathlib.Path, number: int, rng: np.random.Generator) -> None:
    run_to_end(folder)
    run = start(folder, settings=ONE_EPOCH, prepare=_fail_all_reads)
    expect_refusal([run], "cannot be read", "it may be intact and was not renamed")
    names = set(os.listdir(folder / "run" / "checkpoints"))
    expect(names == {"8", str(STEPS)}, f"there are {names}")
    run_to_end(folder)


def write_images(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Two classes of 8 pictures in both splits of a class folder."""
    for split, name, image in itertools.product(("train", "test"), "ab", range(8)):
        (folder / split / name).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / split / name / f"{image}.jpg")


def _write_large_file(path: pathlib.Path) -> None:
    with path.open("wb") as file:
        file.truncate(int(200e6))


@attack("an image that is a pipe, a device, 200 MB or half a JPEG", tries=4)
def spoil_image(folder: pathlib.Path, number: int, rng: np.random.Generator) -> None:
    images = folder / "images"
    write_images(images, rng)
    path = images / "train" / str(rng.choice(["a", "b"])) / f"{rng.integers(8)}.jpg"
    content = path.read_bytes()
    path.unlink()
    makes = [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        _write_large_file,
        lambda path: path.write_bytes(content[: len(content) // 2]),
    ]
    makes[number % len(makes)](path)
    source = [*IMAGES, "--config.data.source=folder", f"--config.data.path={images}"]
    words = (path.name, "cannot be used", "rope_jax.data.verify", "data.bad_images=skip")
    expect_refusal([start(folder, *source, settings=ONE_EPOCH)], *words, status=1)
    run_to_end(folder, *source, "--config.data.bad_images=skip")
