"""Runs one benchmark by name: `python -m benchmarks NAME [...]`."""

import sys

from benchmarks._runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
