"""Models by name, and the options of their families.

Each field of a family's `Options` declares its type and the values that it may have.
"""

import contextlib
import dataclasses
import fnmatch
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax import plugins
from rope_jax.models.pretrained.files import load_weights, open_weights
from rope_jax.models.pretrained.metadata import Description
from rope_jax.text import closest, image_pair, nearest


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The allowed values of a field, and the end of the error message for any other."""

    test: Callable[[Any], bool]
    message: str


def one_of(*words: str | None) -> Allowed:
    """One of a few words, or None if it is among them."""
    return Allowed(
        lambda value: value in words, f"is not allowed; use one of {', '.join(map(str, words))}"
    )


_COUNT = Allowed(lambda n: n is None or n >= 1, "must be at least 1")
Count = Annotated[int, _COUNT]
OptionalCount = Annotated[int | None, _COUNT]
CountOrZero = Annotated[int, Allowed(lambda n: n >= 0, "must be at least 0")]
Positive = Annotated[
    float, Allowed(lambda x: 0 < x < float("inf"), "is not allowed; it must be above 0")
]
Probability = Annotated[
    float, Allowed(lambda p: 0 <= p < 1, "is not allowed; it must be at least 0 and below 1")
]


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of the options of a family, frozen dataclasses whose fields `create_model` overrides.

    Attributes:
        fixed: fields that cannot be changed in this family.
        draws: fields with dropout probabilities, which need a key in training.
    """

    fixed: ClassVar[tuple[str, ...]] = ()
    draws: ClassVar[tuple[str, ...]] = ("drop_path",)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in self.fixed and value != field.default:
                raise ValueError(
                    f"{field.name}={value!r} is not an option of this family: "
                    f"leave it at {field.default!r}"
                )
            for allowed in getattr(field.type, "__metadata__", ()):
                if not allowed.test(value):
                    raise ValueError(f"{field.name}={value!r} {allowed.message}")

    def override(self, model: str, overrides: Mapping[str, Any]) -> "Options":
        """A copy with some fields changed.

        Args:
            model: name of the model, for error messages.
            overrides: values by field.

        Raises:
            ValueError: an unknown field, or a value that is not of the field's type or range.
        """
        known = {field.name: field.type for field in dataclasses.fields(self)}
        changes = {}
        for name, value in overrides.items():
            if name not in known:
                hint = _ELSEWHERE.get(name) or closest(name, [*known, *_ARGUMENTS])
                raise ValueError(f"{model} has no option {name!r}; {hint}")
            kind = getattr(known[name], "__origin__", known[name])  # of Annotated
            kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
            if type(value) is int and int not in kinds and float in kinds:
                value = float(value)
            if type(value) not in kinds and not (value is None and type(None) in kinds):
                what = getattr(kind, "__name__", kind)
                raise ValueError(f"{model}: {name}={value!r} must be of type {what}")
            changes[name] = value
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered model: its family's class and options, and defaults of `create_model`."""

    family: Callable[..., nnx.Module]
    options: Options
    position: str
    num_classes: int
    image_size: int


MODELS: dict[str, Entry] = {}

_ARGUMENTS = ("position", "num_classes", "image_size", "seed", "dtype", "pretrained")
_NAMES = {  # arguments of timm's and Hugging Face's models -> those of `create_model`
    "img_size": "image_size",
    "embed_dim": "width",
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_heads": "heads",
    "num_attention_heads": "heads",
    "num_labels": "num_classes",
    "drop_path_rate": "drop_path",
    "init_values": "layer_scale",
    "global_pool": "pooling",
    "reg_tokens": "registers",
    "num_register_tokens": "registers",
    "pos_embed": "position",
    "checkpoint_path": "pretrained",
}
_ELSEWHERE = {name: f"here it is {here!r}" for name, here in _NAMES.items()} | {
    "features_only": "model.features(images) returns the maps of all stages",
    "dynamic_img_size": "models take images of any size that their patches divide",
    "in_chans": "images have 3 channels: repeat that of grey images",
}
_DTYPES = [jnp.dtype(name) for name in ("float32", "bfloat16", "float16", "float64")]


