"""Models by name."""

import dataclasses
import fnmatch
import os
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.hints import closest
from rope_jax.models.pretrained import load_pretrained


@dataclasses.dataclass(frozen=True)
class Entry:
    """One named model: its family's class and options, and the defaults of `create_model`."""

    family: Callable[..., nnx.Module]
    options: Any
    position: str
    num_classes: int
    image_size: int


MODELS: dict[str, Entry] = {}

_DTYPES = [jnp.dtype(name) for name in ("float32", "bfloat16", "float16", "float64")]


def register(name: str, family: Callable, options: Any, *, position: str, num_classes: int = 1000, image_size: int = 224) -> None:
    """Enters a model under `name`; options is a frozen dataclass whose fields are the documented overrides."""
    MODELS[name] = Entry(family, options, position, num_classes, image_size)


def list_models(pattern: str = "*") -> list[str]:
    """Names of all models that match a shell-style pattern, sorted: `list_models("deit*")`."""
    return sorted(fnmatch.filter(MODELS, pattern))


def find_model(name: str) -> Entry:
    """The entry called `name`; ValueError with the closest name where there is none."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; {closest(name, list_models())}")
    return MODELS[name]


def create_model(
    name: str,
    *,
    position: str | None = None,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    seed: int = 0,
    dtype: Any = jnp.float32,
    pretrained: bool | str | os.PathLike = False,
    **overrides: Any,
) -> nnx.Module:
    """Makes a backbone with a positional scheme.

    Args:
        name: one of `list_models()`.
        position: a scheme as written in `rope_jax.positions`: "axial_rope", "rope2d(base=50)", "rope_mixed+ape", ...
        num_classes: outputs of the head.
        image_size: pixels, int or (height, width), for parameters whose shape depends on it. Calls accept other sizes.
        seed: of the initial weights.
        dtype: in which activations are computed. Parameters are float32, or float64 with dtype=float64 (which needs jax_enable_x64).
        pretrained: False, or a .safetensors or .npz file of official weights, or a hub id; see `pretrained.load_pretrained`. What they
            expect of images is then in `model.preprocessing`.
        **overrides: the family's options by name, for example depth=2 (see `ViTOptions`, `SwinOptions`, `NATOptions`, `CATOptions`,
            `T2TOptions`, `CeiTOptions`, `CCTOptions` in the modules beside this one).

    None stands for the model's own default. Works under `nnx.eval_shape`, which gives shapes without allocating.

    Returns:
        A module: `model(images[B, H, W, 3], train=False, key=None)` gives logits [B, num_classes], `model.features(images)` maps.

    Raises:
        ValueError: an unknown name, option or scheme, or a combination that cannot be; the message says what to change. And weights that
            do not fit, see `pretrained.load_pretrained` also for a file that is missing or a package that is not installed.
    """
    entry = find_model(name)
    if pretrained is True:
        raise ValueError(
            "pretrained=True: say which weights: a .safetensors or .npz file, or a hub id such as 'timm/deit_tiny_patch16_224.fb_in1k'"
        )
    if position is not None and not isinstance(position, str):
        raise ValueError(f"position={position!r} must be the text of a scheme, such as 'axial_rope' or 'rope2d(base=50)'")
    model = entry.family(
        model_options(name, overrides),
        position=entry.position if position is None else position,
        num_classes=_positive("num_classes", entry.num_classes if num_classes is None else num_classes),
        image_size=image_pair(entry.image_size if image_size is None else image_size),
        dtype=_compute_dtype(dtype),
        rngs=nnx.Rngs(seed),
    )
    if pretrained is not False:
        load_pretrained(model, pretrained)
    return model


def model_options(name: str, overrides: dict[str, Any]) -> Any:
    """The options of a model with some overridden; ValueError names an unknown one, or a value of another type."""
    options = find_model(name).options
    known = {field.name: field.type for field in dataclasses.fields(options)}
    for key in overrides:
        if key not in known:
            raise ValueError(f"{name} has no option {key!r}; {closest(key, known)}")
    return dataclasses.replace(options, **{key: _of_kind(f"{name}: {key}", value, known[key]) for key, value in overrides.items()})


def _of_kind(what: str, value: Any, kind: Any) -> Any:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(value) is int and int not in kinds and float in kinds:
        return float(value)
    if type(value) not in kinds and not (value is None and type(None) in kinds):
        raise ValueError(f"{what}={value!r} must be of type {getattr(kind, '__name__', kind)}")
    return value


def image_pair(size: Any) -> tuple[int, int]:
    """(height, width) in pixels from an int or a pair; ValueError for anything else."""
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or not all(isinstance(n, int | np.integer) and n > 0 for n in pair):
        raise ValueError(f"image size {size!r} must be a positive number of pixels or a pair (height, width) of them")
    return int(pair[0]), int(pair[1])


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    return int(value)


def _compute_dtype(dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found not in _DTYPES or found != jax.dtypes.canonicalize_dtype(found):
        name = dtype if found is None else found
        raise ValueError(f"dtype={name} is not available; use float32, bfloat16 or float16, or float64 with jax_enable_x64")
    return found
