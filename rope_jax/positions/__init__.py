"""Positional schemes, by name.

A scheme is a small NNX module with three methods, all of which default to doing nothing (`scheme.Position`):

    embed(tokens, grid, key) -> tokens     what is added after the patch embedding
    terms(grid, key) -> Terms              what the layers' attention needs: a rotation, a bias, something to add, a transform
    mix(tokens, grid, layer) -> tokens     what is done to the tokens between two layers

Its class says where it comes from and what holds for it, which tests measure and `python -m rope_jax.positions` prints.

To add one, write it down in the file of its family and give it a name; it then works in every backbone, recipe and command:

    @scheme("rope_log")
    class LogRope(Rotary):
        \"\"\"2-D RoPE on the logarithm of row and column.\"\"\"

        equation = "theta = log(1 + x) f or log(1 + y) f"
        relative = False

        def coords(self, grid):
            return np.log1p(grids.absolute(grid))

        def freqs(self):
            return frequencies.two_axes(frequencies.decay(frequencies.deal(1, self.pairs // 2), 100.0), "xy")
"""

import fnmatch
import inspect

from flax import nnx

from rope_jax.hints import closest
from rope_jax.positions import (  # noqa: F401  (each enters its schemes in the registry)
    absolute,
    conditional,
    layerwise,
    matrix,
    relative,
    rotary,
    rotary_relatives,
)
from rope_jax.positions.grammar import Call, parse
from rope_jax.positions.grammar import Sum as _Written
from rope_jax.positions.scheme import SCHEMES, PerLayer, Position, Stage, Sum, Terms

__all__ = ["PerLayer", "Position", "Stage", "Terms", "create_position", "list_positions"]


def list_positions(pattern: str = "*") -> list[str]:
    """Names of all positional schemes that match a shell-style pattern, sorted: `list_positions("rope*")`."""
    return sorted(fnmatch.filter(SCHEMES, pattern))


def create_position(text: str, stage: Stage, *, rngs: nnx.Rngs) -> Position:
    """Makes the scheme written in `text` for a stage of a backbone.

    Args:
        text: for example "axial_rope", "rope2d(base=50)", "rope_mixed+ape", "lape(sincos2d(order=lape))".
        stage: the layers that it serves.
        rngs: for learnable tables and frequencies.

    Raises:
        ValueError: unknown scheme or option, text that cannot be read, or a scheme that the stage cannot have.
    """
    # One draw whatever the scheme, so that the same seed gives the rest of a model the same weights under every scheme.
    return _build(parse(text), stage, nnx.Rngs(rngs.params()))


def _build(written: _Written, stage: Stage, rngs: nnx.Rngs) -> Position:
    parts = [_build_one(call, stage, rngs) for call in written.calls]
    return parts[0] if len(parts) == 1 else Sum(stage, parts)


def _build_one(call: Call, stage: Stage, rngs: nnx.Rngs) -> Position:
    if call.name not in SCHEMES:
        raise ValueError(f"unknown positional scheme {call.name!r}; {closest(call.name, list_positions())}")
    cls = SCHEMES[call.name]
    kinds = _options(cls)
    options = {}
    for option, value in call.options:
        if option not in kinds:
            raise ValueError(f"{call.name} has no option {option!r}; {closest(option, kinds)}")
        if type(value) is not kinds[option] and not (kinds[option] is float and type(value) is int):
            raise ValueError(f"{call.name}({option}={value}): {option} must be {_KINDS[kinds[option]]}")
        options[option] = kinds[option](value)
    wraps = [p for p in inspect.signature(cls.__init__).parameters if p == "inner"]
    if len(call.inner) != len(wraps):
        expected = f"one scheme inside, as in {call.name}(ape)" if wraps else "options only, as in name(option=value)"
        raise ValueError(f"{call.name}(...) takes {expected}, but {len(call.inner)} schemes are given")
    inner = [_build(part, stage, rngs) for part in call.inner]
    try:
        return cls(stage, *inner, rngs=rngs, **options)
    except ValueError as error:
        raise ValueError(f"position {call.name}: {error}") from None


_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a word"}


def _options(cls: type[Position]) -> dict[str, type]:
    """A scheme's options with their types: the keyword arguments of its constructor, and of its bases' where it passes them on."""
    kinds: dict[str, type] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(base.__init__).parameters.values()
        kinds = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "rngs"} | kinds
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return kinds
