"""Files of weights: reading, refusals before reading, and metadata."""

import io
import json
import re
import sys
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import rope_jax
from rope_jax.weights import (
    Preprocessing,
    export_state_dict,
    files,
    load_pretrained,
    save_pretrained,
)
from rope_jax.weights.convert import name_table
from rope_jax.weights.files import open_weights
from rope_jax.weights.metadata import Metadata
from tests.parity.official import assert_equal
from tests.parity.test_convert import assert_same
from tests.slow import some_slow

SIZES = {"width": 48, "heads": 3, "depth": 2, "num_classes": 5, "image_size": 64}


def small(position="ape", *, name="deit3_s16", seed=0, pretrained=False):
    return rope_jax.create_model(name, position=position, seed=seed, pretrained=pretrained, **SIZES)


@pytest.mark.parametrize(
    ("name", "position", "image_size", "source", "crop", "resized"),
    [
        ("deit_ti16", "ape", 224, "timm", 0.9, 248),
        ("deit_ti16", "ape", 384, "timm", 1.0, 384),
        ("deit_ti16", "ape", 224, "deit", 0.875, 256),
        ("deit3_s16", "ape", 224, "timm", 0.9, 248),
        ("deit3_s16", "ape", 384, "timm", 1.0, 384),
        ("deit3_s16", "ape", 224, "deit", 1.0, 224),
        ("deit3_s16", "rope_mixed", 224, "timm", 0.9, 248),
        ("deit3_s16", "rope_mixed", 224, "naver", 1.0, 224),
        ("swin_t", "rpb", 224, "timm", 0.9, 248),
        ("swin_t", "rpb", 384, "timm", 1.0, 384),
        ("swin_t", "rpb", 224, "swin", 0.875, 256),
        ("swin_t", "rpb", 384, "swin", 0.875, 438),
        ("nat_mini", "rpb", 224, "nat", 0.875, 256),
    ],
)
def test_preprocessing_follows_the_source(name, position, image_size, source, crop, resized):
    sizes = {"depth": 1} if "deit" in name else {"depths": (1,), "heads": (1,), "width": 32}
    model = nnx.eval_shape(
        lambda: rope_jax.create_model(name, position=position, image_size=image_size, **sizes)
    )
    preprocessing = name_table(model, source).preprocessing
    assert (preprocessing.crop, preprocessing.short_side(image_size)) == (crop, resized)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write_zip(path, *members, **options):
    """Writes an archive with members of any names, also equal ones."""
    with (
        warnings.catch_warnings(action="ignore"),  # about duplicate names
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **options) as archive,
    ):
        for name, content in members:
            archive.writestr(name, content)


def test_lower_precision_is_read(tmp_path):
    state_dict = export_state_dict(small(), source="deit")
    for dtype in (np.float16, ml_dtypes.bfloat16):
        rounded = {key: array.astype(dtype) for key, array in state_dict.items()}
        safetensors.numpy.save_file(rounded, tmp_path / "model.safetensors")
        weights = export_state_dict(small(pretrained=tmp_path / "model.safetensors"), source="deit")
        assert_equal(weights, {key: array.astype(np.float32) for key, array in rounded.items()})


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused(value):
    state_dict = export_state_dict(small(), source="deit")
    state_dict["head.bias"] = np.array([0, 0, 0, value, 0], np.float32)
    model = small(seed=1)
    with pytest.raises(ValueError, match=r"^head\.bias of 'state_dict' holds NaN"):
        rope_jax.convert_state_dict(model, state_dict, source="deit")
    assert_same(model, small(seed=1))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", ["head.weight.npy", "head.weight"])
def test_duplicate_arrays_are_read_as_checked(tmp_path, order, name):
    """Otherwise the shape of one would be checked, and the other read."""
    small, large = (npy(np.zeros((rows, 16), np.float32)) for rows in (48, 2**10))
    write_zip(tmp_path / "model.npz", *[("head.weight.npy", small), (name, large)][::order])
    with open_weights(str(tmp_path / "model.npz")) as file:
        assert file.shapes["head.weight"] == (file.read("head.weight").shape, np.float32)


def test_other_members_are_refused(tmp_path):
    write_zip(tmp_path / "model.npz", ("head.weight.npy", npy(np.zeros(4))), ("notes.txt", b"text"))
    expected_error = pytest.raises(ValueError, match=r"array notes.txt of .* cannot be read")
    with expected_error, open_weights(str(tmp_path / "model.npz")):
        pass


GRIDS = ["[" * 100_000, '{"a": [1e999, 1]}', '{"a": 1}', '{"a": [1]}', '{"a": ["x", "y"]}']
MODEL = '{"family": "ViT", "options": {}, "position": [], "grids": '


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"family": 1}',
        '{"family": "", "options": 1, "position": [], "grids": {}}',
        MODEL + '{}, "description": {"name": 1}}',
        *(f"{MODEL}{grids}}}" for grids in GRIDS),
    ],
)
def test_damaged_metadata_is_refused(text):
    with pytest.raises(ValueError, match="has metadata about its model that cannot be read"):
        Metadata.from_json(text, "model.safetensors")


