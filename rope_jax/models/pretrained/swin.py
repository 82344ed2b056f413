"""Names of microsoft/Swin-Transformer."""

from flax import nnx

from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Row, Table, dense, hierarchical
from rope_jax.models.pretrained.tensors import TOKENS, WINDOW_OFFSETS

DROPPED = ("layers.{s}.blocks.{j}.attn_mask", "layers.{s}.blocks.{j}.attn.relative_position_index")


def rows(*, downsample: str = "layers.{s}.downsample", head: str = "head") -> list[Row]:
    """Swin and its kin: patch merging by a dense layer."""
    return [
        *hierarchical(downsample=downsample, head=head),
        *dense("stages.{s}.downsample.reduction", f"{downsample}.reduction"),
        ("stages.0.position.ape.embedding", "absolute_pos_embed", TOKENS),
        ("stages.{s}.position.rpb.offsets.{j}", "layers.{s}.blocks.{j}.attn.relative_position_bias_table", WINDOW_OFFSETS),
    ]


def table(model: nnx.Module) -> Table:
    """Evaluated on the central 224 of 256 pixels."""
    return Table(rows(), None, Preprocessing(), DROPPED)
