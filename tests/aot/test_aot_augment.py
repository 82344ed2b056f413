"""Augmentations of the training step, compiled for H200s."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from rope_jax.data import on_device

TALK = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


@pytest.mark.parametrize(("augment", "launches"), [("rand_augment", 80), ("three_augment+color_jitter", 40)])
def test_images_are_augmented_where_they_are(compile_for, augment, launches):
    """Devices do not talk, nothing loops over images, and the fifteen operations of RandAugment's two layers are not fifteen programs."""
    plan = on_device.parse(augment)

    def apply(images, epoch, index):
        return on_device.apply(images, on_device.example_keys(0, epoch, index), plan.pixels, (124, 116, 104))

    number = jax.ShapeDtypeStruct((64,), jnp.int32)
    shapes = (jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.uint8), number, number)
    program = compile_for((4, 1), apply, *shapes, specs=[PartitionSpec("data")] * 3)
    assert not re.search(TALK, program.text)
    assert "while" not in program.operations
    assert len(program.operations) < launches
