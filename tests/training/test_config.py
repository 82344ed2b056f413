import dataclasses

import beartype.door
import pytest

from rope_jax import config as cfg


def test_defaults_are_those_of_the_dataclasses():
    assert cfg.resolve(cfg.default()) == cfg.Config()


def test_a_config_survives_json():
    raw = cfg.default()
    raw.eval.resolutions = (6, (8, 12))
    raw.data.image_size = (8, 10)
    raw.ema_decay = 0.99
    config = cfg.resolve(raw)
    assert cfg.from_json(cfg.to_json(config)) == config
    assert config.eval.resolutions == (6, (8, 12))


def test_a_misspelt_key_is_refused_in_recipes_and_files():
    with pytest.raises((KeyError, AttributeError), match="batch_size"):
        cfg.default().batch_sise = 3
    with pytest.raises(cfg.ConfigError, match=r"--config.optim.learning_rat is not a setting; did you mean 'learning_rate'"):
        cfg.resolve({"optim": {"learning_rat": 1.0}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 is out of range; it must be at least 1"),
        ({"batch_size": 1.5}, "batch_size=1.5 is not of the right kind; it must be a whole number"),
        ({"batch_size": True}, "must be a whole number"),
        ({"label_smoothing": 1.0}, "at least 0 and below 1"),
        ({"dtype": "float16"}, "not one of float32, bfloat16"),
        ({"data": {"image_size": -8}}, "a number of pixels or a pair"),
        ({"data": {"image_size": (8, 8, 8)}}, "a number of pixels or a pair"),
        ({"data": {"std": (0.5, 0.0, 0.5)}}, "data.std.*greater than 0"),
        ({"data": {"mean": (0.5, 0.5)}}, "must be 3 numbers"),
        ({"eval": {"resolutions": (8, "x")}}, "a tuple of sizes in pixels"),
        ({"model": {"name": None}}, "must be text"),
        ({"optim": {"b1": float("nan")}}, "must be finite"),
        ({"epochs": float("inf")}, "must be finite"),
        ({"epochs": 0.0}, "trains nothing"),
        ({"optim": {"learning_rate": 1e-6}}, "min_learning_rate=1e-05 is above --config.optim.learning_rate=1e-06"),
    ],
)
def test_bad_values_name_the_flag(values, message):
    with pytest.raises(cfg.ConfigError, match=message):
        cfg.resolve(values)


def test_differences_name_every_field_that_matters():
    before = cfg.Config()
    after = dataclasses.replace(before, seed=1, log_every=7, model=dataclasses.replace(before.model, position="rope2d"))
    assert cfg.differences(before, after) == ["model.position: None -> 'rope2d'", "seed: 0 -> 1"]


def leaves(cls, prefix=""):
    """Name and dataclass field of every setting, those of sections as "section.field"."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            yield from leaves(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


FIELDS = dict(leaves(cfg.Config))
OTHERS = ("something else", 7, 7.5, True, False, (8, 9), (0.1, 0.2, 0.3), ((8, 9),))


def another_value(field):
    """A value of the field's type which is not its default."""
    return next(v for v in OTHERS if v != field.default and beartype.door.is_bearable(v, field.type))


def test_every_field_is_declared_to_matter_or_not():
    assert sorted([*cfg.SEMANTIC, *cfg.COSMETIC]) == sorted(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_a_change_of_a_field_is_told_just_where_it_matters(name):
    before, (section, _, field) = cfg.Config(), name.rpartition(".")
    change = {field: another_value(FIELDS[name])}
    change = {section: dataclasses.replace(getattr(before, section), **change)} if section else change
    after = dataclasses.replace(before, **change)
    told = [f"{name}: {FIELDS[name].default!r} -> {another_value(FIELDS[name])!r}"]
    assert cfg.differences(before, after) == (told if name in cfg.SEMANTIC else [])
    assert cfg.differences(before, after, allowed=[name]) == []


def test_recipe_arguments():
    args = cfg.recipe_arguments("position=axial_rope(k_rope=4,shared=True)+ape,epochs=3", position="none", epochs=1.0, seed=0)
    assert (args.position, args.epochs, args.seed) == ("axial_rope(k_rope=4,shared=True)+ape", 3.0, 0)
    assert cfg.recipe_arguments(None, seed=5).seed == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("posittion=ape", "no argument 'posittion'; did you mean 'position'"),
        ("epochs=two", "epochs=two must be of type float"),
        ("ape", "key=value"),
    ],
)
def test_bad_recipe_arguments(text, message):
    with pytest.raises(cfg.ConfigError, match=message):
        cfg.recipe_arguments(text, position="none", epochs=1.0)


def test_model_overrides():
    assert cfg.model_overrides("depth=6,drop_path=0.1,attention=global") == {"depth": 6, "drop_path": 0.1, "attention": "global"}
