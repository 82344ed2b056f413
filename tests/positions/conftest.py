import doctest

import pytest

from rope_jax import positions
from rope_jax.positions.scheme import SCHEMES


@pytest.fixture
def rope_log():
    """The name of the scheme that the package's docstring defines, registered for one test."""
    examples = doctest.DocTestParser().get_examples(positions.__doc__)
    defined = next(
        number for number, candidate in enumerate(examples) if "@scheme" in candidate.source
    )
    space = {}
    for example in examples[: defined + 1]:
        exec(example.source, space)
    yield "rope_log"
    del SCHEMES["rope_log"]
