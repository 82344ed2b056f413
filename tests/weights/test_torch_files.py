"""Files of `torch.save`, written by tests/data/torch/make.py; hostile ones, which run nothing."""

import collections
import io
import os
import pathlib
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.weights import export_state_dict, load_pretrained
from rope_jax.weights.torch_files import open_torch
from tests.parity.official import assert_equal

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "torch"
DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]
FORMATS = ["", "_legacy", "_protocol4"]


def read(path):
    with open_torch(path) as file:
        arrays = {name: file.read(name) for name in file.shapes}
        assert file.shapes == {name: (x.shape, x.dtype) for name, x in arrays.items()}
    return arrays


def counted(*shape, dtype="float32"):
    return np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("form", FORMATS)
def test_tensors_of_every_dtype_and_their_views(form):
    expected = {name: counted(2, 3, dtype=name) for name in DTYPES} | {
        "parameter": counted(3),
        "transposed": counted(3, 4).T,
        "rows": counted(4, 6)[1:3],
        "columns": counted(4, 6)[:, ::2],
        "expanded": counted(3, 1).repeat(2, axis=1),
        "scalar": np.array(7, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "bits": counted(4, dtype="int32").view(np.int16),
    }
    assert_equal(read(FOLDER / f"tensors{form}.pth"), expected)


@pytest.mark.parametrize("form", FORMATS)
def test_the_model_of_a_training_file(form):
    """The averaged model, optimizer, arguments and NumPy's scalars are not read."""
    arrays = read(FOLDER / f"training{form}.pth")
    layers = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert list(arrays) == [*layers, "1.num_batches_tracked"]
    for number, array in enumerate(arrays.values()):
        np.testing.assert_array_equal(array, np.full_like(array, number))


@pytest.mark.parametrize("form", FORMATS)
def test_arrays_and_sets_next_to_tensors_are_not_read(form):
    assert_equal(read(FOLDER / f"numpy{form}.pth"), {"weight": counted(2, 3)})


def pickled(content, protocol=4):
    """A pickle as NumPy 1 names its functions, where the pickle has names as lines."""
    return pickle.dumps(content, protocol).replace(b"cnumpy._core.", b"cnumpy.core.")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_of_arrays(protocol, tmp_path):
    """As of detectron2, with names and a note next to the arrays."""
    arrays = {name: counted(2, 3, dtype=name) for name in DTYPES if name != "bfloat16"} | {
        "columns": np.asfortranarray(counted(3, 4)),
        "big": counted(300, 7).astype(">f4"),
        "scalar": np.array(7.0),
        "empty": np.zeros((0, 3)),
        "frozen": counted(5),
    }
    arrays["frozen"].flags.writeable = False
    content = {"model": arrays, "__author__": "third_party", "matching_heuristics": True}
    (tmp_path / "model.pkl").write_bytes(pickled(content, protocol))
    assert_equal(read(tmp_path / "model.pkl"), arrays)


def test_mask2former_takes_the_pickles_of_its_authors(tmp_path):
    head = "mask2former(width=16,heads=2,groups=4,pixel_depth=1,pixel_hidden=16,depth=1,hidden=32)"
    settings = {"width": 16, "depths": (1,) * 4, "heads": (1,) * 4, "num_classes": 3}
    settings |= {"image_size": 64, "window_size": 2, "window_padding": "tokens", "head": head}
    model = nnx.eval_shape(lambda: rope_jax.create_model("swin_t", **settings))
    expected, rng = nnx.clone(model), np.random.default_rng(0)
    values = jax.tree.map(lambda x: rng.random(x.shape, np.float32), nnx.state(expected))
    nnx.update(expected, values)
    arrays = export_state_dict(expected, source="mask2former")
    # The first files have an older name, and a weight of the loss.
    queries = arrays.pop("sem_seg_head.predictor.query_feat.weight")
    arrays |= {"sem_seg_head.predictor.static_query.weight": queries}
    arrays |= {"criterion.empty_weight": np.ones(4, np.float32)}
    (tmp_path / "model_final.pkl").write_bytes(pickled({"model": arrays}))
    load_pretrained(model, tmp_path / "model_final.pkl", source="mask2former")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(expected))


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mknod, (str(self.path),)


