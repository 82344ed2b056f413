"""Models by name: `create_model`, for classification and for dense prediction."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from rope_jax.models.dense import create_dense
from rope_jax.models.registry import MODELS, create_backbone, describe, find_model, name_here
from rope_jax.names import plugins
from rope_jax.names.registry import UnknownName
from rope_jax.weights.files import WeightsFile
from rope_jax.weights.load import load_weights
from rope_jax.weights.released import (
    ReleasedWeights,
    find_weights,
    names_released,
    open_listed,
)


def create_model(
    name: str | os.PathLike,
    *,
    position: str | None = None,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    seed: int = 0,
    dtype: Any = jnp.float32,
    pretrained: bool | str | os.PathLike | WeightsFile | ReleasedWeights = False,
    weights_dir: str | os.PathLike | None = None,
    head: str | None = None,
    blocks: Sequence[int] | None = None,
    **overrides: Any,
) -> nnx.Module:
    """Creates a backbone with a positional scheme, and optionally a head of dense prediction.

    >>> import jax.numpy as jnp
    >>> import rope_jax
    >>> model = rope_jax.create_model("vit_digits", position="rope2d+ape", depth=1)
    >>> model(jnp.zeros((2, 8, 8, 3))).shape
    (2, 10)
    >>> [features.shape for features in model.features(jnp.zeros((2, 12, 16, 3)))]
    [(2, 6, 8, 96)]
    >>> model = rope_jax.create_model("vit_digits", head="linear", num_classes=11, depth=1)
    >>> model(jnp.zeros((2, 12, 16, 3))).shape
    (2, 12, 16, 11)

    Works under `nnx.eval_shape`, which returns shapes without allocating. None selects the model's
    default for an argument; with weights that describe their model (`rope_jax.save_pretrained`,
    runs), the value of that model.

    Args:
        name: one of `list_models()`, or such weights: a folder, file or hub id; in
            `rope_jax.create_model` the workdir of a run, too.
        position: a scheme as written in `rope_jax.positions`: "axial_rope", "rope2d(base=50)",
            "rope_mixed+ape", ...
        num_classes: outputs of the head; 0 for none: the model returns the pooled features that its
            head would take. With weights for another number, the head stays new, which is printed.
            In a model with a `head`, every weight of that head then stays new, not only the
            classifier.
        image_size: pixels, a side or (height, width), for parameters whose shape depends on it.
            Calls accept other sizes.
        seed: of the initial weights.
        dtype: of activations. Parameters are float32, or float64 with dtype=float64 (which needs
            jax_enable_x64).
        pretrained: False, or weights: True for the published ones of this model and position, or
            their tag, or a row of `rope_jax.list_weights()`, whose options, classes and size are
            then the defaults, as with a hub id or the name of a file in that list; a .safetensors,
            .npz or PyTorch file, a folder of `save_pretrained`, or a hub id, see
            `rope_jax.weights.load_pretrained`; in `rope_jax.create_model` the workdir of a run,
            too. Their position tables are resized by the scheme's rule. `model.preprocessing` then
            holds the preprocessing that they expect. Weights of a classifier are those of the
            backbone of a model with a `head`, whose other weights stay new.
        weights_dir: folder that holds published weights under the names of their files, see
            `ReleasedWeights.open`; None for the cache. What is not there is downloaded.
        head: of dense prediction, one of `rope_jax.models.heads.list_heads()`, with options if any:
            "upernet(width=512)"; None for a classifier.
        blocks: of an isotropic model, from 0, whose maps the head takes; None for the last one or,
            for heads of four maps, blocks 3, 5, 7 and 11 of 12 (7, 11, 15 and 23 of 24).
        **overrides: the family's options by name, for example depth=2 (`ViTOptions`,
            `SwinOptions`, `NATOptions`, `CATOptions`, `T2TOptions`, `CeiTOptions`, `CCTOptions`,
            `ViTAdapterOptions`).

    Returns:
        A module: `model(images[B, H, W, 3], train=False, key=None)` returns logits
        [B, num_classes], with a head of segmentation [B, H, W, num_classes], and
        `model.features(images)` a list of maps [B, h, w, C], by default after the last block of
        every stage.

    Raises:
        ValueError: an unknown name, option, scheme or head, a head that the backbone cannot serve,
            another impossible combination, or weights that do not fit; the message suggests what to
            change.
        FileNotFoundError: the weights file does not exist.
        ImportError: a package that reads the weights is not installed.
    """
    name = os.fspath(name)
    arguments = {
        "position": position,
        "num_classes": num_classes,
        "image_size": image_size,
        "head": head,
        "blocks": blocks,
    }
    if pretrained is False and names_weights(name):
        pretrained = name
    if names_released(pretrained):
        pretrained = find_weights(name, pretrained, position=position, head=head)
    if isinstance(pretrained, ReleasedWeights) and pretrained.model == name:  # before a download
        options = {**pretrained.description.options, **overrides}
        find_model(name).options.override(name, options)
    if pretrained is False and weights_dir is not None:
        raise ValueError(f"weights_dir={os.fspath(weights_dir)} needs pretrained=True, or a tag")
    with (
        contextlib.nullcontext() if pretrained is False else open_listed(pretrained, weights_dir)
    ) as file:
        described = None if file is None else file.description
        if name == pretrained:
            if described is None:
                hint = name_here(name.rpartition("/")[2])
                raise ValueError(
                    f"{name} does not describe its model: create_model(NAME, pretrained={name!r})"
                    f"{f'; {hint}' if hint else ''}"
                )
            name = described.name
        stored = described if described is not None and described.name == name else None
        try:
            description = describe(name, stored, arguments, overrides)
            create = create_backbone if description.head is None else create_dense
            model = create(description, seed=seed, dtype=dtype)
        except UnknownName as error:
            missing = [] if described is None else {*described.plugins} - {*plugins.list_loaded()}
            if not missing:
                raise
            raise ValueError(
                f"{error}; {file.where} was saved with the plug-in {', '.join(sorted(missing))}: "
                "import it, or name it by --plugins or ROPE_JAX_PLUGINS"
            ) from None
        if file is not None:
            load_weights(model, file, new_head=num_classes is not None)
    return model


def names_weights(name: str) -> bool:
    """True if a name is that of a file, a folder or a hub id, and not of a model.

    >>> names_weights("runs/digits"), names_weights("deit_s16")
    (True, False)
    """
    plugins.load_installed()
    if name in MODELS:
        return False
    return "/" in name or name.endswith(".safetensors") or os.path.exists(name)
