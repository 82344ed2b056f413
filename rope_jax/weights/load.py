"""Loading weights from files into models, and saving models as files."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from rope_jax.models.registry import find_model
from rope_jax.names.notation import parse
from rope_jax.weights.convert import (
    SOURCES,
    WHOLE,
    Conversion,
    Grids,
    count_named,
    export_state_dict,
    fill,
    name_table,
    plan_conversion,
    report,
    rotates,
    table_grids,
)
from rope_jax.weights.files import EXTENSIONS, WeightsFile, write_safetensors
from rope_jax.weights.links import list_slots
from rope_jax.weights.metadata import Metadata, family_name
from rope_jax.weights.own import OWN, parameter_name
from rope_jax.weights.released import open_listed, schemes_of_weights


def convert_state_dict(
    model: nnx.Module,
    state_dict: Mapping[str, Any],
    *,
    source: str,
    grids: Grids | None = None,
    new_head: bool = False,
) -> None:
    """Loads torch-named weights into a model, in place.

    Weights are cast to the model's dtype and layout. Channels of queries and keys are permuted
    if the source pairs them differently for its rotation, and bias tables are flipped if source
    and model count offsets in opposite directions. Tables of another map or window are resized by
    their scheme's rule.

    >>> import rope_jax
    >>> from rope_jax.weights import export_state_dict
    >>> small = {"width": 8, "heads": 1, "depth": 1, "image_size": 32, "num_classes": 2}
    >>> trained = rope_jax.create_model("deit_ti16", seed=1, **small)
    >>> state_dict = export_state_dict(trained, source="timm")
    >>> state_dict["head.weight"].shape
    (2, 8)
    >>> model = rope_jax.create_model("deit_ti16", **small)
    >>> rope_jax.convert_state_dict(model, state_dict, source="timm")
    >>> bool((model.head.kernel[...] == trained.head.kernel[...]).all())
    True

    Args:
        model: from `rope_jax.create_model`.
        state_dict: arrays by their names in the source's files.
        source: naming convention: "timm", "naver" (RoPE-ViT), "deit", "swin", "nat", "lape", "cct",
            "ceit", "t2t", "cat", "dinov2", "dinov3", "resformer", "augreg" (Google's ViTs) or
            "transformers" (Hugging Face's, of ViT, DeiT, DINOv2, DINOv3, BEiT, Swin, Swin V2, NAT
            and DiNAT); for dense prediction "detectron2" (ViTDet), "detrex" (DINO), "vit_adapter",
            "mmseg", "segmenter" or "mask2former"; "rope_jax" for the names of parameters here. With
            those of classifiers the backbone of a model of dense prediction is filled.
        grids: (rows, columns) of the map or window of tables, by name. Other tables are taken to be
            square, as all official ones are, or else of the model's shape. Needed only for a table
            whose length allows both.
        new_head: leave the model's head as it is if the weights have none or one for other classes.

    Parameters that keep their initial weights are printed: those of a new head, and those of a
    model of dense prediction beyond a classifier's.

    Raises:
        ValueError: names or shapes that do not fit, all of them in one message, or a weight that is
            not finite; the model is not changed.
        TypeError: `state_dict` is not a mapping.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict is a {type(state_dict).__name__}; it must be arrays by name: for a file "
            "use create_model(..., pretrained=PATH) or load_pretrained"
        )
    if nested := [key for key, value in state_dict.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"state_dict holds dictionaries under {', '.join(nested)}: pass the one that holds "
            "the weights by itself"
        )
    arrays = {key: np.asarray(array) for key, array in state_dict.items()}
    shapes = {key: (array.shape, array.dtype) for key, array in arrays.items()}
    file = WeightsFile(shapes, arrays.__getitem__, where="state_dict")
    target, source, plan = _plan(model, file, source, new_head=new_head, grids=grids)
    fill(target, plan, file.read, source, file.where)
    report(model, plan)