class Claimed:
    """A NumPy array of which a pickle says this."""

    def __init__(self, shape=(2, 3), dtype="f4", data=bytes(24)):
        self.state = (1, shape, np.dtype(dtype), False, data)

    def __reduce__(self):
        return *np.zeros(1).__reduce__()[:2], self.state


def archive(content, storage=bytes(24), **options):
    """A zip archive like PyTorch's with a pickle and one storage."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as zipped:
        zipped.writestr("archive/data.pkl", content)
        zipped.writestr("archive/data/0", storage)
    return file.getvalue()


def tensor(shape=(2, 3), strides=(3, 1), offset=0, count=6, key="0", flags=b""):
    """A pickle of {"x": tensor}."""
    number = lambda n: b"J" + n.to_bytes(4, "little", signed=True)
    numbers = lambda row: b"(" + b"".join(map(number, row)) + b"t"
    text = lambda s: b"X" + len(s).to_bytes(4, "little") + s.encode()
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu")
    storage += number(count) + b"tQ"
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset)
    return (
        b"\x80\x02}"
        + text("x")
        + rebuilt
        + numbers(shape)
        + numbers(strides)
        + b"\x89}"
        + flags
        + b"tRs."
    )


def legacy(keys):
    """A file of the older format without tensors and with these keys."""
    magic, version = ((0x1950A86A20F9469CFC6C).to_bytes(10, "little"), b"\x80\x02M\xe9\x03.")
    system = b"\x80\x02}X\x0d\x00\x00\x00little_endian\x88s."
    return b"\x80\x02\x8a\x0a" + magic + b"." + version + system + b"\x80\x02}." + keys


SIZE = b"ctorch\nSize\n"
DEEP = 200_000
HOSTILE = {
    "function": (lambda m: archive(pickle.dumps({"x": Touch(m)})), "mknod"),
    "legacy function": (lambda m: pickle.dumps(Touch(m), protocol=2), "mknod"),
    "attribute": (lambda m: archive(b"\x80\x04\x8c\x02os\x8c\x06system\x93."), r"os\.system"),
    "builtin": (lambda m: archive(b"cbuiltins\neval\n."), r"builtins\.eval"),
    "endless name": (
        lambda m: archive(b"\x80\x04)q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b")\x93."),
        "name is no text",
    ),
    "legacy key": (
        lambda m: legacy(b"\x80\x02](" + b")" + b"\x85" * DEEP + b"e."),
        "no tensor has",
    ),
    "extension": (lambda m: archive(b"\x80\x02\x82\x01."), "EXT1"),
    "state": (lambda m: archive(b"\x80\x02\x8a\x0aQ."), "long1"),
    "called value": (lambda m: archive(b"\x80\x02K\x01)R."), "not callable"),
    "arguments": (lambda m: archive(b"\x80\x02" + SIZE + b"(" + b"N" * 99 + b"tR."), "99 arg"),
    "deep list": (
        lambda m: archive(b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b"."),
        "tensors",
    ),
    "deep key": (lambda m: archive(b"\x80\x02})" + b"\x85" * DEEP + b"Ns."), "key of type tuple"),
    "no storage": (lambda m: archive(tensor(key="1")), "data/1"),
    "long storage": (lambda m: archive(tensor(count=7)), "fewer than 28"),
    "short storage": (lambda m: archive(tensor(count=5)), "outside of its storage"),
    "offset": (lambda m: archive(tensor(offset=1)), "outside of its storage"),
    "negative": (lambda m: archive(tensor(strides=(-3, 1))), "natural number"),
    "strides": (lambda m: archive(tensor(strides=(3, 1, 1))), "longer than"),
    "negated": (lambda m: archive(tensor(flags=b"}X\x03\x00\x00\x00neg\x88s")), "lazy view"),
    "compressed": (
        lambda m: archive(tensor(), compression=zipfile.ZIP_DEFLATED),
        "compressed",
    ),
    "bomb": (
        lambda m: archive(b"\x80\x02" + b"N" * 10**8, compression=zipfile.ZIP_DEFLATED),
        "compressed",
    ),
    "function in an array": (
        lambda m: pickle.dumps({"model": {"x": np.array([Touch(m)], object)}}),
        "mknod",
    ),
    "array of objects": (lambda m: pickled({"x": np.array([None])}), "'.O8', which is not one of"),
    "array of records": (lambda m: pickled({"x": Claimed(dtype="f4,f4")}), "'.V8', which is not"),
    "huge array": (lambda m: pickled({"x": Claimed((2**60, 2**60))}), "and dtype float32 has 24"),
    "short array": (lambda m: pickled({"x": Claimed(data=bytes(23))}), "has 23 bytes"),
    "negative array": (lambda m: pickled({"x": Claimed((-2, -3))}), "no natural number"),
    "axes": (lambda m: pickled({"x": Claimed((1,) * 17)}), "more than 16 axes"),
    "no bytes": (lambda m: pickled({"x": Claimed(data=[0] * 24)}), "an array has no bytes"),
    "long text": (lambda m: pickled({"x": "x" * 2**24}), "MiB of instructions and text"),
    "no arrays": (lambda m: pickled({"x": [1, 2]}), "tensors under model, .*, only 'x'"),
    "half an archive": (lambda m: npz()[:-30], "File is not a zip file; .* delete it and try"),
    "another archive": (lambda m: npz(), "no data.pkl"),
    "nothing": (lambda m: b"", "begins with"),
    "text": (lambda m: b"version https://git-lfs.github.com/spec/v1\n", "begins with b'vers'"),
    "tensor alone": (lambda m: archive(b"\x80\x02N."), "no dictionary of tensors"),
}


def test_settings_and_schedules_of_a_training_file_are_ignored(tmp_path):
    path = tmp_path / "weights.pth"
    others = [collections.Counter([3]), collections.defaultdict(list, a=[1]), range(3), slice(2)]
    others += [1j, {1, 2}, np.float32(1)]
    path.write_bytes(pickled({"model": {"x": np.ones(2, np.float32)}, "others": others}))
    assert_equal(read(path), {"x": np.ones(2, np.float32)})


def npz():
    file = io.BytesIO()
    np.savez(file, x=np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_one_error_and_run_nothing(tmp_path, name):
    make, words = HOSTILE[name]
    path = tmp_path / "weights.pth"
    path.write_bytes(make(tmp_path / "marker"))
    with pytest.raises(ValueError, match=rf"weights\.pth cannot be read as .*{words}") as refusal:
        read(path)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "marker").exists()


def test_the_hostile_tensor_is_read_without_its_fault(tmp_path):
    (tmp_path / "weights.pth").write_bytes(archive(tensor(), counted(2, 3).tobytes()))
    assert_equal(read(tmp_path / "weights.pth"), {"x": counted(2, 3)})


@pytest.mark.parametrize("name", ["training.pth", "training_legacy.pth", "arrays.pkl"])
def test_damaged_files_raise_nothing_else(tmp_path, name):
    rng = np.random.default_rng(0)
    if name == "arrays.pkl":
        content = pickled({f"array {number}": rng.random((3, number)) for number in range(9)}, 2)
    else:
        content = (FOLDER / name).read_bytes()
    damaged = [content[:length] for length in range(0, len(content), 211)]
    for value, place in enumerate(rng.integers(len(content), size=60)):
        damaged.append(content[:place] + bytes([4 * value]) + content[place + 1 :])
    refused = 0
    for attempt in damaged:
        (tmp_path / name).write_bytes(attempt)
        try:
            read(tmp_path / name)
        except ValueError:
            refused += 1
    assert refused > len(damaged) / 3


def test_objects_of_other_classes_are_named():
    with pytest.raises(ValueError, match=r"needs 'torch\.nn\.modules\.linear\.Linear'"):
        read(FOLDER / "module.pth")
