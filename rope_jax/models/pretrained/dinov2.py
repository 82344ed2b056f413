"""Names of facebookresearch/dinov2: backbones with and without registers, and their linear classifiers of one layer."""

from flax import nnx

from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Table, dense, isotropic
from rope_jax.models.pretrained.tensors import SAME, TOKENS


def table(model: nnx.Module) -> Table:
    """A backbone's file has no head. That of a linear classifier is a file of its own: add its two tensors as head.weight and head.bias."""
    gated = getattr(model.options, "feed_forward", None) == "swiglu"
    rows = [
        ("registers", "register_tokens", SAME),
        ("position.ape.embedding", "pos_embed", TOKENS),
        *(dense("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.w12") + dense("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.w3") if gated else []),
        *isotropic(scales=("ls1.gamma", "ls2.gamma")),
    ]
    return Table(rows, "half", Preprocessing(), ("mask_token",), optional=("head.weight", "head.bias"))
