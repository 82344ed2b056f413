"""Runs one benchmark by name: `python -m benchmarks NAME [...]`."""

import sys

import benchmarks
from benchmarks._runner import main

if __name__ == "__main__":
    sys.exit(main(benchmarks, sys.argv[1:]))
