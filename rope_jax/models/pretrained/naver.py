"""Names of naver-ai/rope-vit: DeiT-III and Swin with RoPE-Axial, RoPE-Mixed and their sums. Rotations are interleaved."""

import numpy as np
from flax import nnx

from rope_jax.models.pretrained import swin
from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Table, has_stages, isotropic
from rope_jax.models.pretrained.tensors import FLAT_FREQS, FREQS, TOKENS, rotary_of
from rope_jax.positions import PerLayer


def table(model: nnx.Module) -> Table:
    """Its ViTs see whole images, its Swins the central 224 of 256 pixels."""
    if has_stages(model):
        block = "layers.{s}.blocks.{j}"
        rows = [*swin.rows(), ("stages.{s}.position.rope_mixed.mixed.{j}", f"{block}.attn.rope_freqs", FREQS)]
        dropped = (*swin.DROPPED, f"{block}.attn.rope_t_x", f"{block}.attn.rope_t_y")
        return Table(rows, "interleaved", Preprocessing(), dropped, frozen=((f"{block}.attn.rope_freqs", _axial_freqs),))
    rows = [
        *isotropic(),
        ("position.ape.embedding", "pos_embed", TOKENS),
        ("position.rope_mixed.mixed", "freqs", FLAT_FREQS),
    ]
    return Table(rows, "interleaved", Preprocessing(crop=1.0), ("freqs_t_x", "freqs_t_y"))


def _axial_freqs(model: nnx.Module, numbers: dict[str, int], shape: tuple[int, ...]) -> np.ndarray | None:
    """Swin with RoPE-Axial stores its frequencies, of base 50, in every block: [2, N, R], x first."""
    if numbers["s"] >= len(model.stages):
        return None
    rotary = rotary_of(model.stages[numbers["s"]].position)
    freqs = None if rotary is None else rotary.freqs()
    if freqs is None or isinstance(freqs, PerLayer):
        return None
    freqs = np.broadcast_to(freqs, (rotary.stage.heads, *freqs.shape[1:]))
    return np.moveaxis(freqs[:, ::-1], 1, 0)
