"""Files of a run or of its data that are damaged, exchanged, or no files at all."""

import errno
import itertools
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

from rope_jax.data import open_source
from rope_jax.data.prepare import prepare
from rope_jax.workdir import integrity
from tests.faults.attacks import ENDLESS, SMALL, attack, durable, ended, expect, refused, said
from tests.faults.processes import Run

ONE_EPOCH = [*SMALL, "--config.epochs=1.0"]
STEPS = 12
IMAGES = ["--config.batch_size=4", "--config.data.image_size=8", "--config.data.augment=none"]


def start(folder: pathlib.Path, *arguments: str, prepare: Callable | None = None) -> Run:
    """Starts a run in folder/run."""
    given = [*ONE_EPOCH, f"--workdir={folder / 'run'}", *arguments]
    return Run(given, folder / "log.txt", prepare=prepare)


def completed(folder: pathlib.Path, *arguments: str) -> Run:
    """A run in folder/run that must be complete."""
    run = start(folder, *arguments)
    expect(ended([run]) == [0], f"exit status {run.returncode}: {said([run])}")
    return run


def results(folder: pathlib.Path) -> dict:
    """The results of the run in folder/run."""
    return json.loads((folder / "run" / "results.json").read_text())


BESIDE = ("results.json", "metrics.jsonl", "accuracy.png", "config.json", "results.json.tmp")
DAMAGES = ("cut", "empty", "nested", "edited", "folder", "pipe", "device")


