"""The list of published weights, `pretrained=True`, and downloads from a server on this machine."""

import dataclasses
import gzip
import itertools
import json
import os
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.commands import weights as command
from rope_jax.commands.arguments import add_model_arguments, command_parser
from rope_jax.config import ConfigError
from rope_jax.config.settings import DataConfig
from rope_jax.runs.loading import load_model
from rope_jax.runs.restore import start_from
from rope_jax.weights import export_state_dict, list_weights, load_pretrained
from rope_jax.weights.convert import SOURCES, plan_conversion
from rope_jax.weights.files import WeightsFile
from rope_jax.weights.load import load_weights
from rope_jax.weights.released import find_listed, find_weights
from tests.parity.test_convert import as_file
from tests.refusals import expect_refusal
from tests.slow import some_slow
from tests.weights.hub import serve

DATA = pathlib.Path(__file__).parents[1] / "data"
FILE = DATA / "torch" / "deit.pth"
FLOAT32 = np.dtype("float32")
SMALL = {"width": 4, "heads": 1, "depth": 1, "image_size": 32, "num_classes": 2}
TAG = "deit_tiny_patch16_224-a1311bcf"
LISTED = "deit_base_patch16_384-8de9b5d1.pth"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The cache with a small model in place of DeiT-Ti of Meta."""
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path))
    (tmp_path / "weights").mkdir()
    shutil.copy(FILE, tmp_path / "weights" / f"{TAG}.pth")
    return rope_jax.create_model("deit_ti16", pretrained=str(FILE), **SMALL)


def assert_same(model, expected):
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(expected))


def test_rows_name_each_file_once():
    rows = list_weights()
    assert len({(w.where, w.file) for w in rows}) == len(rows)
    assert len({(w.model, w.position, w.tag) for w in rows}) == len(rows)
    assert all(w.source in SOURCES and w.licence for w in rows)
    assert all(w.file is None or w.file == os.path.basename(w.file) for w in rows)


NAMES = json.loads(gzip.decompress((DATA / "released" / "names.json.gz").read_bytes()))["shapes"]
ROWS = {f"{w.model}-{w.position}-{w.tag}": w for w in list_weights()}


@pytest.mark.parametrize(
    "name", some_slow(ROWS, [name for name in ROWS if name.startswith("deit3_s16-rope")])
)
def test_every_row_has_a_model_which_timms_names_fit(name):
    weights = ROWS[name]
    about = weights.description
    model = nnx.eval_shape(
        lambda: rope_jax.create_model(
            about.name,
            position=about.position,
            num_classes=about.num_classes,
            image_size=about.image_size,
            head=about.head,
            **about.options,
        )
    )
    assert model.notation == weights.position
    assert (weights.where in NAMES) == weights.where.startswith("timm/")
    if weights.where in NAMES:
        shapes = {key: (tuple(shape), FLOAT32) for key, shape in NAMES[weights.where].items()}
        assert plan_conversion(model, shapes, source=weights.source).problems == []


def test_heos_models_are_listed_and_come_first():
    sums = ("ape", "rope2d", "rope_mixed", "rope2d+ape", "rope_mixed+ape")
    for size, position in itertools.product("sbl", sums):
        first = find_weights(f"deit3_{size}16", True, position=position)
        assert "naver" in first.where
        assert first.preprocessing.crop == 1.0
        assert first.published[0]["by"] == "authors' README"
    for size, position in itertools.product("tsb", ("rope2d(base=50)", "rope_mixed")):
        assert "naver" in find_weights(f"swin_{size}", True, position=position).where
    assert {w.model for w in list_weights(paper="thesis")} >= {"nat_mini", "dinat_base", "swin_t"}


def test_a_tag_or_true_names_the_weights(cached):
    assert_same(rope_jax.create_model("deit_ti16", pretrained=TAG, **SMALL), cached)
    weights = find_weights("deit_ti16", "fb_in1k")
    assert weights.where == "timm/deit_tiny_patch16_224.fb_in1k"
    assert find_weights("swin_t", "dino_swin_tiny_224_4scale_12ep").head == "dino"
    assert find_weights("swin_t", True, head="upernet").head is None
    with pytest.raises(ValueError, match="1000"):
        rope_jax.create_model("deit_ti16", pretrained=TAG, **SMALL | {"num_classes": None})


def test_a_listed_file_brings_size_and_preprocessing(tmp_path, capsys):
    path = shutil.copy(FILE, tmp_path / LISTED)
    small = {name: SMALL[name] for name in ("width", "heads", "depth", "num_classes")}
    model = rope_jax.create_model("deit_b16", pretrained=path, **small)
    assert (model.image_size, model.preprocessing.crop) == ((384, 384), 0.875)
    assert find_listed("dinov3_vits16_pretrain_lvd1689m-08c60483.pth")
    listed = find_listed("downloads/deit_3_small_224_21k.pth")
    assert listed.describe(WeightsFile({}, {}.get)).preprocessing.crop == 1.0
    assert find_listed("downloads/") is None
    fresh = rope_jax.create_model("deit_b16", **SMALL)
    load_pretrained(fresh, path)
    assert fresh.preprocessing == model.preprocessing
    assert "assumed" not in capsys.readouterr().out
    path = shutil.copy(FILE, tmp_path / "mine.pth")
    model = rope_jax.create_model("deit_b16", pretrained=path, **small)
    assert model.image_size == (224, 224)
    assert re.search(r"preprocessing: centre\(crop=0\.875.*assumed", capsys.readouterr().out)


def as_listed(model, source, name):
    """A model's weights as a file that is in the list under another name."""
    return find_weights(name, True).describe(as_file(export_state_dict(model, source=source)))


