"""Decodes and resizes an image set once, into files that training only has to map.

    python -m rope_jax.data.prepare --source=folder --path=PATH --out=PACKED
    python -m rope_jax.data.prepare --source=imagenet --path=ARCHIVES --out=PACKED --side=256

Sources are those of `rope_jax.data.load` that are read one image at a time; `imagenet` takes the official archives as they are. A run that
was interrupted goes on where it stopped; a split stands under its name when all of it is written. Images that cannot be used are listed
when all have been tried: mend them or add --bad_images=skip, and run it again; the other files are kept. Train with
`--config.data.source=packed --config.data.path=PACKED`.

Whatever needs more pixels than are stored enlarges them: for evaluation at 256 pixels and above pack the test split by itself, with
`--splits=test` and a larger --side, or 0 for the pictures as they are.
"""

import argparse
import functools
import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from rope_jax.data.decode import open_image
from rope_jax.data.frames import INTERPOLATIONS, centre, cut_pixels
from rope_jax.data.index import Source, write_index
from rope_jax.data.packed import write_about
from rope_jax.data.pipeline import BAD_IMAGES
from rope_jax.data.pool import Progress, arguments, in_pool
from rope_jax.data.sources import open_source
from rope_jax.data.workers import DeadWorker


def resized(picture: UInt8[np.ndarray, "H W 3"], *, side: int, square: bool, interpolation: str) -> UInt8[np.ndarray, "h w 3"]:
    """What is stored of a picture.

    Args:
        picture: uint8 [H, W, 3].
        side: of the result in pixels; 0 leaves the size.
        square: whether the centre is cut out to `side` x `side`. Otherwise the short side becomes `side`, unless it is shorter.
        interpolation: see `rope_jax.data.frames`.

    Returns:
        uint8 [h, w, 3].
    """
    height, width = picture.shape[:2]
    if square:
        return cut_pixels(picture, functools.partial(centre, interpolation=interpolation), (side, side))
    if side == 0 or min(height, width) <= side:
        return picture
    short = min(height, width)
    size = (max(1, width * side // short), max(1, height * side // short))
    return np.asarray(Image.fromarray(picture).resize(size, INTERPOLATIONS[interpolation]))


def write_shard(source: Source, place: Path, start: int, stop: int, options: dict) -> tuple[int, list[list]]:
    """Writes the images from number `start` to `stop` into place.bin and what is known of them into place.json.

    Returns:
        how many were examined, and [number, name, reason] of those that cannot be used; the shard is written without them.
    """
    examples, shapes, bad, checksum = [], [], [], hashlib.sha256()
    temporary = place.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for example in range(start, stop):
            try:
                data = source.read(example)
                pixels = resized(open_image(data).pixels() if isinstance(data, bytes) else data, **options)
            except (ValueError, OSError) as error:
                bad.append([example, source.example_name(example), str(error)])
                continue
            content = np.ascontiguousarray(pixels).tobytes()
            file.write(content)
            checksum.update(content)
            examples.append(example)
            shapes.append(pixels.shape[:2])
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    temporary.replace(place.with_suffix(".bin"))
    facts = {"bytes": size, "sha256": checksum.hexdigest(), "examples": examples, "shapes": shapes, "bad": bad}
    temporary.write_text(json.dumps(facts))
    temporary.replace(place.with_suffix(".json"))
    return stop - start, bad


def prepare(
    source: Source,
    out: Path,
    *,
    side: int = 256,
    square: bool = False,
    interpolation: str = "bicubic",
    bad_images: str = "error",
    shard_images: int = 4096,
    workers: int = 0,
) -> Path:
    """Packs one split.

    Args:
        source: the images.
        out: the folder of the packed set.
        side: see `resized`, like `square` and `interpolation`.
        square: see there.
        interpolation: see there.
        bad_images: "error", or "skip": the packed set is without them.
        shard_images: images in a file.
        workers: processes; 0 for this one.

    Returns:
        the folder of the split.

    Raises:
        ValueError: for images that cannot be used, for options out of range, and where another preparation was begun or finished there.
    """
    if side < 0 or (square and side == 0) or shard_images < 1 or interpolation not in INTERPOLATIONS or bad_images not in BAD_IMAGES:
        raise ValueError(
            f"side={side}, square={square}, shard_images={shard_images}, interpolation={interpolation!r}, bad_images={bad_images!r} is "
            "impossible: side is at least 0 (1 with square), shard_images at least 1, interpolation one of "
            f"{', '.join(INTERPOLATIONS)}, bad_images one of {', '.join(BAD_IMAGES)}"
        )
    options = {"side": side, "square": square, "interpolation": interpolation}
    settings = options | {"shard_images": shard_images, "source": source.fingerprint()}
    finished, folder = out / source.split, out / f".{source.split}.partial"
    place = finished if finished.is_dir() else folder
    known = (place / "settings.json").is_file()
    if finished.is_dir() and not known:
        raise ValueError(f"{finished} is there and was not written by this program: choose another folder")
    if known and (there := json.loads((place / "settings.json").read_text())) != settings:
        changed = [f"{name}: {there.get(name)!r}, now {value!r}" for name, value in settings.items() if there.get(name) != value]
        raise ValueError(f"{place} was prepared in another way ({'; '.join(changed)}): remove it, or choose another folder")
    if finished.is_dir():
        if bad_images == "error" and (skipped := len(json.loads((finished / "about.json").read_text())["skipped"])):
            raise ValueError(f"{finished} was prepared without {skipped:,} images: accept that with --bad_images=skip, or remove it")
        print(f"{finished} is there already")
        return finished
    if not known:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / "settings.tmp"
        temporary.write_text(json.dumps(settings, indent=1) + "\n")
        temporary.replace(folder / "settings.json")
    count = len(source.labels)
    shards = [(folder / f"images-{k:05}", first, min(first + shard_images, count)) for k, first in enumerate(range(0, count, shard_images))]
    progress = Progress(f"{source.name} {source.split}", count)
    todo = [shard for shard in shards if not shard[0].with_suffix(".json").is_file()]
    if len(todo) < len(shards):
        progress.add(sum(stop - start for _, start, stop in shards) - sum(stop - start for _, start, stop in todo))
    for examined, _ in in_pool(write_shard, [(source, *shard, options) for shard in todo], workers=workers):
        progress.add(examined)
    facts = [json.loads(shard.with_suffix(".json").read_text()) for shard, *_ in shards]
    bad = [one for fact in facts for one in fact["bad"]]
    if bad and bad_images == "error":
        for shard, fact in zip(shards, facts, strict=True):
            if fact["bad"]:  # made anew when they are mended
                shard[0].with_suffix(".json").unlink()
        told = "".join(f"\n  {example} {name}: {reason}" for example, name, reason in bad[:20])
        raise ValueError(f"{len(bad)} of {count:,} images cannot be used; mend them, or leave them out with --bad_images=skip:{told}")
    examples = [example for fact in facts for example in fact["examples"]]
    write_index(
        folder,
        labels=source.labels[examples].tolist(),
        names=[source.example_name(example) for example in examples],
        class_names=source.about["class_names"],
        name=source.name,
        split=source.split,
    )
    np.save(folder / "shapes.npy", np.array([shape for fact in facts for shape in fact["shapes"]], np.int32))
    write_about(
        folder,
        resized=f"centre cut to {side} x {side}" if square else f"short side at most {side}" if side else "as it was",
        interpolation=interpolation,
        skipped=bad,
        shards=[
            {"file": shard.with_suffix(".bin").name, "examples": len(fact["examples"]), "bytes": fact["bytes"], "sha256": fact["sha256"]}
            for (shard, *_), fact in zip(shards, facts, strict=True)
            if fact["examples"]
        ],
    )
    for shard, *_ in shards:
        shard.with_suffix(".json").unlink()
    folder.rename(finished)
    return finished


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser("python -m rope_jax.data.prepare", description=__doc__.splitlines()[0])
    arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the packed set")
    parser.add_argument("--side", type=int, default=256, help="short side in pixels; 0: as it is (default: 256)")
    parser.add_argument("--square", action="store_true", help="keep only the centre, side x side")
    parser.add_argument("--interpolation", default="bicubic", choices=INTERPOLATIONS)
    parser.add_argument("--bad_images", default="error", choices=BAD_IMAGES, help="what to do where an image cannot be used")
    parser.add_argument("--shard_images", type=int, default=4096, help="images in a file (default: 4096, of about a gigabyte)")
    asked = parser.parse_args(argv)
    options = {name: value for name, value in vars(asked).items() if name not in ("source", "path", "splits", "out")}
    try:
        for split in asked.splits.split(","):
            print(f"written: {prepare(open_source(asked.source, asked.path, split), asked.out, **options)}")
    except (ValueError, OSError, DeadWorker) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
