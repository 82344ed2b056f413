"""Names of ruitian12/resformer."""

from flax import nnx

from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Table, isotropic
from rope_jax.models.pretrained.tensors import DEPTHWISE, SAME


def table(model: nnx.Module) -> Table:
    """Its evaluation is DeiT's."""
    rows = [
        *isotropic(),
        ("position.gpe.kernel", "pos_embed.embed_layer.weight", DEPTHWISE),
        ("position.gpe.bias", "pos_embed.embed_layer.bias", SAME),
        ("position.lpe.kernel.{i}", "blocks.{i}.attn.get_v.weight", DEPTHWISE),
        ("position.lpe.bias.{i}", "blocks.{i}.attn.get_v.bias", SAME),
    ]
    return Table(rows, None, Preprocessing())
