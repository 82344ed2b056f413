"""Name tables of isotropic ViTs, including those with special stems or blocks, by source."""

import numpy as np
from flax import nnx

from rope_jax.models.description import Preprocessing
from rope_jax.positions.absolute import Absolute, Learned
from rope_jax.weights.layouts import (
    DEPTHWISE,
    POINTWISE,
    QKV_WEIGHT,
    QV_BIAS,
    SAME,
    TOKENS,
    Rule,
    find_rotary,
    square,
)
from rope_jax.weights.tables import (
    APE,
    Row,
    Table,
    attention,
    batch_norm,
    block,
    conv,
    dense,
    isotropic,
    norm,
    parts,
)

_DINO_SCALES = ("ls1.gamma", "ls2.gamma")


def deit(model: nnx.Module) -> Table:
    """facebookresearch/deit: DeiT (models.py) and DeiT-III (models_v2.py).

    DeiT is evaluated on the central 224 of 256 pixels, DeiT-III, which has LayerScale, on whole
    images.
    """
    third = getattr(model.options, "layer_scale", None) is not None
    preprocessing = Preprocessing(crop=1.0 if third else 0.875)
    return Table([*isotropic(), APE], preprocessing=preprocessing)


def lape(model: nnx.Module) -> Table:
    """Ingrid725/LaPE: DeiT with one more layer norm in each block.

    Sinusoids are stored in its files, as tables of [T, C].
    """
    rows = [
        *isotropic(),
        APE,
        ("position.lape.scale.{i}", "blocks.{i}.pe_norm.weight", SAME),
        ("position.lape.bias.{i}", "blocks.{i}.pe_norm.bias", SAME),
    ]
    return Table(rows, frozen=(("pos_embed", _sinusoids),))


def _sinusoids(
    model: nnx.Module, numbers: dict[str, int], shape: tuple[int, ...]
) -> np.ndarray | None:
    """A file's table of sinusoids, [T, C] or [1, T, C], of a square map where possible."""
    position = getattr(model, "position", None)
    scheme = getattr(position, "inner", position)
    if not isinstance(scheme, Absolute) or isinstance(scheme, Learned) or len(shape) < 2:
        return None
    (tokens, channels), stage = shape[-2:], scheme.stage
    if channels != stage.channels or tokens > 2**16:  # a file may have any shape
        return None
    table = scheme.table(square(tokens - stage.embed_prefix) or stage.grid)
    return np.asarray(table)[(None,) * (len(shape) - 2)]


def dinov2(model: nnx.Module) -> Table:
    """facebookresearch/dinov2: backbones with and without registers, and linear classifiers.

    A backbone's file has no head. Linear classifiers of one layer are separate files: add their two
    tensors as head.weight and head.bias.
    """
    rows: list[Row] = [("registers", "register_tokens", SAME), APE]
    if getattr(model.options, "feed_forward", None) == "swiglu":
        rows += dense("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.w12")
        rows += dense("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.w3")
    rows += isotropic(scales=_DINO_SCALES)
    return Table(rows, "half", dropped=("mask_token",))


def dinov3(model: nnx.Module) -> Table:
    """facebookresearch/dinov3; a backbone's file has no head, see `dinov2`.

    The bias of k is masked. Its periods are those of base 100 rounded to bfloat16, which rotates
    the official code's tokens by up to 0.01 radians more or less; here and in timm they are exact.
    Norms for small crops and mask tokens are for pretraining only.
    """
    rows: list[Row] = [
        ("registers", "storage_tokens", SAME),
        ("blocks.{i}.attn.qv_bias", "blocks.{i}.attn.qkv.bias", QV_BIAS),
    ]
    if getattr(model.options, "feed_forward", None) == "swiglu":
        rows += parts(
            dense("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.w1"),
            dense("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.w2"),
        )
        rows += dense("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.w3")
    rows += isotropic(scales=_DINO_SCALES)
    dropped = (
        "mask_token",
        "rope_embed.periods",
        "blocks.{i}.attn.qkv.bias_mask",
        "local_cls_norm.weight",
        "local_cls_norm.bias",
    )
    return Table(rows, "half", dropped=dropped)


