"""The options that the page on schemes lists."""

import inspect

import pytest

from docs import scheme_options
from rope_jax.names.notation import parse
from rope_jax.names.options import convert_options, find_options
from rope_jax.positions.rotary import Rotary
from rope_jax.positions.scheme import SCHEMES


@pytest.mark.parametrize("name", sorted(SCHEMES.keys() - {"none"}))
def test_every_option_is_described_with_its_default(name):
    cls = SCHEMES[name]
    shared = scheme_options.options_in(Rotary) if issubclass(cls, Rotary) else {}
    described = shared | scheme_options.options_in(cls)
    assert set(described) >= set(find_options(cls.__init__))
    if cls.extension is not None:
        assert set(described) >= set(find_options(type(cls.extension)))
    (call,) = parse(scheme_options.notation(name, cls).strip("`"), "position")
    parameters = inspect.signature(cls.__init__).parameters
    options = convert_options(name, dict(call.options), find_options(cls.__init__))
    assert options == {option: parameters[option].default for option in find_options(cls.__init__)}
