"""`python -m tests.parity.dense FOLDER [--x64]`: compares every golden of a folder with its check.

Prints the largest difference of every output. The status is 1 if an output is beyond its limit or a
check fails, and 2 if no golden of the folder has a check.
"""

import argparse
import sys
import traceback

import jax

from tests.parity.dense import DATA, differences, find_check, goldens


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.parity.dense")
    parser.add_argument("folder", nargs="?", default=DATA, help="of cases.json and the goldens")
    parser.add_argument("--x64", action="store_true", help="in float64, not float32")
    options = parser.parse_args(arguments)
    cases = goldens(options.folder)
    checked = {name: golden for name, golden in cases.items() if find_check(name)}
    wrong = []
    with jax.enable_x64(options.x64):
        for name, golden in checked.items():
            try:
                rows = differences(golden, "float64" if options.x64 else "float32")
            except Exception:  # the others are still checked
                traceback.print_exc()
                wrong.append(name)
                continue
            for key, (difference, limit) in rows.items():
                holds = difference <= limit
                wrong += [] if holds else [f"{name}.{key}"]
                mark = "" if holds else "   BEYOND"
                print(f"{name:20} {key:24} {difference:8.1e}   limit {limit:.0e}{mark}", flush=True)
    print(f"checked {len(checked)} of {len(cases)} goldens")
    if unchecked := [name for name in cases if name not in checked]:
        print(f"there is no check of {', '.join(unchecked)}")
    if wrong:
        print(f"not as the official code: {', '.join(wrong)}")
    return 1 if wrong else 0 if checked else 2


if __name__ == "__main__":
    sys.exit(main())
