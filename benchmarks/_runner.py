"""Command line and result file of a benchmark.

A benchmark is a function `run(keep, ...)`. Its other parameters define the command line:
keyword-only parameters become options (`add_options` of `rope_jax.commands.arguments`), the others
positional arguments, and `*flags` receives the arguments after `--`. `keep(**figures)` adds
machine, versions, date and settings to the figures, and writes them to the file of `--out`;
benchmarks call it after every part, and `earlier_result` reads the output of an interrupted call.
`columns` and `rows` among the figures are the table of the result, which is printed at the end;
`note` is a line under it.
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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import benchmarks
from rope_jax.commands.arguments import Help, add_options, parser_options
from rope_jax.names.options import find_options
from rope_jax.names.text import format_table
from rope_jax.system.files import write_file
from rope_jax_kernels.tuning.choices import hash_sources

Result = dict[str, Any]
Keep = Callable[..., None]


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
    versions |= {"numpy": np.__version__, "kernels": hash_sources()}
    versions |= figures.pop("versions", {})
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"device": device, "platform": backend, "host": platform.platform()},
        "versions": versions,
        "settings": settings,
    } | figures


def earlier_result(out: pathlib.Path | None, benchmark: str, settings: dict[str, Any]) -> Result:
    """The result of an earlier call of the same measurement, to continue; {} if there is none.

    Args:
        out: its file.
        benchmark: name of the benchmark.
        settings: they must be equal, like the kind of device, jax and the kernels.
    """
    try:
        result = json.loads(out.read_text()) if out is not None else {}
    except (FileNotFoundError, ValueError):
        return {}
    now = record(benchmark, json.loads(json.dumps(settings, default=str)))
    pairs = [
        (result.get("benchmark"), benchmark),
        (result.get("machine", {}).get("device"), now["machine"]["device"]),
        *((result.get("versions", {}).get(x), now["versions"][x]) for x in ("jax", "kernels")),
        *((result.get("settings", {}).get(name), x) for name, x in now["settings"].items()),
    ]
    return result if all(x == y for x, y in pairs) else {}


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
    description, split = inspect.getmodule(function).__doc__, [*argv, "--"].index("--")
    parser = argparse.ArgumentParser(prog=command, description=description, formatter_class=Help)
    _, *parameters = inspect.signature(function, eval_str=True).parameters.values()
    positional = [x for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    for parameter in positional:
        parser.add_argument(parameter.name, **parser_options(parameter.annotation))
    add_options(parser, function, dash="-")
    named = find_options(function)
    if "out" not in named:
        parser.add_argument("--out", type=pathlib.Path, help="the JSON file to write")
    flags = argv[split + 1 :]
    if flags and not any(x.kind is x.VAR_POSITIONAL for x in parameters):
        parser.error(f"unexpected arguments {' '.join(flags)}")
    options = vars(parser.parse_args(argv[:split]))
    settings = {key: value for key, value in options.items() if key != "out"}

    result: Result = {}

    def keep(**figures: Any) -> None:
        nonlocal result
        result = record(name, **{"settings": settings} | figures)
        if (out := options["out"]) is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_file(out, json.dumps(result, indent=1, default=str) + "\n")

    first = [options[x.name] for x in positional]
    function(keep, *first, *flags, **{x: options[x] for x in named})
    if "columns" in result:
        print_table(result["columns"], result["rows"])


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table, with four digits of floating-point numbers."""
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    print(format_table(columns, cells))


def main(argv: Sequence[str]) -> int:
    """Runs a benchmark by name and returns the exit status."""
    modules = pkgutil.iter_modules(benchmarks.__path__)
    names = sorted(module.name for module in modules if not module.name.startswith("_"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("name", choices=names)
    name = parser.parse_args(argv[:1]).name
    module = importlib.import_module(f"benchmarks.{name}")
    call(name, module.run, argv[1:], f"{parser.prog} {name}")
    return 0
