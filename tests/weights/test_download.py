"""Downloads, from a server on this machine: interrupted, resumed, damaged and refused ones."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from rope_jax.weights.download import download
from tests.weights.hub import serve

FILE = pathlib.Path(__file__).parents[1] / "data" / "torch" / "deit.pth"
CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The folder of the server's repositories, with owner/name/deit.pth."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "files" / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "deit.pth").write_bytes(CONTENT)
    return tmp_path / "files"


def url_of(server, name="deit.pth"):
    return f"{server.url}/owner/name/resolve/main/{name}"


@pytest.mark.parametrize("parts", [True, False])
def test_an_interrupted_download_is_resumed(files, tmp_path, parts):
    path = tmp_path / "cache" / "deit.pth"
    with serve(files, parts=parts, cut=100_000) as server:
        with pytest.raises(FileNotFoundError, match=r"try again, which resumes.* save the file as"):
            download(url_of(server), path)
        assert not path.exists()
        download(url_of(server), path)
        assert server.starts == [0, 65536 if parts else 0]
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.glob("deit*")] == ["deit.pth"]


def test_a_part_that_is_not_of_the_file_is_dropped(files, tmp_path):
    path = tmp_path / "deit.pth"
    path.with_name("deit.pth.part").write_bytes(CONTENT + b"more")
    with serve(files) as server:
        download(url_of(server), path)
    assert path.read_bytes() == CONTENT


def test_files_are_checked_against_the_hash_in_their_names(files, tmp_path):
    right = f"deit-{hashlib.sha256(CONTENT).hexdigest()[:8]}.pth"
    folder = files / "owner" / "name"
    for name in (right, "deit-0badc0de.pth"):
        (folder / name).write_bytes(CONTENT)
    with serve(files) as server:
        download(url_of(server, right), tmp_path / right)
        with pytest.raises(ValueError, match="damaged: its SHA-256 does not begin with 0badc0de"):
            download(url_of(server, "deit-0badc0de.pth"), tmp_path / "deit-0badc0de.pth")
        with pytest.raises(FileNotFoundError, match="404"):
            download(url_of(server, "other.pth"), tmp_path / "other.pth")
    assert [file.name for file in tmp_path.glob("*.p*")] == [right]


CLIENT = """
import sys
import huggingface_hub.constants
import numpy as np
import rope_jax

small = {"width": 4, "heads": 1, "depth": 1, "image_size": 32, "num_classes": 2}
expected = rope_jax.create_model("deit_ti16", pretrained=sys.argv[1], **small)
for where in ("timm/deit_tiny_patch16_224.fb_in1k", "fb_in1k", True, "offline", "fb_in1k"):
    if where == "offline":
        huggingface_hub.constants.ENDPOINT = "http://127.0.0.1:9"
        continue
    model = rope_jax.create_model("deit_ti16", pretrained=where, **small)
    np.testing.assert_array_equal(model.head.bias[...], expected.head.bias[...])
    assert model.preprocessing.crop == 0.9, model.preprocessing
for where in ("owner/gated", "owner/none", "owner/empty", "owner/offline"):
    offline = where == "owner/offline"
    huggingface_hub.constants.ENDPOINT = "http://127.0.0.1:9" if offline else sys.argv[2]
    try:
        rope_jax.create_model("deit_ti16", pretrained=where, **small)
    except (FileNotFoundError, PermissionError) as error:
        print(type(error).__name__, error)
"""


@pytest.mark.process
def test_the_client_of_the_hub_finds_what_is_there(tmp_path):
    hub = tmp_path / "hub"
    for name in ("timm/deit_tiny_patch16_224.fb_in1k", "owner/gated", "owner/empty"):
        (hub / name).mkdir(parents=True)
    shutil.copy(FILE, hub / "timm" / "deit_tiny_patch16_224.fb_in1k" / "pytorch_model.bin")
    (hub / "owner" / "gated" / "gated").touch()
    with serve(hub) as server:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, str(FILE), server.url],
            env=os.environ
            | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
            | {"no_proxy": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    gated, none, empty, offline = [line for line in done.stdout.splitlines() if "Error" in line]
    assert "PermissionError" in gated
    assert "'owner/gated' is a gated repository: accept its terms" in gated
    assert "the hub has no such repository" in none
    assert "none of model.safetensors, pytorch_model.bin" in empty
    assert "not in the cache, and the hub cannot be reached" in offline
