"""Name tables of dense prediction: a backbone with its neck and head, or a head by itself."""

from dataclasses import replace

from flax import nnx

from rope_jax.weights.dense import adapter_backbone, deformable
from rope_jax.weights.hierarchical import swin_rows
from rope_jax.weights.layouts import DECONV, FIRST, POINTWISE, QKV_BIAS, QKV_WEIGHT, SAME
from rope_jax.weights.links import HEADS
from rope_jax.weights.tables import (
    APE,
    Row,
    Table,
    batch_norm,
    block,
    conv,
    dense,
    isotropic,
    norm,
    torch_attention,
    within,
)
from rope_jax.weights.timm import timm


def segmenter(model: nnx.Module) -> Table:
    """rstrudel/segmenter: a ViT with the mask transformer or the linear decoder.

    A file also has the classifier that its encoder was trained with, which is dropped; a distilled
    encoder has two.
    """
    head: list[Row] = [
        *dense("classify", "head"),
        *dense("proj", "proj_dec"),
        ("class_tokens", "cls_emb", FIRST),
        *block("blocks.{i}", "blocks.{i}", scales=("", "")),
        *norm("norm", "decoder_norm"),
        ("proj_patch.kernel", "proj_patch", SAME),
        ("proj_class.kernel", "proj_classes", SAME),
        *norm("mask_norm", "mask_norm"),
    ]
    rows = within("decoder.", head, _head(model))
    rows += within("encoder.", _without_classifier([APE, *isotropic()]), "backbone.")
    heads = ("encoder.head", "encoder.head_dist")
    return Table(rows, dropped=tuple(f"{h}.{part}" for h in heads for part in ("weight", "bias")))


def mmseg(model: nnx.Module) -> Table:
    """mmsegmentation's heads: UperNet with its auxiliary head, and Segmenter's.

    Backbones are named as in the code that trains them with that library: with a neck of
    deconvolutions as in BEiT's and MAE's, which are timm's names, ViT-Adapter's as in its code, and
    others as in the library's own ViT. Its patch embedding has a bias in versions 0.x, with which
    the published weights were trained, and by default none in 1.2.2.
    """
    rows = within("", [*_upernet(), *_mmseg_mask_transformer()], _head(model))
    if getattr(getattr(model, "backbone", None), "own_maps", False):
        return vit_adapter(model)
    neck = getattr(model, "neck", None)
    if neck is None or hasattr(neck, "laterals"):  # none, or MultiLevelNeck
        rows += within("backbone.", _mmseg_vit(), "backbone.")
        rows += _pointwise("neck.laterals.{i}", "neck.lateral_convs.{i}.conv")
        rows += conv("neck.convs.{i}", "neck.convs.{i}.conv")
        zeros = ("backbone.patch_embed.projection.bias",)
        return Table(rows, zeros=zeros)
    table = timm(model.backbone)
    deconvs: list[Row] = [
        *dense("up1", "fpn1.0", DECONV),
        *batch_norm("norm", "fpn1.1"),
        *dense("up2", "fpn1.3", DECONV),
        *dense("up", "fpn2.0", DECONV),
    ]
    rows += within("backbone.", _without_classifier(table.rows), "backbone.")
    rows += within("backbone.", deconvs, "neck.")
    dropped = tuple(f"backbone.{name}" for name in table.dropped)
    return Table(rows, table.pairing, table.preprocessing, dropped)


def vit_adapter(model: nnx.Module) -> Table:
    """czczup/ViT-Adapter: the backbone, with UperNet or Mask R-CNN, or one of these heads alone.

    The names of Mask R-CNN are mmdetection's.
    """
    table = adapter_backbone(model)
    rows = [*table.rows, *within("", [*_upernet(), *_mask_rcnn()], _head(model))]
    return replace(table, rows=rows)


