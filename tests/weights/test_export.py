import subprocess
import sys

import jax
import numpy as np
import pytest

import rope_jax
from rope_jax.commands import export as export_model
from tests.refusals import expect_refusal

pytest.importorskip(
    "flatbuffers", reason="jax.export needs flatbuffers to write a program as bytes"
)

# A program that reads the file with only jax and numpy.
ALONE = """
import pathlib, sys
import jax, jax.export, numpy as np
program = jax.export.deserialize(pathlib.Path(sys.argv[1]).read_bytes())
np.save(sys.argv[3], program.call(np.load(sys.argv[2])))
assert not any(name.startswith(("rope_jax", "flax")) for name in sys.modules)
"""


TINY = {"depth": 1, "width": 24, "heads": 2}


def small(name, **options):
    return rope_jax.create_model(name, image_size=32, num_classes=3, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            "deit_ti16",
            TINY | {"position": "rope_mixed+ape"},
            marks=pytest.mark.process,
        ),
        pytest.param(
            "swin_t", {"depths": (1, 1), "heads": (1, 2), "width": 8}, marks=pytest.mark.slow
        ),
    ],
)
def test_the_program_runs_without_the_package(name, options, tmp_path):
    """The program takes any number of images."""
    images = np.random.default_rng(0).standard_normal((3, 32, 64, 3)).astype(np.float32)
    files = [tmp_path / name for name in ("model.bin", "images.npy", "program.npy")]
    np.save(files[1], images)
    model = small(name, **options)
    rope_jax.export(model, files[0], resolution=(32, 64))
    command = [sys.executable, "-c", ALONE, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    model.resize((32, 64))
    np.testing.assert_allclose(np.load(files[2]), jax.jit(model)(images), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deit_ti16", {"dtype": "bfloat16", "registers": 2, "position": "lape(ape)"}),
        ("deit_ti16", {"position": "string"}),  # its rotation is no part of the attention
        ("cat_5", {}),
    ],
)
def test_the_number_of_images_may_be_open(name, options, tmp_path):
    model = small(name, **options, **TINY)
    rope_jax.export(model, tmp_path / "model.bin", resolution=32, platforms=("cpu",))
    program = rope_jax.load_exported(tmp_path / "model.bin")
    assert str(program.in_avals[0].shape[0]) == "b"


def test_exporting_does_not_change_the_model(tmp_path):
    model = small("deit_ti16", **TINY)
    before = model.position.embedding.shape
    rope_jax.export(model, tmp_path / "model.bin", resolution=64, batch=2, platforms=("cpu",))
    assert model.position.embedding.shape == before
    program = jax.export.deserialize((tmp_path / "model.bin").read_bytes())
    assert (program.platforms, program.in_avals[0].shape) == (("cpu",), (2, 64, 64, 3))
    with pytest.raises(ValueError, match="image size 33x33 is not divisible by the patch size 16"):
        rope_jax.export(model, tmp_path / "other.bin", resolution=33)
    with pytest.raises(
        ValueError, match=r"platforms must be a tuple of values, each one of cpu, cuda.*'gpu'"
    ):
        rope_jax.export(model, tmp_path / "other.bin", resolution=32, platforms=("gpu",))
    assert [file.name for file in tmp_path.iterdir()] == ["model.bin"]


def test_changed_programs_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    model = rope_jax.create_model("vit_digits", depth=1, width=16, heads=2)
    rope_jax.export(model, path, resolution=8, batch=1, platforms=("cpu",))
    good = path.read_bytes()
    rope_jax.load_exported(path)
    changed = [b"", good[:-1], good[: len(good) // 2]]
    for place in np.random.default_rng(0).choice(8 * len(good), 50, replace=False).tolist():
        changed.append(bytearray(good))
        changed[-1][place // 8] ^= 1 << place % 8
    for content in changed:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.bin is damaged.*export it again"):
            rope_jax.load_exported(path)


def test_the_command_names_the_missing_extra(tmp_path, monkeypatch, capsys):
    def without(*_, **__):
        raise ImportError("Please install 'flatbuffers'")

    monkeypatch.setattr(export_model, "export", without)
    with expect_refusal(capsys, r"'flatbuffers': pip install 'rope_jax\[export\]'$"):
        export_model.main(["--model=vit_digits", f"--out={tmp_path / 'model.bin'}"])
