"""Writes a trained or converted model as a program that runs with jax alone.

    python -m rope_jax.export_model runs/digits --out=digits.bin
    python -m rope_jax.export_model --model=deit_s16 --weights=FILE --out=deit.bin --resolution=384

In Python: `program = jax.export.deserialize(open("digits.bin", "rb").read())`, then
`program.call(images)` with float32 images [B, H, W, 3], normalised as printed. The program of a
model that detects objects is called with images on one canvas and their extents.
"""

import pathlib

from rope_jax.commands.arguments import Argument, add_model_arguments, command_parser
from rope_jax.names.options import Count
from rope_jax.names.text import image_pair
from rope_jax.runs.loading import load_model
from rope_jax.weights.export import PLATFORMS, export


def main(arguments: list[str] | None = None) -> None:
    """Loads the model and writes the file."""
    parser = command_parser("rope_jax.export_model", __doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, help="file to write")
    add("--resolution", help="224 or 224x320; default: the training resolution")
    add("--batch", type=Argument(Count), help="images in a call; default: any number")
    known = ",".join(PLATFORMS)
    add("--platforms", default=known, help=f"comma-separated, of {known}")
    args = parser.parse_args(arguments)
    with parser.one_line_errors(extra="export"):
        loaded = load_model(args)
        size = image_pair(args.resolution) if args.resolution else loaded.image_size
        args.out.parent.mkdir(parents=True, exist_ok=True)
        export(
            loaded.at(size),
            args.out,
            resolution=size,
            batch=args.batch,
            platforms=tuple(args.platforms.split(",")),
        )
    mean, std = loaded.preprocessing.mean, loaded.preprocessing.std
    batch = "b" if args.batch is None else args.batch
    print(f"{loaded.title}, {loaded.weights}: {args.out}")
    print(
        f"images: float32 [{batch}, {size[0]}, {size[1]}, 3], in [0, 1], minus {mean}, over {std}"
    )
    if loaded.model.padded:
        print(f"extent: int32 [{batch}, 2], rows and columns of each image; beyond them it is 0")