def register(
    name: str,
    family: Callable,
    options: Options,
    *,
    position: str,
    num_classes: int = 1000,
    image_size: int = 224,
    **changes: Any,
) -> None:
    """Registers a model.

    >>> from rope_jax.models.vit import ViT, ViTOptions
    >>> register("vit_narrow", ViT, ViTOptions(width=48, heads=3, depth=1), position="rope2d")
    >>> list_models("vit_narrow")
    ['vit_narrow']
    >>> del MODELS["vit_narrow"]  # in this example only

    Args:
        name: for `create_model`.
        family: class of the model.
        options: of the family; its fields are the overrides of `create_model`.
        position: default positional scheme.
        num_classes: default number of classes.
        image_size: default side of images in pixels.
        **changes: fields of the model's options that differ from `options`.

    Raises:
        ValueError: there is a model of this name.
    """
    if name in MODELS:
        raise ValueError(f"a model named {name!r} exists already: choose another name")
    options = dataclasses.replace(options, **changes)
    MODELS[name] = Entry(family, options, position, num_classes, image_size)
    plugins.registered(name)


def list_models(pattern: str = "*") -> list[str]:
    """Names of all models that match a shell-style pattern, sorted.

    >>> import rope_jax
    >>> rope_jax.list_models("deit_*")
    ['deit_b16', 'deit_s16', 'deit_ti16']

    Args:
        pattern: with the wildcards of `fnmatch`.
    """
    plugins.load_installed()
    return sorted(fnmatch.filter(MODELS, pattern))


def find_model(name: str) -> Entry:
    """The registered model called `name`.

    >>> find_model("swin_t").position
    'rpb'

    Raises:
        ValueError: there is no such model; the message suggests the nearest names.
    """
    plugins.load_installed()
    if name not in MODELS:
        hint = _name_here(name) or nearest(name, MODELS)
        raise plugins.UnknownName(
            f"unknown model {name!r}; {hint}; rope_jax.list_models() lists all"
        )
    return MODELS[name]


def _name_here(name: str) -> str | None:
    """A hint for the name of a model in other libraries; None for any other name.

    >>> _name_here("deit3_small_patch16_224.fb_in1k"), _name_here("deit-small")
    ("'deit3_small_patch16_224.fb_in1k' is 'deit3_s16' here", "'deit-small' is 'deit_s16' here")
    >>> _name_here("vit_base_patch16_rope_ape_224")
    "'vit_base_patch16_rope_ape_224' is 'deit3_b16' here, with position='rope2d+ape'"
    """
    pattern = r"(\w+?)_(tiny|small|base|large|giant)(?:_patch(\d+)_?(.*))?"
    found = re.fullmatch(pattern, name.replace("-", "_"))
    if found is None:
        return None
    family, size, patch, rest = found.groups(default="")
    dino = re.match(r"(reg4_)?(dinov[23])", rest)
    rotary = re.match(r"rope(_mixed)?(_ape)?(?=_|$)", rest)
    family = dino[2] if dino else "deit3" if rotary else "deit" if family == "vit" else family
    if family == "deit" and re.match(r"[a-z]", rest):  # CLIP's ViT, for example, is not here
        return None
    form, also = "_reg" if dino and dino[1] else "", ""
    if rotary:
        scheme = ("rope_mixed" if rotary[1] else "rope2d") + ("+ape" if rotary[2] else "")
        also = f", with position={scheme!r}"
    for letter in (size[:2], size[:1]):
        for candidate in (f"{family}_{letter}{patch or 16}{form}", f"{family}_{letter}"):
            if candidate in MODELS:
                return f"{name!r} is {candidate!r} here{also}"
    return None


