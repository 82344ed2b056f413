"""Augmentations of the training step, compiled for H200s."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from rope_jax.data import split_augment
from rope_jax.data.images import device
from tests.aot.program import collectives


@pytest.mark.parametrize(
    ("augment", "loops"), [("rand_augment", 1), ("three_augment+color_jitter", 2)]
)
def test_augmentations_do_not_communicate(compile_for, augment, loops):
    """No communication; the loops are over RandAugment's layers and the filters of a blur."""
    plan = split_augment(augment)

    def apply(images, epoch, index):
        keys = device.example_keys(0, epoch, index)
        return device.apply(images, keys, plan.pixels, fill=(124, 116, 104))

    number = jax.ShapeDtypeStruct((64,), jnp.int32)
    shapes = (jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.uint8), number, number)
    program = compile_for((4, 1), apply, *shapes, specs=[PartitionSpec("data")] * 3)
    assert collectives(program.text) == []
    carried = re.findall(r"= \((.*)\) while\(", program.text)
    assert len(carried) == loops
    assert all(re.search(r"u(8|32)\[16,224,224,3\]", shapes) for shapes in carried)
    # A layer chooses among fifteen operations instead of running fifteen programs.
    assert len(re.findall(r"= \S+ (?:fusion|scatter|copy)\(", program.text)) < 40
