"""Decodes every image of a set and lists those that cannot be used: `python -m rope_jax.data.verify --source=folder --path=PATH`.

The exit status is 0 where all can, 1 where some cannot, 2 where the set cannot be opened. `--report` writes what was found as JSON.
"""

import argparse
import json
import sys
from pathlib import Path

from rope_jax.data.decode import decode_image
from rope_jax.data.index import Source
from rope_jax.data.packed import Packed
from rope_jax.data.pool import Progress, arguments, in_pool
from rope_jax.data.sources import open_source
from rope_jax.data.workers import DeadWorker

_JOB = 256  # images


def bad_images(source: Source, start: int, stop: int) -> list[dict[str, object]]:
    """The images from number `start` to `stop` that cannot be read or decoded: `example`, `name` and `reason` of each."""
    bad = []
    for example in range(start, stop):
        try:
            data = source.read(example)
            if isinstance(data, bytes):
                decode_image(data)
        except (ValueError, OSError) as error:
            bad.append({"example": example, "name": source.example_name(example), "reason": str(error)})
    return bad


def verify(source: Source, *, workers: int) -> dict[str, object]:
    """Checks one split.

    Returns:
        `name`, `split`, `images`, `classes`, `empty_classes` (names), `bad` (see `bad_images`), and of packed sets `damaged` (files whose
        checksum is wrong).
    """
    count = len(source.labels)
    progress, bad = Progress(f"{source.name} {source.split}", count), []
    jobs = [(source, start, min(start + _JOB, count)) for start in range(0, count, _JOB)]
    for found, examined in in_pool(_examine, jobs, workers=workers):
        bad += found
        progress.add(examined)
    present = set(source.labels.tolist())
    return {
        "name": source.name,
        "split": source.split,
        "images": count,
        "classes": source.classes,
        "empty_classes": [name for label, name in enumerate(source.about["class_names"]) if label not in present],
        "bad": sorted(bad, key=lambda one: one["example"]),
    } | ({"damaged": source.damaged()} if isinstance(source, Packed) else {})


def _examine(source: Source, start: int, stop: int) -> tuple[list[dict[str, object]], int]:
    return bad_images(source, start, stop), stop - start


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser("python -m rope_jax.data.verify", description=__doc__.splitlines()[0])
    arguments(parser)
    parser.add_argument("--report", type=Path, help="a JSON file to write")
    asked = parser.parse_args(argv)
    try:
        found = [verify(open_source(asked.source, asked.path, split), workers=asked.workers) for split in asked.splits.split(",")]
    except (ValueError, OSError, DeadWorker) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if asked.report is not None:
        asked.report.write_text(json.dumps(found, indent=1) + "\n")
    for split in found:
        for one in split["bad"]:
            print(f"bad: {split['split']} {one['example']} {one['name']}: {one['reason']}")
        for file in split.get("damaged", []):
            print(f"damaged: {split['split']} {file}: its checksum is not that of what was written")
        if split["empty_classes"]:
            print(f"{split['name']} {split['split']}: {len(split['empty_classes'])} of {split['classes']} classes have no images")
    number = sum(len(split["bad"]) + len(split.get("damaged", [])) for split in found)
    print(f"{sum(split['images'] for split in found):,} images, {number} found bad")
    return int(number > 0)


if __name__ == "__main__":
    sys.exit(main())
