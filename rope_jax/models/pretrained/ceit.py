"""Names of coeusguo/ceit."""

from flax import nnx

from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Row, Table, block, conv, dense, isotropic, norm
from rope_jax.models.pretrained.tensors import SAME, TOKENS, Rule

_POINTWISE = Rule(lambda x, slot: x[:, :, 0, 0].T, lambda x, slot: x.T[:, :, None, None])
"""A 1 x 1 convolution, [O, I, 1, 1]: a dense layer here."""

_LEFF = "blocks.{i}.leff"
_BATCH_NORMS = {"patch_embed.bn": "i2t.backbone.bn", **{f"{_LEFF}.bn{n}": f"{_LEFF}.bn{n}" for n in (1, 2, 3)}}


def table(model: nnx.Module) -> Table:
    """Batch norms of its files also count batches, which nothing here needs. Images are prepared as by DeiT."""
    rows = [
        *conv("patch_embed.conv", "i2t.backbone.conv"),
        *conv("patch_embed.proj", "i2t.proj"),
        *(row for names in _BATCH_NORMS.items() for row in _batch_norm(*names)),
        *_pointwise(f"{_LEFF}.conv1"),
        *conv(f"{_LEFF}.conv2", f"{_LEFF}.conv2"),
        *_pointwise(f"{_LEFF}.conv3"),
        *dense("lca.mlp.fc1", "lca.feedforward.fc1"),
        *dense("lca.mlp.fc2", "lca.feedforward.fc2"),
        *block("lca", "lca", scales=("", "")),
        ("layer_embedding", "pos_layer_embed", SAME),
        ("position.ape.embedding", "pos_embed", TOKENS),
        *isotropic(),
    ]
    return Table(rows, None, Preprocessing(), tuple(f"{theirs}.num_batches_tracked" for theirs in _BATCH_NORMS.values()))


def _batch_norm(ours: str, theirs: str) -> list[Row]:
    statistics = [(f"{ours}.mean", f"{theirs}.running_mean", SAME), (f"{ours}.variance", f"{theirs}.running_var", SAME)]
    return [*norm(ours, theirs), *statistics]


def _pointwise(name: str) -> list[Row]:
    return [(f"{name}.kernel", f"{name}.weight", _POINTWISE), (f"{name}.bias", f"{name}.bias", SAME)]