def test_weights_of_other_dilations_are_refused():
    small = {"width": 4, "heads": 1, "depth": 2, "num_classes": 2, "image_size": 112}
    create = lambda name="nat_isotropic_s16", position="rpb", **options: rope_jax.create_model(
        name, position=position, **small, **options
    )
    model, warnings = create(), []
    file = as_listed(model, "nat", "dinat_isotropic_s16")
    with pytest.raises(ValueError, match="weights of dinat_isotropic_s16: dilation is 2 there and"):
        load_weights(model, file)
    load_weights(model, file, other_model=warnings.append)
    assert len(warnings) == 1
    load_weights(create("dinat_isotropic_s16", dilation=1), file)
    load_weights(create(dilation=2), file)
    with pytest.raises(ValueError, match=r"position is rpb there and rpb\+rope2d here"):
        load_weights(create(position="rpb+rope2d", dilation=2), file)


def test_published_windows_are_those_from_which_other_windows_extend():
    small = {"width": 8, "depths": (1, 1), "heads": (1, 1), "num_classes": 2, "image_size": 48}
    create = lambda **options: rope_jax.create_model("swinv2_t", **small | options)
    file = as_listed(create(), "timm", "swinv2_t")
    other = create(pretrained=file, window_size=6)
    assert [stage.position.border for stage in other.stages] == [(7, 7), (7, 7)]
    with pytest.raises(ValueError, match="window_size is 8 there and 6 here"):
        load_weights(create(window_size=6), file)
    load_weights(create(window_size=None, image_size=256), file)  # a thirty-second is 8


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("vit_adapter_b16", {}, "no classifier of vit_adapter_b16 is public; add head=upernet"),
        ("deit_ti16", {"pretrained": True, "img_size": 8}, "no option 'img_size'"),
        ("deit_ti16", {"pretrained": ""}, "'': deit_ti16 has no weights of that name"),
        ("deit_ti16", {"pretrained": False, "weights_dir": "x"}, "weights_dir=x needs pretrained"),
        ("deit_ti16", {"pretrained": str(FILE), "weights_dir": "x"}, "holds published weights"),
        ("deit3_s16", {"position": "rpb"}, "position='rpb'.*; there are some with ape, rope2d"),
        ("cat_5", {}, "no weights of cat_5 are public"),
        ("deit3_s16", {"pretrained": "naver_in1k"}, "several positions.*one of rope2d, rope2d"),
        ("deit_ti16", {"pretrained": "fb_in2k"}, "'fb_in2k'.*; there are .*fb_in1k"),
    ],
)
def test_what_is_not_published_names_what_is(model, settings, words):
    with pytest.raises(ValueError, match=words):
        rope_jax.create_model(model, **{"pretrained": True} | settings)


