"""Name tables of sources with hierarchical backbones: one function per source."""

import numpy as np
from flax import nnx

from rope_jax.positions import PerLayer
from rope_jax.positions.relative import ContinuousBias
from rope_jax.weights.layouts import (
    FLAT_FREQS,
    FREQS,
    OFFSETS,
    Q_BIAS,
    TOKENS,
    V_BIAS,
    WINDOW_OFFSETS,
    find_rotary,
)
from rope_jax.weights.tables import (
    APE,
    Frozen,
    Preprocessing,
    Row,
    Table,
    conv,
    cosine_attention,
    dense,
    hierarchical,
    isotropic,
)

_BLOCK = "layers.{s}.blocks.{j}"


def swin_rows(*, downsample: str = "layers.{s}.downsample", head: str = "head") -> list[Row]:
    """Rows of Swin, Swin V2 and other backbones with patch merging by a linear layer."""
    qv_bias = "stages.{s}.blocks.{j}.attn.qv_bias"
    offsets = f"{_BLOCK}.attn.relative_position_bias_table"
    return [
        *hierarchical(downsample=downsample, head=head),
        *dense("stages.{s}.downsample.reduction", f"{downsample}.reduction"),
        ("stages.0.position.ape.embedding", "absolute_pos_embed", TOKENS),
        ("stages.{s}.position.rpb.offsets.{j}", offsets, WINDOW_OFFSETS),
        (qv_bias, f"{_BLOCK}.attn.q_bias", Q_BIAS),
        (qv_bias, f"{_BLOCK}.attn.v_bias", V_BIAS),
        *cosine_attention(f"{_BLOCK}.attn", "cpb_mlp"),
    ]


def _offset_coords(
    model: nnx.Module, numbers: dict[str, int], shape: tuple[int, ...]
) -> np.ndarray | None:
    """Offsets of Swin V2's bias, [1, 2h-1, 2w-1, 2]; they depend on the window of pretraining."""
    stages = getattr(model, "stages", ())
    if numbers["s"] >= len(stages) or len(shape) != 4:
        return None
    schemes = stages[numbers["s"]].position.schemes()
    cpb = next((scheme for scheme in schemes if isinstance(scheme, ContinuousBias)), None)
    return None if cpb is None else cpb.coords(((shape[1] + 1) // 2, (shape[2] + 1) // 2))[None]


SWIN_FROZEN: tuple[tuple[str, Frozen], ...] = (
    (f"{_BLOCK}.attn.relative_coords_table", _offset_coords),
)


def swin(model: nnx.Module) -> Table:
    """microsoft/Swin-Transformer, V1 and V2; evaluated on the central 224 of 256 pixels."""
    return Table(swin_rows(), frozen=SWIN_FROZEN)


def nat(model: nnx.Module) -> Table:
    """SHI-Labs/Neighborhood-Attention-Transformer: NAT, DiNAT, their -s forms, isotropic ViTs.

    Stages are named levels in NAT and layers in the -s forms; so are the blocks of isotropic
    models. Rotations are the thesis' (equation 3.2), added to this code.
    """
    if not model.hierarchical:
        rows = isotropic(blocks="layers.{i}")
        rows.append(("position.rpb.offsets.{i}", "layers.{i}.attn.rpb", OFFSETS))
        return Table(rows, "half")
    patches = hasattr(model.patch_embed.proj, "kernel")
    stage, reduction = ("layers.{s}", dense) if patches else ("levels.{s}", conv)
    rows = hierarchical(stages=stage, downsample=f"{stage}.downsample")
    rows += reduction("stages.{s}.downsample.reduction", f"{stage}.downsample.reduction")
    offsets = f"{stage}.blocks.{{j}}.attn.rpb"
    rows.append(("stages.{s}.position.rpb.offsets.{j}", offsets, OFFSETS))
    return Table(rows, "half")


def naver(model: nnx.Module) -> Table:
    """naver-ai/rope-vit: DeiT-III and Swin with RoPE-Axial, RoPE-Mixed and their sums.

    Rotations are interleaved. Its ViTs are evaluated on whole images, its Swins on the central 224
    of 256 pixels.
    """
    if not model.hierarchical:
        rows = [*isotropic(), APE, ("position.rope_mixed.mixed", "freqs", FLAT_FREQS)]
        dropped = ("freqs_t_x", "freqs_t_y")
        return Table(rows, "interleaved", Preprocessing(crop=1.0), dropped)
    freqs = f"{_BLOCK}.attn.rope_freqs"
    rows = [*swin_rows(), ("stages.{s}.position.rope_mixed.mixed.{j}", freqs, FREQS)]
    dropped = (f"{_BLOCK}.attn.rope_t_x", f"{_BLOCK}.attn.rope_t_y")
    return Table(rows, "interleaved", dropped=dropped, frozen=((freqs, _axial_freqs),))


def _axial_freqs(
    model: nnx.Module, numbers: dict[str, int], shape: tuple[int, ...]
) -> np.ndarray | None:
    """Frequencies of Swin with RoPE-Axial, which are stored in every block: [2, N, R], x first."""
    if numbers["s"] >= len(model.stages):
        return None
    rotary = find_rotary(model.stages[numbers["s"]].position)
    freqs = None if rotary is None else rotary.freqs()
    if freqs is None or isinstance(freqs, PerLayer):
        return None
    freqs = np.broadcast_to(freqs, (rotary.stage.heads, *freqs.shape[1:]))
    return np.moveaxis(freqs[:, ::-1], 1, 0)
