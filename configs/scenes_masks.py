"""Mask R-CNN on scenes of digits, for two CPU cores.

    rope_jax train --config=scenes --workdir=runs/scenes
    rope_jax train --config=scenes_masks --workdir=runs/scenes_masks

The first command trains the backbone by segmentation of the scenes, the second starts from it and
trains a small Mask R-CNN. The second takes seven minutes of CPU time (`make masks`).
Expected: a box AP of 51 % and a mask AP of 38 % at 64 pixels, 40 % and 30 % at 96
(measured once, seed 0).
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: position (a scheme), init_from (a run of `scenes` with it), epochs, seed."""
    args, _ = cfg.recipe_arguments(
        arguments, position="rope_mixed", init_from="runs/scenes", epochs=4.0, seed=0
    )
    config = cfg.load_recipe(cfg.with_arguments("scenes_boxes", **args))
    config.model.head = (
        "mask_rcnn(width=32,hidden=128,anchor_samples=64,box_samples=16,train_candidates=100,"
        "candidates=50,proposals=50,detections=30)"
    )
    config.eval.resolutions = (96,)
    return config
