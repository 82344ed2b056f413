"""Decodes every image of a set, and labels of pixels, and lists the unusable ones.

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
    args = parser.parse_args(argv)
    with parser.one_line_errors(failed=2):  # 1 means bad images
        sources = [
            open_source(args.source, args.path, split, allow_empty=True)
            for split in args.splits.split(",")
        ]
        if args.report is not None:
            args.report.parent.mkdir(parents=True, exist_ok=True)
        results = [verify(source, workers=args.workers) for source in sources]
        bad = sum(map(_print_result, results))
        print(f"{sum(result['images'] for result in results):,} images, {bad} found bad")
        if args.report is not None:
            write_file(args.report, json.dumps(results, indent=1) + "\n")
    return int(bad > 0)


def _print_result(result: dict[str, Any]) -> int:
    """Lists the findings of `verify`; returns the number of bad images and files."""
    split, damaged = result["split"], result["damaged"]
    for image in result["bad"]:
        print(f"bad: {split} {image['example']} {image['name']}: {image['reason']}")
    for file in damaged:
        print(f"damaged: {split} {file}: its checksum differs from the one stored when writing")
    for remark in result["remarks"]:
        print(remark)
    if empty := result["empty_classes"]:
        name, names = f"{result['name']} {split}", ", ".join(empty[:10])
        names += ", ..." if len(empty) > 10 else ""
        print(f"{name}: {len(empty)} of {result['classes']} classes have no images: {names}")
    return len(result["bad"]) + len(damaged)
