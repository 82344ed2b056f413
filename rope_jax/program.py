"""A model as one file that runs without this package: StableHLO with its weights inside."""

import os
import pathlib

import jax
import jax.export
import jax.numpy as jnp
from flax import nnx

from rope_jax.models.registry import image_pair

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(
    model: nnx.Module,
    path: str | os.PathLike,
    *,
    resolution: int | tuple[int, int],
    batch: int | None = None,
    platforms: tuple[str, ...] = PLATFORMS,
) -> None:
    """Writes a model as a compiled program that needs jax alone to run, on any of `platforms`:

        program = jax.export.deserialize(pathlib.Path(path).read_bytes())
        logits = program.call(images)  # float32 [B, h, w, 3], normalised

    Attention and rotations are those of "xla"; the weights are part of the file.

    Args:
        model: from `rope_jax.create_model` or `load_checkpoint`.
        path: of the file, written whole or not at all.
        resolution: (h, w) of images in pixels, or one number; position tables are resized by their scheme's rule.
        batch: images in a call; None leaves it open.
        platforms: where the program is to run.

    Raises:
        ValueError: the model cannot take images of that resolution, or a platform is unknown.
        ImportError: flatbuffers, which writes the file, is not installed: the extra `export`.
    """
    if unknown := [name for name in platforms if name not in PLATFORMS]:
        raise ValueError(f"platforms={platforms}: {unknown[0]!r} is unknown; use some of {', '.join(PLATFORMS)}")
    size = image_pair(resolution)
    copy = nnx.clone(model)
    copy.resize(size)
    graph, state = nnx.split(copy)
    first = jax.export.symbolic_shape("b")[0] if batch is None else batch
    images = jax.ShapeDtypeStruct((first, *size, 3), jnp.float32)
    # Without a GPU in sight every part of the model takes its "xla" form, which runs everywhere.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        program = jax.export.export(jax.jit(lambda images: nnx.merge(graph, state)(images)), platforms=platforms)(images)
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(program.serialize())
    temporary.replace(path)