# A truncated file.
ENDING = safetensors.numpy.save({"norm.weight": np.zeros(48, np.float32)})[:-100]


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"\x00" * 100, b"\xff" * 8 + b"{}", ENDING]
)
@pytest.mark.parametrize("name", ["model.npz", "model.safetensors"])
def test_damaged_files_are_refused(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="or damaged"):
        small(pretrained=tmp_path / name)


def test_corrupted_compressed_files_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "model.npz", **export_state_dict(small(), source="deit"))
    content, model = bytearray((tmp_path / "model.npz").read_bytes()), small()
    name = b"blocks.0.mlp.fc1.weight.npy"
    start = content.index(name) + len(name)  # of its compressed stream, or close to that
    for place in range(start + 40, start + 400, 40):
        content[place] ^= 16
        (tmp_path / "model.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"array blocks.*fc1\.weight of .* cannot be read"):
            load_pretrained(model, tmp_path / "model.npz")
        content[place] ^= 16


def test_hub_ids_are_downloaded_if_possible(tmp_path, monkeypatch):
    model = small("rope_mixed")
    save_pretrained(model, tmp_path / "model.safetensors", source="timm")
    requests = []

    def hub_file(repository, names):
        requests.append((repository, *names))
        if not (tmp_path / names[0]).exists():
            raise FileNotFoundError
        return str(tmp_path / names[0])

    monkeypatch.setattr(files, "hub_file", hub_file)
    assert_same(small("rope_mixed", seed=1, pretrained="timm/vit_small.naver_in1k"), model)
    names = [("model.safetensors", "pytorch_model.bin"), ("config.json",)]
    names += [("preprocessor_config.json",)]
    assert requests == [("timm/vit_small.naver_in1k", *name) for name in names]
    again = rope_jax.create_model("timm/vit_small.naver_in1k")  # the file describes its model
    assert_same(again, model)
    assert (again.name, again.notation, again.image_size) == ("deit3_s16", "rope_mixed", (64, 64))
    state = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    safetensors.numpy.save_file(state, tmp_path / "model.safetensors")  # as timm writes it
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": TIMMS}))
    assert small("rope_mixed", pretrained="timm/vit_small.augreg").preprocessing.crop == 0.8


HALF, QUARTER = (0.5,) * 3, (0.25,) * 3
TIMMS = {"mean": HALF, "std": QUARTER, "crop_pct": 0.8, "interpolation": "bilinear"}
OTHERS = {"image_mean": HALF, "image_std": QUARTER, "resample": 2, "size": 224}
CENTER = OTHERS | {"do_center_crop": True, "crop_size": 224}


@pytest.mark.parametrize(
    ("timms", "others", "expected"),
    [
        ({"pretrained_cfg": TIMMS}, None, (0.8, "bilinear")),
        ({"pretrained_cfg": TIMMS | {"mean": None}}, None, None),
        ({"image_mean": HALF}, None, None),
        # transformers' file, read after another library's config.json
        ({}, OTHERS, (0.0, "bilinear")),  # resized to a square
        ({}, OTHERS | {"crop_pct": 0.9, "resample": 3}, (0.9,)),
        ({}, OTHERS | {"resample": 7}, None),
        ({}, CENTER | {"size": {"shortest_edge": 256}}, (0.875, "bilinear")),
        ({}, CENTER | {"size": {}}, None),
    ],
)
def test_preprocessing_of_a_repository(timms, others, expected, tmp_path, monkeypatch):
    safetensors.numpy.save_file({"x": np.zeros(1)}, tmp_path / "model.safetensors")
    for name, content in (("config.json", timms), ("preprocessor_config.json", others)):
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(files, "hub_file", lambda _, names: str(tmp_path / names[0]))
    with open_weights("timm/vit_small.augreg") as file:
        assert file.preprocessing == (expected and Preprocessing(HALF, QUARTER, *expected))


@pytest.mark.parametrize(
    ("name", "position"),
    some_slow(
        [
            ("deit3_s16", "ape"),
            ("deit3_s16", "rope2d(pairing=interleaved)"),
            ("swin_t", "rope2d(pairing=interleaved)"),
            *((name, None) for name in ("nat_mini", "cat_5", "cct_7_3x1", "ceit_t", "t2t_vit_7")),
            *((name, None) for name in ("beit_b16", "dinov3_s16", "resformer_ti16")),
        ],
        [("deit3_s16", "ape")],
    ),
)
def test_unknown_names_are_summarised(name, position, tmp_path):
    """For example names of CLIP, to which no table is nearest; every source lists its own."""
    names = [f"visual.transformer.resblocks.{i}.attn.in_proj_weight" for i in range(2)]
    np.savez(tmp_path / "other.npz", **{name: np.zeros((48, 48), np.float32) for name in names})
    depths = {"depths": (1,), "heads": (1,)} if name in ("swin_t", "nat_mini") else {"depth": 1}
    model = nnx.eval_shape(lambda: rope_jax.create_model(name, position=position, **depths))
    message = r"no name .* in a known source \(.*timm.*\), but visual\..*\.0\..*_weight, "
    with pytest.raises(ValueError, match=message):
        load_pretrained(model, tmp_path / "other.npz")


def test_hub_ids_need_the_client_of_the_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ImportError,
        match=r"is a hub id, which needs huggingface_hub: install the extra: pip install "
        r"'rope_jax\[hub\]'",
    ):
        small(pretrained="timm/vit_small.naver_in1k")


