"""Memory of training steps on H200s, as planned by XLA, and their collectives.

    python -m benchmarks memory --out benchmarks/results/memory_h200.json

Compiles training steps of classification (bfloat16, AdamW, averaged weights, 224 pixels) and of
dense prediction (the recipes as they are, in bfloat16) ahead of time for H200s. No GPU is needed,
but jax[cuda13], JAX_PLATFORMS=cpu and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 are. A running process
needs somewhat more memory.
"""

import collections
import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks._gpus import absent_gpus
from benchmarks._runner import Keep, record
from rope_jax import config, data
from rope_jax.system.sharding import (
    make_mesh,
    split_batch,
    state_shardings,
    use_mesh,
    with_shardings,
)
from rope_jax.training.setup import assemble, create, initial_state
from rope_jax.training.step import make_step

# Autotuning is off, so that the program is the same on every machine.
OPTIONS = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
FITS = 0.9 * 139.8 * 2**30  # bytes of an H200, less a tenth for allocations outside XLA's plan
BATCHES = (32, 64)  # images per GPU, between which memory grows linearly
COLLECTIVE = r"all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
# Title, model, hosts of eight GPUs, over how many GPUs parameters are divided.
MODELS = [
    ("ViT-L", "deit3_l16", 1, 1),
    ("ViT-L", "deit3_l16", 1, 8),
    ("ViT-L", "deit3_l16", 32, 8),
    ("Swin-B", "swin_b", 1, 1),
    ("Swin-B", "swin_b", 1, 8),
    ("Swin-B", "swin_b", 32, 8),
    ("ViT-S", "vit_s16", 1, 1),
    ("Swin-T", "swin_t", 1, 1),
    ("NAT-Mini", "nat_mini", 1, 1),
]
# Title, recipe, pixels, classes; two images on one GPU.
DENSE = [
    ("DINO, ViTDet-B", "dino:variant=vit_b", 1024, 80),
    ("DINO, ViTDet-B, largest canvas", "dino:variant=vit_b", 1344, 80),
    ("DINO, Swin-B, largest canvas", "dino:variant=swin_b", 1344, 80),
    ("Mask2Former, Swin-S", "mask2former:variant=swin_s", 512, 150),
    ("Mask2Former, Swin-B", "mask2former:variant=swin_b", 512, 150),
]


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled training step.

    Attributes:
        state: bytes per device of parameters, optimizer state and averages.
        other: bytes per device of activations, gradients, gathered parameters and the batch.
        text: the optimised HLO.
    """

    state: int
    other: int
    text: str


def classifier(name: str, image_size: int | None = None, **options: Any) -> config.Config:
    """The settings of a model: its scheme, head and other options as in `--config.model`."""
    settings = config.default()
    settings.update({"dtype": "bfloat16", "ema_decay": 0.9999})
    settings.data.update({"image_size": image_size})
    settings.model.update({"name": name, "num_classes": 1000} | options)
    return config.resolve(settings)


def compile_step(
    settings: config.Config, devices: list[jax.Device], batch: int, size: int = 224, fsdp: int = 1
) -> Step:
    """Compiles a training step.

    Args:
        settings: of the run, with the number of classes.
        devices: to compile for.
        batch: images per device.
        size: side of the images in pixels.
        fsdp: as in `MeshConfig`.
    """
    mesh, count = make_mesh(fsdp, devices=devices), batch * len(devices)
    settings = dataclasses.replace(settings, batch_size=count)
    make = functools.partial(create, settings)
    black = np.zeros((count, 8, 8, 3), np.uint8)  # the step does not use them
    classes = settings.model.num_classes
    images = data.Images(black, np.zeros(count, np.int32), "black", "train", classes)
    run = assemble(settings, mesh, images, images, nnx.eval_shape(make))
    state = jax.eval_shape(lambda: initial_state(run, make()))

    def array(*shape: int, dtype: type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *shape), dtype)

    boxes = settings.data.max_boxes
    labels = {
        "images": {"label": array()},
        "pixels": {"label": array(size, size, dtype=jnp.uint8), "extent": array(2)},
        "boxes": {
            "label": array(boxes),
            "boxes": array(boxes, 4, dtype=jnp.float32),
            "extent": array(2),
        },
    }
    arrays = {"image": array(size, size, 3, dtype=jnp.uint8), "epoch": array(), "index": array()}
    arrays |= labels[run.task.labels.labels_of]
    with use_mesh(mesh):
        placed = with_shardings(state, state_shardings(state, mesh))
        traced = make_step(run).trace(placed, with_shardings(arrays, split_batch(mesh)))
    compiled = traced.lower().compile(compiler_options=OPTIONS)
    memory = compiled.memory_analysis()
    # The state is donated, so the aliased bytes are those of the state.
    state_bytes = memory.alias_size_in_bytes
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - 2 * state_bytes
    return Step(state_bytes, memory.temp_size_in_bytes + arguments, compiled.as_text())


def gib(count: float) -> str:
    """Bytes in GiB."""
    return f"{count / 2**30:.1f}"


def model_row(title: str, name: str, hosts: int, fsdp: int) -> list[str]:
    """Memory, largest batch and collectives of a training step, with the blocks in a scan."""
    settings, devices = classifier(name, options="scan_layers=True"), absent_gpus(hosts, 8)
    small, large = (compile_step(settings, devices, batch, fsdp=fsdp) for batch in BATCHES)
    slope = (large.other - small.other) / (BATCHES[1] - BATCHES[0])
    fitting = BATCHES[1] + (FITS - large.state - large.other) / slope
    kinds = collections.Counter(re.findall(rf" ({COLLECTIVE})(?:-start)?\(", large.text))
    collectives = ", ".join(f"{kinds[x]} {x}" for x in COLLECTIVE.split("|") if kinds[x])
    sizes = [gib(large.state), gib(large.other), str(math.floor(fitting / 8) * 8)]
    return [title, str(8 * hosts), str(fsdp), *sizes, collectives]


def dense_row(title: str, recipe: str, size: int, classes: int) -> list[str]:
    """Memory of a training step of a recipe."""
    settings = config.resolve(config.load_recipe(recipe))
    model = dataclasses.replace(settings.model, num_classes=classes)
    settings = dataclasses.replace(settings, model=model)
    step = compile_step(settings, absent_gpus(), 2, size)
    return [title, f"`{recipe}`", f"{size} x {size}", "2", gib(step.state), gib(step.other)]


def run(keep: Keep) -> None:
    """Compiles the programs, and saves the tables after each.

    Args:
        keep: saves the result.
    """
    machine = record("memory", {})["machine"] | {"device": "NVIDIA H200 (compiled for)"}
    other = f"other memory at {BATCHES[1]} images per GPU, GiB"
    header = ["model", "GPUs", "fsdp", "state, GiB", other, "largest batch per GPU", "collectives"]
    models = {"columns": header, "rows": [], "note": "Classification."}
    header = ["model", "recipe", "pixels", "images", "state, GiB", "other memory, GiB"]
    dense = {"columns": header, "rows": [], "note": "Recipes of dense prediction, on one GPU."}
    for table, make_row, cases in ((models, model_row, MODELS), (dense, dense_row, DENSE)):
        for case in cases:
            table["rows"].append(make_row(*case))
            print(*table["rows"][-1], sep="\t", flush=True)
            keep(settings={}, machine=machine, tables=[models, dense])