def load_pretrained(
    model: nnx.Module,
    where: str | os.PathLike,
    *,
    source: str | None = None,
    new_head: bool = False,
) -> None:
    """Loads weights into a model, and sets `model.preprocessing` and `model.class_names`.

    >>> import tempfile
    >>> import rope_jax
    >>> small = {"width": 8, "heads": 1, "depth": 1, "image_size": 32, "num_classes": 2}
    >>> path = f"{tempfile.mkdtemp()}/weights.safetensors"
    >>> save_pretrained(rope_jax.create_model("deit_ti16", **small), path, source="timm")
    >>> model = rope_jax.create_model("deit_ti16", seed=1, **small)
    >>> load_pretrained(model, path)
    >>> model.preprocessing.mean
    (0.485, 0.456, 0.406)

    Args:
        model: from `rope_jax.create_model`.
        where: path of a .safetensors, .npz or PyTorch file, or of a pickle of NumPy arrays, with
            names of a source or of parameters here; a folder that `save_pretrained` wrote; or a hub
            id "owner/name" (needs huggingface_hub), whose model.safetensors is used, or else its
            pytorch_model.bin.
        source: naming convention, see `convert_state_dict`; None for that of the file or of the
            hub's owner, or else the source that names most of the tensors.
        new_head: leave the model's head as it is, and print so, if the weights have none or one for
            other classes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a file of weights, or the weights do not fit the model (all problems
            in one message) or are not finite, so that the model is not changed, or a file of
            `save_pretrained` belongs to a different model of the same names and shapes.
        ImportError: the package that reads it is not installed.
    """
    with open_listed(where) as file:
        load_weights(model, file, source=source, new_head=new_head)


def load_weights(
    model: nnx.Module,
    file: WeightsFile,
    *,
    source: str | None = None,
    new_head: bool = False,
    other_model: Callable[[str], None] | None = None,
) -> None:
    """Loads an open file; arguments as in `load_pretrained`.

    `other_model` is called with the differences of a different model; None raises a ValueError.
    """
    file_head, _ = _heads(model, file)
    file = _extract_backbone(model, file)
    target, source, plan = _plan(model, file, source, new_head=new_head)
    if file.metadata is None:
        different = _unlike_listed(model, target, file)
    else:
        different = _unlike_saved(target, file, plan.backbone)
    if different:
        owner = "another model" if file.listed is None else file.listed.name
        message = f"{file.where!r} holds the weights of {owner}: {'; '.join(different)}"
        if other_model is None:
            raise ValueError(
                f"{message}. Create that model; rope_jax.convert_state_dict checks names and "
                "shapes only"
            )
        other_model(message)
    fill(target, plan, file.read, source, file.where)
    description = file.description
    usual = name_table(target, source).preprocessing
    model.preprocessing = (description and description.preprocessing) or file.preprocessing or usual
    report(model, plan, file_head, _epsilon(model, file) if plan.backbone else "")
    if usual is not None and description is None and file.preprocessing is None:
        print(
            f"preprocessing: {usual.crop_notation}, mean={usual.mean}, std={usual.std}, assumed "
            f"from the names of the weights, which are those of {source}"
        )
    if description is not None and model.num_classes and not (plan.backbone or plan.new_head):
        model.class_names = description.class_names


def _unlike_listed(model: nnx.Module, target: nnx.Module, file: WeightsFile) -> list[str]:
    """Differences of published weights' model, as far as names and shapes may not show them.

    Args:
        model: to be filled.
        target: it, or its backbone.
        file: of the weights.
    """
    listed = file.listed
    if listed is None:
        return []
    there = find_model(listed.name).options.override(listed.name, listed.options)
    related = type(there) is type(target.options)
    differences = [
        (name, getattr(there, name), getattr(target.options, name))
        for name in ("dilation", "dilations")
        if model.name != listed.name and related and hasattr(there, name)
    ]
    modules = [module for _, module in nnx.iter_modules(target)]
    borders = [module.border for module in modules if getattr(module, "border", None)]
    if borders and related and hasattr(there, "window_size"):  # from which `cpb` extends
        differences.append(("window_size", there.window_size, max(borders)[0] + 1))
    positions = [schemes_of_weights(text) for text in (listed.position, model.notation)]
    if positions[0] != positions[1]:
        differences.append(("position", listed.position, model.notation))
    return [f"{name} is {old} there and {new} here" for name, old, new in differences if old != new]