def damage(path: pathlib.Path, kind: str) -> None:
    """Damages a file, or puts something else in its place."""
    content = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    if kind == "folder":
        (path / "inside").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        changed = {"cut": content[: len(content) // 2], "empty": b"", "nested": b"[" * 100_000}
        path.write_bytes(changed.get(kind, content.replace(b"0.", b"0.9")))


@attack("a file beside the checkpoints that is cut, edited, nested, a folder, a pipe", tries=10)
def damaged_beside(folder: pathlib.Path, number: int, rng: np.random.Generator) -> None:
    completed(folder)
    before = results(folder)
    # Their numbers have no common divisor: all pairs come in turn.
    name, kind = BESIDE[number % len(BESIDE)], DAMAGES[number % len(DAMAGES)]
    damage(folder / "run" / name, kind)
    run = completed(folder)
    expect("Traceback" not in run.said(), f"{kind} {name}: {run.said()[-2000:]}")
    expect(results(folder) == before, f"{kind} {name}: other results")
    expect(durable(folder / "run") == STEPS, f"{kind} {name}: the last step is gone")
    completed(folder)


@attack("a workdir that is deleted, moved or replaced during the run", tries=3)
def gone_workdir(folder: pathlib.Path, number: int, rng: np.random.Generator) -> None:
    run = start(folder, ENDLESS)
    run.wait_for("\nsaved step 8:")
    time.sleep(rng.uniform(0, 0.5))
    workdir, elsewhere = folder / "run", folder / "elsewhere"
    workdir.rename(elsewhere)
    if number % 3 == 0:
        shutil.rmtree(elsewhere)
    elif number % 3 == 2:
        workdir.mkdir()
    refused([run], f"{workdir} was deleted or moved", status=1)
    files = [str(path) for path in workdir.rglob("*") if path.is_file()]
    left = [name for name in files if ".writing" not in name]  # of a save that was under way
    expect(not left, f"it went on to write {left}")
    if number % 3:
        expect(durable(elsewhere) >= 8, "step 8 was reported as saved")


@attack("a step's folder that is a link, a dangling link, a file", tries=3)
def moved_step(folder: pathlib.Path, number: int, rng: np.random.Generator) -> None:
    completed(folder)
    before = results(folder)
    for turn, step in enumerate((8, STEPS)):
        place, elsewhere = folder / "run" / "checkpoints" / str(step), folder / str(step)
        shutil.move(place, elsewhere)
        kind = ("link", "dangling", "file")[(number + turn) % 3]
        if kind == "file":
            place.write_text("moved")
        else:
            place.symlink_to(elsewhere if kind == "link" else folder / "nowhere")
        refused([start(folder)], f"checkpoints/{step} is", "put the folder of that step")
        expect(results(folder) == before, f"{kind}: the results are gone")
        place.unlink()
        shutil.move(elsewhere, place)
    completed(folder)


def _unreadable() -> None:
    """Every file of a checkpoint fails to be read, each time with another error."""
    codes = itertools.cycle((errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE))

    def file_sha256(path: pathlib.Path) -> str:
        code = next(codes)
        raise OSError(code, os.strerror(code), str(path))

    integrity.file_sha256 = file_sha256


@attack("reads that fail while a checkpoint is verified", tries=2)
def failed_reads(folder: pathlib.Path, number: int, rng: np.random.Generator) -> None:
    completed(folder)
    refused(
        [start(folder, prepare=_unreadable)],
        "cannot be read",
        "it may be intact and was not renamed",
    )
    names = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    expect(names == sorted(["8", str(STEPS)]), f"there are {names}")
    completed(folder)


def write_images(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Two classes of 8 pictures in both splits of a class folder."""
    for split, name, image in itertools.product(("train", "test"), "ab", range(8)):
        (folder / split / name).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / split / name / f"{image}.jpg")


def _too_large(path: pathlib.Path) -> None:
    with path.open("wb") as file:
        file.truncate(int(200e6))


@attack("an image that is a pipe, a device, 200 MB or half a JPEG", tries=4)
def bad_image(folder: pathlib.Path, number: int, rng: np.random.Generator) -> None:
    images = folder / "images"
    write_images(images, rng)
    path = images / "train" / str(rng.choice(["a", "b"])) / f"{rng.integers(8)}.jpg"
    content = path.read_bytes()
    path.unlink()
    makes = [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        _too_large,
        lambda path: path.write_bytes(content[: len(content) // 2]),
    ]
    makes[number % len(makes)](path)
    source = [*IMAGES, "--config.data.source=folder", f"--config.data.path={images}"]
    words = (path.name, "cannot be used", "rope_jax.data.verify", "data.bad_images=skip")
    refused([start(folder, *source)], *words, status=1)
    completed(folder, *source, "--config.data.bad_images=skip")


@attack("a packed set whose pixels, labels, names or shapes are exchanged", tries=4)
def exchanged_pixels(folder: pathlib.Path, number: int, rng: np.random.Generator) -> None:
    write_images(folder / "images", rng)
    packed = folder / "packed"
    for split in ("train", "test"):
        prepare(open_source("folder", str(folder / "images"), split), packed, shard_images=4)
    name = ("images-00002.bin", "labels.npy", "names.npy", "shapes.npy")[number % 4]
    split = str(rng.choice(["train", "test"]))
    path = packed / split / name
    source = [*IMAGES, "--config.data.source=packed", f"--config.data.path={packed}"]
    good = path.read_bytes()
    place = int(rng.integers(len(good) // 2, len(good)))
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    if name.endswith(".bin"):  # `rope_jax data verify` compares pixels, a run does not
        damaged = open_source("packed", str(packed), split).damaged()
        expect(damaged == [name], f"{damaged} are said to be damaged")
    else:
        run = start(folder, *source)
        refused([run], name, "changed")
        expect("bad_images" not in run.said(), f"advice that does not help: {said([run])}")
    path.write_bytes(good)
    completed(folder, *source)


@attack("a data file of unequal lengths, or with an enormous label", tries=4)
def lying_arrays(folder: pathlib.Path, number: int, rng: np.random.Generator) -> None:
    images, labels = np.zeros((400, 8, 8), np.uint8), np.zeros(400, np.int64)
    if number % 2 == 0:
        labels = labels[: int(rng.integers(1, 400))]
    else:
        labels[int(rng.integers(400))] = int(rng.integers(100_000, 2**31))
    np.savez_compressed(folder / "set.npz", train_images=images, train_labels=labels)
    source = ["--config.data.source=npz", f"--config.data.path={folder / 'set.npz'}"]
    refused([start(folder, *source)], "set.npz", "labels")
    expect(not (folder / "run").exists(), "it left a workdir")
