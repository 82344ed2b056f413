"""Names of ElleLeonne/Cross-Axis-Transformer."""

import numpy as np
from flax import nnx

from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Table, conv, dense, norm
from rope_jax.models.pretrained.tensors import QKV_WEIGHT, SAME, Rule, rotary_of


def _reordered(x: np.ndarray) -> np.ndarray:
    """From rows of q, v, k to rows of q, k, v, or back."""
    q, one, other = np.split(x, 3)
    return np.concatenate([q, other, one])


_QVK_WEIGHT = Rule(lambda x, slot: QKV_WEIGHT.load(_reordered(x), slot), lambda x, slot: _reordered(QKV_WEIGHT.save(x, slot)))
_PAIRING = "half"
_LAYER = "cv_head.layers.{i}"


def table(model: nnx.Module) -> Table:
    """Its weights need operator="released", imprint="decayed" and position="cat_rope(mode=released)", whose tables are in its files.

    Its images are squashed to the size of training and not normalised.

    Raises:
        ValueError: the model pairs other channels for its rotation and has an imprint on q and k, whose channels cannot be permuted.
    """
    decayed = getattr(model.options, "imprint", None) == "decayed"
    rotary = rotary_of(model.position) if decayed else None
    if rotary is not None and rotary.pairing != _PAIRING:
        raise ValueError(
            f"pairing={rotary.pairing} does not go with weights for pairing={_PAIRING} and imprint='decayed', which adds to channels of q "
            f"and k as they are: create the model with a position of pairing={_PAIRING}"
        )
    rows = [
        *conv("patch_embed.proj", "cv_head.embed_image"),
        *norm("blocks.{i}.norm1", f"{_LAYER}.norm_in"),
        ("blocks.{i}.attn.qkv.kernel", f"{_LAYER}.self_attn.qkv_proj.weight", _QVK_WEIGHT),
        ("blocks.{i}.attn.norm.scale", f"{_LAYER}.self_attn.g_norm.weight", SAME),
        ("blocks.{i}.attn.norm.bias", f"{_LAYER}.self_attn.g_norm.bias", SAME),
        *dense("blocks.{i}.attn.proj", f"{_LAYER}.self_attn.o_proj"),
        *norm("blocks.{i}.norm2", f"{_LAYER}.norm_out"),
        *dense("blocks.{i}.mlp.fc1", f"{_LAYER}.ffn.in_proj"),
        *dense("blocks.{i}.mlp.fc2", f"{_LAYER}.ffn.out_proj"),
        *norm("norm", "cv_head.out_norm"),
        *dense("head", "logits"),
    ]
    tables = tuple(f"{_LAYER}.self_attn.pos.{name}" for name in ("cos", "sin"))
    return Table(rows, _PAIRING, Preprocessing((0.0,) * 3, (1.0,) * 3, crop=1.0, interpolation="bilinear"), dropped=tables)
