"""Files of weights: safetensors and npz, from a path or a hub. Never a pickle: reading one can run any program.

What a file holds is known from its header. Names, shapes and dtypes are checked before any of its arrays is read.
"""

import contextlib
import dataclasses
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.models.pretrained.convert import (
    SOURCES,
    convert_state_dict,
    export_state_dict,
    plan_conversion,
    refuse,
    table_grids,
    table_of,
)
from rope_jax.models.pretrained.identity import Identity, identity_of
from rope_jax.models.pretrained.rows import has_stages
from rope_jax.models.pretrained.tensors import rotary_of

_HUB_FILE = "model.safetensors"
_HUB_SOURCES = {"timm": "timm"}  # whose names files of an organisation have
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EXTENSIONS = (".safetensors", ".npz", ".npy", ".pt", ".pth", ".bin", ".pkl", ".ckpt", ".tar")  # of paths; a hub id may hold dots, too
_IDENTITY = "rope_jax"  # under which a file's metadata say of what model the weights are
_INSTALL = "install the extra: pip install rope_jax[hub]"


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """An open file: shape and dtype of each tensor by name, and a function that reads one.

    Files of `save_pretrained` also say of which source their names are, and of which model the weights.
    """

    shapes: dict[str, tuple[tuple[int, ...], np.dtype]]
    read: Callable[[str], np.ndarray]
    source: str | None = None
    identity: Identity | None = None


def load_pretrained(model: nnx.Module, where: str | os.PathLike, *, source: str | None = None) -> None:
    """Puts the weights of a file into a model, and what they expect of images into `model.preprocessing`.

    Args:
        model: from `rope_jax.create_model`.
        where: path of a .safetensors or .npz file with torch's names, or a hub id "owner/name" (needs huggingface_hub), whose
            model.safetensors is taken.
        source: whose names they are, see `convert_state_dict`; None for what the file or the hub's owner says, or else the first source
            whose names fit.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such file, or the weights do not fit the model (all problems in one message; the model is left as it was).
            Or a file of `save_pretrained` is of a model that computes something else with weights of the same names and shapes.
        ImportError: the package that reads it is not installed.
    """
    path, owner = _find(os.fspath(where))
    with open_weights(path) as file:
        source = source or file.source or _HUB_SOURCES.get(owner) or _first_that_fits(model, file)
        grids = None
        if file.identity is not None:
            file.identity.check(model, path)
            grids = file.identity.grids
        plan = plan_conversion(model, file.shapes, source=source, grids=grids)
        refuse(plan.problems, source)
        wanted = [*(link.key for link in plan.links), *plan.frozen]
        convert_state_dict(model, {key: file.read(key) for key in wanted}, source=source, grids=grids)
    model.preprocessing = table_of(model, source).preprocessing


def save_pretrained(model: nnx.Module, path: str | os.PathLike, *, source: str) -> None:
    """Writes a model's weights into a .safetensors file with the names and layouts of `source`; loading them is exact.

    The file also says what the model is, so that no other one takes the weights by mistake.

    Raises:
        ValueError: the source has no name for some of the parameters, or the path does not end in .safetensors.
        ImportError: safetensors is not installed.
    """
    if not os.fspath(path).endswith(".safetensors"):
        raise ValueError(f"path={os.fspath(path)!r} must end in .safetensors")
    state_dict = export_state_dict(model, source=source)
    identity = identity_of(model, table_grids(model, source=source))
    metadata = {"format": "pt", "source": source, _IDENTITY: identity.to_json()}
    _safetensors().numpy.save_file(state_dict, path, metadata=metadata)


