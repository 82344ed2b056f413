"""The result files of benchmarks and experiments, for tables and pictures."""

import json
import pathlib
from collections.abc import Mapping, Sequence

from benchmarks._runner import Result

ROOT = pathlib.Path(__file__).parents[1]


def read_results(root: pathlib.Path = ROOT) -> list[Result]:
    """Reads all results, newest first, with the path of each file under "file"."""
    results = []
    for folder in ("benchmarks", "experiments"):
        for path in sorted((root / folder / "results").glob("*.json")):
            result = json.loads(path.read_text())
            results.append(result | {"file": str(path.relative_to(root))})
    return sorted(results, key=lambda result: result["date"], reverse=True)


def newest(
    results: Sequence[Result], benchmark: str, settings: Mapping[str, str] = {}
) -> list[Result]:
    """The newest result of a benchmark for each platform (GPUs first) and all other settings."""
    latest: dict[str, Result] = {}
    for result in results:
        if result["benchmark"] == benchmark and settings.items() <= result["settings"].items():
            latest.setdefault(str([result["machine"]["platform"], result["settings"]]), result)
    return sorted(latest.values(), key=lambda result: result["machine"]["platform"] != "gpu")


def origin(result: Result) -> str:
    """Device, jax version, date and file of a result."""
    version, date = result["versions"]["jax"], result["date"][:10]
    suffix = "" if result.get("complete", True) else ", not complete"
    return f"{result['machine']['device']}, jax {version}, {date}, `{result['file']}`{suffix}"
