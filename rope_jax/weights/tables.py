"""Name tables, which map parameters to the tensors of a source's files, and rows they share."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from flax import nnx

from rope_jax.models.description import Preprocessing
from rope_jax.weights.layouts import (
    CONV,
    DENSE,
    PER_HEAD,
    Q_BIAS,
    QKV_BIAS,
    QKV_WEIGHT,
    SAME,
    TOKENS,
    V_BIAS,
    Rule,
)
from rope_jax_kernels.rotation import Pairing

Row = tuple[str, str, Rule]
APE: Row = ("position.ape.embedding", "pos_embed", TOKENS)
Frozen = Callable[[nnx.Module, dict[str, int], tuple[int, ...]], np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class Table:
    """The names of one source for one model.

    A name may hold numbers in braces: "blocks.{i}.norm1.scale" is one row for all blocks. {s}
    counts stages; a file's name may also use {next}, which is s + 1.

    Attributes:
        rows: (name here, name in the file, layout); None for the names that parameters have here.
        pairing: channels that the source's rotations pair, or None where it has no rotations.
        preprocessing: of the source's evaluation, where it has one.
        dropped: names of tensors that follow from others and are ignored.
        frozen: names of tensors that the model computes instead of storing them, each with a
            function of the model, the name's numbers and the tensor's shape. It returns the
            expected tensor, or None if there is none.
        drift: of a stored one from it: of a sinusoid whose angle was rounded to float32, at the
            200th token.
        zeros: names of tensors that a file may lack; their parameters become 0.
        alternatives: pairs of names: of a tensor, and of one that some files have in its place,
            perhaps for all blocks.
        starts: of the names of a backbone, where files of several models differ in no more than
            that. Rows have the first; see `with_start`.
    """

    rows: list[Row] | None
    pairing: Pairing | None = None
    preprocessing: Preprocessing | None = Preprocessing()
    dropped: tuple[str, ...] = ()
    frozen: tuple[tuple[str, Frozen], ...] = ()
    zeros: tuple[str, ...] = ()
    drift: float = 2e-5
    alternatives: tuple[tuple[str, str], ...] = ()
    starts: tuple[str, ...] = ()

    def with_start(self, names: Iterable[str]) -> "Table":
        """This table with the first of its starts that some of a file's names have."""
        starts = [s for s in self.starts if any(name.startswith(s) for name in names)]
        if not starts:
            return self
        first = self.starts[0]
        rename = lambda name: re.sub(f"^{re.escape(first)}", starts[0], name)
        rows = [(ours, rename(theirs), rule) for ours, theirs, rule in self.rows]
        dropped = tuple(map(rename, self.dropped))
        pairs = tuple(tuple(map(rename, pair)) for pair in self.alternatives)
        return dataclasses.replace(self, rows=rows, dropped=dropped, alternatives=pairs)


def match_name(template: str, name: str) -> dict[str, int] | None:
    """The numbers of a template's braces in `name`, or None if the name does not match."""
    match = re.fullmatch(_pattern(template), name)
    return match and {key: int(number) for key, number in match.groupdict().items()}


def begins(name: str, templates: Sequence[str]) -> bool:
    """True if a name begins as one of some templates.

    >>> begins("blocks.3.scale1.gamma", ["head.", "blocks.{i}.scale"])
    True
    """
    return any(re.match(_pattern(template), name) for template in templates)


def _pattern(template: str) -> str:
    return re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(template))


def fill_name(template: str, values: dict[str, int]) -> str:
    """Fills in the numbers of a template."""
    return template.format(**values, next=values.get("s", 0) + 1)


def within(theirs: str, rows: list[Row], ours: str) -> list[Row]:
    """Rows of a module that is part of another."""
    return [(f"{ours}{name}", f"{theirs}{their_name}", rule) for name, their_name, rule in rows]


def norm(ours: str, theirs: str) -> list[Row]:
    """Rows of a layer norm."""
    return [(f"{ours}.scale", f"{theirs}.weight", SAME), (f"{ours}.bias", f"{theirs}.bias", SAME)]


def batch_norm(ours: str, theirs: str) -> list[Row]:
    """Rows of a batch norm, whose count of batches is dropped."""
    return [
        *norm(ours, theirs),
        (f"{ours}.mean", f"{theirs}.running_mean", SAME),
        (f"{ours}.variance", f"{theirs}.running_var", SAME),
    ]


def dense(ours: str, theirs: str, kernel: Rule = DENSE, bias: Rule = SAME) -> list[Row]:
    """Rows of a linear layer, with or without bias."""
    return [
        (f"{ours}.kernel", f"{theirs}.weight", kernel),
        (f"{ours}.bias", f"{theirs}.bias", bias),
    ]


def conv(ours: str, theirs: str) -> list[Row]:
    """Rows of a convolution, with or without bias."""
    return dense(ours, theirs, CONV)


