import doctest

import pytest

from rope_jax import positions
from rope_jax.positions.scheme import SCHEMES


@pytest.fixture
def rope_log():
    """The name of the scheme that the package's docstring defines, registered for one test."""
    examples = doctest.DocTestParser().get_examples(positions.__doc__)
    code = "".join(example.source for example in examples)
    exec(code[: code.index("images =")], {})
    yield "rope_log"
    del SCHEMES["rope_log"]
