"""Runs that start from the weights of another run or of a file."""

import resource
import zipfile

import numpy as np
import pytest

import rope_jax
from rope_jax.config import ConfigError
from rope_jax.system.npz import open_npz
from tests.training.recipe import logits, run, start_from

APE = {"model__position": "ape"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    run(workdir, epochs=0.5, eval__resolutions=(), **APE)
    return workdir


def test_runs_start_from_a_run_of_equal_resolution(trained):
    images = np.random.default_rng(0).normal(size=(1, 8, 8, 3)).astype(np.float32)
    loaded = rope_jax.load_checkpoint(str(trained))[0]
    named = rope_jax.create_model(str(trained))  # the workdir of a run describes its model
    assert (named.notation, named.preprocessing) == ("ape", loaded.preprocessing)
    options = loaded.options.__dict__ | {"position": "ape", "image_size": 8, "num_classes": 10}
    filled = rope_jax.create_model("vit_digits", pretrained=trained, **options)
    for model in (start_from(trained, **APE), named, filled):
        assert np.array_equal(logits(model, images), logits(loaded, images))


def test_position_tables_are_resized_to_another_resolution(trained):
    images = np.random.default_rng(0).normal(size=(2, 12, 16, 3)).astype(np.float32)
    model = start_from(trained, data__image_size=(12, 16), **APE)
    assert model.position.embedding.shape == (6 * 8, 16)
    loaded = rope_jax.load_checkpoint(str(trained))[0]
    np.testing.assert_allclose(logits(model, images), logits(loaded, images), atol=1e-5)


def test_heads_for_other_classes_stay_fresh(trained, capsys):
    model = start_from(trained, model__num_classes=20, **APE)
    assert model.head.kernel.shape == (16, 20)
    assert "head: new, 20 classes\n" in capsys.readouterr().out
    loaded = rope_jax.load_checkpoint(str(trained))[0]
    assert np.array_equal(model.norm.scale[...], loaded.norm.scale[...])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array(8 * ["a", "b"]), r"norm.scale has dtype <U1; weights are floating-point"),
        (np.ones(3, np.float32), r"norm.scale has shape \[3\], but .* \[16\]"),
    ],
)
def test_weights_of_another_shape_or_type_are_refused(tmp_path, array, message):
    np.savez(tmp_path / "weights.npz", **{"norm.scale": array})
    with pytest.raises(ConfigError, match=message):
        start_from(tmp_path / "weights.npz", **APE)


def test_weights_that_are_not_finite_are_refused(trained, tmp_path):
    """Runs do not save such weights, but files may hold them."""
    model = rope_jax.create_model(trained)
    model.norm.scale[...] = model.norm.scale[...].at[3].set(np.nan)
    rope_jax.save_pretrained(model, tmp_path)
    message = r"norm\.scale of .* holds NaN or infinite values.*\[--config\.init_from\]"
    with pytest.raises(ConfigError, match=message):
        start_from(tmp_path, **APE)


@pytest.mark.parametrize("count", [10**9, 10**12])
def test_headers_with_wrong_sizes_cost_no_memory(tmp_path, count):
    """The header claims 4 GB or 4 TB, and no data follow."""
    path, header = tmp_path / "weights.npz", {"descr": "<f4", "fortran_order": False}
    with zipfile.ZipFile(path, "w") as archive, archive.open("norm.scale.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
    with pytest.raises(ConfigError, match=rf"norm.scale has shape \[{count}\], but .* \[16\]"):
        start_from(path, **APE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB
    with open_npz(path) as file, pytest.raises(ValueError, match=r"norm.scale .* cannot be read"):
        file.read("norm.scale")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # All names are listed.
        ({}, r"position.mixed is missing: .*\s+position.embedding of shape .* is not expected"),
        # The patches of this model do not divide the image size of the other.
        (
            APE | {"model__name": "deit3_ti16", "data__image_size": 32},
            r"patch_embed.proj.kernel has shape \[2, 2, 3, 16\],",
        ),
    ],
)
def test_weights_of_another_model_are_refused(trained, changes, message):
    with pytest.raises(ConfigError, match=message):
        start_from(trained, **changes)