@contextlib.contextmanager
def open_weights(path: str) -> Iterator[WeightsFile]:
    """Opens a .safetensors or .npz file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is of another kind, or damaged.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"pretrained={path!r}: there is no such file")
    kind = os.path.splitext(path)[1]
    if kind == ".safetensors":
        with _open_safetensors(path) as file:
            yield file
    elif kind == ".npz":
        with _open_npz(path) as file:
            yield file
    else:
        raise ValueError(
            f"pretrained={path!r}: weights are read from .safetensors and .npz only, because pickles (.pt, .pth, .bin) can run programs: "
            "open it with torch.load(..., weights_only=True) and save its tensors with safetensors.torch.save_file"
        )


@contextlib.contextmanager
def _open_safetensors(path: str) -> Iterator[WeightsFile]:
    library = _safetensors()
    try:
        file = library.safe_open(path, framework="np")
    except library.SafetensorError as error:
        raise ValueError(f"pretrained={path!r} is not a safetensors file, or damaged: {error}") from None
    with file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (not a dictionary)
        shapes = {key: (tuple(s.get_shape()), jnp.dtype(_DTYPES.get(s.get_dtype(), "int8"))) for key, s in slices.items()}
        says = file.metadata() or {}
        identity = Identity.from_json(says[_IDENTITY], path) if _IDENTITY in says else None
        yield WeightsFile(shapes, file.get_tensor, says.get("source") if says.get("source") in SOURCES else None, identity)


@contextlib.contextmanager
def _open_npz(path: str) -> Iterator[WeightsFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            shapes = {name.removesuffix(".npy"): _npy_header(archive, name) for name in archive.namelist()}
        with np.load(path, allow_pickle=False) as arrays:
            yield WeightsFile(shapes, arrays.__getitem__)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"pretrained={path!r} is not an npz file, or damaged: {error}") from None


def _npy_header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    with archive.open(name) as file:
        try:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):  # later versions allow headers of any length, which numpy reads whole before it looks at them
                raise ValueError(f"npy files of version {version} are not read; write it with numpy.savez")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        except ValueError as error:
            raise zipfile.BadZipFile(f"{name}: {error}") from None
    return shape, dtype


def _find(where: str) -> tuple[str, str | None]:
    """Path of a file, and the owner of the hub's repository that it is from."""
    hub_id = re.fullmatch(r"([\w-][\w.-]*)/[\w-][\w.-]*", where)
    if os.path.exists(where) or not hub_id or os.path.splitext(where)[1] in _EXTENSIONS:
        return where, None
    return _download(where), hub_id[1].lower()


def _download(name: str) -> str:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(f"pretrained={name!r} is a hub id, which needs huggingface_hub: {_INSTALL}") from error
    try:
        return huggingface_hub.hf_hub_download(name, _HUB_FILE)
    except FileNotFoundError:  # it could not be asked, and says so
        raise
    except (huggingface_hub.utils.EntryNotFoundError, huggingface_hub.utils.RepositoryNotFoundError) as error:
        raise FileNotFoundError(
            f"pretrained={name!r}: the hub has no such repository, or no {_HUB_FILE} in it. Where weights are published as a pickle only, "
            "as naver-ai's are, open it with torch.load(..., weights_only=True), save its tensors with safetensors.torch.save_file, and "
            "give the path of that file"
        ) from error


def _safetensors():
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(f".safetensors files need safetensors: {_INSTALL}") from error
    return safetensors


def _first_that_fits(model: nnx.Module, file: WeightsFile) -> str:
    """The source with the fewest problems; the first of equal ones, unless they disagree on how channels are paired for rotation."""
    problems = {source: len(plan_conversion(model, file.shapes, source=source).problems) for source in SOURCES}
    best = [source for source in SOURCES if problems[source] == min(problems.values())]
    rotates = any(rotary_of(holder.position) is not None for holder in (model.stages if has_stages(model) else [model]))
    if rotates and problems[best[0]] == 0 and len({table_of(model, source).pairing for source in best}) > 1:
        raise ValueError(
            f"the names of these weights fit the sources {', '.join(best)}, which pair channels differently: say which with "
            "rope_jax.convert_state_dict(model, arrays, source=...)"
        )
    return best[0]
