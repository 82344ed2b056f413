"""Models by name, and the options of their families.

Each field of a family's `Options` declares its type and the values that it may have.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.models.description import Description
from rope_jax.names.options import CountOrZero, Words, convert, convert_options, find_options
from rope_jax.names.registry import Registry
from rope_jax.names.text import closest, image_pair


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
        owner = type(self)
        vars(self).update(convert_options(owner.__name__, vars(self), find_options(owner)))

    def override(self, model: str, overrides: Mapping[str, Any]) -> "Options":
        """A copy with some fields changed.

        Args:
            model: name of the model, for error messages.
            overrides: values by field.

        Raises:
            ValueError: an unknown field, or a value that is not of the field's type or range.
        """
        fields = find_options(type(self))
        for name in overrides:
            if name not in fields:
                hint = _ELSEWHERE.get(name) or closest(name, [*fields, *_ARGUMENTS])
                raise ValueError(f"{model} has no option {name!r}; {hint}")
        return dataclasses.replace(self, **convert_options(model, overrides, fields))

    def check_read(self, model: str, overrides: Iterable[str]) -> None:
        """Rejects overrides without effect: fields that the model reads with other values alone.

        Args:
            model: name of the model, for error messages.
            overrides: the fields that were changed to get these options.
        """


def check_divisible(owner: str, width: int, divisors: Mapping[str, int]) -> None:
    """Raises ValueError unless each of `divisors`, by their names, divides `owner`'s width."""
    for name, divisor in divisors.items():
        if width % divisor:
            raise ValueError(
                f"{owner} has width={width}, which is not divisible by {name}={divisor}: change "
                "one of them"
            )


def check_blocks(name: str, blocks: Sequence[int], depth: int, count: int | None = None) -> None:
    """Raises ValueError unless an argument has ascending numbers of a model's blocks.

    Args:
        name: of the argument.
        blocks: its value.
        depth: number of the model's blocks.
        count: required number of blocks; None for any.
    """
    ascending = sorted({*blocks}) == [*blocks] and {*blocks} <= {*range(depth)}
    if not ascending or count not in (None, len(blocks)):
        few = "numbers" if count is None else "one number" if count == 1 else f"{count} numbers"
        raise ValueError(
            f"{name}={tuple(blocks)} must be {few} of blocks in ascending order, from 0 to "
            f"{depth - 1}, as the model has {depth} blocks"
        )


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered model: its family's class and options, and defaults of `create_model`."""

    family: Callable[..., nnx.Module]
    options: Options
    position: str
    num_classes: int
    image_size: int


def name_here(name: str) -> str | None:
    """A hint for the name of a model in other libraries; None for any other name.

    >>> name_here("deit3_small_patch16_224.fb_in1k"), name_here("deit-small")
    ("'deit3_small_patch16_224.fb_in1k' is 'deit3_s16' here", "'deit-small' is 'deit_s16' here")
    >>> name_here("vit_base_patch16_rope_ape_224")
    "'vit_base_patch16_rope_ape_224' is 'deit3_b16' here, with position='rope2d+ape'"
    >>> name_here("deit_tiny_distilled_patch16_224")
    "'deit_tiny_distilled_patch16_224' is 'deit_ti16_distilled' here"
    """
    pattern = r"(\w+?)_(tiny|small|base|large|giant)(_distilled)?(?:_patch(\d+)_?(.*)|_window.*)?"
    match = re.fullmatch(pattern, name.replace("-", "_"))
    if match is None:
        return None
    family, size, distilled, patch, suffix = match.groups(default="")
    dino = re.match(r"(reg4_)?(dinov[23])", suffix)
    rotary = re.match(r"rope(_mixed)?(_ape)?(?=_|$)", suffix)
    family = dino[2] if dino else "deit3" if rotary else "deit" if family == "vit" else family
    if family == "deit" and re.match(r"[a-z]", suffix):  # CLIP's ViT, for example, is not here
        return None
    form, also = "_reg" if dino and dino[1] else distilled, ""
    if rotary:
        scheme = ("rope_mixed" if rotary[1] else "rope2d") + ("+ape" if rotary[2] else "")
        also = f", with position={scheme!r}"
    for letter in (size[:2], size[:1]):
        for candidate in (f"{family}_{letter}{patch or 16}{form}", f"{family}_{letter}"):
            if candidate in MODELS:
                return f"{name!r} is {candidate!r} here{also}"
    return None


MODELS: Registry[Entry] = Registry("model", elsewhere=name_here, listed_by="rope_jax.list_models()")

