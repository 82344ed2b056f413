"""How a scheme is written: `name`, `name(option=value, ...)`, sums `a+b`, and wrappers `outer(inner(...))`."""

import dataclasses
import re

Value = int | float | bool | str
_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?|[(),=+])")
_WORDS = {"True": True, "False": False}
_DEEPEST = 16


@dataclasses.dataclass(frozen=True)
class Call:
    """One scheme as written: its name, the schemes that it wraps, and its options."""

    name: str
    inner: tuple["Sum", ...] = ()
    options: tuple[tuple[str, Value], ...] = ()


@dataclasses.dataclass(frozen=True)
class Sum:
    """One or more schemes joined by `+`."""

    calls: tuple[Call, ...]


def parse(text: str) -> Sum:
    """Reads a scheme, for example `axial_rope(k_rope=4, shared=True)+ape`.

    Raises:
        ValueError: the text does not follow the grammar; the message shows where.
    """
    tokens = _tokens(text)
    tree, end = _sum(text, tokens, 0)
    if end != len(tokens):
        raise _error(text, tokens, end, "the end")
    return tree


def _tokens(text: str) -> list[tuple[str, int]]:
    tokens, place, depth = [], 0, 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(_explain(text, place, "a name, a number or one of ( ) , = +"))
        # A sign belongs to a number only behind "="; elsewhere "+" joins schemes.
        if match[1][0] in "+-" and len(match[1]) > 1 and (not tokens or tokens[-1][0] != "="):
            raise ValueError(_explain(text, match.start(1), "a scheme's name"))
        depth += (match[1] == "(") - (match[1] == ")")
        if depth > _DEEPEST:
            raise ValueError(_explain(text, match.start(1), f"at most {_DEEPEST} parentheses inside each other"))
        tokens.append((match[1], match.start(1)))
        place = match.end()
    return tokens


def _explain(text: str, place: int, expected: str) -> str:
    return (
        f"position={text!r} cannot be read: expected {expected} at {text[place : place + 10]!r} (character {place + 1}); "
        "write name, name(option=value, ...), a+b or outer(inner)"
    )


def _error(text: str, tokens: list, at: int, expected: str) -> ValueError:
    return ValueError(_explain(text, tokens[at][1] if at < len(tokens) else len(text), expected))


def _is(tokens: list, at: int, what: str) -> bool:
    return at < len(tokens) and tokens[at][0] == what


def _sum(text: str, tokens: list, at: int) -> tuple[Sum, int]:
    call, at = _call(text, tokens, at)
    calls = [call]
    while _is(tokens, at, "+"):
        call, at = _call(text, tokens, at + 1)
        calls.append(call)
    return Sum(tuple(calls)), at


def _call(text: str, tokens: list, at: int) -> tuple[Call, int]:
    if at >= len(tokens) or not tokens[at][0].isidentifier():
        raise _error(text, tokens, at, "a scheme's name")
    name, at = tokens[at][0], at + 1
    if not _is(tokens, at, "("):
        return Call(name), at
    inner, options = [], {}
    at += 1
    while not _is(tokens, at, ")"):
        if at < len(tokens) and _is(tokens, at + 1, "="):
            if not tokens[at][0].isidentifier():
                raise _error(text, tokens, at, "an option's name")
            option, at = tokens[at][0], at + 2
            if at >= len(tokens) or not re.match(r"[\w+-]", tokens[at][0]) or tokens[at][0] == "+":
                raise _error(text, tokens, at, f"a value for {option}")
            if option in options:
                raise _error(text, tokens, at - 2, f"each option once, but {option} is there twice,")
            options[option], at = _value(tokens[at][0]), at + 1
        else:
            part, at = _sum(text, tokens, at)
            inner.append(part)
        if _is(tokens, at, ","):
            at += 1
        elif not _is(tokens, at, ")"):
            raise _error(text, tokens, at, "',' or ')'")
    return Call(name, tuple(inner), tuple(options.items())), at + 1


def _value(token: str) -> Value:
    if not re.match(r"[\d+-]", token):  # not even "inf" and "nan" are numbers here
        return _WORDS.get(token, token)
    return int(token) if re.fullmatch(r"[+-]?\d{1,30}", token) else float(token)
