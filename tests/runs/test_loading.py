import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rope_jax.commands.arguments import add_model_arguments
from rope_jax.config import ConfigError
from rope_jax.runs import loading
from rope_jax.training.checkpoint import Checkpoints
from rope_jax.weights import save_pretrained
from tests.small_run import OPTIONS, save_run


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


def test_a_run_is_loaded_as_its_last_command_left_it(tmp_path):
    """Not with settings of another training, such as those of a folder copied into it."""
    save_run(tmp_path, 3, position="rope2d")
    trained = dataclasses.asdict(load(tmp_path).config)
    later = {"data": trained["data"] | {"path": "moved"}, "eval": {"extend": "interpolate"}}
    for changes, path in ((later, "moved"), (later | {"epochs": 99.0}, trained["data"]["path"])):
        (tmp_path / "config.json").write_text(json.dumps(trained | changes))
        loaded = load(tmp_path)
        assert loaded.config.data.path == path
        rule = "interpolate" if path == "moved" else "none"
        assert loaded.at((16, 16)).position.extension.extend == rule
        assert loaded.model.position.extension.extend == "none"


def test_create_returns_the_weights_before_training(tmp_path):
    first = save_run(tmp_path / "first", 3, position="rope_mixed", seed=7)
    save_run(tmp_path / "second", 3, position="rope_mixed", init_from=str(tmp_path / "first"))
    before = load(tmp_path / "second").create()
    assert jnp.array_equal(before.position.mixed[...], first.position.mixed[...])


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
        (["--model=vit_digits", "--weights=/"], r"load_checkpoint open the WORKDIR.*\[--weights\]"),
        (["--model=vit"], r"unknown model 'vit'.*\[--model\]"),
    ],
)
def test_mistakes_name_the_argument(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load(*arguments)
