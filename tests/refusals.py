"""Commands that end with one error line."""

import contextlib
import re

import pytest


@contextlib.contextmanager
def expect_refusal(capsys, message, status=2):
    """Expects a command to end with this status and a last line that matches the pattern."""
    with pytest.raises(SystemExit) as caught:
        yield
    line = capsys.readouterr().err.splitlines()[-1]
    assert (caught.value.code, bool(re.search(message, line))) == (status, True), line
