import argparse
import resource
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.commands.arguments import add_model_arguments
from rope_jax.config import ConfigError
from rope_jax.runs import loading
from rope_jax.system.npz import open_npz
from rope_jax.training.checkpoint import Checkpoints
from rope_jax.weights import save_pretrained
from rope_jax.weights.create import create_model
from tests.small_run import OPTIONS, save_run
from tests.training.recipe import logits, run, start_from


def load(*arguments):
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return loading.load_model(parser.parse_args([str(argument) for argument in arguments]))


def test_loading_a_workdir_verifies_its_checkpoint_once(tmp_path, monkeypatch):
    saved = save_run(tmp_path, 3)
    verified, problem = [], Checkpoints.problem
    monkeypatch.setattr(
        Checkpoints, "problem", lambda self, step: verified.append(step) or problem(self, step)
    )
    loaded = load(tmp_path)
    assert verified == [3]
    assert (loaded.title, loaded.image_size, loaded.step) == (
        "vit_digits with axial_rope",
        (8, 8),
        3,
    )
    assert jnp.array_equal(loaded.model.head.kernel, saved.head.kernel)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 4; there are \[3\] \[WORKDIR\]"):
        load(tmp_path, "--step=4")


def test_the_origin_of_weights_names_seed_and_step(tmp_path):
    hashes = set()
    for number, (decay, ema, averaged) in enumerate(
        [(None, True, ""), (0.9, True, ", averaged weights (EMA)"), (0.9, False, "")]
    ):
        workdir = tmp_path / str(number)
        save_run(workdir, 8, seed=3, ema_decay=decay, eval={"ema": ema})
        loaded = load(workdir, "--step=8")
        assert loaded.weights == f"{workdir}, seed 3, step 8{averaged}"
        hashes.add(loaded.sha256)
    assert len(hashes) == 3  # the same step and weights, but of other runs


def test_models_are_loaded_by_name(tmp_path):
    arguments = ["--model=deit_ti16", f"--options={OPTIONS}", "--num_classes=3"]
    fresh = load(*arguments, "--image_size=16x32", "--seed=2", "--dtype=bfloat16")
    assert (fresh.image_size, fresh.position, fresh.weights) == ((16, 32), "ape", "fresh, seed 2")
    images = jax.ShapeDtypeStruct((1, 16, 32, 3), jnp.float32)
    assert jax.eval_shape(fresh.model, images).dtype == jnp.bfloat16
    assert (fresh.sha256, fresh.step, fresh.config) == (None, None, None)
    path = tmp_path / "weights.safetensors"
    save_pretrained(fresh.model, path, source="timm")
    loaded = load(*arguments, "--image_size=16x32", f"--weights={path}", "--source=timm")
    assert jnp.array_equal(loaded.model.head.kernel, fresh.model.head.kernel)
    assert loaded.preprocessing == loaded.model.preprocessing
    assert len(loaded.sha256) == 64


OTHER_SCHEMAS = {
    "no config": lambda metadata: {},
    "a list for a section": lambda metadata: {"config": metadata["config"] | {"data": []}},
    "a later setting": lambda metadata: {"config": metadata["config"] | {"colour": "grey"}},
    "numbers for classes": lambda metadata: metadata | {"class_names": [0, 1]},
}


@pytest.mark.parametrize("kind", OTHER_SCHEMAS)
def test_checkpoints_of_other_schemas_are_named(tmp_path, kind):
    """The checkpoint verifies, as it is intact."""
    params = nnx.to_pure_dict(nnx.state(save_run(tmp_path, 3), nnx.Param))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        metadata = OTHER_SCHEMAS[kind](checkpoints.about(3))
        checkpoints.save(4, {"params": params}, about=metadata)
    with pytest.raises(ConfigError, match=f"checkpoint 4 of {tmp_path} ") as caught:
        load(tmp_path)
    assert "--config." not in str(caught.value)  # no flag was passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name either the WORKDIR of a run or a --model"),
        (["somewhere", "--model=vit_digits"], "name either the WORKDIR of a run or a --model"),
        (["somewhere"], r"somewhere does not exist; pass the WORKDIR .*\[WORKDIR\]"),
        (["somewhere", "--position=ape"], "--position needs --model"),
        (["--model=vit_digits", "--step=1"], "--step needs a WORKDIR"),
        (["--model=vit_digits", "--source=timm"], "--source=timm needs --weights"),
        (["--model=vit_digits", "--image_size=9y"], r"image size '9y' must be .*\[--model\]"),
        (["--model=vit_digits", "--weights=none.npz"], r"none\.npz.*\[--weights\]"),
        (["--model=vit"], r"unknown model 'vit'.*\[--model\]"),
    ],
)
def test_mistakes_name_the_argument(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load(*arguments)


APE = {"model__position": "ape"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    run(workdir, epochs=0.5, eval__resolutions=(), **APE)
    return workdir


def test_runs_start_from_a_run_of_equal_resolution(trained):
    images = np.random.default_rng(0).normal(size=(1, 8, 8, 3)).astype(np.float32)
    model, loaded = start_from(trained, **APE), rope_jax.load_checkpoint(str(trained))[0]
    assert np.array_equal(logits(model, images), logits(loaded, images))
    named = rope_jax.create_model(str(trained))  # the workdir of a run describes its model
    assert np.array_equal(logits(named, images), logits(loaded, images))
    assert (named.notation, named.preprocessing) == ("ape", loaded.preprocessing)
    options = loaded.options.__dict__ | {"position": "ape", "image_size": 8, "num_classes": 10}
    filled = rope_jax.create_model("vit_digits", pretrained=trained, **options)
    assert np.array_equal(logits(filled, images), logits(loaded, images))


def test_only_the_public_create_model_opens_workdirs(trained):
    for arguments in ({"name": trained}, {"name": "vit_digits", "pretrained": trained}):
        with pytest.raises(FileNotFoundError, match=r"rope_jax\.load_checkpoint open the WORKDIR"):
            create_model(**arguments)


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


def test_weights_of_another_model_are_refused_with_all_names(trained):
    message = r"position.mixed is missing: .*\s+position.embedding of shape .* is not expected"
    with pytest.raises(ConfigError, match=message):
        start_from(trained)


def test_weights_of_other_patch_sizes_are_refused_by_shape(trained):
    """The patches of this model do not divide the image size of the other."""
    with pytest.raises(ConfigError, match=r"patch_embed.proj.kernel has shape \[2, 2, 3, 16\],"):
        start_from(trained, model__name="deit3_ti16", data__image_size=32, **APE)