def _heads(model: nnx.Module, file: WeightsFile) -> tuple[str | None, str | None]:
    """Names of the heads of dense prediction of a file's model, where known, and of a model."""
    texts = (file.description and file.description.head, getattr(model, "head_notation", None))
    return tuple(text and parse(text, "head")[0].name for text in texts)


def _extract_backbone(model: nnx.Module, file: WeightsFile) -> WeightsFile:
    """Extracts the backbone of a file for another head, if it has names of parameters here."""
    file_head, model_head = _heads(model, file)
    if file.source != OWN or file_head in (None, model_head) or model_head is None:
        return file
    prefix = "backbone."
    shapes = {
        name.removeprefix(prefix): shape
        for name, shape in file.shapes.items()
        if name.startswith(prefix)
    }
    # The class of a model with a head differs; the names reveal backbones of other families.
    metadata = dataclasses.replace(
        file.metadata,
        family=family_name(model.backbone),
        description=dataclasses.replace(file.description, head=None),
    )
    read = lambda name: file.read(prefix + name)
    return dataclasses.replace(file, shapes=shapes, read=read, metadata=metadata)


def _epsilon(model: nnx.Module, file: WeightsFile) -> str:
    """The epsilon of a backbone's norms, if its weights were trained with another."""
    options = {} if file.metadata is None else file.metadata.options
    trained = options.get("norm_epsilon")
    new = getattr(model, "backbone", model).options.norm_epsilon
    return "" if trained in (None, new) else f", norm_epsilon={new:g}, trained with {trained:g}"


def _plan(
    model: nnx.Module,
    file: WeightsFile,
    source: str | None,
    *,
    new_head: bool,
    grids: Grids | None = None,
) -> tuple[nnx.Module, str, Conversion]:
    """The target of weights (the model or its backbone), the source of their names, and the plan.

    `grids` override those of the file. If several sources name the weights equally well, but pair
    channels for rotation differently, and all have other problems, the first one's are reported.

    Raises:
        ValueError: the names fit several such sources, one of them without any problem.
    """
    candidates = _candidates(model, file, source)
    pairings = {name_table(target, name).pairing for target, name in candidates if rotates(target)}
    unclear = source is None and len(pairings) > 1
    plans = [
        plan_conversion(
            target,
            file.shapes,
            source=name,
            grids=_grids(target, file, name) if grids is None else grids,
            new_head=new_head,
            backbone=target is not model,
        )
        for target, name in (candidates if unclear else candidates[:1])
    ]
    if unclear and not all(plan.problems for plan in plans):
        raise ValueError(
            f"the names of these weights fit the sources "
            f"{', '.join(name for _, name in candidates)}, which pair channels differently: say "
            "which by source= of rope_jax.convert_state_dict, or --source"
        )
    return *candidates[0], plans[0]


def _candidates(
    model: nnx.Module, file: WeightsFile, source: str | None
) -> list[tuple[nnx.Module, str]]:
    """Possible targets of weights (the model or its backbone), each with a source of their names.

    The source is the argument, else that of the file or of its hub's owner, else all that name
    most of the tensors, in the order of `SOURCES`.

    Raises:
        ValueError: they are those of another head, or of no known source.
    """
    file_head, model_head = _heads(model, file)
    if file_head not in (None, model_head):
        instead = "is a classifier" if model_head is None else f"has the head {model_head!r}"
        raise ValueError(
            f"{file.where!r} holds a model with the head {file_head!r}, and this model {instead}: "
            "use weights of the same head, of a classifier, or with names of rope_jax"
        )
    targets, source = [model], source or file.source
    if (backbone := getattr(model, "backbone", None)) is not None:
        classifier = file.description is not None and file_head is None
        targets = [backbone] if classifier else [model, backbone]
    candidates = [
        (target, name)
        for target in targets
        for name in (SOURCES if source is None else [source])
        if name in WHOLE or not hasattr(target, "backbone")
    ]
    if len(candidates) == 1:
        return candidates
    counts = [count_named(target, name, file.shapes) for target, name in candidates]
    if source is None and not any(max(counts)):
        names = ", ".join(sorted(file.shapes)[:3]) or "nothing"
        raise ValueError(
            f"{file.where!r} has no name that a parameter of this model has in a known source "
            f"({', '.join(SOURCES)}), but {names}: take the file of such a source"
        )
    return [pair for pair, count in zip(candidates, counts, strict=True) if count == max(counts)]


