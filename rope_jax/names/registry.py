"""Registries by name: schemes, models, heads, image sources, augmentations and tasks."""

import fnmatch
import keyword
from collections.abc import Callable, Mapping

from rope_jax.names import plugins
from rope_jax.names.text import closest, nearest


class UnknownName(ValueError):
    """A name that is not registered, for example because a plug-in is missing."""


class Registry[T](dict[str, T]):
    """Values of one kind by name, to which users and plug-ins may add their own.

    >>> colours = Registry("colour", {"red": 1, "green": 2})
    >>> colours.register("grey", 3)
    >>> colours.names("gr*"), colours["grey"]
    (['green', 'grey'], 3)
    >>> colours["reed"]
    Traceback (most recent call last):
    rope_jax.names.registry.UnknownName: unknown colour 'reed'; did you mean 'red'? known: red, ...
    """

    def __init__(
        self,
        kind: str,
        values: Mapping[str, T] = {},
        *,
        elsewhere: Callable[[str], str | None] = lambda name: None,
        listed_by: str | None = None,
    ):
        """Creates a registry with its first values.

        Args:
            kind: "positional scheme", for error messages.
            values: by name.
            elsewhere: a hint for a name that papers or other libraries use, or None.
            listed_by: a call that lists all names, if they are too many for an error message.
        """
        super().__init__(values)
        self._kind, self._elsewhere, self._listed_by = kind, elsewhere, listed_by

    def register(self, name: str, value: T) -> None:
        """Adds a value; raises ValueError if the name exists, or is not an identifier."""
        if not name.isidentifier() or keyword.iskeyword(name):  # which the notation cannot say
            raise ValueError(
                f"a {self._kind} cannot be named {name!r}: use letters, digits and _, and no word "
                "of Python"
            )
        if name in self:
            raise ValueError(f"a {self._kind} named {name!r} exists already: choose another name")
        self[name] = value
        plugins.note_name(name)

    def names(self, pattern: str = "*") -> list[str]:
        """All names that match a shell-style pattern, sorted, including those of plug-ins."""
        plugins.load_installed()
        return sorted(fnmatch.filter(self, pattern))

    def __missing__(self, name: str) -> T:
        """The value if an installed plug-in has it; raises UnknownName otherwise."""
        plugins.load_installed()
        if name in self:
            return self[name]
        text = str(name)
        hint = self._elsewhere(text) or (nearest if self._listed_by else closest)(text, self)
        listing = f"; {self._listed_by} lists all" if self._listed_by else ""
        raise UnknownName(f"unknown {self._kind} {name!r}; {hint}{listing}")
