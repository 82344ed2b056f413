"""Writes the names and shapes of timm's published weights: python make.py, with torch and timm.

`names.json.gz` has, by hub id, the shape of each tensor by its name. They are those of timm's
models, because no file is downloaded.
"""

import gzip
import json
import pathlib

import timm
import torch

HERE = pathlib.Path(__file__).parent
LIST = HERE.parents[2] / "rope_jax" / "weights" / "released.json"

shapes = {}
for row in json.loads(LIST.read_text()):
    owner, _, name = row["where"].rpartition("/")
    if owner == "timm":
        with torch.device("meta"):
            model = timm.create_model(name)
        tensors = model.state_dict().items()
        shapes[row["where"]] = {key: list(tensor.shape) for key, tensor in tensors}
text = json.dumps({"timm": timm.__version__, "shapes": shapes})
(HERE / "names.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
