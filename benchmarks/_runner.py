"""Command line and result file of a benchmark or experiment.

A benchmark is a function `run(keep, ...)`. Its other parameters define the command line:
keyword-only parameters become options, the others positional arguments, and `*flags` receives the
arguments after `--`. `keep(**figures)` adds machine, versions, date and settings to the figures,
writes them to the file of `--out`, and returns the result; benchmarks call it after every part, and
`earlier` reads what an interrupted call has written there. `columns` and `rows` among the figures
are the table of the result; `note` is a line under it.
"""

import argparse
import datetime
import importlib
import inspect
import json
import os
import pathlib
import pkgutil
import platform
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rope_jax.system.files import write_file
from rope_jax_kernels.tuning.choices import sources_of_kernels

Result = dict[str, Any]
Keep = Callable[..., Result]


def record(benchmark: str, settings: dict[str, Any], **figures: Any) -> Result:
    """Returns a result with machine, versions and date.

    Args:
        benchmark: name of the benchmark.
        settings: its arguments.
        **figures: the measurements; `versions` are added to those of Python, jax, NumPy and the
            sources of the kernels.
    """
    device, backend = jax.devices()[0].device_kind, jax.default_backend()
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    versions |= {"numpy": np.__version__, "kernels": sources_of_kernels()}
    versions |= figures.pop("versions", {})
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"device": device, "platform": backend, "host": platform.platform()},
        "versions": versions,
        "settings": settings,
    } | figures


def earlier(out: pathlib.Path | None, benchmark: str, settings: dict[str, Any]) -> Result:
    """The result of an earlier call of the same measurement, to continue; {} if there is none.

    Args:
        out: its file.
        benchmark: name of the benchmark.
        settings: that must be the same, as must be the kind of device, jax and the kernels.
    """
    try:
        result = json.loads(out.read_text()) if out is not None else {}
    except (FileNotFoundError, ValueError):
        return {}
    now = record(benchmark, json.loads(json.dumps(settings, default=str)))
    same = [
        (result.get("benchmark"), benchmark),
        (result.get("machine", {}).get("device"), now["machine"]["device"]),
        *((result.get("versions", {}).get(x), now["versions"][x]) for x in ("jax", "kernels")),
        *((result.get("settings", {}).get(name), x) for name, x in now["settings"].items()),
    ]
    return result if all(one == other for one, other in same) else {}


def parser_of(function: Callable, command: str) -> argparse.ArgumentParser:
    """Creates a parser for a function's parameters after `keep`, and for --out."""
    description = inspect.getmodule(function).__doc__
    parser = argparse.ArgumentParser(
        prog=command,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    helps = dict(re.findall(r"^ +(\w+): (.+)$", function.__doc__ or "", re.MULTILINE))
    for parameter in list(inspect.signature(function, eval_str=True).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL or parameter.name == "out":
            continue
        kind = _without_none(parameter.annotation)
        options: dict[str, Any] = {"help": helps.get(parameter.name, "").replace("%", "%%")}
        if typing.get_origin(kind) is list:
            options["nargs"] = "*"
            (kind,) = typing.get_args(kind)
        if typing.get_origin(kind) is typing.Literal:
            words = [word for word in typing.get_args(kind) if word is not None]
            options |= {"choices": words, "type": str}
        else:
            options |= {"action": "store_true"} if kind is bool else {"type": kind}
        if parameter.kind is parameter.KEYWORD_ONLY:
            required = parameter.default is parameter.empty
            options |= {"required": True} if required else {"default": parameter.default}
            parser.add_argument("--" + parameter.name.replace("_", "-"), **options)
        else:
            parser.add_argument(parameter.name, **options)
    parser.add_argument("--out", type=pathlib.Path, help="the JSON file to write")
    return parser


def _without_none(annotation: Any) -> Any:
    """X of `X | None`; other annotations as they are."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (annotation,) = {*typing.get_args(annotation)} - {type(None)}
    return annotation


def call(name: str, function: Callable, argv: Sequence[str], command: str) -> None:
    """Runs a benchmark with the arguments of a command line.

    Args:
        name: name of the benchmark in the result.
        function: the benchmark.
        argv: command line arguments.
        command: the command, for the help text.
    """
    # Other libraries need memory on the GPU, too. jax reads this when it first lists devices.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    split = argv.index("--") if "--" in argv else len(argv)
    flags = argv[split + 1 :]
    parameters = list(inspect.signature(function).parameters.values())[1:]
    parser = parser_of(function, command)
    if flags and not any(x.kind is x.VAR_POSITIONAL for x in parameters):
        parser.error(f"unexpected arguments {' '.join(flags)}")
    options = vars(parser.parse_args(argv[:split]))
    out = options["out"]
    settings = {key: value for key, value in options.items() if key != "out"}

    def keep(**figures: Any) -> Result:
        result = record(name, **{"settings": settings} | figures)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_file(out, json.dumps(result, indent=1, default=str) + "\n")
        return result

    positional = [options[x.name] for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    named = {x.name: options[x.name] for x in parameters if x.kind is x.KEYWORD_ONLY}
    function(keep, *positional, *flags, **named)


def main(package: types.ModuleType, argv: Sequence[str]) -> int:
    """Runs a module of a package by name and returns the exit status."""
    modules = pkgutil.iter_modules(package.__path__)
    names = sorted(module.name for module in modules if not module.name.startswith("_"))
    parser = argparse.ArgumentParser(prog=f"python -m {package.__name__}")
    parser.add_argument("name", choices=names)
    name = parser.parse_args(argv[:1]).name
    module = importlib.import_module(f"{package.__name__}.{name}")
    call(name, module.run, argv[1:], f"{parser.prog} {name}")
    return 0
