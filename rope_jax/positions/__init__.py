"""Positional schemes, by name.

A scheme is a small NNX module with three methods, which do nothing by default (`Position`):

    embed(tokens, grid, key) -> tokens     added after the patch embedding
    terms(grid, key) -> Terms              for the layers' attention: a rotation, a bias, ...
    mix(tokens, grid, layer) -> tokens     applied to the tokens between two layers

Its class declares its source and properties; tests measure the properties, and
`python -m rope_jax.positions` prints the source, the formula and the rule for other maps.

To add one, give a class a name; keyword-only parameters of its constructor are its options. In a
module that is loaded as a plug-in (`rope_jax.names.plugins`), it works in every backbone, recipe
and command:

    >>> import jax, numpy as np, rope_jax
    >>> from rope_jax.positions import frequencies, grids
    >>> from rope_jax.positions.rotary import Rotary
    >>> from rope_jax.positions.scheme import SCHEMES, scheme
    >>> @scheme("rope_log")
    ... class LogRope(Rotary):
    ...     \"\"\"2-D RoPE on the logarithm of row and column.\"\"\"
    ...
    ...     equation = "theta = log(1 + x) f or log(1 + y) f"
    ...     relative = False
    ...
    ...     def coords(self, grid):
    ...         return np.log1p(grids.absolute(grid))
    ...
    ...     def freqs(self):
    ...         return frequencies.two_axes(frequencies.ladder(self.pairs // 2, 100.0), "xy")
    >>> images = jax.numpy.zeros((1, 64, 96, 3))
    >>> create = lambda: rope_jax.create_model("swin_t", position="rope_log", num_classes=10)
    >>> jax.eval_shape(lambda: create()(images)).shape
    (1, 10)
    >>> del SCHEMES["rope_log"]  # in this example only
"""

from collections.abc import Sequence

from flax import nnx

from rope_jax.names.notation import Call, parse
from rope_jax.names.options import convert_options, find_options
from rope_jax.positions import (  # noqa: F401  (importing a family registers its schemes)
    absolute,
    conditional,
    decomposed,
    lape,
    matrix,
    relative,
    rotary,
    rotary_models,
)
from rope_jax.positions.scheme import SCHEMES, Combined, PerLayer, Position, Stage, Terms

__all__ = ["PerLayer", "Position", "Stage", "Terms", "create_position", "list_positions"]


def list_positions(pattern: str = "*") -> list[str]:
    """Lists the names of all positional schemes that match a shell-style pattern, sorted.

    >>> from rope_jax import list_positions
    >>> list_positions("rope*")
    ['rope1d', 'rope2d', 'rope3d', 'rope_mixed']
    """
    return SCHEMES.names(pattern)


def create_position(text: str, stage: Stage, *, rngs: nnx.Rngs) -> Position:
    """Creates a scheme for a stage of a backbone.

    >>> from flax import nnx
    >>> from rope_jax.positions import Stage, create_position
    >>> stage = Stage(depth=2, heads=3, head_dim=16, channels=48, grid=(4, 5))
    >>> position = create_position("rope2d(base=50)+ape", stage, rngs=nnx.Rngs(0))
    >>> position.terms((8, 8)).rotation.coords.shape
    (64, 2)

    Args:
        text: "axial_rope", "rope2d(base=50)", "rope_mixed+ape", "lape(sincos2d(order=lape))", ...
        stage: the layers that use the scheme.
        rngs: for learnable tables and frequencies.

    Raises:
        ValueError: an unknown scheme or option, malformed text, or a scheme that is not defined for
            the stage.
    """
    # Every scheme consumes one draw, so that the other weights of a model do not depend on it.
    position = _create(parse(text, "position"), stage, nnx.Rngs(rngs.params()))
    for _, table in nnx.to_flat_state(nnx.state(position, nnx.Param)):
        table.set_metadata(layers=table.get_metadata().get("layers", True))
    return position


def _create(calls: Sequence[Call], stage: Stage, rngs: nnx.Rngs) -> Position:
    parts = [_create_one(call, stage, rngs) for call in calls]
    return parts[0] if len(parts) == 1 else Combined(stage, parts)


def _create_one(call: Call, stage: Stage, rngs: nnx.Rngs) -> Position:
    name = call.name
    cls = SCHEMES[name]
    extension_options = {} if cls.extension is None else find_options(type(cls.extension))
    own_options = find_options(cls.__init__)  # they take precedence over the extension's
    declared = own_options | extension_options | own_options
    options = convert_options(name, dict(call.options), declared)
    extended = {option: options.pop(option) for option in options.keys() - own_options.keys()}
    if len(call.inner) != cls.wraps:
        inside = f"one scheme inside, as in {name}(ape)"
        expected = inside if cls.wraps else "options only, as in name(option=value)"
        raise ValueError(f"{name}(...) takes {expected}, but {len(call.inner)} schemes are given")
    inner = [_create(calls, stage, rngs) for calls in call.inner]
    try:
        position = cls(stage, *inner, rngs=rngs, **options)
        if extended:
            position.extend(**extended)
        return position
    except ValueError as error:
        raise ValueError(f"position {name}: {error}") from None
