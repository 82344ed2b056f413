"""Names of facebookresearch/dinov3. Rotations turn halves of a head."""

from flax import nnx

from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Table, dense, halves, isotropic
from rope_jax.models.pretrained.tensors import QV_BIAS, SAME


def table(model: nnx.Module) -> Table:
    """A backbone's file has no head, see `dinov2.table`.

    Its mask of biases says that k has none. Its periods are those of base 100, rounded to bfloat16, which turns the official code's tokens
    by up to 0.01 radians less or more; here and in timm they are exact. Norms for small crops and mask tokens act in pretraining only.
    """
    gated = getattr(model.options, "feed_forward", None) == "swiglu"
    rows = [
        ("registers", "storage_tokens", SAME),
        ("blocks.{i}.attn.qv_bias", "blocks.{i}.attn.qkv.bias", QV_BIAS),
        *(halves("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.w1", "blocks.{i}.mlp.w2") if gated else []),
        *(dense("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.w3") if gated else []),
        *isotropic(scales=("ls1.gamma", "ls2.gamma")),
    ]
    dropped = ("mask_token", "rope_embed.periods", "blocks.{i}.attn.qkv.bias_mask", "local_cls_norm.weight", "local_cls_norm.bias")
    return Table(rows, "half", Preprocessing(), dropped, optional=("head.weight", "head.bias"))
