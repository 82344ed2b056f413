"""Decodes every image of a set, and labels of pixels, to find those that cannot be used."""

from typing import Any

from rope_jax.data.images.decode import decode_image
from rope_jax.data.jobs import ImageCounter, run_jobs
from rope_jax.data.sources.index import Source

_JOB = 256  # images


def verify(source: Source, *, workers: int) -> dict[str, Any]:
    """Checks one split.

    Args:
        source: the images.
        workers: number of processes; 0 to use this one.

    Returns:
        `name`, `split`, `images`, `classes`, `empty_classes` (names), `bad` (`example`, `name` and
        `reason` of each image that cannot be read or decoded), `remarks` (see `Source.remarks`),
        and `damaged` (files of a packed set with a wrong checksum).
    """
    count = len(source.labels)
    counter, bad = ImageCounter(f"{source.name} {source.split}", count), []
    present: set[int] = set()
    jobs = [(source, start, min(start + _JOB, count)) for start in range(0, count, _JOB)]
    for rejected, classes, examined in run_jobs(_examine, jobs, workers=workers):
        bad += rejected
        present |= classes
        counter.add(examined)
    names = enumerate(source.class_names)
    return {
        "name": source.name,
        "split": source.split,
        "images": count,
        "classes": len(source.class_names),
        "empty_classes": [name for label, name in names if label not in present],
        "bad": sorted(bad, key=lambda image: image["example"]),
        "remarks": source.remarks(),
        "damaged": source.damaged_files(),
    }


def _examine(source: Source, start: int, stop: int) -> tuple[list[dict[str, Any]], set[int], int]:
    """Examines images `start` to `stop`: the bad ones, the classes, and the number of images."""
    bad, present = [], set()
    for example in range(start, stop):
        try:
            present.update(source.read_classes(example))
            data = source.read(example)
            if isinstance(data, bytes):
                decode_image(data)
        except (ValueError, OSError) as error:
            name = source.example_name(example)
            bad.append({"example": example, "name": name, "reason": str(error)})
    return bad, present, stop - start
