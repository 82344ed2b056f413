import pathlib

import pytest

from rope_jax.config import list_recipes, recipe_path

ROOT = pathlib.Path(__file__).parents[2]


def test_names_and_files_of_recipes(tmp_path, monkeypatch):
    assert list_recipes() == sorted(path.stem for path in ROOT.glob("configs/*.py"))
    assert recipe_path("digits") == str(ROOT / "configs" / "digits.py")
    assert recipe_path("deit3:variant=s,path=a/b") == f"{ROOT}/configs/deit3.py:variant=s,path=a/b"
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
