"""Ctrl-C in a command of this package: one line in place of a traceback, from the first import on.

The package imports this module before all others, which take seconds.
"""

import sys
import types


def end_in_one_line() -> None:
    """Makes a KeyboardInterrupt that nothing handles end the process with one line."""
    before = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("rope_jax: stopped by Ctrl-C", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = excepthook


if sys.argv[:1] == ["-m"]:  # as long as `python -m rope_jax...` imports the package
    end_in_one_line()