@pytest.mark.parametrize("position", ["rope_mixed", "rope_mixed+ape"])
@pytest.mark.parametrize("source", [None, "timm"])
def test_weights_of_another_position_are_refused_by_name(position, source, tmp_path):
    path = tmp_path / "timm.npz"
    np.savez(path, **export_state_dict(small(position), source="timm"))
    advice = re.escape(f'; create it with position="{position}"')
    with pytest.raises(ValueError, match=rf"rope\.freqs of .* is not expected: .*{advice}"):
        load_pretrained(small(), path, source=source)


def test_ambiguous_pairings_are_not_guessed(tmp_path):
    """nat_s has the names of naver's Swin, which pairs channels differently.

    For weights that fit neither, the reason is reported.
    """
    make = lambda position, depths=(1, 1), **options: rope_jax.create_model(
        "nat_s_tiny", position=position, image_size=32, depths=depths, heads=(3, 6), **options
    )
    path = tmp_path / "weights.npz"
    np.savez(path, **export_state_dict(make("none"), source="nat"))
    make("none", pretrained=path)
    with pytest.raises(ValueError, match=r"fit the sources .*naver.*pair channels differently"):
        make("rope2d", pretrained=path)
    with pytest.raises(ValueError, match=r"layers\.0\.blocks\.1\..* is missing"):
        make("rope2d", depths=(2, 1), pretrained=path)


NAT = {"width": 16, "depths": (2, 1), "heads": (1, 2), "num_classes": 5, "image_size": 32}


@pytest.mark.parametrize(
    ("saved", "loaded", "advice"),
    [
        (
            ("nat_mini", "rpb", {}),
            ("dinat_mini", "rpb", {}),
            "dilations is [1, 1, 1, 1] there and [8, 4, 2, 1] here",
        ),
        (
            ("nat_mini", "none", {}),
            ("nat_mini", "none", {"kernel_size": 5}),
            "kernel_size is 7 there and 5 here",
        ),
        (("nat_s_tiny", "none", {}), ("swin_t", "none", {}), "family is NAT there and Swin here"),
        (
            ("nat_mini", "none", {}),
            ("nat_mini", "axial_rope", {}),
            "position is [['none', {}]] there and [['axial_rope', {",
        ),
        (("swin_t", "rope2d", {}), ("swin_t", "rope2d(base=50)", {}), "'base': 100.0"),
    ],
)
def test_files_identify_their_model(saved, loaded, advice, tmp_path):
    path = tmp_path / "model.safetensors"
    make = lambda name, position, options, **weights: rope_jax.create_model(
        name, position=position, **NAT | options, **weights
    )
    model = make(*saved)
    save_pretrained(model, path, source="nat" if "nat" in saved[0] else "naver")
    with pytest.raises(
        ValueError,
        match=rf"holds the weights of another model: .*{re.escape(advice)}.*Create that model",
    ):
        make(*loaded, pretrained=path)
    assert_same(make(*saved, seed=1, pretrained=path), model)


def test_options_irrelevant_to_weights_may_differ(tmp_path):
    path = tmp_path / "model.safetensors"
    model = small("rope2d+ape")
    save_pretrained(model, path, source="naver")
    other = rope_jax.create_model(
        "deit3_s16",
        position="ape+rope2d(pairing=interleaved)",
        drop_path=0.3,
        layer_scale=1e-5,
        scan_layers=True,
        pretrained=path,
        **SIZES,
    )
    np.testing.assert_array_equal(
        other.position.parts[0].embedding[...], model.position.parts[1].embedding[...]
    )


def test_files_identify_the_maps_of_their_tables(tmp_path):
    """16 tokens may be 2 x 8 or 4 x 4."""
    make = lambda size, **options: rope_jax.create_model(
        "deit3_s16", **SIZES | {"image_size": size}, **options
    )
    model = make((32, 128))
    save_pretrained(model, tmp_path / "model.safetensors", source="deit")
    assert_same(make((32, 128), seed=1, pretrained=tmp_path / "model.safetensors"), model)
    square = make(64, pretrained=tmp_path / "model.safetensors")
    model.resize((64, 64))
    assert_same(square, model)