def mask2former(model: nnx.Module) -> Table:
    """facebookresearch/Mask2Former: a Swin with its norms and the head, or the head alone.

    In its code maps are padded to whole windows by zeros for tokens: create a Swin with
    window_padding="tokens".
    """
    head = getattr(model, "head", model)
    if not hasattr(head, "pixel_decoder"):  # another model
        return Table([])
    pixels, queries = "pixel_decoder", "predictor"
    rows = [*_pixel_decoder(pixels), *_masked_decoder(queries, head.options.width)]
    if head is model:
        return Table(rows)
    rows = within("sem_seg_head.", rows, "head.")
    rows += within("backbone.", _without_classifier(swin_rows()), "backbone.")
    rows += norm("neck.norms.{i}", "backbone.norm{i}")
    features = "sem_seg_head.predictor.query_feat.weight"
    older = features.replace("query_feat", "static_query")  # before it was published
    return Table(rows, dropped=("criterion.empty_weight",), alternatives=((features, older),))


def _head(model: nnx.Module) -> str:
    """Start of the names of a head's parameters, which may be the model itself."""
    return "head." if hasattr(model, "backbone") else ""


def _without_classifier(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not row[0].startswith(HEADS)]


def _upernet() -> list[Row]:
    """UPerHead and FCNHead, whose 1 x 1 convolutions are linear layers here."""
    decode, auxiliary = "decode_head", "auxiliary_head"
    pointwise = {
        "pooling.convs.{i}": f"{decode}.psp_modules.{{i}}.1",
        "laterals.{i}": f"{decode}.lateral_convs.{{i}}",
    }
    wide = {
        "smooth.{i}": f"{decode}.fpn_convs.{{i}}",
        "pooling.fuse": f"{decode}.bottleneck",
        "fuse": f"{decode}.fpn_bottleneck",
        "auxiliary.conv": f"{auxiliary}.convs.0",
    }
    rows = []
    for names, make in ((pointwise, _pointwise), (wide, conv)):
        for ours, theirs in names.items():
            rows += make(f"{ours}.conv", f"{theirs}.conv") + batch_norm(
                f"{ours}.bn", f"{theirs}.bn"
            )
    rows += _pointwise("classify.linear", f"{decode}.conv_seg")
    return rows + _pointwise("auxiliary.classify.linear", f"{auxiliary}.conv_seg")


def _pointwise(ours: str, theirs: str) -> list[Row]:
    return dense(ours, theirs, POINTWISE)


def _mask_rcnn() -> list[Row]:
    """mmdetection's, whose 1 x 1 convolutions are linear layers here."""
    boxes, masks = "roi_head.bbox_head", "roi_head.mask_head"
    return [
        *_pointwise("pyramid.laterals.{i}", "neck.lateral_convs.{i}.conv"),
        *conv("pyramid.outputs.{i}", "neck.fpn_convs.{i}.conv"),
        *conv("anchor_head.conv", "rpn_head.rpn_conv"),
        *_pointwise("anchor_head.classify", "rpn_head.rpn_cls"),
        *_pointwise("anchor_head.steps", "rpn_head.rpn_reg"),
        *dense("box_head.fc1", f"{boxes}.shared_fcs.0"),
        *dense("box_head.fc2", f"{boxes}.shared_fcs.1"),
        *dense("box_head.classify", f"{boxes}.fc_cls"),
        *dense("box_head.steps", f"{boxes}.fc_reg"),
        *conv("mask_head.convs.{i}", f"{masks}.convs.{{i}}.conv"),
        *dense("mask_head.up", f"{masks}.upsample", DECONV),
        *_pointwise("mask_head.classify", f"{masks}.conv_logits"),
    ]


def _mmseg_mask_transformer() -> list[Row]:
    head: list[Row] = [
        *dense("proj", "dec_proj"),
        ("class_tokens", "cls_emb", FIRST),
        *_mmseg_block("blocks.{i}", "layers.{i}"),
        *norm("norm", "decoder_norm"),
        *dense("proj_patch", "patch_proj"),
        *dense("proj_class", "classes_proj"),
        *norm("mask_norm", "mask_norm"),
    ]
    return within("decode_head.", head, "")


