"""Rotary embeddings beyond the training grid: the rules of language models, along each axis.

The angle of a pair of channels is coordinates times frequencies, so that every rule is a factor on
the frequencies of an axis, whatever the scheme. All are written in training patches: a scheme
turns a pair by w radians from one patch to the next on the training grid. A query sees T patches
along an axis there and n = s T here (the map, or its window or neighbourhood), and the pair turns
by

    extrapolate    w
    interpolate    w / s                  position interpolation, Chen et al., arXiv 2306.15595
    ntk            w / s^(i / (M - 1))    "NTK-aware", Peng et al., arXiv 2309.00071, section 3.1
    yarn           (g + (1 - g) / s) w    "NTK-by-parts" and YaRN, sections 3.2 and 3.4

NTK-aware scaling replaces the base of a ladder base^(-i / M) of M frequencies by
base s^(M / (M - 1)), so that the highest frequency stays and the lowest one is interpolated. Here
i / (M - 1) is ln(high / w) / ln(high / low), over all heads of a layer: the same number for a
ladder of that form, and defined for any other frequencies, also learned ones. A single frequency is
interpolated. In `yarn`, g is 0 for pairs that turn less than alpha times over the T patches, 1 for
those that turn more than beta times, and linear in the number of turns between them (the authors'
code is linear in i). A pair that both axes turn counts with the length of its vector of
frequencies, so that it keeps its direction if both axes grow alike.

Along an axis that is smaller than in training (s < 1), `interpolate` stretches the map to the range
of training, as EVA-02 and VisionLLaMA do; `ntk` and `yarn` extrapolate, since every offset occurred
in training. `none` leaves a scheme to its own rule.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.names.notation import parse
from rope_jax.names.options import NotNegative, Positive, convert, convert_options, find_options

RULES = ("none", "extrapolate", "interpolate", "ntk", "yarn")

_LADDER = 1e-3  # ln(high / low) above which frequencies are a ladder, and not a single one


class Extent(NamedTuple):
    """The extent that a query attends to along each axis of coordinates.

    Attributes:
        sides: patches, [A].
        steps: coordinates from one patch to the next, [A]; 0 along an axis of one patch, nan along
            one on which they are not evenly spaced.
        tokens: keys of a query, without prefix tokens.
    """

    sides: np.ndarray
    steps: np.ndarray
    tokens: int

    @classmethod
    def from_coords(cls, coords: Float[np.ndarray, "*map A"], region: tuple[int, ...]) -> "Extent":
        """Measures a region of a map with these coordinates.

        >>> from rope_jax.positions.grids import centres
        >>> sides, steps, tokens = Extent.from_coords(centres((4, 8)), (4, 4))
        >>> sides.tolist(), steps.tolist(), tokens
        ([4, 4], [0.25, 0.25], 16)

        Args:
            coords: of a map [H, W, A] or a video [T, H, W, A].
            region: rows and columns that a query sees. A single axis counts in reading order.
        """
        *grid, axes = coords.shape
        sides = (1,) * (axes - len(region)) + tuple(region)
        if axes == 1:
            sides, grid = ((region[0] - 1) * grid[1] + region[1],), [math.prod(grid)]
        coords = coords.reshape(*(1,) * (axes - len(grid)), *grid, axes)
        steps = np.zeros(axes)
        for axis in range(axes):
            differences = np.diff(coords[..., axis], axis=axis).ravel()
            steps[axis] = differences[0] if differences.size else 0.0
            if not np.allclose(differences, steps[axis]):
                steps[axis] = np.nan
        return cls(np.array(sides), steps, math.prod(region))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extension:
    """The options of a rotary scheme for grids larger or smaller than in training.

    Attributes:
        extend: one of `RULES`.
        log_scale: whether logits grow with the logarithm of the number of tokens.
        alpha, beta: of yarn, in turns over the training grid.
    """

    extend: Literal[*RULES] = "none"
    log_scale: bool = False
    alpha: NotNegative = 1.0
    beta: Positive = 32.0

    def __post_init__(self):
        if self.alpha >= self.beta:
            raise ValueError(
                f"alpha={self.alpha:g} and beta={self.beta:g} are numbers of turns between which "
                "yarn changes over: use alpha < beta"
            )

    def freqs(
        self, freqs: Float[Array | np.ndarray, "*layers N A R"], trained: Extent, current: Extent
    ) -> Float[Array | np.ndarray, "*layers N A R"]:
        """The frequencies for a map of another size; unchanged on the training grid.

        >>> rows = lambda n: Extent(np.array([n]), np.array([1.0]), n)
        >>> ladder = np.array([[[1.0, 0.1, 0.01]]])
        >>> Extension(extend="interpolate").freqs(ladder, rows(8), rows(16)).tolist()
        [[[0.5, 0.05, 0.005]]]
        >>> Extension(extend="ntk").freqs(ladder, rows(8), rows(32)).tolist()
        [[[1.0, 0.05, 0.0025]]]

        Args:
            freqs: radians per unit of coordinate.
            trained: extent of a query in training. An axis of one patch has no step to keep, and is
                left to the scheme.
            current: extent of a query on this map.

        Raises:
            ValueError: coordinates are not evenly spaced, so that there is no step to keep.
        """
        if self.extend == "none":
            return freqs
        if np.isnan([trained.steps, current.steps]).any():
            raise ValueError(
                f"extend={self.extend} needs coordinates that are evenly spaced, and those of this "
                "position are not: leave it out"
            )
        fixed = (trained.steps == 0) | (current.steps == 0)
        stretch = np.where(fixed, 1, current.sides / trained.sides)[:, None]
        steps = np.divide(trained.steps, current.steps, out=np.ones(fixed.size), where=~fixed)[
            :, None
        ]
        if ((stretch == 1) & (steps == 1)).all():
            return freqs
        turned = freqs * abs(trained.steps)[:, None]
        return freqs * (steps * self._factor(turned, trained.sides[:, None], stretch))

    def _factor(self, turned: Any, sides: np.ndarray, stretch: np.ndarray) -> Any:
        """The rule, as a factor on radians per training patch; [A, 1] or like `turned`."""
        if self.extend == "interpolate":
            return 1 / stretch
        stretch = np.maximum(stretch, 1)
        if self.extend == "extrapolate":
            return np.ones_like(stretch)
        xp = turned.__array_namespace__()  # numpy, or jax.numpy for learned frequencies
        turns = turned != 0
        lengths = xp.sqrt(xp.where(turns, xp.sum(turned**2, axis=-2, keepdims=True), 1))
        if self.extend == "yarn":
            fraction = (sides * lengths / (2 * np.pi) - self.alpha) / (self.beta - self.alpha)
            fraction = xp.clip(fraction, 0, 1)
            return fraction + (1 - fraction) / stretch
        logs, over = xp.log(lengths), {"axis": (-3, -1), "keepdims": True, "where": turns}
        high = xp.max(logs, initial=-np.inf, **over)
        low = xp.min(logs, initial=np.inf, **over)
        ladder = high - low > _LADDER
        place = xp.where(ladder, (high - logs) / xp.where(ladder, high - low, 1), 1)
        return stretch**-place

    def logit_scale(self, trained: Extent, current: Extent, prefix: int) -> float:
        """Factor on the logits of attention; 1 on the training grid.

        With L tokens, `log_scale` is ln L / ln L_trained, at any size (Chiang and Cholak, arXiv
        2202.12172). Otherwise the factor is YaRN's, 1 / t with sqrt(1 / t) = 0.1 ln s + 1 (arXiv
        2309.00071, section 3.4), on larger maps only. There s is the ratio of the numbers of
        patches, because the temperature depends on the number of keys that share a query's
        attention.

        Args:
            trained, current: extents of a query in training, and on this map.
            prefix: number of class and register tokens, which count in `log_scale`.
        """
        if self.log_scale:
            before, now = (math.log(max(2, x.tokens + prefix)) for x in (trained, current))
            return now / before
        if self.extend != "yarn":
            return 1.0
        return (0.1 * math.log(max(1.0, current.tokens / trained.tokens)) + 1) ** 2


def extend_rotations(model: nnx.Module, extend: str | None, log_scale: bool) -> list[nnx.Module]:
    """Sets the rule of all rotary schemes of a model; other options stay those of the scheme.

    >>> import rope_jax
    >>> model = rope_jax.create_model("vit_digits", position="rope2d(beta=8)", depth=1)
    >>> (scheme,) = extend_rotations(model, "yarn(alpha=0.5)", log_scale=True)
    >>> scheme.extension
    Extension(extend='yarn', log_scale=True, alpha=0.5, beta=8.0)

    Args:
        model: changed in place, but not its notation: `save_pretrained` does not keep the rule.
        extend: one of `RULES`, with any options: "ntk", "yarn(beta=8)"; None changes nothing.
        log_scale: True, or False to leave it to the scheme.

    Returns:
        The schemes that were set.

    Raises:
        ValueError: the model has no rotary scheme, or the rule or its options are unknown.
    """
    if extend is None and not log_scale:
        return []
    options: dict[str, Any] = {"log_scale": True} if log_scale else {}
    if extend is not None:
        call, *more = parse(extend, "extend")
        if more or call.inner:
            raise ValueError(f"extend={extend} must be one rule, such as ntk or yarn(beta=8)")
        fields = find_options(Extension)
        options["extend"] = convert(call.name, fields.pop("extend"), "extend")
        options |= convert_options(call.name, dict(call.options), fields)
    schemes = [m for _, m in nnx.iter_modules(model) if getattr(m, "extension", None) is not None]
    if not schemes:
        rule = f"extend={extend}" if extend is not None else "log_scale"
        raise ValueError(
            f"{rule} is for rotary positions, such as rope2d or axial_rope, and this model's has "
            "no rotation by coordinates times frequencies: leave it out"
        )
    for scheme in schemes:
        scheme.extend(**options)
    return schemes
