"""The result files of benchmarks and experiments, for tables and pictures."""

import json
import pathlib
from collections.abc import Sequence

from benchmarks._runner import Result

ROOT = pathlib.Path(__file__).parents[1]


def read_results(root: pathlib.Path | None = None) -> list[Result]:
    """Reads all results, newest first, with the path of each file under "file"."""
    root, results = root or ROOT, []
    for folder in ("benchmarks", "experiments"):
        for path in sorted((root / folder / "results").glob("*.json")):
            result = json.loads(path.read_text())
            results.append(result | {"file": str(path.relative_to(root))})
    return sorted(results, key=lambda result: result["date"], reverse=True)


def newest(
    results: Sequence[Result], benchmark: str, platform: str | None = None, **settings: str
) -> Result | None:
    """Returns the newest result of a benchmark with the given platform and settings, or None."""
    for result in results:
        on_platform = platform in (None, result["machine"]["platform"])
        matches = settings.items() <= result["settings"].items()
        if result["benchmark"] == benchmark and on_platform and matches:
            return result
    return None


def no_result(command: str) -> str:
    """Text in place of a table without results."""
    return f"No result yet: `python -m {command}`.\n"


def origin(result: Result) -> str:
    """Device, jax version, date and file of a result."""
    version, date = result["versions"]["jax"], result["date"][:10]
    return f"{result['machine']['device']}, jax {version}, {date}, `{result['file']}`"
