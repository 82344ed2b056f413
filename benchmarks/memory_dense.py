"""Memory of training steps of dense prediction on a GPU, as planned by XLA.

    python -m benchmarks memory_dense --out benchmarks/results/memory_dense_h200.json

Compiles the training steps of recipes, in bfloat16, ahead of time for an H200: the weights, the
optimizer's state and the gradients are part of them. What is needed is described in
`benchmarks.memory`.
"""

from typing import Any, Literal

from benchmarks._planned import compile_recipe, gpus
from benchmarks._runner import Keep, record

# Model -> recipe, pixels, images, classes.
PROGRAMS = {
    "DINO, ViTDet-B": ("dino:variant=vit_b", 1024, 2, 80),
    "DINO, ViTDet-B, largest canvas": ("dino:variant=vit_b", 1344, 2, 80),
    "DINO, Swin-B, largest canvas": ("dino:variant=swin_b", 1344, 2, 80),
    "Mask2Former, Swin-S": ("mask2former:variant=swin_s", 512, 2, 150),
    "Mask2Former, Swin-B": ("mask2former:variant=swin_b", 512, 2, 150),
}


def row_of(model: str) -> dict[str, Any]:
    """Bytes of a step on one GPU: of its state, and of all else."""
    recipe, size, batch, classes = PROGRAMS[model]
    step = compile_recipe(recipe, gpus(1)[:1], batch, size, classes)
    row = {"model": model, "recipe": recipe, "size": size, "batch": batch}
    return row | {"state_bytes": step.state, "rest_bytes": step.rest}


_ALL = list(PROGRAMS)


def run(keep: Keep, *, models: list[Literal[*PROGRAMS]] = _ALL) -> None:
    """Compiles the programs, and saves the result after each.

    Args:
        keep: saves the result.
        models: programs to compile
    """
    rows = []
    machine = record("memory_dense", {})["machine"] | {"device": "NVIDIA H200 (compiled for)"}
    for model in models:
        rows.append(row_of(model))
        print(rows[-1], flush=True)
        keep(settings={}, machine=machine, rows=rows)
