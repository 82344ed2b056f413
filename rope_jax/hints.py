"""What an error says about a word that is not known."""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, if there is one, and all that are known: "did you mean 'ape'? known: ape, none"."""
    known = list(known)
    close = difflib.get_close_matches(word, known, 1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(known) or 'none'}"
