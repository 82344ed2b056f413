"""Makes golden.json: small models of transformers, on noise for weights.

    python tests/data/transformers/make.py

Needs transformers (here 5.24.0) and torch, and the repository as the working folder. Names are
those of the files that `save_pretrained` writes.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(pathlib.Path.cwd()))

from tests.parity.official import images, tensor

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "num_labels": 3}
SIZES |= {"intermediate_size": 32, "patch_size": 4, "image_size": 16, "layer_norm_eps": 1e-6}
SWIN = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "num_labels": 3, "window_size": 4}
CASES = {
    "vit": ("ViTForImageClassification", "ViTConfig", SIZES),
    "dinov3": (
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        SIZES
        | {"num_register_tokens": 4, "layer_norm_eps": 1e-5}
        | {"use_gated_mlp": True, "hidden_act": "silu"},
    ),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", SIZES | {"use_swiglu_ffn": True}),
    "beit": (
        "BeitForImageClassification",
        "BeitConfig",
        SIZES | {"use_relative_position_bias": True},
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        SWIN | {"image_size": 32, "layer_norm_eps": 1e-5},
    ),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Config", SWIN | {"image_size": 32}),
}


def find_kind(key, shape):
    """The kind of noise, see tests/parity/official.py."""
    if "norm" in key and key.endswith("weight"):
        return "norm_weight"
    if key.endswith("bias"):
        return "bias"
    if "lambda" in key:
        return "layerscale"
    return "linear" if key.endswith("weight") and len(shape) > 1 else "table"


golden = {}
for name, (model_class, config_class, settings) in CASES.items():
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    file = f"{folder}/model.safetensors"
    shapes = {key: list(x.shape) for key, x in load_file(file).items()}
    keys = {key: [shape, find_kind(key, shape)] for key, shape in sorted(shapes.items())}
    weights = {key: torch.from_numpy(tensor(key, *keys[key])) for key in keys}
    save_file({key: x.contiguous() for key, x in weights.items()}, file, {"format": "pt"})
    model = type(model).from_pretrained(folder).eval()
    size = (settings["image_size"],) * 2
    with torch.no_grad():
        x = torch.from_numpy(np.ascontiguousarray(images(*size).transpose(0, 3, 1, 2)))
        y = model(pixel_values=x)
    y = y.logits if "logits" in y else y.last_hidden_state
    golden[name] = {"class": model_class, "keys": keys, "size": size, "output": y.tolist()}
text = json.dumps({"transformers": transformers.__version__, "cases": golden})
(pathlib.Path(__file__).parent / "golden.json").write_text(f"{text}\n")
