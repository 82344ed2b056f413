"""Names of Ingrid725/LaPE: DeiT with one more layer norm in each block."""

import numpy as np
from flax import nnx

from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Table, isotropic
from rope_jax.models.pretrained.tensors import SAME, TOKENS, square
from rope_jax.positions.absolute import Absolute, Learned


def table(model: nnx.Module) -> Table:
    """Sinusoids are in its files, as frozen tables of [T, C]."""
    rows = [
        *isotropic(),
        ("position.ape.embedding", "pos_embed", TOKENS),
        ("position.lape.scale.{i}", "blocks.{i}.pe_norm.weight", SAME),
        ("position.lape.bias.{i}", "blocks.{i}.pe_norm.bias", SAME),
    ]
    return Table(rows, None, Preprocessing(), frozen=(("pos_embed", _sinusoids),))


def _sinusoids(model: nnx.Module, numbers: dict[str, int], shape: tuple[int, ...]) -> np.ndarray | None:
    position = getattr(model, "position", None)
    scheme = getattr(position, "inner", position)
    if not isinstance(scheme, Absolute) or isinstance(scheme, Learned):
        return None
    if len(shape) != 2 or shape[1] != scheme.stage.channels or shape[0] > 2**16:  # a file may claim any shape
        return None
    return np.asarray(scheme.table(square(shape[0] - scheme.stage.embed_prefix) or scheme.stage.grid))
