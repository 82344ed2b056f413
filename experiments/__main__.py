"""Runs one experiment by name: `python -m experiments NAME [...]`."""

import sys

import experiments
from benchmarks._runner import main

if __name__ == "__main__":
    sys.exit(main(experiments, sys.argv[1:]))
