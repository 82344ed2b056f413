"""Incomplete weights: no parameter silently keeps its initial value."""

import dataclasses
import functools
import operator
import re

import jax
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.config import resolve
from rope_jax.models.layers import STORED
from rope_jax.training.checkpoint import Checkpoints
from rope_jax.training.setup import create
from rope_jax.weights import export_state_dict, load_pretrained
from rope_jax.weights.load import load_weights
from rope_jax.weights.own import OWN
from rope_jax.weights.tables import begins
from tests.models import small
from tests.parity.test_convert import as_file
from tests.slow import some_slow

VIT = {"width": 8, "heads": 1, "depth": 2}
STAGES = {"width": 8, "depths": (1, 1), "heads": (1, 1)}
ADAPTER = VIT | {
    "depth": 4,
    "groups": (0, 1, 2, 3),
    "deform_heads": 1,
    "prior_width": 4,
    "class_token": True,
    "pooling": "class",
    "last_norm": True,
}
UPERNET = VIT | {"head": "upernet(width=4,auxiliary_width=4)", "depth": 4}
CASES = [
    ("deit_ti16", VIT, OWN),
    ("deit_ti16", VIT | {"scan_layers": True}, OWN),
    ("deit_ti16", VIT, "timm"),
    ("deit_ti16", VIT | {"position": "lape(ape)"}, "lape"),
    ("deit3_s16", VIT | {"position": "rope_mixed+ape"}, "naver"),
    ("dinov2_s14", VIT | {"image_size": 56}, "dinov2"),
    ("dinov2_s14", VIT | {"image_size": 56}, "timm"),
    ("dinov3_s16", VIT, "dinov3"),
    ("dinov3_s16_plus", VIT, "timm"),
    ("vit_adapter_ti16", ADAPTER, OWN),
    ("vit_adapter_ti16", ADAPTER, "vit_adapter"),
    ("swin_t", STAGES | {"position": "rpb+ape"}, "swin"),
    ("nat_mini", STAGES, "nat"),
    ("cct_7_3x1", VIT | {"image_size": 32}, "cct"),
    ("ceit_t", VIT, "ceit"),
    ("t2t_vit_7", VIT, "t2t"),
    ("deit_ti16", UPERNET, OWN),
    ("deit_ti16", UPERNET, "mmseg"),
]
QUICK = [CASES[n] for n in (0, 11)]


def abstract(name, settings):
    """A model of shapes only."""
    return small.abstract(name, **{"num_classes": 3, "image_size": 64} | settings)


def random_weights(name, settings, source):
    model, rng = abstract(name, settings), np.random.default_rng(0)
    values = jax.tree.map(lambda x: rng.random(x.shape).astype(x.dtype), nnx.state(model))
    nnx.update(model, values)
    return export_state_dict(model, source=source)


def missing_values(model):
    state = nnx.to_flat_state(nnx.state(model, STORED))
    empty = lambda variable: isinstance(variable.get_value(), jax.ShapeDtypeStruct)
    return [".".join(map(str, path)) for path, variable in state if empty(variable)]


def refusal(model, file, **options):
    """The error of loading a file; None without one."""
    try:
        load_weights(model, file, **options)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("name", "settings", "source"), some_slow(CASES, QUICK))
