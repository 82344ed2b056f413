"""Files from elsewhere may be wrong, but nothing in them is ever executed."""

import io
import pathlib
import pickle
import zipfile

import numpy as np
import pytest

import rope_jax
from rope_jax import config as cfg
from rope_jax import data, evaluate
from rope_jax.config.settings import DataConfig
from rope_jax.runs import restore
from rope_jax.training.checkpoint import Checkpoints
from rope_jax.training.setup import prepare

from ..training.recipe import tiny


class Trap:
    """Leaves a file behind when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return pathlib.Path.touch, (self.marker,)


def make_pickle(marker):
    return pickle.dumps({"head.kernel": Trap(marker)})


def array_file(marker):
    """A .npy file whose only object is the trap, as `np.save` writes arrays of objects."""
    file = io.BytesIO()
    np.save(file, np.array([Trap(marker)], dtype=object), allow_pickle=True)
    return file.getvalue()


def archive(marker, *names):
    """A zip of such files, which is a .npz file, with a pickle inside as in torch's files."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        for name in names:
            zipped.writestr(f"{name}.npy", array_file(marker))
        zipped.writestr("archive/data.pkl", make_pickle(marker))
    return file.getvalue()


SPLITS = ("train_images", "train_labels", "test_images", "test_labels")


def make_checkpoint(folder, content):
    step = folder / "run" / "checkpoints" / "1"
    step.mkdir(parents=True)
    for name in ("manifest.json", "_CHECKPOINT_METADATA", "params"):
        (step / name).write_bytes(content)
    return folder / "run"


def small(pretrained):
    return rope_jax.create_model("vit_digits", pretrained=pretrained)


def write(path, content):
    path.write_bytes(content)
    return str(path)


LOADERS = {
    "init_from .npz": lambda d, m: restore.start_from(
        rope_jax.create_model("vit_digits", depth=1),
        write(d / "w.npz", archive(m, "head.kernel")),
        DataConfig(),
    ),
    "init_from .npz that is a pickle": lambda d, m: restore.start_from(
        rope_jax.create_model("vit_digits", depth=1),
        write(d / "w.npz", make_pickle(m)),
        DataConfig(),
    ),
    "init_from .pkl": lambda d, m: restore.start_from(
        rope_jax.create_model("vit_digits", depth=1),
        write(d / "w.pkl", make_pickle(m)),
        DataConfig(),
    ),
    "pretrained .npz": lambda d, m: small(write(d / "w.npz", archive(m, "head.kernel"))),
    "pretrained .safetensors": lambda d, m: small(write(d / "w.safetensors", make_pickle(m))),
    "pretrained .pth": lambda d, m: small(write(d / "w.pth", archive(m, "head.kernel"))),
    "converted arrays": lambda d, m: rope_jax.convert_state_dict(
        rope_jax.create_model("vit_digits"),
        {"head.weight": np.array([Trap(m)], dtype=object)},
        source="timm",
    ),
    "images .npz": lambda d, m: data.load(
        "npz", write(d / "i.npz", archive(m, *SPLITS)), "train", None
    ),
    "images in a run": lambda d, m: prepare(
        tiny(data__source="npz", data__path=write(d / "i.npz", archive(m, *SPLITS)))
    ),
    "image": lambda d, m: rope_jax.decode_image(make_pickle(m)),
    "checkpoint": lambda d, m: rope_jax.load_checkpoint(str(make_checkpoint(d, make_pickle(m)))),
    "checkpoint of a run": lambda d, m: Checkpoints(
        make_checkpoint(d, archive(m)) / "checkpoints"
    ).newest_verified(rename=True),
    "results": lambda d, m: evaluate.read_results(
        pathlib.Path(write(d / "results.json", make_pickle(m))).parent
    ),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_pickles_are_refused_unopened(tmp_path, loader):
    marker = tmp_path / "marker"
    with pytest.raises((ValueError, cfg.ConfigError, OSError, TypeError)):
        LOADERS[loader](tmp_path, marker)
    assert not marker.exists()


@pytest.mark.parametrize(
    "load",
    [
        lambda marker: pickle.loads(make_pickle(marker)),
        lambda marker: np.load(io.BytesIO(array_file(marker)), allow_pickle=True),
    ],
)
def test_the_trap_works(tmp_path, load):
    load(tmp_path / "marker")
    assert (tmp_path / "marker").exists()
