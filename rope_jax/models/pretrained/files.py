"""Files of weights: safetensors and npz, from a path, a folder or a hub.

Pickles are never loaded, because they can run any program. Names, shapes and dtypes are checked
from the header before any array is read.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.models.pretrained.convert import (
    SOURCES,
    convert_state_dict,
    export_state_dict,
    name_table,
    plan_conversion,
    refuse,
    table_grids,
)
from rope_jax.models.pretrained.layouts import rotary_of
from rope_jax.models.pretrained.metadata import Description, Metadata
from rope_jax.models.pretrained.own import OWN, has_own_names, load_own, own_state_dict, plan_own
from rope_jax.models.pretrained.tables import Preprocessing
from rope_jax.npz import open_npz
from rope_jax.text import parse

_HUB_FILE = "model.safetensors"
_HUB_SOURCES = {"timm": "timm"}  # source of the files of an organisation
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Of paths; a hub id may contain dots, too.
_EXTENSIONS = (".safetensors", ".npz", ".npy", ".pt", ".pth", ".bin", ".pkl", ".ckpt", ".tar")
_METADATA = "rope_jax"  # entry of a file's metadata that describes the model
_FROM_PICKLE = (
    "open it with torch.load(..., weights_only=True) and save its tensors with "
    "safetensors.torch.save_file"
)
_INSTALL = "install the extra: pip install 'rope_jax[hub]'"


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """An open file of weights.

    Attributes:
        shapes: shape and dtype of each tensor by name.
        read: reads one tensor.
        source: naming convention, if the file was written by `save_pretrained`.
        metadata: of the model, likewise.
        where: path or hub id, for error messages.
        preprocessing: of the hub repository's evaluation, where its config.json has timm's.
    """

    shapes: dict[str, tuple[tuple[int, ...], np.dtype]]
    read: Callable[[str], np.ndarray]
    source: str | None = None
    metadata: Metadata | None = None
    where: str = ""
    preprocessing: Preprocessing | None = None

    @property
    def description(self) -> Description | None:
        """All that creates the model of the weights again, if the file has it."""
        return None if self.metadata is None else self.metadata.description


FOLDERS: list[Callable[[str], contextlib.AbstractContextManager[WeightsFile] | None]] = []
"""Functions that open a folder of weights of another kind (a run's), or return None."""


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
    if file.metadata is not None and (message := _other_model(model, file)):
        if other_model is None:
            raise ValueError(
                f"{message}. Create the model that was saved, or pass the arrays to "
                "rope_jax.convert_state_dict, which checks names and shapes only"
            )
        other_model(message)
    source = source or file.source or _first_that_fits(model, file)
    about = file.description
    if source == OWN:
        size = None if about is None else about.image_size
        plan = plan_own(model, file.shapes, image_size=size, new_head=new_head)
        refuse(plan.problems, source)
        load_own(model, file.read, plan)
        preprocessing = None
    else:
        grids = None if file.metadata is None else file.metadata.grids
        how = {"source": source, "grids": grids, "new_head": new_head}
        plan = plan_conversion(model, file.shapes, **how)
        refuse(plan.problems, source)
        wanted = [*(link.key for link in plan.links), *plan.frozen]
        convert_state_dict(model, {key: file.read(key) for key in wanted}, **how)
        preprocessing = name_table(model, source).preprocessing
    described = about and about.preprocessing
    model.preprocessing = described or file.preprocessing or preprocessing
    if plan.new_head:
        print(f"head: new, {model.num_classes} classes")
    elif about is not None and model.num_classes:
        model.class_names = about.class_names


def _other_model(model: nnx.Module, file: WeightsFile) -> str | None:
    """What to tell about weights of a different model; None for those of this one."""
    other = file.metadata.differences(model)
    if file.source == OWN and file.description is not None and not other:
        # Under these names, order and pairing of the schemes are those of the model.
        there, here = _schemes(file.description.position), _schemes(model.notation)
        other = [f"position is {there} there and {here} here"] if there != here else []
    if not other:
        return None
    return f"{file.where!r} holds the weights of another model: {'; '.join(other)}"


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

    Args:
        model: from `rope_jax.create_model` or `rope_jax.load_checkpoint`.
        path: of a .safetensors file, or of a folder, created if missing, for a model.safetensors.
        source: names and layouts of other code for the weights, see `convert_state_dict`; None for
            the names of parameters here, which every model has.

    Raises:
        ValueError: the source has no name for some of the parameters; the path has another
            extension; the model was not created by `create_model`.
    """
    path = os.fspath(path)
    if os.path.splitext(path)[1] in _EXTENSIONS[1:]:
        raise ValueError(f"path={path!r} must end in .safetensors, or be a folder")
    if source is None:
        state_dict, grids = own_state_dict(model), {}
    else:
        state_dict = export_state_dict(model, source=source)
        grids = table_grids(model, source=source)
    metadata = Metadata.of(model, grids)
    if metadata.description is None:
        raise ValueError("the model was not created by rope_jax.create_model: create it so")
    library = _safetensors()
    if not path.endswith(".safetensors"):
        os.makedirs(path, exist_ok=True)
        path = os.path.join(path, _HUB_FILE)
    entries = {"format": "pt", "source": source or OWN, _METADATA: metadata.to_json()}
    temporary = f"{path}.tmp"
    try:
        library.numpy.save_file(state_dict, temporary, metadata=entries)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


@contextlib.contextmanager
def open_weights(where: str | os.PathLike) -> Iterator[WeightsFile]:
    """Opens weights, see `load_pretrained`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another format, or is damaged.
        ImportError: the package that reads it is not installed.
    """
    where = os.fspath(where)
    with contextlib.ExitStack() as stack:
        folders = (opened(where) for opened in FOLDERS if os.path.isdir(where))
        folder = next(filter(None, folders), None)
        if folder is not None:
            yield stack.enter_context(folder)
            return
        path, owner = _find(where)
        file = stack.enter_context(_open_file(path))
        source = file.source or _HUB_SOURCES.get(owner)
        preprocessing = None if owner is None else _hub_preprocessing(where)
        yield dataclasses.replace(file, source=source, where=where, preprocessing=preprocessing)


@contextlib.contextmanager
def _open_file(path: str) -> Iterator[WeightsFile]:
    """Opens a .safetensors or .npz file."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"pretrained={path!r}: there is no such file")
    kind = os.path.splitext(path)[1]
    if kind == ".safetensors":
        with _open_safetensors(path) as file:
            yield file
    elif kind == ".npz":
        with open_npz(path) as file:
            yield WeightsFile(file.shapes, file.read)
    else:
        raise ValueError(
            f"pretrained={path!r}: weights are read from .safetensors and .npz only, because "
            f"pickles (.pt, .pth, .bin) can run programs: {_FROM_PICKLE}"
        )


@contextlib.contextmanager
def _open_safetensors(path: str) -> Iterator[WeightsFile]:
    library = _safetensors()
    try:
        file = library.safe_open(path, framework="np")
    except library.SafetensorError as error:
        raise ValueError(
            f"pretrained={path!r} is not a safetensors file, or damaged: {error}"
        ) from None
    with file:
        names = file.keys()
        slices = {name: file.get_slice(name) for name in names}
        shapes = {
            key: (tuple(s.get_shape()), jnp.dtype(_DTYPES.get(s.get_dtype(), "int8")))
            for key, s in slices.items()
        }
        entries = file.metadata() or {}
        source = entries.get("source") if entries.get("source") in (*SOURCES, OWN) else None
        described = entries.get(_METADATA)
        metadata = None if described is None else Metadata.from_json(described, path)
        yield WeightsFile(shapes, file.get_tensor, source, metadata)


def _find(where: str) -> tuple[str, str | None]:
    """Path of a file, and the owner of the hub repository that it comes from."""
    if os.path.isdir(where):
        path = os.path.join(where, _HUB_FILE)
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"pretrained={where!r} is a folder without {_HUB_FILE} or checkpoints: name one "
                "that rope_jax.save_pretrained or a run of rope_jax.main wrote, or a file"
            )
        return path, None
    hub_id = re.fullmatch(r"([\w-][\w.-]*)/[\w-][\w.-]*", where)
    if os.path.exists(where) or not hub_id or os.path.splitext(where)[1] in _EXTENSIONS:
        return where, None
    return _download(where), hub_id[1].lower()


