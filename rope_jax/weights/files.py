"""Files of weights: safetensors, npz and PyTorch's own, from a path, a folder or a hub.

Nothing in a file is ever run. Names, shapes and dtypes are checked before any array is read.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

from rope_jax.models.description import Description, Preprocessing
from rope_jax.system.files import write_file
from rope_jax.system.npz import open_npz
from rope_jax.weights.convert import SOURCES
from rope_jax.weights.download import hub_file
from rope_jax.weights.metadata import Metadata
from rope_jax.weights.torch_files import open_torch

HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # the first that a repository has
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TORCH = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl")
# Of paths; a hub id may contain dots, too.
EXTENSIONS = (".safetensors", ".npz", ".npy", *TORCH)
_METADATA = "rope_jax"  # entry of a file's metadata that describes the model


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """An open file of weights.

    Attributes:
        shapes: shape and dtype of each tensor by name.
        read: reads one tensor.
        source: naming convention, if the file was written by `save_pretrained`.
        metadata: of the model, likewise.
        where: path or hub id, for error messages.
        preprocessing: of the weights' evaluation, where their hub repository or the list of
            published weights has it.
        listed: the arguments of `create_model` for published weights.
        path: of the file.
    """

    shapes: dict[str, tuple[tuple[int, ...], np.dtype]]
    read: Callable[[str], np.ndarray]
    source: str | None = None
    metadata: Metadata | None = None
    where: str = ""
    preprocessing: Preprocessing | None = None
    listed: Description | None = None
    path: str | None = None

    @property
    def description(self) -> Description | None:
        """The arguments that create the model of the weights, if they are known."""
        return self.listed if self.metadata is None else self.metadata.description


@contextlib.contextmanager
def open_weights(where: str | os.PathLike | WeightsFile) -> Iterator[WeightsFile]:
    """Opens weights, see `load.load_pretrained`; an open file is returned as it is.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another format, or is damaged.
        ImportError: the package that reads it is not installed.
    """
    if isinstance(where, WeightsFile):
        yield where
        return
    where = plain_hub_id(os.fspath(where))
    path, owner = _find(where)
    with _open_file(path) as file:
        yield dataclasses.replace(
            file,
            source=file.source or ("timm" if owner == "timm" else None),
            where=where,
            preprocessing=None if owner is None else _hub_preprocessing(where),
            path=path,
        )


@contextlib.contextmanager
def _open_file(path: str) -> Iterator[WeightsFile]:
    """Opens a file by its extension."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"pretrained={path!r}: there is no such file")
    kind = os.path.splitext(path)[1]
    if kind == ".safetensors":
        with _open_safetensors(path) as file:
            yield file
    elif kind in (".npz", *TORCH):
        with open_npz(path) if kind == ".npz" else open_torch(path) as file:
            yield WeightsFile(file.shapes, file.read)
    else:
        raise ValueError(
            f"pretrained={path!r}: weights are read from .safetensors, .npz and PyTorch's files "
            f"({', '.join(TORCH)})"
        )


@contextlib.contextmanager
def _open_safetensors(path: str) -> Iterator[WeightsFile]:
    import safetensors

    try:
        file = safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
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


def plain_hub_id(where: str) -> str:
    """A hub id without timm's prefix.

    >>> plain_hub_id("hf-hub:timm/deit_tiny_patch16_224.fb_in1k")
    'timm/deit_tiny_patch16_224.fb_in1k'
    """
    return re.sub("^hf[-_]hub:", "", where)


def _find(where: str) -> tuple[str, str | None]:
    """Path of a file, and the owner of the hub repository that it comes from."""
    if os.path.isdir(where):
        for name in HUB_FILES:
            if os.path.isfile(path := os.path.join(where, name)):
                return path, None
        raise FileNotFoundError(
            f"pretrained={where!r} is a folder without {HUB_FILES[0]}: name one that "
            "rope_jax.save_pretrained wrote, or a file; rope_jax.create_model and "
            "rope_jax.load_checkpoint open the WORKDIR of a run"
        )
    hub_id = re.fullmatch(r"([\w-][\w.-]*)/[\w-][\w.-]*", where)
    if os.path.exists(where) or not hub_id or os.path.splitext(where)[1] in EXTENSIONS:
        return where, None
    return hub_file(where, HUB_FILES), hub_id[1].lower()


def write_safetensors(
    path: str, state_dict: dict[str, np.ndarray], source: str, metadata: Metadata
) -> None:
    """Writes a .safetensors file, or model.safetensors into a folder; folders may be new.

    Args:
        path: of the file or folder.
        state_dict: tensors by name.
        source: the naming convention.
        metadata: of the model.
    """
    import safetensors.numpy

    file = pathlib.Path(path if path.endswith(".safetensors") else os.path.join(path, HUB_FILES[0]))
    file.parent.mkdir(parents=True, exist_ok=True)
    entries = {"format": "pt", "source": source, _METADATA: metadata.to_json()}
    write_file(file, safetensors.numpy.save(state_dict, metadata=entries))


def _hub_preprocessing(name: str) -> Preprocessing | None:
    """The preprocessing in a repository of timm or transformers; None if there is none."""
    for file, parse in _CONFIGS.items():
        try:
            with open(hub_file(name, [file]), encoding="utf-8") as config:
                return parse(json.load(config))
        except (
            ArithmeticError,
            AttributeError,
            FileNotFoundError,
            KeyError,  # another library's names
            TypeError,
            ValueError,
        ):
            continue
    return None


def _timm_preprocessing(entries: dict) -> Preprocessing:
    entries = entries["pretrained_cfg"]
    mean, std = (tuple(map(float, entries[key])) for key in ("mean", "std"))
    return Preprocessing(mean, std, float(entries["crop_pct"]), str(entries["interpolation"]))


def _transformers_preprocessing(entries: dict) -> Preprocessing:
    """The preprocessing of an image processor; without a crop, images are resized to a square."""
    mean, std = (tuple(map(float, entries[f"image_{key}"])) for key in ("mean", "std"))
    crop = float(entries.get("crop_pct") or 0.0)
    if entries.get("do_center_crop"):
        crop = _side(entries["crop_size"]) / _side(entries["size"])
    return Preprocessing(mean, std, crop, _INTERPOLATIONS[entries["resample"]])


def _side(size: int | dict[str, int]) -> int:
    return size if isinstance(size, int) else size.get("shortest_edge") or size["height"]


_CONFIGS = {
    "config.json": _timm_preprocessing,
    "preprocessor_config.json": _transformers_preprocessing,
}
_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}  # as Pillow counts them