def _mmseg_vit() -> list[Row]:
    return [
        APE,
        ("class_token", "cls_token", SAME),
        *conv("patch_embed.proj", "patch_embed.projection"),
        *_mmseg_block("blocks.{i}", "layers.{i}"),
        *norm("norm", "ln1"),
    ]


def _mmseg_block(ours: str, theirs: str) -> list[Row]:
    return [
        *norm(f"{ours}.norm1", f"{theirs}.ln1"),
        (f"{ours}.attn.qkv.kernel", f"{theirs}.attn.attn.in_proj_weight", QKV_WEIGHT),
        (f"{ours}.attn.qkv.bias", f"{theirs}.attn.attn.in_proj_bias", QKV_BIAS),
        *dense(f"{ours}.attn.proj", f"{theirs}.attn.attn.out_proj"),
        *norm(f"{ours}.norm2", f"{theirs}.ln2"),
        *dense(f"{ours}.mlp.fc1", f"{theirs}.ffn.layers.0.0"),
        *dense(f"{ours}.mlp.fc2", f"{theirs}.ffn.layers.1"),
    ]


def _pixel_decoder(theirs: str) -> list[Row]:
    """Mask2Former's, whose 1 x 1 convolutions are linear layers here."""
    ours, layer = "pixel_decoder", f"{theirs}.transformer.encoder.layers.{{i}}"
    return [
        *_pointwise(f"{ours}.projections.{{i}}", f"{theirs}.input_proj.{{i}}.0"),
        *norm(f"{ours}.norms.{{i}}", f"{theirs}.input_proj.{{i}}.1"),
        (f"{ours}.levels", f"{theirs}.transformer.level_embed", SAME),
        *deformable(f"{ours}.layers.{{i}}.attn", f"{layer}.self_attn"),
        *norm(f"{ours}.layers.{{i}}.norm", f"{layer}.norm1"),
        *_feed_forward(f"{ours}.layers.{{i}}.mlp", layer, "norm2"),
        *_pointwise(f"{ours}.lateral", f"{theirs}.adapter_1"),
        *norm(f"{ours}.lateral_norm", f"{theirs}.adapter_1.norm"),
        *conv(f"{ours}.smooth", f"{theirs}.layer_1"),
        *norm(f"{ours}.smooth_norm", f"{theirs}.layer_1.norm"),
        *_pointwise(f"{ours}.pixels", f"{theirs}.mask_features"),
    ]


def _masked_decoder(theirs: str, width: int) -> list[Row]:
    ours, layer = "decoder", "decoder.layers.{i}"
    cross, attn, mlp = (
        f"{theirs}.transformer_{name}_layers.{{i}}"
        for name in ("cross_attention", "self_attention", "ffn")
    )
    return [
        (f"{ours}.queries", f"{theirs}.query_feat.weight", SAME),
        (f"{ours}.positions", f"{theirs}.query_embed.weight", SAME),
        (f"{ours}.levels", f"{theirs}.level_embed.weight", SAME),
        *torch_attention(f"{layer}.cross", f"{cross}.multihead_attn", width),
        *norm(f"{layer}.cross_norm", f"{cross}.norm"),
        *torch_attention(f"{layer}.attn", f"{attn}.self_attn", width),
        *norm(f"{layer}.norm", f"{attn}.norm"),
        *_feed_forward(f"{layer}.mlp", mlp, "norm"),
        *norm(f"{ours}.norm", f"{theirs}.decoder_norm"),
        *dense(f"{ours}.classify", f"{theirs}.class_embed"),
        *dense(f"{ours}.embed.{{i}}", f"{theirs}.mask_embed.layers.{{i}}"),
    ]


def _feed_forward(ours: str, theirs: str, last: str) -> list[Row]:
    return [
        *dense(f"{ours}.fc1", f"{theirs}.linear1"),
        *dense(f"{ours}.fc2", f"{theirs}.linear2"),
        *norm(f"{ours}.norm", f"{theirs}.{last}"),
    ]