def test_a_file_behind_a_page_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"get ceit_tiny.*\.pth from https://drive.*save"):
        rope_jax.create_model("ceit_t", pretrained=True)
    (tmp_path / "weights").mkdir()
    shutil.copy(FILE, tmp_path / "weights" / "ceit_tiny_patch16_224.pth")
    with find_weights("ceit_t", True).open() as file:
        assert "head.weight" in file.shapes


def parse(*words):
    parser = command_parser("rope_jax.evaluate", None)
    add_model_arguments(parser)
    return parser.parse_args(["--options=width=4,heads=1,depth=1", "--num_classes=2", *words])


def test_training_and_commands_start_from_them(cached, capsys):
    model = rope_jax.create_model("deit_ti16", seed=1, **SMALL)
    start_from(model, f"released:{TAG}", DataConfig())
    assert_same(model, cached)
    words = ["--model=deit_ti16", f"--pretrained={TAG}", "--image_size=32"]
    loaded = load_model(parse(*words))
    assert_same(loaded.model, cached)
    assert (loaded.weights, loaded.released.published[0]["top1"]) == (TAG, 72.2)
    with pytest.raises(ConfigError, match="--weights and --pretrained"):
        load_model(parse(*words, f"--weights={FILE}"))


def test_a_listed_file_of_a_command_brings_its_size(tmp_path):
    path = str(shutil.copy(FILE, tmp_path / LISTED))
    loaded = load_model(parse("--model=deit_b16", f"--weights={path}", "--source=deit"))
    assert (loaded.image_size, loaded.weights) == ((384, 384), path)
    assert loaded.sha256 is not None
    assert loaded.released.published[0]["resolution"] == 384


def test_a_file_of_the_user_comes_before_a_tag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"width": 4, "depths": (1,), "heads": (1,), "kernel_size": 3, "image_size": 32}
    model = rope_jax.create_model("nat_tiny", num_classes=2, **small)
    rope_jax.save_pretrained(model, "nat_tiny")  # which is a tag, too
    assert_same(rope_jax.create_model("nat_tiny", pretrained="nat_tiny"), model)


def test_the_command_lists_them(capsys):
    command.main(["deit3_s16", "--position=rope_mixed", "--paper=heo"])
    table = capsys.readouterr().out
    assert "80.9, 384: 81.8 (authors' README), 224: 81.252 (timm" in table
    assert "naver-ai/rope_mixed_deit_small_patch16_LS" in table
    with expect_refusal(capsys, "no published weights match"):
        command.main(["deit5*"])


def test_files_are_downloaded_once_unless_a_folder_has_them(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "files" / "owner" / "name"
    folder.mkdir(parents=True)
    shutil.copy(FILE, folder)
    known = find_weights("deit_ti16", TAG)
    with serve(tmp_path / "files") as server:
        url = f"{server.url}/owner/name/resolve/main/deit.pth"
        weights = dataclasses.replace(known, where=url, file="deit.pth")
        for place, downloads in ((folder, 0), (None, 1), (None, 1)):
            with weights.open(place) as file:
                assert file.shapes["head.bias"][0] == (2,)
            assert len(server.starts) == downloads


def test_repositories_and_files_are_taken_from_a_folder(tmp_path, cached):
    folder = tmp_path / "deit_tiny_patch16_224.fb_in1k"
    folder.mkdir()
    shutil.copy(FILE, folder / "pytorch_model.bin")
    model = rope_jax.create_model("deit_ti16", pretrained=True, weights_dir=tmp_path, **SMALL)
    assert_same(model, cached)
