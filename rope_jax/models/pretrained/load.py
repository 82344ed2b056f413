"""Weights of files into models, and models into files."""

import dataclasses
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from rope_jax.models.pretrained.convert import (
    DENSE,
    SOURCES,
    export_state_dict,
    load_state_dict,
    name_table,
    plan_conversion,
    refuse,
    report,
    table_grids,
)
from rope_jax.models.pretrained.files import (
    EXTENSIONS,
    WeightsFile,
    open_weights,
    write_safetensors,
)
from rope_jax.models.pretrained.layouts import rotary_of
from rope_jax.models.pretrained.links import is_backbone
from rope_jax.models.pretrained.metadata import CLASSIFIER_OPTIONS, Metadata, family_of
from rope_jax.models.pretrained.own import (
    OWN,
    has_own_names,
    load_own,
    own_state_dict,
    plan_own,
)
from rope_jax.text import parse


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
        where: path of a .safetensors or .npz file, with torch's names or those of parameters here;
            a folder that `save_pretrained` wrote; the workdir of a run; or a hub id "owner/name"
            (needs huggingface_hub), whose model.safetensors is used.
        source: naming convention, see `convert_state_dict`, or "rope_jax" for names of parameters
            here; None for that of the file or of the hub's owner, or else the first source whose
            names fit.
        new_head: leave the model's head as it is, and print so, if the weights have none or one for
            other classes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a file of weights, or the weights do not fit the model (all problems
            in one message; the model is not changed), or a file of `save_pretrained` belongs to a
            different model with weights of the same names and shapes.
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
    target, source = _target(model, file, source)
    about, backbone = file.description, target is not model
    if source == OWN:
        size = None if about is None else about.image_size
        how = {"image_size": size, "new_head": new_head, "backbone": backbone}
        plan = plan_own(target, file.shapes, **how)
    else:
        grids = None if file.metadata is None else file.metadata.grids
        how = {"source": source, "grids": grids, "new_head": new_head}
        plan = plan_conversion(target, file.shapes, backbone=backbone, **how)
    backbone = backbone or is_backbone(target, plan.fresh)
    if file.metadata is not None and (message := _other_model(target, file, backbone)):
        if other_model is None:
            raise ValueError(f"{message}. {_advice(target, file.metadata.options)}")
        other_model(message)
    refuse(plan.problems, source)
    if source == OWN:
        load_own(target, file.read, plan)
        preprocessing = None
    else:
        wanted = [*(link.key for link in plan.links), *plan.frozen]
        load_state_dict(target, {key: file.read(key) for key in wanted}, **how)
        preprocessing = name_table(target, source).preprocessing
    described = about and about.preprocessing
    model.preprocessing = described or file.preprocessing or preprocessing
    epsilon = _epsilon(model, file) if backbone else ""
    if told := report(model, plan, backbone=backbone, head=there, epsilon=epsilon):
        print(told)
    if about is not None and model.num_classes and not (backbone or plan.new_head):
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


def _target(model: nnx.Module, file: WeightsFile, source: str | None) -> tuple[nnx.Module, str]:
    """What weights are for, the model or its backbone, and their source.

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
    backbone, source = getattr(model, "backbone", None), source or file.source
    targets = [model, backbone]
    if backbone is None or there is not None:
        targets = [model]
    elif file.description is not None:  # a classifier's
        targets = [backbone]
    own = next((target for target in targets if has_own_names(target, file.shapes)), None)
    if source is None and own is None:
        return _first_that_fits(model, targets, file)
    if source in (None, OWN):
        return targets[-1] if own is None else own, OWN
    return targets[0] if source in DENSE else targets[-1], source


def _other_model(model: nnx.Module, file: WeightsFile, backbone: bool) -> str | None:
    """What to tell about weights of a different model; None for those of this one.

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
    """What to do about weights of a model of other options."""
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


def _first_that_fits(
    model: nnx.Module, targets: Sequence[nnx.Module], file: WeightsFile
) -> tuple[nnx.Module, str]:
    """The target and the source of names with the fewest problems, the first of equal ones.

    Raises:
        ValueError: none has any of the names; or several fit, and pair channels for rotation
            differently.
    """
    plans = []
    for target in targets:
        for source in DENSE if hasattr(target, "backbone") else SOURCES:
            how = {"source": source, "backbone": target is not model}
            plan = plan_conversion(target, file.shapes, **how)
            if plan.links:
                plans.append((len(plan.problems), target, source))
    if not plans:
        names = ", ".join(sorted(file.shapes)[:3]) or "nothing"
        raise ValueError(
            f"{file.where!r} has no name that a parameter of this model has in a known source "
            f"({', '.join(SOURCES)}), but {names}: take the file of such a source"
        )
    fewest, target, first = min(plans, key=operator.itemgetter(0))
    best = [source for count, other, source in plans if count == fewest and other is target]
    pairings = {name_table(target, source).pairing for source in best}
    rotates = any(rotary_of(part.position) is not None for part in target.parts().values())
    if rotates and fewest == 0 and len(pairings) > 1:
        raise ValueError(
            f"the names of these weights fit the sources {', '.join(best)}, which pair channels "
            "differently: say which by source= of rope_jax.convert_state_dict, or --source"
        )
    return target, first


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
    if source is None:
        state_dict, grids = own_state_dict(model), {}
    else:
        state_dict = export_state_dict(model, source=source)
        grids = table_grids(model, source=source)
    write_safetensors(path, state_dict, source or OWN, Metadata.of(model, grids))
