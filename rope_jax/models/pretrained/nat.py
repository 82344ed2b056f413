"""Names of SHI-Labs/Neighborhood-Attention-Transformer: NAT, DiNAT, their -s forms, and the isotropic ViTs of its isotropic.py."""

from flax import nnx

from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Table, conv, dense, has_stages, hierarchical, isotropic
from rope_jax.models.pretrained.tensors import OFFSETS


def table(model: nnx.Module) -> Table:
    """NAT calls its stages levels, the -s forms call them layers, and isotropic models so call their blocks.

    Rotations are the thesis' (equation 3.2), which put them into this code.
    """
    if not has_stages(model):
        rows = [*isotropic(blocks="layers.{i}"), ("position.rpb.offsets.{i}", "layers.{i}.attn.rpb", OFFSETS)]
        return Table(rows, "half", Preprocessing(), ("layers.{i}.attn.relative_position_index",))
    patches = hasattr(model.patch_embed.proj, "kernel")
    stages = "layers.{s}" if patches else "levels.{s}"
    rows = hierarchical(stages=stages, downsample=f"{stages}.downsample")
    rows += (dense if patches else conv)("stages.{s}.downsample.reduction", f"{stages}.downsample.reduction")
    rows += [("stages.{s}.position.rpb.offsets.{j}", f"{stages}.blocks.{{j}}.attn.rpb", OFFSETS)]
    return Table(rows, "half", Preprocessing())
