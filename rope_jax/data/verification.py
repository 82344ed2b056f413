"""Decodes every image of a set, and labels of pixels, and lists those that cannot be used.

    python -m rope_jax.data.verify --source=folder --path=PATH

The exit status is 0 if all images can be used, 1 if some cannot, and 2 if they cannot be verified.
`--report` writes the result as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rope_jax.commands.arguments import command_parser
from rope_jax.data.images.decode import decode_image
from rope_jax.data.jobs import ImageCounter, add_arguments, run_jobs
from rope_jax.data.sources import open_source
from rope_jax.data.sources.index import Source
from rope_jax.system.files import write_file

_JOB = 256  # images


def verify(source: Source, *, workers: int) -> dict[str, Any]:
    """Checks one split.

    Args:
        source: the images.
        workers: number of processes; 0 to use this one.

    Returns:
        `name`, `split`, `images`, `classes`, `empty_classes` (names), `bad` (`example`, `name` and
        `reason` of each image that cannot be read or decoded), `remarks` (sentences about labels),
        and for packed sets `damaged` (files with a wrong checksum).
    """
    count = len(source.labels)
    counter, bad = ImageCounter(f"{source.name} {source.split}", count), []
    present: set[int] = set()
    jobs = [(source, start, min(start + _JOB, count)) for start in range(0, count, _JOB)]
    for found, classes, examined in run_jobs(_examine, jobs, workers=workers):
        bad += found
        present |= classes
        counter.add(examined)
    names = enumerate(source.class_names)
    found = {
        "name": source.name,
        "split": source.split,
        "images": count,
        "classes": len(source.class_names),
        "empty_classes": [name for label, name in names if label not in present],
        "bad": sorted(bad, key=lambda one: one["example"]),
        "remarks": source.remarks(),
    }
    damaged = source.damaged()
    return found if damaged is None else found | {"damaged": damaged}


def _examine(source: Source, start: int, stop: int) -> tuple[list[dict[str, Any]], set[int], int]:
    """The bad images among `start` to `stop`, the classes there, and how many were examined."""
    bad, present = [], set()
    for example in range(start, stop):
        try:
            present.update(source.classes_of(example))
            data = source.read(example)
            if isinstance(data, bytes):
                decode_image(data)
        except (ValueError, OSError) as error:
            name = source.example_name(example)
            bad.append({"example": example, "name": name, "reason": str(error)})
    return bad, present, stop - start


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = command_parser("rope_jax.data.verify", __doc__)
    add_arguments(parser)
    parser.add_argument("--report", type=Path, help="a JSON file to write")
    asked = parser.parse_args(argv)
    with parser.one_line_errors(failed=2):  # 1 is of bad images
        sources = [
            open_source(asked.source, asked.path, split, allow_empty=True)
            for split in asked.splits.split(",")
        ]
        results = [verify(source, workers=asked.workers) for source in sources]
        if asked.report is not None:
            write_file(asked.report, json.dumps(results, indent=1) + "\n")
    bad = sum(map(_print_result, results))
    print(f"{sum(result['images'] for result in results):,} images, {bad} found bad")
    return int(bad > 0)


def _print_result(result: dict[str, Any]) -> int:
    """Lists the findings of `verify`; returns the number of bad images and files."""
    split, damaged = result["split"], result.get("damaged", [])
    for one in result["bad"]:
        print(f"bad: {split} {one['example']} {one['name']}: {one['reason']}")
    for file in damaged:
        print(f"damaged: {split} {file}: its checksum is not that of what was written")
    for remark in result["remarks"]:
        print(remark)
    if empty := result["empty_classes"]:
        name, some = f"{result['name']} {split}", ", ".join(empty[:10])
        some += ", ..." if len(empty) > 10 else ""
        print(f"{name}: {len(empty)} of {result['classes']} classes have no images: {some}")
    return len(result["bad"]) + len(damaged)


if __name__ == "__main__":
    sys.exit(main())