_ARGUMENTS = (
    *("position", "num_classes", "image_size", "seed", "dtype", "pretrained", "weights_dir"),
    *("head", "blocks"),
)
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
        ValueError: a model of this name exists, or the name is not an identifier.
    """
    options = dataclasses.replace(options, **changes)
    MODELS.register(name, Entry(family, options, position, num_classes, image_size))


def list_models(pattern: str = "*") -> list[str]:
    """Names of all models that match a shell-style pattern, sorted.

    >>> import rope_jax
    >>> rope_jax.list_models("deit_*16")
    ['deit_b16', 'deit_s16', 'deit_ti16']

    Args:
        pattern: with the wildcards of `fnmatch`.
    """
    return MODELS.names(pattern)


def find_model(name: str) -> Entry:
    """The registered model called `name`.

    >>> find_model("swin_t").position
    'rpb'

    Raises:
        ValueError: there is no such model; the message suggests the nearest names.
    """
    return MODELS[name]


def describe(
    name: str,
    described: Description | None,
    arguments: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> Description:
    """The complete arguments of `create_model`.

    Args:
        name: of the model.
        described: the description of weights of that model, if they have one.
        arguments: position, num_classes, image_size, head and blocks; None for the value in
            `described`, or the model's default.
        overrides: options of the model.

    Raises:
        ValueError: there is no such model, or a value that it cannot have.
    """
    entry = find_model(name)
    default = described or entry
    requested = {key: value for key, value in arguments.items() if value is not None}
    if described is not None and "head" not in requested:
        requested = {"head": described.head, "blocks": described.blocks} | requested
    head, blocks = requested.get("head"), requested.get("blocks")
    if head is None and blocks is not None:
        raise ValueError(f"blocks={tuple(blocks)} are those of a head: name it, or leave them out")
    classes, options = default.num_classes, {} if described is None else {**described.options}
    stored_head = None if described is None else described.head
    if head is not None and stored_head is None:
        classes = 0  # those of a classifier are not the head's
    if head is not None and head.partition("(")[0] != (stored_head or "").partition("(")[0]:
        options.pop("last_norm", None)  # the other head's
    made = entry.options.override(name, {**options, **overrides})
    made.check_read(name, [x for x in overrides if getattr(made, x) != getattr(entry.options, x)])
    scheme = Annotated[str, Words("the text of a scheme, such as 'rope2d(base=50)'")]
    size = image_pair(requested.get("image_size", default.image_size))
    return Description(
        name,
        convert(requested.get("position", default.position), scheme, "position"),
        convert(requested.get("num_classes", classes), CountOrZero, "num_classes"),
        size,
        {**options, **overrides},
        head=head,
        blocks=blocks,
        trained_size=size if described is None else described.trained_size,
        trained_options=None if described is None else described.trained_options,
    )


def create_backbone(description: Description, *, seed: int, dtype: Any) -> nnx.Module:
    """Creates a model with initial weights, without its head of dense prediction."""
    entry, size = find_model(description.name), description.image_size
    options, trained_options = (
        entry.options.override(description.name, values)
        for values in (description.options, description.trained_options)
    )
    # Weights depend on all other options, and windows on the kind of attention.
    kinds = [getattr(values, "attention", "window") for values in (options, trained_options)]
    windows = {"window_size"} & vars(options).keys() if kinds[0] == kinds[1] else ()
    windows = {name: getattr(trained_options, name) for name in windows}
    trained = (dataclasses.replace(options, **windows), description.trained_size)
    settings = {"num_classes": description.num_classes, "dtype": _compute_dtype(dtype)}
    settings["position"] = description.position

    def make(options: Options, image_size: tuple[int, int]) -> nnx.Module:
        return entry.family(options, **settings, image_size=image_size, rngs=nnx.Rngs(seed))

    model = make(options, size)
    model.name, model.notation, model.image_size = description.name, description.position, size
    model.trained_options, model.trained_size = trained
    if trained != (options, size):  # schemes extend from the training grid and windows
        trained_modules = dict(nnx.iter_modules(nnx.eval_shape(lambda: make(*trained))))
        for path, module in nnx.iter_modules(model):
            for name in getattr(module, "of_training", ()):
                setattr(module, name, getattr(trained_modules[path], name))
    return model


def _compute_dtype(dtype: Any) -> np.dtype:
    try:
        result = jnp.dtype(dtype)
    except TypeError:
        result = None
    if result not in _DTYPES or result != jax.dtypes.canonicalize_dtype(result):
        raise ValueError(
            f"dtype={result or dtype} is not available; use float32, bfloat16 or float16, or "
            "float64 with jax_enable_x64"
        )
    return result