def create_model(
    name: str | os.PathLike,
    *,
    position: str | None = None,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    seed: int = 0,
    dtype: Any = jnp.float32,
    pretrained: bool | str | os.PathLike = False,
    **overrides: Any,
) -> nnx.Module:
    """Creates a backbone with a positional scheme.

    >>> import jax.numpy as jnp
    >>> import rope_jax
    >>> model = rope_jax.create_model("vit_digits", position="rope2d+ape", depth=1)
    >>> model(jnp.zeros((2, 8, 8, 3))).shape
    (2, 10)
    >>> [features.shape for features in model.features(jnp.zeros((2, 12, 16, 3)))]
    [(2, 6, 8, 96)]

    Works under `nnx.eval_shape`, which returns shapes without allocating. None selects the model's
    default for an argument; with weights that describe their model (`rope_jax.save_pretrained`,
    runs), the value of that model.

    Args:
        name: one of `list_models()`, or such weights: a folder, file, workdir or hub id.
        position: a scheme as written in `rope_jax.positions`: "axial_rope", "rope2d(base=50)",
            "rope_mixed+ape", ...
        num_classes: outputs of the head; 0 for none: the model returns the pooled features that its
            head would take. With weights for another number, the head stays new, which is printed.
        image_size: pixels, a side or (height, width), for parameters whose shape depends on it.
            Calls accept other sizes.
        seed: of the initial weights.
        dtype: of activations. Parameters are float32, or float64 with dtype=float64 (which needs
            jax_enable_x64).
        pretrained: False, or weights: a .safetensors or .npz file, a folder of `save_pretrained`,
            the workdir of a run, or a hub id; see `pretrained.load_pretrained`. Their position
            tables are resized by the scheme's rule. `model.preprocessing` then holds the
            preprocessing that they expect.
        **overrides: the family's options by name, for example depth=2 (`ViTOptions`,
            `SwinOptions`, `NATOptions`, `CATOptions`, `T2TOptions`, `CeiTOptions`, `CCTOptions`).

    Returns:
        A module: `model(images[B, H, W, 3], train=False, key=None)` returns logits
        [B, num_classes], `model.features(images)` a list of maps [B, h, w, C].

    Raises:
        ValueError: an unknown name, option or scheme, an impossible combination, or weights that do
            not fit; the message suggests what to change.
        FileNotFoundError: the weights file does not exist.
        ImportError: a package that reads the weights is not installed.
    """
    if pretrained is True:
        raise ValueError(
            "pretrained=True: say which weights: a .safetensors or .npz file, or a hub id such as "
            "'timm/deit_tiny_patch16_224.fb_in1k'"
        )
    plugins.load_installed()
    name = os.fspath(name)
    if pretrained is False and name not in MODELS and names_weights(name):
        pretrained = name
    with contextlib.ExitStack() as stack:
        file = None if pretrained is False else stack.enter_context(open_weights(pretrained))
        described = None if file is None else file.description
        if name == pretrained:
            if described is None:
                hint = _name_here(name.rpartition("/")[2])
                raise ValueError(
                    f"{name} does not describe its model: create_model(NAME, pretrained={name!r})"
                    f"{f'; {hint}' if hint else ''}"
                )
            name = described.name
        same = described if described is not None and described.name == name else None
        try:
            model = _create(
                name,
                same,
                position=position,
                num_classes=num_classes,
                image_size=image_size,
                seed=seed,
                dtype=dtype,
                overrides=overrides,
            )
        except plugins.UnknownName as error:
            missing = [] if described is None else {*described.plugins} - {*plugins.loaded()}
            if not missing:
                raise
            raise ValueError(
                f"{error}; {pretrained} was saved with the plug-in {', '.join(sorted(missing))}: "
                "import it, or name it by --plugins or ROPE_JAX_PLUGINS"
            ) from None
        if file is not None:
            load_weights(model, file, new_head=num_classes is not None)
    return model


def names_weights(name: str) -> bool:
    """Whether a name that no model has is that of a file, a folder or a hub id.

    >>> names_weights("runs/digits"), names_weights("deit_s16")
    (True, False)
    """
    return "/" in name or name.endswith(".safetensors") or os.path.exists(name)


def _create(
    name: str,
    described: Description | None,
    *,
    position: Any,
    num_classes: Any,
    image_size: Any,
    seed: int,
    dtype: Any,
    overrides: Mapping[str, Any],
) -> nnx.Module:
    """A model with initial weights; None selects what `described` has, or the model's default."""
    entry = find_model(name)
    default = described or entry
    position = default.position if position is None else position
    if not isinstance(position, str):
        raise ValueError(
            f"position={position!r} must be the text of a scheme, such as 'axial_rope' or "
            "'rope2d(base=50)'"
        )
    num_classes = default.num_classes if num_classes is None else num_classes
    if not isinstance(num_classes, int | np.integer) or num_classes < 0:
        raise ValueError(
            f"num_classes={num_classes!r} must be a whole number: of classes, or 0 for no head"
        )
    size = image_pair(default.image_size if image_size is None else image_size)
    options = {} if described is None else described.options
    model = entry.family(
        entry.options.override(name, {**options, **overrides}),
        position=position,
        num_classes=int(num_classes),
        image_size=size,
        dtype=_compute_dtype(dtype),
        rngs=nnx.Rngs(seed),
    )
    model.name, model.notation, model.image_size = name, position, size
    return model


def _compute_dtype(dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found not in _DTYPES or found != jax.dtypes.canonicalize_dtype(found):
        name = dtype if found is None else found
        raise ValueError(
            f"dtype={name} is not available; use float32, bfloat16 or float16, or float64 with "
            "jax_enable_x64"
        )
    return found
