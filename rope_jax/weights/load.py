"""Weights of files into models, and models into files."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx

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
from rope_jax.weights.files import EXTENSIONS, WeightsFile, open_weights, write_safetensors
from rope_jax.weights.links import slots_of
from rope_jax.weights.metadata import CLASSIFIER_OPTIONS, Metadata, family_of
from rope_jax.weights.own import OWN, own_name


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
            "ceit", "t2t", "cat", "dinov2", "dinov3" or "resformer"; for dense prediction
            "detectron2" (ViTDet), "detrex" (DINO), "vit_adapter", "mmseg", "segmenter" or
            "mask2former"; "rope_jax" for the names of parameters here. With those of classifiers
            the backbone of a model of dense prediction is filled.
        grids: (rows, columns) of the map or window of tables, by name. Other tables are taken to be
            square, as all official ones are, or else of the model's shape. Needed only for a table
            whose length allows both.
        new_head: leave the model's head as it is if the weights have none or one for other classes.

    Parameters that keep their initial weights are printed: of a new head, and what a model of dense
    prediction has beyond a classifier.

    Raises:
        ValueError: names or shapes that do not fit, all of them in one message, or a weight that is
            not finite; the model is not changed.
    """
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
        where: path of a .safetensors, .npz or PyTorch file, with torch's names or those of
            parameters here; a folder that `save_pretrained` wrote; or a hub id
            "owner/name" (needs huggingface_hub), whose model.safetensors is used, or else its
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
    with open_weights(where) as file:
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

    `other_model` is called with what differs in a different model, instead of raising a ValueError.
    """
    there, _ = _heads(model, file)
    file = _backbone_of(model, file)
    target, source, plan = _plan(model, file, source, new_head=new_head)
    if file.metadata is not None and (message := _other_model(target, file, plan.backbone)):
        if other_model is None:
            raise ValueError(f"{message}. {_advice(target, file.metadata.options)}")
        other_model(message)
    fill(target, plan, file.read, source, file.where)
    about = file.description
    usual = name_table(target, source).preprocessing
    model.preprocessing = (about and about.preprocessing) or file.preprocessing or usual
    report(model, plan, there, _epsilon(model, file) if plan.backbone else "")
    if about is not None and model.num_classes and not (plan.backbone or plan.new_head):
        model.class_names = about.class_names


def _heads(model: nnx.Module, file: WeightsFile) -> tuple[str | None, str | None]:
    """Names of the heads of dense prediction of a file's model, where known, and of a model."""
    texts = (file.description and file.description.head, getattr(model, "head_notation", None))
    there, here = (text and parse(text, "head")[0].name for text in texts)
    return there, here


def _backbone_of(model: nnx.Module, file: WeightsFile) -> WeightsFile:
    """The backbone alone of a file for another head, if it has names of parameters here."""
    there, here = _heads(model, file)
    if file.source != OWN or there in (None, here) or here is None:
        return file
    prefix = "backbone."
    shapes = {
        name.removeprefix(prefix): shape
        for name, shape in file.shapes.items()
        if name.startswith(prefix)
    }
    # A model with a head has a class of its own; the names tell backbones of other families.
    metadata = dataclasses.replace(
        file.metadata,
        family=family_of(model.backbone),
        description=dataclasses.replace(file.description, head=None),
    )
    read = lambda name: file.read(prefix + name)
    return dataclasses.replace(file, shapes=shapes, read=read, metadata=metadata)


def _epsilon(model: nnx.Module, file: WeightsFile) -> str:
    """The epsilon of a backbone's norms, if its weights were trained with another."""
    options = {} if file.metadata is None else file.metadata.options
    trained = options.get("norm_epsilon")
    own = getattr(model, "backbone", model).options.norm_epsilon
    return "" if trained in (None, own) else f", norm_epsilon={own:g}, trained with {trained:g}"


