"""Registries: uniform errors."""

import re

import pytest

from rope_jax.names.registry import Registry, UnknownName


@pytest.mark.parametrize(
    ("name", "hints", "message"),
    [
        ("appe", {}, "unknown fruit 'appe'; did you mean 'apple'? known: apple, pear"),
        ("ap", {}, "unknown fruit 'ap'; did you mean 'apple'? known: apple, pear"),
        ("pome", {}, "unknown fruit 'pome'; here it is 'apple'"),
        (
            "appe",
            {"listed_by": "list_fruits()"},
            "unknown fruit 'appe'; the nearest are 'apple', 'pear'; list_fruits() lists all",
        ),
        (
            "pome",
            {"listed_by": "list_fruits()"},
            "unknown fruit 'pome'; here it is 'apple'; list_fruits() lists all",
        ),
    ],
)
def test_unknown_names_have_hints(name, hints, message):
    elsewhere = {"pome": "here it is 'apple'"}.get
    fruits = Registry("fruit", {"apple": 1, "pear": 2}, elsewhere=elsewhere, **hints)
    with pytest.raises(UnknownName, match=f"^{re.escape(message)}$"):
        fruits[name]
    assert name not in fruits


@pytest.mark.parametrize("name", ["", "a+b", "bad name()+", "my-fruit", "None", "class"])
def test_names_outside_the_notation_are_refused(name):
    fruits = Registry("fruit")
    with pytest.raises(ValueError, match=re.escape(f"a fruit cannot be named {name!r}: use")):
        fruits.register(name, 1)
    assert not fruits
