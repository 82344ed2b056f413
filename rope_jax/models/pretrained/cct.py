"""Names of SHI-Labs/Compact-Transformers: ViT-Lite, CVT and CCT."""

import numpy as np
from flax import nnx

from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Table, conv, dense, norm
from rope_jax.models.pretrained.tensors import QKV_BIAS, QKV_WEIGHT, SAME, TOKENS, square
from rope_jax.positions.absolute import SinCos1D

_CIFAR = {  # by the number of classes
    10: Preprocessing((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), crop=1.0),
    100: Preprocessing((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), crop=1.0),
}


def table(model: nnx.Module) -> Table:
    """Its norm1 is the second norm of a block, after attention; the first one is pre_norm. Sinusoids are in its files.

    Images are prepared for CIFAR where the head has 10 or 100 classes, else for ImageNet.
    """
    block = "classifier.blocks.{i}"
    rows = [
        *conv("patch_embed.proj", "tokenizer.conv_layers.0.0"),
        *conv("patch_embed.convs.{i}", "tokenizer.conv_layers.{i}.0"),
        ("class_token", "classifier.class_emb", SAME),
        ("position.ape.embedding", "classifier.positional_emb", TOKENS),
        *norm("blocks.{i}.norm1", f"{block}.pre_norm"),
        ("blocks.{i}.attn.qkv.kernel", f"{block}.self_attn.qkv.weight", QKV_WEIGHT),
        ("blocks.{i}.attn.qkv.bias", f"{block}.self_attn.qkv.bias", QKV_BIAS),
        *dense("blocks.{i}.attn.proj", f"{block}.self_attn.proj"),
        *norm("blocks.{i}.norm2", f"{block}.norm1"),
        *dense("blocks.{i}.mlp.fc1", f"{block}.linear1"),
        *dense("blocks.{i}.mlp.fc2", f"{block}.linear2"),
        *norm("norm", "classifier.norm"),
        *dense("attention_pool", "classifier.attention_pool"),
        *dense("head", "classifier.fc"),
    ]
    preprocessing = _CIFAR.get(model.head.out_features, Preprocessing(crop=0.9))
    return Table(rows, None, preprocessing, frozen=(("classifier.positional_emb", sinusoids),))


def sinusoids(model: nnx.Module, numbers: dict[str, int], shape: tuple[int, ...]) -> np.ndarray | None:
    """What a file's frozen table of 1-D sinusoids, [1, T, C], must contain; see `Table.frozen`."""
    scheme = getattr(model, "position", None)
    if not isinstance(scheme, SinCos1D):
        return None
    if len(shape) != 3 or shape[::2] != (1, scheme.stage.channels) or shape[1] > 2**16:  # a file may claim any shape
        return None
    return np.asarray(scheme.table(square(shape[1] - scheme.stage.embed_prefix) or scheme.stage.grid))[None]