def augreg(model: nnx.Module) -> Table:
    """google-research/vision_transformer: ViT and AugReg, in .npz files of Flax.

    Kernels are [in, out], with an axis for heads. Images are resized to a square and scaled to
    -1..1. The layer before the head of ViTs for ImageNet-21k, `pre_logits`, has no parameters
    here: their files need num_classes=0, or a new head.
    """
    heads = getattr(model.options, "heads", None)
    heads = heads if isinstance(heads, int) else 1  # of hierarchical models, of other names

    def layer(ours: str, theirs: str, kernel: Rule = SAME, bias: Rule = SAME) -> list[Row]:
        return [
            (f"{ours}.kernel", f"{theirs}/kernel", kernel),
            (f"{ours}.bias", f"{theirs}/bias", bias),
        ]

    def norm(ours: str, theirs: str) -> list[Row]:
        return [(f"{ours}.{name}", f"{theirs}/{name}", SAME) for name in ("scale", "bias")]

    kernel = Rule(
        lambda x, slot: x.reshape(len(x), -1), lambda x, slot: x.reshape(len(x), heads, -1)
    )
    bias = Rule(lambda x, slot: x.reshape(-1), lambda x, slot: x.reshape(heads, -1))
    out = Rule(
        lambda x, slot: x.reshape(-1, x.shape[-1]),
        lambda x, slot: x.reshape(heads, -1, x.shape[-1]),
    )
    ours, theirs = "blocks.{i}", "Transformer/encoderblock_{i}"
    attention = f"{theirs}/MultiHeadDotProductAttention_1"
    rows: list[Row] = [
        ("class_token", "cls", SAME),
        ("position.ape.embedding", "Transformer/posembed_input/pos_embedding", TOKENS),
        *layer("patch_embed.proj", "embedding"),
        *norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0"),
        *layer(f"{ours}.attn.proj", f"{attention}/out", out),
        *norm(f"{ours}.norm2", f"{theirs}/LayerNorm_2"),
        *layer(f"{ours}.mlp.fc1", f"{theirs}/MlpBlock_3/Dense_0"),
        *layer(f"{ours}.mlp.fc2", f"{theirs}/MlpBlock_3/Dense_1"),
        *norm("norm", "Transformer/encoder_norm"),
        *layer("head", "head"),
        *layer("head.pre_logits", "pre_logits"),
    ]
    rows += parts(
        *(
            layer(f"{ours}.attn.qkv", f"{attention}/{name}", kernel, bias)
            for name in ("query", "key", "value")
        )
    )
    half = (0.5,) * 3
    return Table(rows, preprocessing=Preprocessing(half, half, 0.0, "bilinear"))


def resformer(model: nnx.Module) -> Table:
    """ruitian12/resformer; its evaluation is DeiT's."""
    rows = [
        *isotropic(),
        ("position.gpe.kernel", "pos_embed.embed_layer.weight", DEPTHWISE),
        ("position.gpe.bias", "pos_embed.embed_layer.bias", SAME),
        ("position.lpe.kernel.{i}", "blocks.{i}.attn.get_v.weight", DEPTHWISE),
        ("position.lpe.bias.{i}", "blocks.{i}.attn.get_v.bias", SAME),
    ]
    return Table(rows)


_CIFAR = {  # by the number of classes
    10: Preprocessing((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), crop=1.0),
    100: Preprocessing((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), crop=1.0),
}


def cct(model: nnx.Module) -> Table:
    """SHI-Labs/Compact-Transformers: ViT-Lite, CVT and CCT.

    Its norm1 is the second norm of a block; the first is pre_norm. Sinusoids are stored in its
    files. Images are prepared for CIFAR where the head has 10 or 100 classes, else for ImageNet.
    """
    layer = "classifier.blocks.{i}"
    rows = [
        *conv("patch_embed.proj", "tokenizer.conv_layers.0.0"),
        *conv("patch_embed.convs.{i}", "tokenizer.conv_layers.{i}.0"),
        ("class_token", "classifier.class_emb", SAME),
        ("position.ape.embedding", "classifier.positional_emb", TOKENS),
        *norm("blocks.{i}.norm1", f"{layer}.pre_norm"),
        *attention("blocks.{i}.attn", f"{layer}.self_attn"),
        *norm("blocks.{i}.norm2", f"{layer}.norm1"),
        *dense("blocks.{i}.mlp.fc1", f"{layer}.linear1"),
        *dense("blocks.{i}.mlp.fc2", f"{layer}.linear2"),
        *norm("norm", "classifier.norm"),
        *dense("attention_pool", "classifier.attention_pool"),
        *dense("head", "classifier.fc"),
    ]
    preprocessing = _CIFAR.get(model.num_classes, Preprocessing(crop=0.9))
    frozen = (("classifier.positional_emb", _sinusoids),)
    return Table(rows, preprocessing=preprocessing, frozen=frozen)