def _grids(model: nnx.Module, file: WeightsFile, source: str) -> Grids:
    """(rows, columns) of the map or window of a file's tables by name, where the file has them.

    Under the names that parameters have here, the map is that of the image size.
    """
    if source != OWN or file.description is None:
        return {} if file.metadata is None else file.metadata.grids
    try:
        grids = model.grids(file.description.image_size)
    except ValueError:  # other patches, whose shapes are refused
        return {}
    part_grids = dict(zip(model.parts(), grids, strict=True))
    names = [parameter_name(slot) for slot in list_slots(model) if slot.scheme is not None]
    return {
        name: grid
        for name in names
        for part, grid in part_grids.items()
        if name.startswith(f"{part}position.") and name in file.shapes
    }


def _unlike_saved(model: nnx.Module, file: WeightsFile, backbone: bool) -> list[str]:
    """Differences of saved weights' model.

    `backbone` is whether the model is that of a model of dense prediction.
    """
    other = file.metadata.differences(model, backbone=backbone)
    if file.source == OWN and file.description is not None and not other:
        # Under these names, order and pairing of the schemes are those of the model.
        saved, current = _schemes(file.description.position), _schemes(model.notation)
        other = [f"position is {saved} there and {current} here"] if saved != current else []
    return other


def _schemes(notation: str) -> list[str]:
    """Each part of a sum with the channels that it pairs."""
    calls = parse(notation, "position")
    return [f"{call.name}, {dict(call.options).get('pairing', 'half')}" for call in calls]


def save_pretrained(
    model: nnx.Module, path: str | os.PathLike, *, source: str | None = None
) -> None:
    """Writes a model: its weights, and metadata to create it by `rope_jax.create_model(path)`.

    The metadata are its name, options, position, classes and image size, and its preprocessing and
    class names, if any. The round trip is exact, and no other model loads the weights by mistake.

    >>> import tempfile
    >>> import rope_jax
    >>> small = {"width": 8, "heads": 1, "depth": 1, "image_size": 32, "num_classes": 2}
    >>> model = rope_jax.create_model("deit_ti16", position="rope2d", **small)
    >>> model.class_names = ("cat", "dog")
    >>> folder = tempfile.mkdtemp()
    >>> rope_jax.save_pretrained(model, folder)
    >>> again = rope_jax.create_model(folder)
    >>> again.name, again.notation, again.image_size, again.class_names
    ('deit_ti16', 'rope2d', (32, 32), ('cat', 'dog'))

    A model that was assembled from parts, such as a `PyramidBackbone`, has no name in
    `create_model`: assemble it again, and `load_pretrained` fills it.

    Args:
        model: from `rope_jax.create_model` or `rope_jax.load_checkpoint`, or assembled.
        path: of a .safetensors file, or of a folder, created if missing, for a model.safetensors.
        source: names and layouts of other code for the weights, see `convert_state_dict`; None for
            the names of parameters here, which every model has.

    Raises:
        ValueError: the source has no name for some of the parameters; the path has another
            extension.
        OSError: the file could not be written; a previous one is untouched.
    """
    path = os.fspath(path)
    if os.path.splitext(path)[1] in EXTENSIONS[1:]:
        raise ValueError(f"path={path!r} must end in .safetensors, or be a folder")
    source = source or OWN
    grids = {} if source == OWN else table_grids(model, source=source)
    state_dict = export_state_dict(model, source=source)
    write_safetensors(path, state_dict, source, Metadata.from_model(model, grids))
