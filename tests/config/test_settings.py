import json
import runpy

import pytest

from rope_jax import config as cfg
from rope_jax.system.files import SaveFailed


def test_defaults_match_the_dataclasses():
    assert cfg.resolve(cfg.default()) == cfg.Config()


def test_configs_round_trip_through_json():
    raw = cfg.default()
    raw.eval.resolutions = (6, (8, 12))
    raw.data.image_size = (8, 10)
    raw.ema_decay = 0.99
    config = cfg.resolve(raw)
    assert cfg.resolve_stored(json.loads(cfg.to_json(config))) == config
    assert config.eval.resolutions == (6, (8, 12))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1 .*, not 0"),
        ({"batch_size": 1.5}, "batch_size must be a whole number .*, not 1.5"),
        ({"batch_size": True}, "must be a whole number"),
        ({"label_smoothing": 1.0}, "at least 0 and below 1"),
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16, not 'float16'"),
        ({"data": {"image_size": -8}}, "a number of pixels or a pair"),
        ({"data": {"image_size": (8, 8, 8)}}, "a number of pixels or a pair"),
        ({"data": {"std": (0.5, 0.0, 0.5)}}, "data.std must be 3 values, each a number above 0"),
        ({"data": {"mean": (0.5, 0.5)}}, "data.mean must be 3 values"),
        ({"eval": {"resolutions": (8, "x")}}, "must be a tuple of values, each a number of pixels"),
        ({"eval": {"frames": "centre"}}, "must be a tuple of values, each text"),
        ({"model": {"name": None}}, "must be text"),
        ({"optim": {"b1": float("nan")}}, "optim.b1 must be a number .*, not nan"),
        ({"epochs": float("inf")}, "epochs must be a number .*, not inf"),
        ({"epochs": 0.0}, "epochs must be a number above 0, not 0.0: to evaluate"),
        (
            {"optim": {"learning_rate": 1e-6}},
            "min_learning_rate=1e-05 is above --config.optim.learning_rate=1e-06",
        ),
        (
            {"batch_size": 100, "mix": {"mixup": 0.8, "groups": 8}},
            "batch_size=100 .*mix.groups=8 .* a batch of 96 or 104, or --config.mix.groups=1",
        ),
        ({"batch_size": 8, "mix": {"cutmix": 1.0, "groups": 8}}, "at least 2 .* of 16 or 24"),
        ({"data": {"img_size": 8}}, r"--config.data.img_size .*; use --config.data.image_size$"),
        ({"optim": {"epochs": 8}}, r"--config.optim.epochs .*; use --config.epochs$"),
        ({"learning_rate": 8}, r"; use --config.optim.learning_rate$"),
        ({"name": "x"}, r"; use --config.model.name or --config.optim.name$"),
        ({"lr": 8}, r"; use --config.optim.learning_rate$"),
        ({"optim": {"weight_decai": 8}}, r"; did you mean 'weight_decay'\?"),
        ({"optim.b1": 0.8}, "--config.optim.b1 is in a section: give that as a dict"),
    ],
)
def test_bad_values_and_misplaced_settings_name_the_flag(values, message):
    with pytest.raises(cfg.ConfigError, match=message):
        cfg.resolve(values)


def test_schedules_without_a_minimum_ignore_it():
    optim = {"learning_rate": 1e-6, "schedule": "constant"}
    assert cfg.resolve({"optim": optim}).optim.learning_rate == 1e-6


def test_resumable_settings():
    """Settings that change the numbers of a run must not be on this list."""
    assert {name for name, field in cfg.settings().items() if field.metadata["resumable"]} == {
        "data.path", "data.bad_images", "data.allow_empty", "data.workers", "data.on_device",
        "eval.resolutions", "eval.extend", "eval.log_scale",
        "eval.batch_size", "eval.ema", "eval.frame", "eval.frames",
        "eval.scale_windows", "mesh.fsdp", "log_every", "checkpoint_every",
        "keep_checkpoints", "non_finite", "profile_at", "plugins", "tensorboard",
    }  # fmt: skip


def test_model_overrides():
    long = "-" * 10_000 + "1"  # a word, which the model refuses
    assert cfg.model_overrides(f"depth={long}") == {"depth": long}
    with pytest.raises(cfg.ConfigError, match="of its own"):
        cfg.model_overrides("position=ape")


@pytest.mark.parametrize(
    ("error", "blamed", "message"),
    [
        *(
            (error, cfg.ConfigError, r"9 TiB \[--config\.x\]")
            for error in (ValueError, ImportError, OverflowError, MemoryError)
        ),
        (SaveFailed, SaveFailed, "^9 TiB$"),  # is not the flag's fault
    ],
)
def test_blamed_errors_name_the_flag(error, blamed, message):
    with pytest.raises(blamed, match=message), cfg.blame("--config.x"):
        raise error("9 TiB")


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ([], "holds no settings by name"),
        ({"data": []}, "holds no settings by name"),
        ({"optim": {"lr": 0.1}}, r"\(optim\.lr is not a setting"),  # not named as a flag
    ],
)
def test_stored_settings_of_other_versions_are_refused(stored, reason):
    message = rf"^run/config\.json holds settings of another version .*{reason}"
    with pytest.raises(cfg.ConfigError, match=message):
        cfg.resolve_stored(stored, "run/config.json")


def test_settings_are_printed(capsys):
    runpy.run_module("rope_jax.config", run_name="__main__")
    output = capsys.readouterr().out
    assert output == cfg.settings_help() + "\n"
    assert max(map(len, output.splitlines())) <= 100
    assert (
        "--config.ema_decay: a number of at least 0 and below 1, or None; default: None" in output
    )
    assert "--config.log_every: a whole number of at least 1; default: 50; resumable\n" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("posittion=ape", "no argument 'posittion'; did you mean 'position'"),
        ("lr=1", "no argument 'lr'; known: position, epochs; .* use --config.optim.learning_rate$"),
        ("epochs=two", "epochs must be a number, not 'two'"),
        ("ape", "key=value"),
    ],
)
def test_bad_recipe_arguments(text, message):
    with pytest.raises(cfg.ConfigError, match=message):
        cfg.recipe_arguments(text, position="none", epochs=1.0)
