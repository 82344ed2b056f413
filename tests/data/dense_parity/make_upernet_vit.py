"""Makes the goldens upernet_vit_* with mmsegmentation's code and configs, on a CPU.

    python tests/data/dense_parity/make_upernet_vit.py

Needs mmsegmentation 1.2.2, mmcv-lite 2.2.0, mmengine, opencv-python-headless and torch, and the
repository as the working folder. No official file is edited. mmcv's compiled operators, which these
models do not use, are replaced by an empty module, and the version of mmcv by one that
mmsegmentation accepts.
"""

import json
import pathlib
import sys
from unittest import mock

import mmcv
import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path.cwd()))
mmcv.__version__ = "2.1.0"
sys.modules["mmcv.ops"] = mock.MagicMock()

import mmseg  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmseg.registry import MODELS  # noqa: E402
from mmseg.utils import register_all_modules  # noqa: E402

from tests.parity.official import tensor  # noqa: E402

HERE = pathlib.Path(__file__).parent
CONFIGS = pathlib.Path(mmseg.__file__).parent / ".mim" / "configs" / "vit"
# True if the patch embedding has a bias, as in versions 0.x; 1.2.2 has none by default.
CASES = {
    "upernet_vit_mln": ("vit_vit-b16_mln_upernet_8xb2-80k_ade20k-512x512", True),
    "upernet_vit_ln_mln": ("vit_deit-s16-ln_mln_upernet_8xb2-160k_ade20k-512x512", False),
    "upernet_vit_plain": ("vit_deit-s16_upernet_8xb2-160k_ade20k-512x512", True),
}
# A map of 5 x 7 tokens, resized from 4 x 4, whose half has 2 x 3: both sides are odd.
SIZES = {
    "image": [80, 112],
    "created_for": [64, 64],
    "embed_dim": 48,
    "depth": 4,
    "heads": 3,
    "blocks": [0, 1, 2, 3],
    "width": 32,
    "classes": 13,
    "auxiliary": {"map": 3, "width": 32},
}


def build(config, patch_bias):
    """The model of an official config at a smaller size, and the settings of its golden."""
    settings = Config.fromfile(CONFIGS / f"{config}.py")
    official = settings.model
    width, classes = SIZES["embed_dim"], SIZES["classes"]
    channels = {"in_channels": [width] * 4}
    changes = {
        "pretrained": None,
        "backbone": {
            "img_size": tuple(SIZES["created_for"]),
            "embed_dims": width,
            "num_layers": SIZES["depth"],
            "num_heads": SIZES["heads"],
            "out_indices": tuple(SIZES["blocks"]),
            "patch_bias": patch_bias,
        },
        "decode_head": {"channels": SIZES["width"], "num_classes": classes, **channels},
        "auxiliary_head": {
            "in_channels": width,
            "channels": SIZES["auxiliary"]["width"],
            "num_classes": classes,
        },
    }
    neck = official.get("neck")
    if neck is not None:
        changes["neck"] = {"out_channels": width, **channels}
    settings.merge_from_dict({"model": changes})
    official = settings.model
    assert official.auxiliary_head.in_index == SIZES["auxiliary"]["map"]
    epsilon = official.backbone.norm_cfg["eps"]
    final = bool(official.backbone.get("final_norm", False))
    summary = {"neck": "none" if neck is None else "multilevel", "last_norm": final}
    return MODELS.build(official), SIZES | summary | {"norm_epsilon": epsilon}


def find_kind(key, value, owner):
    """The kind of a tensor, which determines its values."""
    leaf = key.rpartition(".")[2]
    if leaf == "num_batches_tracked":
        return "counter"
    if leaf in ("running_mean", "running_var"):
        return leaf
    if isinstance(owner, nn.LayerNorm | nn.modules.batchnorm._BatchNorm) and leaf == "weight":
        return "norm_weight"
    if leaf in ("cls_token", "pos_embed"):
        return "table"
    return "linear" if value.ndim > 1 else "bias"


def fill(model):
    """Fills a model with values determined by names and kinds; returns shapes and kinds."""
    owners, keys, state = dict(model.named_modules()), {}, {}
    for key, value in model.state_dict().items():
        kind = find_kind(key, value, owners[key.rpartition(".")[0]])
        keys[key] = [list(value.shape), kind]
        state[key] = value
        if kind != "counter":
            state[key] = torch.from_numpy(tensor(key, tuple(value.shape), kind))
    model.load_state_dict(state)
    return keys


def outputs(model, dtype):
    """The stored outputs by name, channels first."""
    rng = np.random.default_rng(1234)
    x = torch.from_numpy(rng.standard_normal((1, 3, *SIZES["image"]), dtype=np.float32)).to(dtype)
    with torch.no_grad():
        maps = model.to(dtype).eval().extract_feat(x)
        results = {f"map{i}": x[:, :8] for i, x in enumerate(maps)}
        results["logits"] = model.decode_head(maps)[:, ::3]
        full_size = model.encode_decode(x, [{"img_shape": x.shape[2:]}])
        results["logits_at_image_size"] = full_size[:, ::7, ::4, ::4]
        results["aux_logits"] = model.auxiliary_head(maps)
    return {key: value.numpy() for key, value in results.items()}


def main():
    register_all_modules(init_default_scope=True)
    cases = json.loads((HERE / "cases.json").read_text())
    for name, (config, patch_bias) in CASES.items():
        model, cases[name] = build(config, patch_bias)
        keys = fill(model)
        single, double = outputs(model, torch.float32), outputs(model, torch.float64)
        exact = {f"{key}_f64": value for key, value in double.items()}
        np.savez_compressed(HERE / f"{name}.npz", **single, **exact)
        metadata = {
            "name": name,
            "source": {
                "repo": "open-mmlab/mmsegmentation",
                "commit": "1.2.2 (wheel), mmcv-lite 2.2.0, mmengine 0.10.7",
                "path": f"configs/vit/{config}.py",
                "constructor": f"the config's model, sizes of cases.json, {patch_bias=}",
            },
            "inputs": "images(80, 112, n=1)",
            "notes": [
                "map*: after the neck, first 8 channels; logits: every third class; "
                "logits_at_image_size: every 7th class, 4th row and column",
                "the neck resizes by factors: half of an odd side leaves out the last token",
            ],
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "param_count": {"trainable": sum(p.numel() for p in model.parameters())},
            "arrays": {
                key: {"shape": list(x.shape), "dtype": str(x.dtype), "std": float(x.std())}
                for key, x in single.items()
            },
            "noise_max_abs_f32_vs_f64": {
                key: float(np.abs(x - double[key]).max()) for key, x in single.items()
            },
            "keys": keys,
        }
        (HERE / f"{name}.json").write_text(json.dumps(metadata, indent=1) + "\n")
        print(name, metadata["param_count"], metadata["noise_max_abs_f32_vs_f64"])
    lines = [f" {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    (HERE / "cases.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
