"""Names of huggingface/pytorch-image-models: DeiT, DeiT-III, the ViTs of RoPE-ViT (eva.py, interleaved) and Swin."""

from flax import nnx

from rope_jax.models.pretrained import swin
from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Table, has_stages, isotropic
from rope_jax.models.pretrained.tensors import FREQS, TOKENS, rotary_of


def table(model: nnx.Module) -> Table:
    """Its ViTs with a rotation are of another file than those without, with other names for LayerScale."""
    if has_stages(model):
        # A stage begins with the downsampling that Microsoft's code puts at the end of the one before.
        rows = swin.rows(downsample="layers.{next}.downsample", head="head.fc")
        return Table(rows, "interleaved", Preprocessing(crop=0.9), swin.DROPPED)
    rotates = rotary_of(model.position) is not None
    rows = [
        *isotropic(scales=("gamma_1", "gamma_2") if rotates else ("ls1.gamma", "ls2.gamma")),
        ("position.ape.embedding", "pos_embed", TOKENS),
        ("position.rope_mixed.mixed", "rope.freqs", FREQS),
    ]
    scaled = any(block.scale1 is not None for block in model.blocks)
    return Table(rows, "interleaved", Preprocessing(crop=1.0 if scaled and not rotates else 0.9))
