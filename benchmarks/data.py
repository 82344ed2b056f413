"""Images per second and core of the loader: JPEG folder, tensorflow-datasets and packed pixels, against plain decoding with Pillow.

    ROPE_JAX_TEST_IMAGES=FOLDER python -m benchmarks data --out benchmarks/results/data_cpu.json

Takes photographs (--images: a folder or tar archive of JPEG files; default imagenet_photos_334.tar in the folder named by
ROPE_JAX_TEST_IMAGES), makes a class folder and packed sets of them, and loads each in one process, without a training step. Rates are per
second of processor time, so that other programs on the machine matter little; the ways take turns, and the median counts. `by hand` is what
any loader on Pillow has to do for the same images: decode, cut, resize. With --workers batches also come from worker processes, per second
on the clock. --tfds names a set that tensorflow-datasets has prepared of the same files. What the training step does to images is timed
alone, on whatever device jax has, per second on the clock.
"""

import argparse
import contextlib
import io
import os
import pathlib
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from benchmarks._record import record, write
from rope_jax.data import batches, decode_image, load, on_device
from rope_jax.data.folder import Folder
from rope_jax.data.frames import resized_crop
from rope_jax.data.prepare import prepare

SIZE = (224, 224)
CROP = "resized_crop+flip"
# The augmentations of Swin's and DeiT-III's recipes that are done in the step.
IN_STEP = ("rand_augment(m=9,mstd=0.5)", "three_augment+color_jitter", "rand_augment(m=9,mstd=0.5)+erase(p=0.25)")
DRAWS = np.random.default_rng(0).integers(0, 2**64, 100_000, dtype=np.uint64).tolist()


