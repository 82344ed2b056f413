import pathlib

import pytest

from rope_jax.config import ConfigError, list_recipes, load_recipe, recipe_path, resolve

ROOT = pathlib.Path(__file__).parents[2]


def test_names_and_files_of_recipes(tmp_path, monkeypatch):
    assert list_recipes() == sorted(path.stem for path in ROOT.glob("configs/*.py"))
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine.py").touch()
    assert recipe_path("mine.py:epochs=3") == "mine.py:epochs=3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("digit:epochs=3", "--config=digit is not a recipe; did you mean 'digits'"),
        ("configs/digit.py", "configs/digit.py is not a recipe; known"),
    ],
)
def test_unknown_recipes_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        recipe_path(text)


START = "from rope_jax import config as cfg\n\ndef get_config():\n    config = cfg.default()\n    "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (START + "config.batch_sise = 3", "batch_sise.*the nearest are 'batch_size'"),
        (START + "config.optim.lr = 3", "use --config.optim.learning_rate"),
        (START + "config.batch_size = 'many'", "type"),
        (START + "raise ValueError('which images?')", r"which images\? \(/.*/mine.py, line 5\)$"),
        (START + "return half(config)\n\ndef half(x):\n    return x / 2", r"mine.py, line 8\)$"),
        (START + "raise SystemExit(0)", r"mine.py: SystemExit: 0 \(/.*/mine.py, line 5\)$"),
        ("x = 1", "has no attribute 'get_config'"),
        ("x = (", r"never closed \(mine.py, line 1\)$"),
        ("import no_such_module", r"No module named 'no_such_module' \(/.*/mine.py, line 1\)$"),
        ("import sys\nsys.exit(0)", r"mine.py: SystemExit: 0 \(/.*/mine.py, line 2\)$"),
        ("x = 1\nx /= 0", r"ZeroDivisionError: division by zero \(/.*/mine.py, line 2\)$"),
    ],
)
def test_errors_in_recipes_are_reported_with_their_line(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(f"{tmp_path}/mine.py")


def test_derived_settings_follow_changes(tmp_path):
    derived = "config.eval.batch_size = config.get_ref('batch_size') * 2\n    return config"
    (tmp_path / "mine.py").write_text(START + derived)
    config = resolve(load_recipe(f"{tmp_path}/mine.py", {"batch_size": 32}))
    assert (config.batch_size, config.eval.batch_size) == (32, 64)


DATACLASS = """
from __future__ import annotations
import dataclasses
from rope_jax.config import default

@dataclasses.dataclass
class Size:
    side: int

def get_config():
    config = default()
    config.data.image_size = Size(12).side
    return config
"""


def test_recipes_may_define_dataclasses(tmp_path):
    (tmp_path / "mine.py").write_text(DATACLASS)
    assert load_recipe(f"{tmp_path}/mine.py").data.image_size == 12
    (tmp_path / "mine.txt").write_text(DATACLASS)
    with pytest.raises(ConfigError, match=r"mine.txt is no Python file: its name must end in .py"):
        load_recipe(f"{tmp_path}/mine.txt")