def _plan(
    model: nnx.Module,
    file: WeightsFile,
    source: str | None,
    *,
    new_head: bool,
    grids: Grids | None = None,
) -> tuple[nnx.Module, str, Conversion]:
    """The target of weights (the model or its backbone), the source of their names, and the plan.

    `grids` are those of the file, or as given. If several sources name the weights equally well,
    but pair channels for rotation differently, one that has other problems is as good as any: these
    are told.

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

    The source is the given one, else that of the file or of its hub's owner, else all that name
    most of the tensors, in the order of `SOURCES`.

    Raises:
        ValueError: they are those of another head, or of no known source.
    """
    there, here = _heads(model, file)
    if there not in (None, here):
        instead = "is a classifier" if here is None else f"has the head {here!r}"
        raise ValueError(
            f"{file.where!r} holds a model with the head {there!r}, and this model {instead}: "
            "use weights of the same head, of a classifier, or with names of rope_jax"
        )
    targets, source = [model], source or file.source
    if (backbone := getattr(model, "backbone", None)) is not None:
        classifier = file.description is not None and there is None
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
    """(rows, columns) of the map or window of a file's tables by name, as far as it says so.

    Under the names that parameters have here, the map is that of the image size.
    """
    if source != OWN or file.description is None:
        return {} if file.metadata is None else file.metadata.grids
    try:
        grids = model.grids(file.description.image_size)
    except ValueError:  # other patches, whose shapes are refused
        return {}
    of_part = dict(zip(model.parts(), grids, strict=True))
    names = [own_name(slot) for slot in slots_of(model) if slot.scheme is not None]
    return {
        name: grid
        for name in names
        for part, grid in of_part.items()
        if name.startswith(f"{part}position.") and name in file.shapes
    }


def _other_model(model: nnx.Module, file: WeightsFile, backbone: bool) -> str | None:
    """A message about weights of a different model; None for those of this one.

    `backbone` is whether the model is that of a model of dense prediction.
    """
    other = file.metadata.differences(model, backbone=backbone)
    if file.source == OWN and file.description is not None and not other:
        # Under these names, order and pairing of the schemes are those of the model.
        there, here = _schemes(file.description.position), _schemes(model.notation)
        other = [f"position is {there} there and {here} here"] if there != here else []
    if not other:
        return None
    return f"{file.where!r} holds the weights of another model: {'; '.join(other)}"


def _advice(model: nnx.Module, saved: Mapping[str, Any]) -> str:
    """Advice for weights of a model with other options."""
    here = dataclasses.asdict(model.options)
    both = [name for name in CLASSIFIER_OPTIONS if name in here and name in saved]
    there = {name: saved[name] for name in both if saved[name] != here[name]}
    if not there:
        return (
            "Create the model that was saved, or pass the arrays to rope_jax.convert_state_dict, "
            "which checks names and shapes only"
        )
    settings = ", ".join(f"{name}={value}" for name, value in there.items())
    head = ", or with a head of dense prediction" if all(there.values()) else ""
    return f"Create the model as it was saved, with {settings}{head}"


def _schemes(notation: str) -> list[str]:
    """Each part of a sum with the channels that it pairs."""
    calls = parse(notation, "position")
    return [f"{call.name}, {dict(call.options).get('pairing', 'half')}" for call in calls]


def save_pretrained(
    model: nnx.Module, path: str | os.PathLike, *, source: str | None = None
) -> None:
    """Writes a model: its weights, and what `rope_jax.create_model(path)` needs to create it again.

    That is its name, options, position, classes and image size, and the preprocessing and class
    names that it has. The round trip is exact, and no other model loads the weights by mistake.

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

    A model that was put together of parts, such as a `PyramidBackbone`, has no name in
    `create_model`: put it together again, and `load_pretrained` fills it.

    Args:
        model: from `rope_jax.create_model` or `rope_jax.load_checkpoint`, or put together.
        path: of a .safetensors file, or of a folder, created if missing, for a model.safetensors.
        source: names and layouts of other code for the weights, see `convert_state_dict`; None for
            the names of parameters here, which every model has.

    Raises:
        ValueError: the source has no name for some of the parameters; the path has another
            extension.
    """
    path = os.fspath(path)
    if os.path.splitext(path)[1] in EXTENSIONS[1:]:
        raise ValueError(f"path={path!r} must end in .safetensors, or be a folder")
    source = source or OWN
    grids = {} if source == OWN else table_grids(model, source=source)
    state_dict = export_state_dict(model, source=source)
    write_safetensors(path, state_dict, source, Metadata.of(model, grids))