def t2t(model: nnx.Module) -> Table:
    """yitu-opensource/T2T-ViT; sinusoids are stored in its files.

    These are moving averages with a decay of 0.99996: over 780,000 steps in float32, that of a
    constant drifts by 1.3e-4. Those published first need `logit_scale="width"`, which the files do
    not show.
    """
    ours, theirs = "patch_embed.attention{n}", "tokens_to_token.attention{n}"
    rows: list[Row] = [(f"{ours}.w", f"{theirs}.w", SAME)]
    for name in ("norm1", "norm2"):
        rows += norm(f"{ours}.{name}", f"{theirs}.{name}")
    for name in ("kqv", "proj"):
        rows += dense(f"{ours}.{name}", f"{theirs}.{name}")
    rows += [
        *dense(f"{ours}.mlp.fc1", f"{theirs}.mlp.0"),
        *dense(f"{ours}.mlp.fc2", f"{theirs}.mlp.2"),
        *dense("patch_embed.project", "tokens_to_token.project"),
        APE,
        *isotropic(),
    ]
    frozen = (("pos_embed", _sinusoids),)
    return Table(rows, preprocessing=Preprocessing(crop=0.9), frozen=frozen, drift=3e-4)


def ceit(model: nnx.Module) -> Table:
    """coeusguo/ceit."""
    leff = "blocks.{i}.leff"
    rows = [
        *conv("patch_embed.conv", "i2t.backbone.conv"),
        *batch_norm("patch_embed.bn", "i2t.backbone.bn"),
        *conv("patch_embed.proj", "i2t.proj"),
        *dense(f"{leff}.conv1", f"{leff}.conv1", POINTWISE),
        *conv(f"{leff}.conv2", f"{leff}.conv2"),
        *dense(f"{leff}.conv3", f"{leff}.conv3", POINTWISE),
        *batch_norm(f"{leff}.bn{{n}}", f"{leff}.bn{{n}}"),
        *dense("lca.mlp.fc1", "lca.feedforward.fc1"),
        *dense("lca.mlp.fc2", "lca.feedforward.fc2"),
        *block("lca", "lca", scales=("", "")),
        ("layer_embedding", "pos_layer_embed", SAME),
        APE,
        *isotropic(),
    ]
    return Table(rows)


def _swap_k_and_v(x: np.ndarray) -> np.ndarray:
    q, first, second = np.split(x, 3)
    return np.concatenate([q, second, first])


# A projection whose rows are those of q, v, k.
_QVK_WEIGHT = Rule(
    lambda x, slot: QKV_WEIGHT.read(_swap_k_and_v(x), slot),
    lambda x, slot: _swap_k_and_v(QKV_WEIGHT.write(x, slot)),
)


def cat(model: nnx.Module) -> Table:
    """ElleLeonne/Cross-Axis-Transformer.

    Its weights need operator="released", imprint="decayed" and position="cat_rope(mode=released)",
    whose tables are in its files. Its images are resized to a square and not normalised.

    Raises:
        ValueError: the model pairs other channels for its rotation and adds an imprint to q and k,
            so that their channels cannot be permuted.
    """
    pairing = "half"
    decayed = getattr(model.options, "imprint", None) == "decayed"
    rotary = find_rotary(model.position) if decayed else None
    if rotary is not None and rotary.pairing != pairing:
        raise ValueError(
            f"pairing={rotary.pairing} cannot be combined with weights for pairing={pairing} and "
            "imprint='decayed', which adds to channels of q and k as they are: create the model "
            f"with a position of pairing={pairing}"
        )
    layer = "cv_head.layers.{i}"
    rows = [
        *conv("patch_embed.proj", "cv_head.embed_image"),
        *norm("blocks.{i}.norm1", f"{layer}.norm_in"),
        ("blocks.{i}.attn.qkv.kernel", f"{layer}.self_attn.qkv_proj.weight", _QVK_WEIGHT),
        *norm("blocks.{i}.attn.norm", f"{layer}.self_attn.g_norm"),
        *dense("blocks.{i}.attn.proj", f"{layer}.self_attn.o_proj"),
        *norm("blocks.{i}.norm2", f"{layer}.norm_out"),
        *dense("blocks.{i}.mlp.fc1", f"{layer}.ffn.in_proj"),
        *dense("blocks.{i}.mlp.fc2", f"{layer}.ffn.out_proj"),
        *norm("norm", "cv_head.out_norm"),
        *dense("head", "logits"),
    ]
    tables = tuple(f"{layer}.self_attn.pos.{name}" for name in ("cos", "sin"))
    preprocessing = Preprocessing((0.0,) * 3, (1.0,) * 3, crop=0.0, interpolation="bilinear")
    return Table(rows, pairing, preprocessing, dropped=tables)
