"""Decodes and resizes an image set once, into files that training only has to read.

    python -m rope_jax.data.prepare --source=folder --path=PATH --out=PACKED
    python -m rope_jax.data.prepare --source=imagenet --path=ARCHIVES --out=PACKED --side=256

Sources are those of `rope_jax.data.load` that are read one image at a time. An interrupted run
resumes; a split gets its final name once it is complete. Images that cannot be used are listed at
the end: repair them or add --bad_images=skip, and run the command again; the other files are kept.
Train with `--config.data.source=packed --config.data.path=PACKED`.

Crops that need more pixels than are stored are upsampled: for evaluation at 256 pixels and above,
pack the test split separately, with `--splits=test` and a larger --side, or 0 for the original
size.
"""

from pathlib import Path

from rope_jax.commands.arguments import Argument, add_image_set, command_parser
from rope_jax.data.examples import BAD_IMAGES
from rope_jax.data.images.crops import INTERPOLATIONS
from rope_jax.data.packing import prepare
from rope_jax.data.sources import open_source
from rope_jax.names.options import Count, CountOrZero


def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    parser = command_parser("rope_jax.data.prepare", __doc__)
    add_image_set(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the packed set")
    add(
        "--side",
        type=Argument(CountOrZero),
        default=256,
        help="short side in pixels; 0: as it is",
    )
    add("--square", action="store_true", help="keep only the centre, side x side")
    add("--interpolation", default="bicubic", choices=INTERPOLATIONS, help="of resizing")
    add(
        "--bad_images",
        default="error",
        choices=BAD_IMAGES,
        help="for images that cannot be used",
    )
    add("--allow_empty", action="store_true", help="accept class folders without images")
    add(
        "--shard_images",
        type=Argument(Count),
        default=4096,
        help="images per file; 4096 are about a gigabyte",
    )
    options = vars(parser.parse_args(argv))
    kind, path, splits, out, allow_empty = (
        options.pop(name) for name in ("source", "path", "splits", "out", "allow_empty")
    )
    with parser.one_line_errors():
        for split in splits.split(","):
            source = open_source(kind, path, split, allow_empty=allow_empty)
            prepare(source, out, **options)
            for remark in source.remarks():
                print(remark)
