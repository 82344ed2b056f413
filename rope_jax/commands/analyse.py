"""Analyses of how a model uses position: attention, frequencies, correlation, costs.

    python -m rope_jax.analysis attention runs/digits
    python -m rope_jax.analysis maps --model=deit_s16 --weights=deit_s.safetensors --images=cat.jpg
    python -m rope_jax.analysis fourier --model=deit3_s16 --position=rope_mixed
    python -m rope_jax.analysis costs --model=swin_t --positions none rpb axial_rope rope_mixed

Each command writes its figures to NAME.json and its plots to .png files in the folder --out, by
default the workdir.
"""

import pathlib

from rope_jax.analysis.analyses import OF_MODEL, OF_SCHEMES, analyse_model, keep
from rope_jax.commands.arguments import (
    CommandParser,
    add_model_arguments,
    add_options,
    command_parser,
)
from rope_jax.names.options import find_options
from rope_jax.runs.loading import load_model
from rope_jax.system.sharding import start_devices
from rope_jax.training.kernels import kernels_of_run


def _parser() -> CommandParser:
    parser = command_parser("rope_jax.analysis", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="NAME")
    out = "folder to write to; default: the WORKDIR, or the current folder"
    for name, analysis in (OF_MODEL | OF_SCHEMES).items():
        summary = analysis.__doc__.partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--out", type=pathlib.Path, help=out)
        if name in OF_MODEL:
            add_model_arguments(command)
        add_options(command, analysis)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs one analysis from the command line."""
    parser = _parser()
    args = parser.parse_args(arguments)
    name, workdir = args.command, getattr(args, "workdir", None)
    out = args.out or pathlib.Path(workdir or ".")
    options = {x: getattr(args, x) for x in find_options((OF_MODEL | OF_SCHEMES)[name])}
    with parser.one_line_errors(extra="plot"):
        start_devices()
        if args.out is not None:
            out.mkdir(parents=True, exist_ok=True)
        if name in OF_SCHEMES:
            keep(name, out, OF_SCHEMES[name](out, **options))
        else:
            loaded = load_model(args)
            with kernels_of_run(loaded.config, workdir and pathlib.Path(workdir)):
                analyse_model(name, loaded, out, **options)
