"""Images per second and CPU core of the data loader, compared with decoding by Pillow.

    ROPE_JAX_TEST_IMAGES=FOLDER python -m benchmarks data --out benchmarks/results/data_cpu.json

Creates a class folder and packed sets from the photographs of --images, and loads each of them in
one process, without a training step. Rates are per second of CPU time, so that other programs on
the machine have little effect; the loaders run in turns, and the median is reported. `by hand` is
the minimum work of a loader based on Pillow: decode, crop, resize. With --workers, batches are also
loaded by worker processes, with rates per second of wall time. The augmentations of the training
step are timed separately, on jax's default device, per second of wall time.
"""

import contextlib
import functools
import io
import itertools
import os
import pathlib
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from benchmarks._runner import Keep
from rope_jax.data import batches, decode_image, load, split_augment
from rope_jax.data.images import device
from rope_jax.data.images.crops import resized_crop
from rope_jax.data.prepare import prepare
from rope_jax.data.sources.folder import Folder
from rope_jax.text import format_table

SIZE = (224, 224)
CROP = "resized_crop+flip"
PILLOW = "Pillow's decoding"
# Augmentations of Swin's and DeiT-III's recipes that run in the training step.
IN_STEP = (
    "rand_augment(m=9,mstd=0.5)",
    "three_augment+color_jitter",
    "rand_augment(m=9,mstd=0.5)+erase(p=0.25)",
)
DRAWS = np.random.default_rng(0).integers(0, 2**64, 100_000, dtype=np.uint64).tolist()


def photographs(images: pathlib.Path) -> dict[str, bytes]:
    """The JPEG files of a folder or a tar archive, by name."""
    endings = (".jpg", ".jpeg")
    if images.is_dir():
        paths = [x for x in sorted(images.rglob("*")) if x.suffix.lower() in endings]
        return {path.name: path.read_bytes() for path in paths}
    with tarfile.open(images) as archive:
        members = [x for x in archive if x.isfile() and x.name.lower().endswith(endings)]
        return {pathlib.Path(x.name).name: archive.extractfile(x).read() for x in members}


def by_pillow(files: list[bytes]) -> None:
    """Decodes with Pillow."""
    for data in files:
        np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def by_decode_image(files: list[bytes]) -> None:
    """Decodes with rope_jax.decode_image."""
    for data in files:
        decode_image(data)


def by_hand(files: list[bytes]) -> None:
    """Decodes, crops and resizes with Pillow."""
    for data, draw in zip(files, DRAWS, strict=False):
        image = Image.open(io.BytesIO(data)).convert("RGB")
        box = resized_crop(*image.size, SIZE, draw)
        np.asarray(image.resize(SIZE, box.interpolation, box=box.edges))