def _download(name: str) -> str:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"pretrained={name!r} is a hub id, which needs huggingface_hub: {_INSTALL}"
        ) from error
    try:
        return huggingface_hub.hf_hub_download(name, _HUB_FILE)
    except FileNotFoundError:  # the hub could not be reached
        raise
    except (
        huggingface_hub.utils.EntryNotFoundError,
        huggingface_hub.utils.RepositoryNotFoundError,
    ) as error:
        raise FileNotFoundError(
            f"pretrained={name!r}: the hub has no such repository, or no {_HUB_FILE} in it. For "
            f"weights that are published as a pickle only, as naver-ai's are, {_FROM_PICKLE}, and "
            "pass the path of that file"
        ) from error


def _hub_preprocessing(name: str) -> Preprocessing | None:
    """The preprocessing in the config.json of a timm repository; None if there is none."""
    import huggingface_hub

    try:
        with open(huggingface_hub.hf_hub_download(name, "config.json"), encoding="utf-8") as file:
            about = json.load(file)["pretrained_cfg"]
        mean, std = (tuple(map(float, about[key])) for key in ("mean", "std"))
        return Preprocessing(mean, std, float(about["crop_pct"]), str(about["interpolation"]))
    except (FileNotFoundError, huggingface_hub.utils.EntryNotFoundError):
        return None
    except (KeyError, TypeError, ValueError):  # another library's names
        return None


def _safetensors():
    """The package, imported where it is used: `import rope_jax` stays fast."""
    import safetensors.numpy

    return safetensors


def _first_that_fits(model: nnx.Module, file: WeightsFile) -> str:
    """The source with the fewest problems, the first of equal ones.

    Raises:
        ValueError: none has any of the names; or several fit, and pair channels for rotation
            differently.
    """
    if has_own_names(model, file.shapes):
        return OWN
    plans = {source: plan_conversion(model, file.shapes, source=source) for source in SOURCES}
    if not any(plan.links for plan in plans.values()):
        names = ", ".join(sorted(file.shapes)[:3]) or "nothing"
        raise ValueError(
            f"{file.where!r} has no name that a parameter of this model has in a known source "
            f"({', '.join(SOURCES)}), but {names}: take the file of such a source"
        )
    problems = {source: len(plan.problems) for source, plan in plans.items()}
    fewest = min(problems.values())
    best = [source for source in SOURCES if problems[source] == fewest]
    pairings = {name_table(model, source).pairing for source in best}
    rotates = any(rotary_of(part.position) is not None for part in model.parts().values())
    if rotates and fewest == 0 and len(pairings) > 1:
        raise ValueError(
            f"the names of these weights fit the sources {', '.join(best)}, which pair channels "
            "differently: say which by source= of rope_jax.convert_state_dict, or --source"
        )
    return best[0]