def test_missing_tensors_are_errors_or_printed(name, settings, source, capsys):
    """Single tensors (of large models a sample), and groups whose names begin alike."""
    weights, model = random_weights(name, settings, source), abstract(name, settings)
    assert missing_values(model)
    starts = {f"{key.partition('.')[0]}." for key in weights if "." in key}
    singles = [*weights][:: 1 + len(weights) // 60]
    for absent in ["", *sorted(starts), *singles]:
        gone = {
            key for key in weights if key == absent or (absent in starts and begins(key, [absent]))
        }
        remaining = {key: array for key, array in weights.items() if key not in gone}
        for new_head in (False, True)[: 1 + absent.startswith("head")]:
            file = as_file(remaining, source)
            error = refusal(model, file, new_head=new_head)
            if error is None:
                words = re.findall(r"[a-z_][\w.{}]+", capsys.readouterr().out)
                assert words or not gone
                assert [x for x in missing_values(model) if not begins(x, words)] == []
                model = abstract(name, settings)
            else:  # for a missing head or backbone, the remaining names are listed
                assert any(key in error for key in (gone if absent in weights else weights))


DINO = [
    ("deit_ti16", VIT | {"pooling": "class_mean"}, "timm"),
    ("dinov2_s14", VIT | {"image_size": 56}, "dinov2"),
    ("dinov3_s16", VIT, "dinov3"),
]


@pytest.mark.parametrize(("name", "settings", "source"), some_slow(DINO, DINO[:1]))
def test_weights_without_a_head_need_an_explicit_request(name, settings, source, tmp_path, capsys):
    """Files of DINO, DINOv2 and DINOv3 have no head; 1,000 default classes are no request."""
    path, weights = tmp_path / "dino.npz", random_weights(name, settings, source)
    np.savez(path, **{key: x for key, x in weights.items() if not key.startswith("head.")})
    settings = {"image_size": 64} | settings
    create = lambda **classes: nnx.eval_shape(
        lambda: rope_jax.create_model(name, pretrained=path, **settings, **classes)
    )
    for load in (create, lambda: load_pretrained(abstract(name, settings), path)):
        with pytest.raises(ValueError, match=r"no head. Create the model with num_classes=0 for"):
            load()
    create(num_classes=0)
    assert re.fullmatch("preprocessing: .*\n", capsys.readouterr().out)
    create(num_classes=1000)
    assert capsys.readouterr().out.startswith("head: new, 1000 classes\n")


def test_both_heads_of_a_distilled_model_are_its_classifier(capsys):
    name, weights = "deit_ti16_distilled", random_weights("deit_ti16_distilled", VIT, "deit")
    assert weights["pos_embed"].shape == (1, 2 + 16, 8)
    model = abstract(name, VIT | {"num_classes": 5})
    with pytest.raises(ValueError, match=r"head_dist.weight has shape \[3, 8\]"):
        rope_jax.convert_state_dict(model, weights, source="deit")
    rope_jax.convert_state_dict(model, weights, source="deit", new_head=True)
    assert all(begins(x, ["head.", "distillation_head."]) for x in missing_values(model))
    assert capsys.readouterr().out == "head: new, 5 classes\n"
    rope_jax.convert_state_dict(abstract(name, VIT | {"num_classes": 0}), weights, source="deit")
    # Segmenter's files have them in the encoder.
    mask = VIT | {"head": "segmenter(depth=1,head_dim=4)"}
    encoder = {f"encoder.{key}": x for key, x in weights.items() if key.startswith("head")}
    model = abstract(name, mask)
    weights = random_weights(name, mask, "segmenter") | encoder
    rope_jax.convert_state_dict(model, weights, source="segmenter")
    assert missing_values(model) == []


@pytest.mark.parametrize("gone", [("ema", "head", "bias"), ("stats",)])
def test_incomplete_checkpoints_are_refused(gone, tmp_path):
    """A checkpoint of a run with averaged weights and batch statistics."""
    model = {"name": "ceit_t", "num_classes": 3, "options": "depth=1,width=8,heads=1"}
    config = resolve({"model": model, "data": {"image_size": 64}, "ema_decay": 0.9})
    model_shapes, rng = nnx.eval_shape(lambda: create(config)), np.random.default_rng(0)
    values = lambda kind: jax.tree.map(
        lambda x: rng.random(x.shape).astype(x.dtype),
        nnx.to_pure_dict(nnx.state(model_shapes, kind)),
    )
    state = {"params": values(nnx.Param), "ema": values(nnx.Param), "stats": values(nnx.BatchStat)}
    *path, last = gone
    del functools.reduce(operator.getitem, path, state)[last]
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state, about={"config": dataclasses.asdict(config)})
    with pytest.raises(ValueError, match=rf"{'.'.join(gone)}.* is missing"):
        rope_jax.load_checkpoint(str(tmp_path))