def epoch(source: str, path: str, augment: str, files: list[bytes]) -> None:
    """Loads one epoch in this process."""
    images = load(source, path, "train", SIZE)
    stream = batches(images, batch_size=32, seed=0, augment=augment)
    for _ in itertools.islice(stream, len(images.labels) // 32):
        pass


def cpu_seconds(way: Callable[[list[bytes]], None], files: list[bytes]) -> float:
    """CPU time of one call, in seconds."""
    begun = time.process_time()
    way(files)
    return time.process_time() - begun


def rate_of_workers(source: str, path: str, workers: int, seconds: float = 10.0) -> float:
    """Images per second from worker processes in batches of 128, after start-up."""
    images = load(source, path, "train", SIZE)
    with batches(images, batch_size=128, seed=0, augment=CROP, workers=workers) as stream:
        for _ in range(2 * workers + 2):  # prepared before the clock starts
            next(stream)
        begun, steps = time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            next(stream)
            steps += 1
        return 128 * steps / (time.monotonic() - begun)


def rate_in_step(augment: str, batch: int, rounds: int) -> float:
    """Images per second that the device augments."""
    plan = split_augment(augment)

    @jax.jit
    def augmented(images: jax.Array, epoch: jax.Array) -> jax.Array:
        keys = device.example_keys(0, jnp.full(batch, epoch), jnp.arange(batch))
        pixels = device.apply(images, keys, plan.pixels, (124, 116, 104))
        return device.apply_erasing(pixels.astype(jnp.float32), keys, plan.erasing)

    images = jax.random.randint(jax.random.key(0), (batch, *SIZE, 3), 0, 256, jnp.uint8)
    times = []
    for number in range(rounds + 1):
        begun = time.monotonic()
        jax.block_until_ready(augmented(images, jnp.int32(number)))
        times.append(time.monotonic() - begun)
    return batch / statistics.median(times[1:])  # the first run compiles


@contextlib.contextmanager
def image_sets(files: dict[str, bytes]) -> Iterator[dict[str, tuple[str, str]]]:
    """Writes the files as a class folder and packed sets; yields (source, path) by name."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place, "photographs")
        for k, (name, data) in enumerate(files.items()):
            (folder / "train" / f"{k % 4}").mkdir(parents=True, exist_ok=True)
            (folder / "train" / f"{k % 4}" / name).write_bytes(data)
        with contextlib.redirect_stdout(io.StringIO()):
            prepare(Folder(str(folder), "train"), pathlib.Path(place, "packed"))
            prepare(Folder(str(folder), "train"), pathlib.Path(place, "squares"), square=True)
        yield {
            "folder": ("folder", str(folder)),
            "packed": ("packed", f"{place}/packed"),
            "packed squares": ("packed", f"{place}/squares"),
        }


def rates(times: dict[str, list[float]], images: int) -> list[dict[str, Any]]:
    """Images per CPU second of each loader, also relative to Pillow's decoding.

    Args:
        times: CPU seconds of each measurement, by loader.
        images: number of images.
    """
    rows = []
    for name, seconds in times.items():
        count = images // 32 * 32 if ":" in name else images  # only full batches
        pairs = zip(seconds, times[PILLOW], strict=True)
        share = statistics.median((count / own) / (images / pillow) for own, pillow in pairs)
        speed = count / statistics.median(seconds)
        rows.append({"way": name, "images_per_cpu_second": speed, "of_pillow": share})
    return rows


_DEFAULT = pathlib.Path(os.environ.get("ROPE_JAX_TEST_IMAGES", "."), "imagenet_photos_334.tar")


def run(
    keep: Keep,
    *,
    images: pathlib.Path = _DEFAULT,
    tfds: str | None = None,
    rounds: int = 5,
    workers: int = 0,
    batch: int = 32,
) -> None:
    """Measures the loaders and augmentations.

    Args:
        keep: saves the result.
        images: a folder or tar archive of JPEG files; default: a file in $ROPE_JAX_TEST_IMAGES
        tfds: folder of the same images, prepared by tensorflow-datasets
        rounds: measurements of each loader
        workers: number of worker processes
        batch: images per batch in the training step; 256 or more for a GPU
    """
    if not images.exists():
        raise SystemExit(f"{images} does not exist: pass a folder or archive with --images")
    files = photographs(images)
    content, device = list(files.values()), jax.devices()[0].device_kind
    with image_sets(files) as sets:
        if tfds:
            sets["tfds"] = ("tfds", tfds)
        ways = {PILLOW: by_pillow, "decode_image": by_decode_image, "by hand": by_hand}
        for name, of in sets.items():
            ways[f"{name}: {CROP}"] = functools.partial(epoch, *of, CROP)
        ways["folder: centre"] = functools.partial(epoch, *sets["folder"], "none")
        times = {name: [] for name in ways}
        for _, (name, way) in itertools.product(range(rounds), ways.items()):
            times[name].append(cpu_seconds(way, content))
        rows = rates(times, len(files))
        from_workers = []
        for name, of in sets.items() if workers else ():
            rate = rate_of_workers(*of, workers)
            from_workers.append({"set": name, "workers": workers, "images_per_second": rate})
            print(f"{name}, {workers} workers: {rate:.0f} images/s")
    in_step = []
    for augment in IN_STEP:
        rate = rate_in_step(augment, batch, rounds)
        in_step.append({"augment": augment, "images_per_second": rate})
        print(f"in the step, {augment}: {rate:.0f} images/s on {device}")
    cells = [(x["way"], f"{x['images_per_cpu_second']:.0f}", f"{x['of_pillow']:.2f}") for x in rows]
    print(format_table(("loader", "images/s per core", "relative to Pillow's decoding"), cells))
    pixels = [int(np.prod(Image.open(io.BytesIO(data)).size)) for data in content]
    about = {"images": len(files), "mean_pixels": statistics.mean(pixels)}
    about["mean_bytes"] = statistics.mean(map(len, content))
    settings = {"images": images.name, "tfds": bool(tfds), "rounds": rounds, "workers": workers}
    settings |= {"batch": batch, "size": SIZE}
    figures = {"rows": rows, "workers": from_workers, "in_step": in_step}
    keep(settings=settings, cores=os.cpu_count(), photographs=about, **figures)
