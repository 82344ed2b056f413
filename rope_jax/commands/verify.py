"""Decodes every image of a set, and labels of pixels, and lists those that cannot be used.

    python -m rope_jax.data.verify --source=folder --path=PATH

The exit status is 0 if all images can be used, 1 if some cannot, and 2 if they cannot be verified.
`--report` writes the result as JSON.
"""

import json
from pathlib import Path
from typing import Any

from rope_jax.commands.arguments import add_image_set, command_parser
from rope_jax.data.sources import open_source
from rope_jax.data.verification import verify
from rope_jax.system.files import write_file


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = command_parser("rope_jax.data.verify", __doc__)
    add_image_set(parser)
    parser.add_argument("--report", type=Path, help="a JSON file to write")
    asked = parser.parse_args(argv)
    with parser.one_line_errors(failed=2):  # 1 is of bad images
        sources = [
            open_source(asked.source, asked.path, split, allow_empty=True)
            for split in asked.splits.split(",")
        ]
        results = [verify(source, workers=asked.workers) for source in sources]
        bad = sum(map(_print_result, results))
        print(f"{sum(result['images'] for result in results):,} images, {bad} found bad")
        if asked.report is not None:
            write_file(asked.report, json.dumps(results, indent=1) + "\n")
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
