"""Files of weights: safetensors and npz, from a path or a hub.

Pickles are never loaded, because they can run any program. Names, shapes and dtypes are checked
from the header before any array is read.
"""

import contextlib
import dataclasses
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
from rope_jax.models.pretrained.metadata import Metadata
from rope_jax.npz import open_npz

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
_INSTALL = "install the extra: pip install rope_jax[hub]"


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """An open file of weights.

    Attributes:
        shapes: shape and dtype of each tensor by name.
        read: reads one tensor.
        source: naming convention, if the file was written by `save_pretrained`.
        metadata: of the model, likewise.
    """

    shapes: dict[str, tuple[tuple[int, ...], np.dtype]]
    read: Callable[[str], np.ndarray]
    source: str | None = None
    metadata: Metadata | None = None


def load_pretrained(
    model: nnx.Module, where: str | os.PathLike, *, source: str | None = None
) -> None:
    """Loads a file of weights into a model and sets `model.preprocessing`.

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
        where: path of a .safetensors or .npz file with torch's names, or a hub id "owner/name"
            (needs huggingface_hub), whose model.safetensors is used.
        source: naming convention, see `convert_state_dict`; None for that of the file or of the
            hub's owner, or else the first source whose names fit.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a file of weights, or the weights do not fit the model (all problems
            in one message; the model is not changed), or a file of `save_pretrained` belongs to a
            different model with weights of the same names and shapes.
        ImportError: the package that reads it is not installed.
    """
    path, owner = _find(os.fspath(where))
    with open_weights(path) as file:
        source = source or file.source or _HUB_SOURCES.get(owner) or _first_that_fits(model, file)
        grids = None
        if file.metadata is not None:
            file.metadata.check(model, path)
            grids = file.metadata.grids
        conversion = plan_conversion(model, file.shapes, source=source, grids=grids)
        refuse(conversion.problems, source)
        wanted = [*(link.key for link in conversion.links), *conversion.frozen]
        state_dict = {key: file.read(key) for key in wanted}
        convert_state_dict(model, state_dict, source=source, grids=grids)
    model.preprocessing = name_table(model, source).preprocessing


def save_pretrained(model: nnx.Module, path: str | os.PathLike, *, source: str) -> None:
    """Writes a model's weights with the names and layouts of a source; the round trip is exact.

    The file also describes the model, so that no other model loads the weights by mistake.

    >>> import tempfile
    >>> import rope_jax
    >>> small = {"width": 8, "heads": 1, "depth": 1, "image_size": 32, "num_classes": 2}
    >>> path = f"{tempfile.mkdtemp()}/weights.safetensors"
    >>> save_pretrained(rope_jax.create_model("deit_ti16", **small), path, source="timm")
    >>> with open_weights(path) as file:
    ...     file.source, file.shapes["head.weight"][0]
    ('timm', (2, 8))

    Args:
        model: from `rope_jax.create_model`.
        path: of a .safetensors file.
        source: see `convert_state_dict`.

    Raises:
        ValueError: the source has no name for some of the parameters, or the path has another
            extension.
        ImportError: safetensors is not installed.
    """
    if not os.fspath(path).endswith(".safetensors"):
        raise ValueError(f"path={os.fspath(path)!r} must end in .safetensors")
    state_dict = export_state_dict(model, source=source)
    described = Metadata.of(model, table_grids(model, source=source)).to_json()
    metadata = {"format": "pt", "source": source, _METADATA: described}
    _safetensors().numpy.save_file(state_dict, path, metadata=metadata)


@contextlib.contextmanager
def open_weights(path: str) -> Iterator[WeightsFile]:
    """Opens a .safetensors or .npz file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another format, or is damaged.
    """
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
        source = entries.get("source") if entries.get("source") in SOURCES else None
        described = entries.get(_METADATA)
        metadata = None if described is None else Metadata.from_json(described, path)
        yield WeightsFile(shapes, file.get_tensor, source, metadata)


def _find(where: str) -> tuple[str, str | None]:
    """Path of a file, and the owner of the hub repository that it comes from."""
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


def _safetensors():
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(f".safetensors files need safetensors: {_INSTALL}") from error
    return safetensors


def _first_that_fits(model: nnx.Module, file: WeightsFile) -> str:
    """The source with the fewest problems, the first of equal ones.

    Raises:
        ValueError: several sources fit, and pair channels for rotation differently.
    """
    problems = {
        source: len(plan_conversion(model, file.shapes, source=source).problems)
        for source in SOURCES
    }
    fewest = min(problems.values())
    best = [source for source in SOURCES if problems[source] == fewest]
    pairings = {name_table(model, source).pairing for source in best}
    rotates = any(rotary_of(part.position) is not None for part in model.parts().values())
    if rotates and fewest == 0 and len(pairings) > 1:
        raise ValueError(
            f"the names of these weights fit the sources {', '.join(best)}, which pair channels "
            "differently: say which with rope_jax.convert_state_dict(model, arrays, source=...)"
        )
    return best[0]
