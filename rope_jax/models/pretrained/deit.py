"""Names of facebookresearch/deit: DeiT (models.py) and DeiT-III (models_v2.py)."""

from flax import nnx

from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Table, isotropic
from rope_jax.models.pretrained.tensors import TOKENS


def table(model: nnx.Module) -> Table:
    """DeiT's evaluation keeps 224 of 256 pixels; DeiT-III, which knows LayerScale, all."""
    third = getattr(model.options, "layer_scale", None) is not None
    return Table([*isotropic(), ("position.ape.embedding", "pos_embed", TOKENS)], None, Preprocessing(crop=1.0 if third else 0.875))