def photographs(images: pathlib.Path) -> dict[str, bytes]:
    """JPEG files of a folder or a tar archive, by name."""
    if images.is_dir():
        return {path.name: path.read_bytes() for path in sorted(images.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")}
    with tarfile.open(images) as archive:
        members = [member for member in archive if member.isfile() and member.name.lower().endswith((".jpg", ".jpeg"))]
        return {pathlib.Path(member.name).name: archive.extractfile(member).read() for member in members}


def by_hand(files: list[bytes]) -> None:
    """Decode, cut, resize: Pillow alone."""
    for data, draw in zip(files, DRAWS, strict=False):
        image = Image.open(io.BytesIO(data)).convert("RGB")
        cut = resized_crop(*image.size, SIZE, draw)
        np.asarray(image.resize(SIZE, cut.interpolation, box=cut.box))


def epoch_of(source: str, path: str, augment: str) -> Callable[[list[bytes]], None]:
    """Loads one epoch in this process."""
    images = load(source, path, "train", SIZE)

    def epoch(files: list[bytes]) -> None:
        for _ in zip(range(len(images.labels) // 32), batches(images, batch_size=32, seed=0, augment=augment), strict=False):
            pass

    return epoch


def cpu_seconds(function: Callable[[list[bytes]], None], files: list[bytes]) -> float:
    """Processor time of one call."""
    begun = time.process_time()
    function(files)
    return time.process_time() - begun


def rate_of_workers(path: str, source: str, workers: int, seconds: float) -> float:
    """Images per second on the clock, of batches of 128 made by worker processes, after they have started."""
    images = load(source, path, "train", SIZE)
    with batches(images, batch_size=128, seed=0, augment=CROP, workers=workers) as stream:
        for _ in range(2 * workers + 2):  # what was prepared while nobody asked
            next(stream)
        begun, steps = time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            next(stream)
            steps += 1
        return 128 * steps / (time.monotonic() - begun)


def rate_in_step(augment: str, batch: int, rounds: int) -> float:
    """Images per second on the clock that the device augments."""
    plan = on_device.parse(augment)

    @jax.jit
    def augmented(images: jax.Array, epoch: jax.Array) -> jax.Array:
        keys = on_device.example_keys(0, jnp.full(batch, epoch), jnp.arange(batch))
        pixels = on_device.apply(images, keys, plan.pixels, (124, 116, 104))
        return on_device.apply_erasing(pixels.astype(jnp.float32), keys, plan.erasing)

    images = jax.random.randint(jax.random.key(0), (batch, *SIZE, 3), 0, 256, jnp.uint8)
    times = []
    for epoch in range(rounds + 1):
        begun = time.monotonic()
        jax.block_until_ready(augmented(images, jnp.int32(epoch)))
        times.append(time.monotonic() - begun)
    return batch / statistics.median(times[1:])  # the first compiled


def main(argv: list[str]) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks data", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = pathlib.Path(os.environ.get("ROPE_JAX_TEST_IMAGES", "."), "imagenet_photos_334.tar")
    parser.add_argument("--images", type=pathlib.Path, default=default, help="a folder or tar archive of JPEG files")
    parser.add_argument("--tfds", help="folder of a set that tensorflow-datasets has prepared of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32, help="images that the step augments at once; 256 and more for a GPU")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args(argv)
    if not args.images.exists():
        parser.error(f"{args.images} does not exist: name photographs with --images, or their folder with ROPE_JAX_TEST_IMAGES")
    files = photographs(args.images)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place, "photographs")
        for k, (name, data) in enumerate(files.items()):
            (folder / "train" / f"{k % 4}").mkdir(parents=True, exist_ok=True)
            (folder / "train" / f"{k % 4}" / name).write_bytes(data)
        with contextlib.redirect_stdout(io.StringIO()):
            for name, options in (("packed", {}), ("squares", {"square": True})):
                prepare(Folder(str(folder), "train"), pathlib.Path(place, name), **options)
        sets = {
            "folder": ("folder", str(folder)),
            "packed": ("packed", f"{place}/packed"),
            "packed squares": ("packed", f"{place}/squares"),
        }
        if args.tfds:
            sets["tfds"] = ("tfds", args.tfds)
        ways = {
            "Pillow's decoding": lambda files: [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in files],
            "decode_image": lambda files: [decode_image(data) for data in files],
            "by hand": by_hand,
            **{f"{name}: {CROP}": epoch_of(*where, CROP) for name, where in sets.items()},
            "folder: centre": epoch_of("folder", str(folder), "none"),
        }
        content, times = list(files.values()), {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                times[name].append(cpu_seconds(way, content))
        # Batches are whole.
        images = {name: len(files) if ":" not in name else len(files) // 32 * 32 for name in ways}
        rows = [
            {
                "way": name,
                "images_per_cpu_second": images[name] / statistics.median(seconds),
                "of_pillow": statistics.median(
                    images[name] / ours / (len(files) / theirs) for ours, theirs in zip(seconds, times["Pillow's decoding"], strict=True)
                ),
            }
            for name, seconds in times.items()
        ]
        workers = [
            {"set": name, "workers": args.workers, "images_per_second": rate_of_workers(where[1], where[0], args.workers, 10.0)}
            for name, where in sets.items()
            if args.workers
        ]
    in_step = [{"augment": augment, "images_per_second": rate_in_step(augment, args.batch, args.rounds)} for augment in IN_STEP]
    for row in rows:
        print(f"{row['way']:38} {row['images_per_cpu_second']:8.0f} images/s and core   {row['of_pillow']:5.2f} of Pillow's decoding")
    for row in workers:
        print(f"{row['set']}, {row['workers']} workers: {row['images_per_second']:.0f} images/s")
    for row in in_step:
        print(f"in the step, {row['augment']}: {row['images_per_second']:.0f} images/s on {jax.devices()[0].device_kind}")
    pixels = [int(np.prod(Image.open(io.BytesIO(data)).size)) for data in content]
    about = {"images": len(files), "mean_pixels": statistics.mean(pixels), "mean_bytes": statistics.mean(map(len, content))}
    settings = vars(args) | {"images": args.images.name, "tfds": bool(args.tfds), "size": SIZE}
    write(record("data", settings, cores=os.cpu_count(), photographs=about, rows=rows, workers=workers, in_step=in_step), args.out)
