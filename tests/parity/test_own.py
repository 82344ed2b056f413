"""Weights by this package's names: saved models, other sizes, other heads, old files."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.layers import STORED
from rope_jax.positions import Position
from rope_jax.positions.resample import resample
from rope_jax.positions.scheme import SCHEMES
from rope_jax.weights import Preprocessing, export_state_dict, load_pretrained
from rope_jax.weights.convert import name_table
from tests.parity.test_convert import VIT, all_weights, assert_near, assert_same, logits, small
from tests.slow import some_slow
from tests.training.recipe import largest_file

# Every scheme whose parameters depend on the map, with each pattern of attention.
TABLES = [
    ("deit_ti16", "ape"),
    ("deit3_s16", "rope_mixed+ape"),
    ("deit_ti16", "lape(ape,join=unshare)"),
    ("vit_s16", "rpb(key_norm=True)"),
    ("deit_ti16", "rpb(prefix=True)"),
    ("swin_t", "rpb+ape"),
    ("nat_mini", "rpb+ape"),
]


@pytest.mark.parametrize(("name", "position"), some_slow(TABLES, TABLES[1::2]))
def test_saved_models_load_at_their_size_and_another(name, position, tmp_path):
    model = small(name, position, image_size=(64, 96))
    model.preprocessing = Preprocessing(mean=(0.1, 0.2, 0.3), crop=0.9)
    model.class_names = tuple("abcde")
    rope_jax.save_pretrained(model, tmp_path / "saved")
    again = rope_jax.create_model(str(tmp_path / "saved"), seed=7)
    assert_same(again, model)
    attributes = ("name", "notation", "options", "image_size", "preprocessing", "class_names")
    for attribute in (*attributes, "num_classes"):
        assert getattr(again, attribute) == getattr(model, attribute)
    other = rope_jax.create_model(str(tmp_path / "saved"), image_size=(128, 64), drop_path=0.0)
    model.resize((128, 64))
    assert_same(other, model)
    assert (other.image_size, other.options.drop_path) == ((128, 64), 0.0)


def test_windows_of_a_fraction_of_the_image_are_saved(tmp_path):
    """Also those of a model with a head for maps."""
    model = small("swin_t", "rpb", head="linear", image_size=64)
    model.scale_windows()
    model.resize((96, 96))
    file = tmp_path / "new" / "model.safetensors"
    rope_jax.save_pretrained(model, file)
    again = rope_jax.create_model(str(file))
    assert again.backbone.window == model.backbone.window == (3, 3)
    assert_same(again, model)


class Tables(Position):
    """Two tables that a rule resizes together, and a number without axes."""

    learnable, acts = True, "tokens"

    def __init__(self, stage, *, rngs):
        super().__init__(stage, rngs=rngs)
        self.first, self.second = (
            nnx.Param(jnp.zeros(stage.grid, stage.dtype), layers=False) for _ in range(2)
        )
        self.factor = nnx.Param(jnp.zeros(()), layers=False)

    def resize(self, grid):
        maps = resample(jnp.stack([self.first[...], self.second[...]]), grid, "bicubic")
        for table, values in zip((self.first, self.second), maps, strict=True):
            table.set_value(values)
        super().resize(grid)


def test_custom_schemes_are_resized_by_their_rule(tmp_path, monkeypatch):
    monkeypatch.setitem(SCHEMES, "tables", Tables)
    model = small("deit3_s16", "tables", image_size=(64, 96))
    rope_jax.save_pretrained(model, tmp_path)
    assert_same(rope_jax.create_model(str(tmp_path)), model)
    other = rope_jax.create_model(str(tmp_path), image_size=(128, 64))
    model.resize((128, 64))
    assert_same(other, model)


def test_files_without_metadata_are_read(tmp_path):
    """Their names are paths of parameters."""
    model = small("deit3_s16", "ape+rope2d")
    flat = nnx.to_flat_state(nnx.state(model, STORED))
    arrays = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}
    np.savez(tmp_path / "weights.npz", **arrays)
    make = {"num_classes": 5, "position": "ape+rope2d", "pretrained": tmp_path / "weights.npz"}
    create = lambda **options: rope_jax.create_model("deit3_s16", **VIT, **make, **options)
    assert_same(create(image_size=64), model)
    # Its 16 rows are read as 4 x 4 tokens, the only square.
    other = create(image_size=(96, 80))
    model.resize((96, 80))
    assert_near(all_weights(other), all_weights(model))


def test_a_new_head_for_other_classes_is_reported(tmp_path, capsys):
    model = small("deit3_s16", "ape")
    model.class_names = tuple("abcde")
    rope_jax.save_pretrained(model, tmp_path)
    create = lambda **options: rope_jax.create_model("deit3_s16", **VIT, **options)
    fresh = create(num_classes=4, image_size=64, seed=3)
    other = create(num_classes=4, pretrained=tmp_path, seed=3)
    assert capsys.readouterr().out == "head: new, 4 classes\n"
    np.testing.assert_array_equal(other.head.kernel[...], fresh.head.kernel[...])
    other.head = model.head
    assert_same(other, model)
    assert other.class_names is None
    for classes in ({}, {"num_classes": 5}):
        assert create(pretrained=tmp_path, **classes).class_names == tuple("abcde")
    assert capsys.readouterr().out == ""


def test_models_without_classes_return_the_input_of_the_head(tmp_path):
    model = small("swin_t", "rpb")
    rope_jax.save_pretrained(model, tmp_path)
    bare = rope_jax.create_model(str(tmp_path), num_classes=0)
    pooled = logits(bare)
    assert bare.num_classes == 0
    np.testing.assert_allclose(
        pooled @ model.head.kernel[...] + model.head.bias[...], logits(model), atol=1e-4
    )
    rope_jax.save_pretrained(bare, tmp_path / "bare")
    assert_same(rope_jax.create_model(str(tmp_path / "bare")), bare)
    with pytest.raises(ValueError, match=r"head\.kernel are missing.* with num_classes=0 for"):
        load_pretrained(model, tmp_path / "bare")
    load_pretrained(model, tmp_path / "bare", new_head=True)


OFFICIAL = [
    ("deit_ti16", "ape", "deit"),
    ("deit3_s16", "rope_mixed+ape", "naver"),
    ("deit3_s16", "rope2d", "naver"),  # the names are also those of timm, which crops differently
    ("swin_t", "rpb", "timm"),
    ("nat_mini", "rpb", "nat"),
]


@pytest.mark.parametrize(("name", "position", "source"), some_slow(OFFICIAL, OFFICIAL[1:2]))
def test_official_files_fit_other_classes_and_sizes(name, position, source, tmp_path, capsys):
    """A file of arrays with the names of other code, without metadata."""
    trained, path = small(name, position, image_size=64), tmp_path / "official.npz"
    np.savez(path, **export_state_dict(trained, source=source))
    changed = {"width", "heads", "depth", "depths", "dilations"} & vars(trained.options).keys()
    sizes = {key: getattr(trained.options, key) for key in changed}
    load = {"pretrained": path, "position": position, "image_size": 128} | sizes
    model = rope_jax.create_model(name, num_classes=4, **load)
    assert capsys.readouterr().out.startswith("head: new, 4 classes\npreprocessing: ")
    rope_jax.create_model(name, num_classes=0, **load)
    assert capsys.readouterr().out.startswith("preprocessing: ")
    assert model.preprocessing == name_table(model, source).preprocessing
    trained.resize(128)
    expected, loaded = all_weights(trained), all_weights(model)
    del expected["head"]
    assert loaded.pop("head")["kernel"].shape[1] == 4
    assert_near(loaded, expected)
    with pytest.raises(ValueError, match=r"create the model with num_classes=5"):
        rope_jax.create_model(name, **load)


def test_names_without_a_saved_model_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"without model\.safetensors: name one that"):
        rope_jax.create_model(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        rope_jax.create_model(str(tmp_path / "none.safetensors"))
    arrays, path = export_state_dict(small("deit3_s16", "ape"), source="timm"), tmp_path / "x.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"does not describe its model: create_model\(NAME, pre"):
        rope_jax.create_model(str(path))
    with pytest.raises(ValueError, match=r"must end in \.safetensors, or be a folder"):
        rope_jax.save_pretrained(small("deit3_s16", "ape"), path)


def test_a_failed_save_keeps_the_previous_file(tmp_path):
    model, other = (small("deit3_s16", "ape", seed=seed) for seed in (0, 1))
    rope_jax.save_pretrained(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with largest_file(1000), pytest.raises(OSError, match="could not be written"):
        rope_jax.save_pretrained(other, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
