"""Writes the files of this folder with PyTorch (here 2.13 and 2.14 for CPU, under Python 3.11)."""

import argparse
import pathlib

import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
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


def counted(*shape, dtype="float32"):
    """0, 1, 2, ... in the given shape."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return numbers.to(getattr(torch, dtype))


whole = counted(4, 6)
tensors = {f"{name}": counted(2, 3, dtype=name) for name in DTYPES} | {
    "parameter": torch.nn.Parameter(counted(3)),
    "transposed": counted(3, 4).T,
    "rows": whole[1:3],  # of one storage with the next
    "columns": whole[:, ::2],
    "expanded": counted(3, 1).expand(3, 2),
    "scalar": torch.tensor(7.0),
    "empty": torch.zeros(0, 3),
    "bits": counted(4, dtype="int32").view(torch.float32).view(torch.int16),
}
layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
optimizer = torch.optim.AdamW(layers.parameters())
layers(torch.ones(4, 3)).sum().backward()
optimizer.step()
with torch.no_grad():
    for number, value in enumerate(layers.state_dict().values()):
        value.fill_(number)
training = {
    "model": {f"module.{name}": value for name, value in layers.state_dict().items()},
    "model_ema": {"weight": torch.zeros(1)},
    "optimizer": optimizer.state_dict(),
    "args": argparse.Namespace(lr=1e-3, size=[224, 224], name="tiny", seed=None),
    "accuracy": np.float64(81.4),
    "count": np.int64(3),
    "epoch": 300,
    "loss": torch.tensor(0.5),
}
training["model"] = type(layers.state_dict())(training["model"])
with_numpy = {
    "rng": np.arange(3),
    "objects": np.array([None, "text"], object),
    "text": np.array(["text"]),
    "sets": [{"fc1", "fc2"}, frozenset({1})],
    "model": {"weight": counted(2, 3), "mean": np.zeros(3)},
}
torch.save(with_numpy, HERE / "numpy.pth")
torch.save(with_numpy, HERE / "numpy_legacy.pth", _use_new_zipfile_serialization=False)
torch.save(with_numpy, HERE / "numpy_protocol4.pth", pickle_protocol=4)
for name, content in {"tensors": tensors, "training": training}.items():
    torch.save(content, HERE / f"{name}.pth")
    torch.save(content, HERE / f"{name}_legacy.pth", _use_new_zipfile_serialization=False)
    torch.save(content, HERE / f"{name}_protocol4.pth", pickle_protocol=4)
torch.save({"module": torch.nn.Linear(2, 2)}, HERE / "module.pth")

shapes = {
    "cls_token": (1, 1, 4),
    "pos_embed": (1, 5, 4),
    "patch_embed.proj": (4, 3, 16, 16),
    "blocks.0.norm1": (4,),
    "blocks.0.attn.qkv": (12, 4),
    "blocks.0.attn.proj": (4, 4),
    "blocks.0.norm2": (4,),
    "blocks.0.mlp.fc1": (16, 4),
    "blocks.0.mlp.fc2": (4, 16),
    "norm": (4,),
    "head": (2, 4),
}
deit = {}
for name, shape in shapes.items():
    if name in ("cls_token", "pos_embed"):
        deit[name] = counted(*shape)
    else:
        deit |= {f"{name}.weight": counted(*shape), f"{name}.bias": counted(shape[0])}
torch.save({"model": deit}, HERE / "deit.pth")