def parts(*layers: list[Row]) -> list[Row]:
    """Rows of a linear layer that a file stores as several, each with a part of the outputs."""
    return [
        (ours, theirs, dataclasses.replace(rule, part=(place, len(layers))))
        for place, rows in enumerate(layers)
        for ours, theirs, rule in rows
    ]


def attention(ours: str, theirs: str) -> list[Row]:
    """Rows of an attention layer."""
    return [
        *dense(f"{ours}.qkv", f"{theirs}.qkv", QKV_WEIGHT, QKV_BIAS),
        *dense(f"{ours}.proj", f"{theirs}.proj"),
    ]


def projections(ours: str, query: str, key: str, value: str) -> list[Row]:
    """Rows of an attention layer's q, k and v, which a file holds as three linear layers.

    That of k may lack a bias.
    """
    q, k = (dense(f"{ours}.qkv", theirs, QKV_WEIGHT, QKV_BIAS) for theirs in (query, key))
    return [
        *parts(q, k, dense(f"{ours}.qkv", value)),
        (f"{ours}.qv_bias", f"{query}.bias", Q_BIAS),
        (f"{ours}.qv_bias", f"{value}.bias", V_BIAS),
    ]


def cosine_attention(theirs: str, network: str) -> list[Row]:
    """Rows of the scales and the position bias of Swin V2; `network` names the network's layers."""
    ours = "stages.{s}.position.cpb"
    return [
        ("stages.{s}.blocks.{j}.attn.logit_scale", f"{theirs}.logit_scale", PER_HEAD),
        (f"{ours}.kernel1.{{j}}", f"{theirs}.{network}.0.weight", DENSE),
        (f"{ours}.bias1.{{j}}", f"{theirs}.{network}.0.bias", SAME),
        (f"{ours}.kernel2.{{j}}", f"{theirs}.{network}.2.weight", DENSE),
    ]


def torch_attention(ours: str, theirs: str, width: int) -> list[Row]:
    """Rows of torch's MultiheadAttention, which holds q, k and v, of `width` each, as one."""
    rows: list[Row] = []
    for place, name in enumerate("qkv"):
        cut = slice(place * width, (place + 1) * width)
        kernel, bias = (dataclasses.replace(rule, cut=cut) for rule in (DENSE, SAME))
        rows += [
            (f"{ours}.{name}.kernel", f"{theirs}.in_proj_weight", kernel),
            (f"{ours}.{name}.bias", f"{theirs}.in_proj_bias", bias),
        ]
    return rows + dense(f"{ours}.out", f"{theirs}.out_proj")


def block(ours: str, theirs: str, *, scales: tuple[str, str]) -> list[Row]:
    """Rows of a transformer block; `scales` are the names of its two LayerScales."""
    return [
        *norm(f"{ours}.norm1", f"{theirs}.norm1"),
        *attention(f"{ours}.attn", f"{theirs}.attn"),
        *norm(f"{ours}.norm2", f"{theirs}.norm2"),
        *dense(f"{ours}.mlp.fc1", f"{theirs}.mlp.fc1"),
        *dense(f"{ours}.mlp.fc2", f"{theirs}.mlp.fc2"),
        (f"{ours}.scale1.gamma", f"{theirs}.{scales[0]}", SAME),
        (f"{ours}.scale2.gamma", f"{theirs}.{scales[1]}", SAME),
    ]


def isotropic(
    *, blocks: str = "blocks.{i}", scales: tuple[str, str] = ("gamma_1", "gamma_2")
) -> list[Row]:
    """Rows of a ViT without its positions."""
    return [
        ("class_token", "cls_token", SAME),
        ("distillation_token", "dist_token", SAME),
        *conv("patch_embed.proj", "patch_embed.proj"),
        *norm("patch_embed.norm", "patch_embed.norm"),
        *block("blocks.{i}", blocks, scales=scales),
        *norm("norm", "norm"),
        *dense("head", "head"),
        *dense("distillation_head", "head_dist"),
    ]


def hierarchical(
    *, stages: str = "layers.{s}", downsample: str = "layers.{s}.downsample", head: str = "head"
) -> list[Row]:
    """Rows of a hierarchical backbone without its positions: Swin's and NAT's."""
    return [
        *conv("patch_embed.proj", "patch_embed.proj"),
        *conv("patch_embed.proj.{i}", "patch_embed.proj.{i}"),
        *norm("patch_embed.norm", "patch_embed.norm"),
        *block("stages.{s}.blocks.{j}", f"{stages}.blocks.{{j}}", scales=("gamma1", "gamma2")),
        *norm("stages.{s}.downsample.norm", f"{downsample}.norm"),
        *norm("norm", "norm"),
        *dense("head", head),
    ]
