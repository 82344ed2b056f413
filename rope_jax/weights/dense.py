"""Name tables of backbones of detection and segmentation: one function per source."""

from flax import nnx

from rope_jax.weights.layouts import DECONV, PATCH_TOKENS, POINTWISE, SAME
from rope_jax.weights.tables import Row, Table, batch_norm, conv, dense, isotropic, norm


def detectron2(model: nnx.Module) -> Table:
    """facebookresearch/detectron2: ViTDet's backbone and feature pyramid.

    The entry of the class token in the table of positions is not used and is dropped. The map is
    padded to whole windows by zeros for tokens: create the model with window_padding="tokens".
    """
    prefix = next(iter(model.parts()), "")  # "backbone." of a backbone in a larger model
    rows: list[Row] = [
        *isotropic(),
        ("position.ape.embedding", "pos_embed", PATCH_TOKENS),
        ("position.decomposed.rows.{i}", "blocks.{i}.attn.rel_pos_h", SAME),
        ("position.decomposed.columns.{i}", "blocks.{i}.attn.rel_pos_w", SAME),
    ]
    rows = [(f"{prefix}{ours}", f"net.{theirs}", rule) for ours, theirs, rule in rows]
    for index, level in enumerate(getattr(getattr(model, "neck", None), "levels", ())):
        if level.scale in _LEVELS:  # others have no name there
            rows += _pyramid_level(f"neck.levels.{index}", level.scale)
    return Table(rows)


_LEVELS = {4.0: (2, (0, 3), 4), 2.0: (3, (0,), 1), 1.0: (4, (), 0), 0.5: (5, (), 1)}


def _pyramid_level(ours: str, scale: float) -> list[Row]:
    """Rows of one scale of a feature pyramid, whose modules are numbered together with GELU."""
    # The level, and numbers of its transposed convolutions and of its first convolution.
    level, deconvs, first = _LEVELS[scale]
    theirs = f"simfp_{level}"
    rows: list[Row] = []
    for number, place in enumerate(deconvs):
        rows += dense(f"{ours}.deconvs.{number}", f"{theirs}.{place}", DECONV)
    rows += norm(f"{ours}.norms.0", f"{theirs}.1")
    for place, layer in enumerate(("lateral", "output"), first):
        rows += conv(f"{ours}.{layer}", f"{theirs}.{place}")
        rows += norm(f"{ours}.{layer}_norm", f"{theirs}.{place}.norm")
    return rows


def adapter_backbone(model: nnx.Module) -> Table:
    """czczup/ViT-Adapter: the backbone.

    The entry of the class token in the table of positions is not used and is dropped. In its code
    maps are padded to whole windows by zeros for queries, keys and values: create a model with
    windows with window_padding="qkv".
    """
    prefix = next(iter(model.parts()), "")  # "backbone." of a backbone in a larger model
    rows: list[Row] = [
        *isotropic(scales=("gamma1", "gamma2")),
        ("position.ape.embedding", "pos_embed", PATCH_TOKENS),
        ("levels", "level_embed", SAME),
        *_spatial_prior(),
        *dense("up", "up", DECONV),
    ]
    for level in range(4):
        rows += batch_norm(f"map_norms.{level}", f"norm{level + 1}")
    injector, extractor = "interactions.{i}.injector", "interactions.{i}.extractor"
    rows += _deformable(injector, injector)
    rows.append((f"{injector}.scale.gamma", f"{injector}.gamma", SAME))
    rows += _extractor("interactions.{i}.extractors.0", extractor)
    for index in (1, 2):
        extra = f"interactions.{{i}}.extra_extractors.{index - 1}"
        rows += _extractor(f"interactions.{{i}}.extractors.{index}", extra)
    rows = [(f"{prefix}{ours}", f"{prefix}{theirs}", rule) for ours, theirs, rule in rows]
    return Table(rows)


def _spatial_prior() -> list[Row]:
    """Rows of the convolutional branch, whose 1 x 1 convolutions are linear layers here."""
    places = {f"stem.{n}": (f"stem.{3 * n}", f"stem.{3 * n + 1}") for n in range(3)}
    places |= {f"convs.{n}": (f"conv{n + 2}.0", f"conv{n + 2}.1") for n in range(3)}
    rows: list[Row] = []
    for ours, (theirs, norm_name) in places.items():
        rows += conv(f"prior.{ours}.conv", f"spm.{theirs}")
        rows += batch_norm(f"prior.{ours}.bn", f"spm.{norm_name}")
    for n in range(4):
        rows += dense(f"prior.projections.{n}", f"spm.fc{n + 1}", POINTWISE)
    return rows


def _deformable(ours: str, theirs: str) -> list[Row]:
    """Rows of deformable attention and of the norms of its two inputs."""
    rows = [*norm(f"{ours}.query_norm", f"{theirs}.query_norm")]
    rows += norm(f"{ours}.token_norm", f"{theirs}.feat_norm")
    return rows + deformable(f"{ours}.attn", f"{theirs}.attn")


def deformable(ours: str, theirs: str) -> list[Row]:
    """Rows of deformable attention."""
    names = {"offset": "sampling_offsets", "weight": "attention_weights"}
    names |= {"value": "value_proj", "out": "output_proj"}
    return [row for x, y in names.items() for row in dense(f"{ours}.{x}", f"{theirs}.{y}")]


def _extractor(ours: str, theirs: str) -> list[Row]:
    return [
        *_deformable(ours, theirs),
        *norm(f"{ours}.mlp_norm", f"{theirs}.ffn_norm"),
        *dense(f"{ours}.fc1", f"{theirs}.ffn.fc1"),
        *dense(f"{ours}.fc2", f"{theirs}.ffn.fc2"),
        *conv(f"{ours}.conv", f"{theirs}.ffn.dwconv.dwconv"),
    ]
