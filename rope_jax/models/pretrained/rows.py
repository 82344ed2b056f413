"""What a name table is made of, and the rows that many sources share."""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
from flax import nnx

from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.tensors import CONV, DENSE, QKV_BIAS, QKV_WEIGHT, SAME, Rule
from rope_jax_kernels.rotation import Pairing

Row = tuple[str, str, Rule]
Frozen = Callable[[nnx.Module, dict[str, int], tuple[int, ...]], np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class Table:
    """The names of one source for one model.

    A name may hold numbers in braces: "blocks.{i}.norm1.scale" is one row for all blocks. {s} counts stages; a file's name may also say
    {next}, which is s + 1.

    Attributes:
        rows: (name here, name in the file, layout).
        pairing: the channels that the source's rotations turn together, or None where it has no models with rotations.
        preprocessing: what the source's evaluation does to images.
        dropped: names of tensors that are derived from others and not needed.
        frozen: names of tensors that the model computes and does not hold, with a function of the model, the name's numbers and the
            tensor's shape that gives what it must contain, up to the rounding of float32, or None where the model computes no such thing.
        optional: names of tensors that a file may lack: the parameters that they fill stay as they are.
    """

    rows: list[Row]
    pairing: Pairing | None
    preprocessing: Preprocessing
    dropped: tuple[str, ...] = ()
    frozen: tuple[tuple[str, Frozen], ...] = ()
    optional: tuple[str, ...] = ()


def numbers(template: str, name: str) -> dict[str, int] | None:
    """The numbers in `name` if it is one of `template`'s, else None."""
    pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(template))
    match = re.fullmatch(pattern, name)
    return match and {key: int(number) for key, number in match.groupdict().items()}


def filled(template: str, values: dict[str, int]) -> str:
    """`template` with its numbers filled in."""
    return template.format(**values, next=values.get("s", 0) + 1)


def norm(ours: str, theirs: str) -> list[Row]:
    """A layer norm."""
    return [(f"{ours}.scale", f"{theirs}.weight", SAME), (f"{ours}.bias", f"{theirs}.bias", SAME)]


def dense(ours: str, theirs: str) -> list[Row]:
    """A dense layer, with or without bias."""
    return [(f"{ours}.kernel", f"{theirs}.weight", DENSE), (f"{ours}.bias", f"{theirs}.bias", SAME)]


def halves(ours: str, first: str, second: str) -> list[Row]:
    """A dense layer of which a file keeps each half of the outputs as a layer of its own."""
    half = lambda rows, i: [(name, theirs, dataclasses.replace(rule, part=(i, 2))) for name, theirs, rule in rows]
    pairs = zip(half(dense(ours, first), 0), half(dense(ours, second), 1), strict=True)
    return [row for pair in pairs for row in pair]


def conv(ours: str, theirs: str) -> list[Row]:
    """A convolution, with or without bias."""
    return [(f"{ours}.kernel", f"{theirs}.weight", CONV), (f"{ours}.bias", f"{theirs}.bias", SAME)]


def block(ours: str, theirs: str, *, scales: tuple[str, str]) -> list[Row]:
    """A transformer block: scales are the names of its two LayerScale factors."""
    return [
        *norm(f"{ours}.norm1", f"{theirs}.norm1"),
        (f"{ours}.attn.qkv.kernel", f"{theirs}.attn.qkv.weight", QKV_WEIGHT),
        (f"{ours}.attn.qkv.bias", f"{theirs}.attn.qkv.bias", QKV_BIAS),
        *dense(f"{ours}.attn.proj", f"{theirs}.attn.proj"),
        *norm(f"{ours}.norm2", f"{theirs}.norm2"),
        *dense(f"{ours}.mlp.fc1", f"{theirs}.mlp.fc1"),
        *dense(f"{ours}.mlp.fc2", f"{theirs}.mlp.fc2"),
        (f"{ours}.scale1.gamma", f"{theirs}.{scales[0]}", SAME),
        (f"{ours}.scale2.gamma", f"{theirs}.{scales[1]}", SAME),
    ]


def isotropic(*, blocks: str = "blocks.{i}", scales: tuple[str, str] = ("gamma_1", "gamma_2")) -> list[Row]:
    """A ViT but for its positions."""
    return [
        ("class_token", "cls_token", SAME),
        *conv("patch_embed.proj", "patch_embed.proj"),
        *norm("patch_embed.norm", "patch_embed.norm"),
        *block("blocks.{i}", blocks, scales=scales),
        *norm("norm", "norm"),
        *dense("head", "head"),
    ]


def hierarchical(*, stages: str = "layers.{s}", downsample: str = "layers.{s}.downsample", head: str = "head") -> list[Row]:
    """A backbone of stages but for its positions: Swin's and NAT's."""
    return [
        *conv("patch_embed.proj", "patch_embed.proj"),
        *conv("patch_embed.proj.{i}", "patch_embed.proj.{i}"),
        *norm("patch_embed.norm", "patch_embed.norm"),
        *block("stages.{s}.blocks.{j}", f"{stages}.blocks.{{j}}", scales=("gamma1", "gamma2")),
        *norm("stages.{s}.downsample.norm", f"{downsample}.norm"),
        *norm("norm", "norm"),
        *dense("head", head),
    ]


def has_stages(model: nnx.Module) -> bool:
    """Whether a model is a hierarchy of stages, and not isotropic."""
    return hasattr(model, "stages")
