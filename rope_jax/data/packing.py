"""Decodes and resizes an image set once, into files that training only has to read.

An interrupted run resumes; a split gets its final name once it is complete.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from rope_jax.data.examples import BAD_IMAGES
from rope_jax.data.images.crops import INTERPOLATIONS, centre, crop_pixels, stretch
from rope_jax.data.images.decode import decode_image
from rope_jax.data.jobs import ImageCounter, run_jobs
from rope_jax.data.labels import find_labels
from rope_jax.data.sources.index import BadImages, Source, write_index
from rope_jax.data.sources.packed import FORMAT
from rope_jax.names.options import convert
from rope_jax.system.files import file_sha256, read_json, write_file


@dataclasses.dataclass(frozen=True)
class Resizing:
    """The size at which pictures are stored.

    Attributes:
        side: in pixels; 0 keeps the original size.
        square: True to crop the centre to `side` x `side`. Otherwise the short side becomes `side`,
            unless it is shorter.
        interpolation: a name of `rope_jax.data.images.crops.INTERPOLATIONS`.
    """

    side: int = 256
    square: bool = False
    interpolation: str = "bicubic"

    def __call__(self, picture: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "h w 3"]:
        """Resizes a picture, uint8 [H, W, 3]."""
        side, (height, width) = self.side, picture.shape[:2]
        options = {"interpolation": self.interpolation}
        if self.square:
            return crop_pixels(picture, functools.partial(centre, **options), (side, side))
        short = min(height, width)
        if side == 0 or short <= side:
            return picture
        size = (max(1, height * side // short), max(1, width * side // short))
        return crop_pixels(picture, functools.partial(stretch, **options), size)

    def __str__(self) -> str:
        if self.square:
            return f"centre cut to {self.side} x {self.side}"
        return f"short side at most {self.side}" if self.side else "as it was"


def write_shard(source: Source, place: Path, start: int, stop: int, resizing: Resizing) -> int:
    """Writes images `start` to `stop` to place.bin, then their metadata to place.json.

    The metadata has `bytes` and `sha256` of the file, `examples` (numbers) and their `shapes`, and
    `bad` ([number, name, reason]): images that cannot be used and are left out.

    Returns:
        The number of images.
    """
    examples, shapes, bad = [], [], []
    file = place.with_suffix(".bin")
    with file.open("wb") as output:
        for example in range(start, stop):
            try:
                data = source.read(example)
                pixels = resizing(decode_image(data) if isinstance(data, bytes) else data)
            except (ValueError, OSError) as error:
                bad.append([example, source.example_name(example), str(error)])
                continue
            output.write(np.ascontiguousarray(pixels))
            examples.append(example)
            shapes.append(pixels.shape[:2])
    facts = _facts(file) | {"examples": examples, "shapes": shapes, "bad": bad}
    write_file(place.with_suffix(".json"), json.dumps(facts))
    return stop - start


def _facts(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}


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
        side: see `Resizing`.
        square: see `Resizing`.
        interpolation: see `Resizing`.
        bad_images: "error", or "skip" to leave them out of the packed set.
        shard_images: images per file.
        workers: number of processes; 0 to use this one.

    Returns:
        The folder of the split.

    Raises:
        BadImages: images that cannot be used.
        ValueError: an unknown value, a square of size 0, or a preparation with other options in the
            same folder.
    """
    if (kind := find_labels(source.labels_of)).placed:
        raise ValueError(
            f"{source.name} has {kind.words}, which a packed set cannot hold: train on the set "
            "as it is"
        )
    convert(bad_images, Literal[*BAD_IMAGES], "bad_images")
    convert(interpolation, Literal[*INTERPOLATIONS], "interpolation")
    if side < int(square):
        raise ValueError(f"side={side} is impossible with square={square}: it is at least 1")
    resizing, count = Resizing(side, square, interpolation), len(source.labels)
    settings = {
        **dataclasses.asdict(resizing),
        "shard_images": shard_images,
        "source": source.fingerprint(),
    }
    finished, partial = out / source.split, out / f".{source.split}.partial"
    folder = finished if finished.is_dir() else partial
    if folder is partial and not (partial / "settings.json").is_file():
        partial.mkdir(parents=True, exist_ok=True)
        write_file(partial / "settings.json", json.dumps(settings, indent=1) + "\n")
    if (stored := read_json(folder / "settings.json")) != settings:
        raise ValueError(
            f"{folder} was prepared in another way ({stored}, now {settings}): remove it, or "
            "choose another folder"
        )
    if folder is finished:
        print(
            f"{finished} already exists, prepared from as many files with the same names and "
            "labels: remove it if their content has changed"
        )
        return finished
    shards = {
        partial / f"images-{number:05}": (start, min(start + shard_images, count))
        for number, start in enumerate(range(0, count, shard_images))
    }
    jobs = [
        (source, place, *part, resizing)
        for place, part in shards.items()
        if not place.with_suffix(".json").is_file()
    ]
    remaining = sum(stop - start for _, _, start, stop, _ in jobs)
    counter = ImageCounter(f"{source.name} {source.split}", remaining)
    for images in run_jobs(write_shard, jobs, workers=workers):
        counter.add(images)
    facts = {place: read_json(place.with_suffix(".json")) for place in shards}
    if bad_images == "error":
        _refuse_bad(facts, count)
    _write_packed_index(source, partial, facts, resizing)
    for place in facts:
        place.with_suffix(".json").unlink()
    partial.rename(finished)
    print(f"written: {finished}")
    return finished


def _refuse_bad(facts: dict[Path, dict[str, Any]], count: int) -> None:
    """Raises an error that lists unusable images; the next run rewrites their shards."""
    bad = [image for fact in facts.values() for image in fact["bad"]]
    for place, fact in facts.items():
        if fact["bad"]:
            place.with_suffix(".json").unlink()
    if bad:
        lines = "".join(f"\n  {example} {name}: {reason}" for example, name, reason in bad[:20])
        raise BadImages(
            f"{len(bad)} of {count:,} images cannot be used; "
            f"repair them, or leave them out with --bad_images=skip:{lines}"
        )


def _write_packed_index(
    source: Source, folder: Path, facts: dict[Path, dict[str, Any]], resizing: Resizing
) -> None:
    """Writes the index of the packed split, see `rope_jax.data.sources.packed`."""
    examples = [example for fact in facts.values() for example in fact["examples"]]
    shapes = [shape for fact in facts.values() for shape in fact["shapes"]]
    shards = [
        {
            "file": f"{place.name}.bin",
            "examples": len(fact["examples"]),
            "bytes": fact["bytes"],
            "sha256": fact["sha256"],
        }
        for place, fact in facts.items()
        if fact["examples"]
    ]
    write_index(
        folder,
        labels=source.labels[examples],
        names=[source.example_name(example) for example in examples],
        class_names=source.class_names,
        arrays={"shapes.npy": np.array(shapes, np.int32)},
        name=source.name,
        split=source.split,
        format=FORMAT,
        resized=str(resizing),
        interpolation=resizing.interpolation,
        skipped=[image for fact in facts.values() for image in fact["bad"]],
        shards=shards,
    )
    description = read_json(folder / "about.json")
    description["files"] = {file.name: _facts(file) for file in sorted(folder.glob("*.npy"))}
    write_file(folder / "about.json", json.dumps(description, indent=1) + "\n")
