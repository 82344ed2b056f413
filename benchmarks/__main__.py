"""Runs one benchmark by name: `python -m benchmarks NAME [...]`."""

import importlib
import pkgutil
import sys

import benchmarks


def main(argv: list[str]) -> int:
    """Hands the arguments after the name to that benchmark; lists the names when there is none of this name."""
    names = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_"))
    if not argv or argv[0] not in names:
        print("usage: python -m benchmarks NAME [...], where NAME is one of: " + ", ".join(names), file=sys.stderr)
        return 2
    importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
