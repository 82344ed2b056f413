"""Analyses of how a model uses position: attention, frequencies, correlation, costs.

    python -m rope_jax.analysis attention runs/digits
    python -m rope_jax.analysis maps --model=deit_s16 --weights=deit_s.safetensors --images=cat.jpg
    python -m rope_jax.analysis fourier --model=deit3_s16 --position=rope2d,rope_mixed
    python -m rope_jax.analysis joining --model=deit_ti16 "--position=ape,lape(ape)" --images=DIR
    python -m rope_jax.analysis costs --model=swin_t --positions none rpb axial_rope rope_mixed

Each command writes its figures to NAME.json and its plots to .png files in the folder --out, by
default the workdir. Several models or sizes, as several workdirs, schemes or resolutions, have
files of their own, NAME_SCHEME.json, and are drawn together by `attention`, `correlation` and
`joining`.
"""

import argparse
import pathlib
import re
from typing import Any

from rope_jax.analysis.analyses import (
    OF_MODEL,
    OF_SCHEMES,
    TOGETHER,
    analyse_model,
    keep,
    labels,
)
from rope_jax.commands.arguments import (
    CommandParser,
    add_model_arguments,
    add_options,
    command_parser,
)
from rope_jax.config import ConfigError
from rope_jax.names.notation import items
from rope_jax.names.options import find_options
from rope_jax.runs.loading import load_model
from rope_jax.system.sharding import start_devices
from rope_jax.training.kernels import kernels_of_run


def _parser() -> CommandParser:
    parser = command_parser("rope_jax.analysis", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="NAME")
    for name, analysis in (OF_MODEL | OF_SCHEMES).items():
        summary = analysis.__doc__.partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument(
            "--out",
            type=pathlib.Path,
            help="folder to write to; default: the WORKDIR, or the current folder",
        )
        if name in OF_MODEL:
            add_model_arguments(command, several=True)
        add_options(command, analysis)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs one analysis from the command line."""
    parser = _parser()
    args = parser.parse_args(arguments)
    name, workdirs = args.command, getattr(args, "workdir", ())
    out = args.out or pathlib.Path(workdirs[0] if len(workdirs) == 1 else ".")
    options = {x: getattr(args, x) for x in find_options((OF_MODEL | OF_SCHEMES)[name])}
    with parser.one_line_errors(extra="plot"):
        start_devices()
        if args.out is not None:
            out.mkdir(parents=True, exist_ok=True)
        if name in OF_SCHEMES:
            keep(name, out / name, OF_SCHEMES[name](out, **options))
        else:
            _analyse(name, args, out, options)


def _analyse(
    name: str, args: argparse.Namespace, out: pathlib.Path, options: dict[str, Any]
) -> None:
    """Analyses every model at every resolution, then draws several together."""
    models = [
        (workdir, load_model(argparse.Namespace(**vars(args) | named)))
        for workdir in args.workdir or [None]
        for position in items(args.position or "") or [None]
        for named in [{"workdir": workdir, "position": position}]
    ]
    sizes = items(options.get("resolution") or "") or [None]
    cases = [(workdir, loaded, size) for workdir, loaded in models for size in sizes]
    results, named = {}, labels([x[1:] for x in cases])
    stems = [out / "_".join([name, *re.findall(r"[\w.+=-]+", label)]) for label in named]
    if len({*stems}) < len(stems):
        raise ConfigError(f"files of {' and '.join(named)} would have one name: move a workdir")
    for label, stem, (workdir, loaded, size) in zip(named, stems, cases, strict=True):
        asked = options | ({"resolution": size} if "resolution" in options else {})
        with kernels_of_run(loaded.config, workdir and pathlib.Path(workdir)):
            results[label] = analyse_model(name, loaded, stem, **asked)
    if len(cases) > 1 and name in TOGETHER:
        title = ", ".join(dict.fromkeys(loaded.name for _, loaded in models))
        TOGETHER[name](results, out / name, title)
