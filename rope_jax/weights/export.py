"""Export of a model as one file that runs without this package: StableHLO with its weights."""

import dataclasses
import hashlib
import os
import pathlib
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
from flax import nnx

from rope_jax.names.options import convert
from rope_jax.names.text import image_pair
from rope_jax.system.files import open_regular, write_file

_SEAL = b"\nsha256 "  # after the program, which jax reads as if nothing followed
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(
    model: nnx.Module,
    path: str | os.PathLike,
    *,
    resolution: int | tuple[int, int],
    batch: int | None = None,
    platforms: tuple[str, ...] = PLATFORMS,
) -> None:
    """Writes a model as a compiled program that needs only jax to run.

    The file ends with a digest, which `load_exported` checks and `jax.export.deserialize` ignores.
    Attention and rotations use the "xla" implementation.

    The program of a model that detects objects takes images of one canvas, padded with 0 at the
    bottom and on the right, and their extents, int32 [B, 2] (rows, columns); it returns a
    dictionary of `boxes` [B, N, 4], corners x1, y1, x2, y2 in pixels of the canvas, `scores` and
    `classes` [B, N], the highest-scoring first; and of a model with masks `masks` [B, N, 28, 28],
    the probabilities of the cells of each box.

    >>> import pathlib, tempfile
    >>> import jax, jax.export, jax.numpy as jnp
    >>> import rope_jax
    >>> model = rope_jax.create_model("vit_digits", depth=1)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.bin"
    >>> rope_jax.export(model, path, resolution=8, batch=1, platforms=("cpu",))
    >>> program = jax.export.deserialize(path.read_bytes())
    >>> program.call(jnp.zeros((1, 8, 8, 3))).shape  # float32 [B, H, W, 3], normalised
    (1, 10)

    Args:
        model: from `rope_jax.create_model` or `load_checkpoint`.
        path: of the file, which is written atomically.
        resolution: of images in pixels, a side or (height, width); position tables are resized by
            their scheme's rule.
        batch: images per call; None leaves it open.
        platforms: platforms of the program: "cpu", "cuda", "rocm", "tpu".

    Raises:
        ValueError: the model cannot take images of that resolution, or a platform is unknown.
        ImportError: flatbuffers, which writes the file, is not installed: the extra `export`.
    """
    convert(platforms, tuple[Literal[*PLATFORMS], ...], "platforms")
    size = image_pair(resolution)
    copy = nnx.clone(model)
    copy.resize(size)
    graph, state = nnx.split(copy)
    images_in_call = jax.export.symbolic_shape("b")[0] if batch is None else batch
    inputs = [jax.ShapeDtypeStruct((images_in_call, *size, 3), jnp.float32)]
    if model.padded:
        inputs.append(jax.ShapeDtypeStruct((images_in_call, 2), jnp.int32))

    @jax.jit
    def forward(*inputs: jax.Array) -> Any:
        outputs = nnx.merge(graph, state)(*inputs)
        if not dataclasses.is_dataclass(outputs):
            return outputs
        return {name: x for name, x in vars(outputs).items() if x is not None}

    # With a CPU as default device, every part of the model uses its "xla" form.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        program = jax.export.export(forward, platforms=platforms)(*inputs)
    content = bytes(program.serialize())
    write_file(pathlib.Path(path), content + _SEAL + hashlib.sha256(content).hexdigest().encode())


def load_exported(path: str | os.PathLike) -> jax.export.Exported:
    """Reads a program that `export` wrote.

    >>> import pathlib, tempfile
    >>> import jax.numpy as jnp
    >>> import rope_jax
    >>> model = rope_jax.create_model("vit_digits", depth=1)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.bin"
    >>> rope_jax.export(model, path, resolution=8, batch=1, platforms=("cpu",))
    >>> rope_jax.load_exported(path).call(jnp.zeros((1, 8, 8, 3))).shape
    (1, 10)

    Args:
        path: of the file.

    Returns:
        The program; `.call(images)` runs it, or `.call(images, extent)` for padded images.

    Raises:
        ValueError: it is damaged, or not a file of `export`.
        OSError: it cannot be read.
        ImportError: flatbuffers, which reads the file, is not installed: the extra `export`.
    """
    with open_regular(path) as file:
        content, seal, digest = file.read().rpartition(_SEAL)
    if not seal or digest != hashlib.sha256(content).hexdigest().encode():
        raise ValueError(
            f"{os.fspath(path)} is damaged, or was not written by rope_jax.export: export it again"
        )
    return jax.export.deserialize(bytearray(content))
