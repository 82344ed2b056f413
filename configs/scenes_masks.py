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
    args = cfg.recipe_arguments(
        arguments, position="rope_mixed", init_from="runs/scenes", epochs=4.0, seed=0
    )
    config = cfg.default()
    config.seed = args.seed
    config.epochs = args.epochs
    config.batch_size = 8
    config.log_every = 250
    config.checkpoint_every = 1000
    config.init_from = args.init_from

    config.model.name = "vit_digits"
    config.model.position = args.position
    config.model.head = (
        "mask_rcnn(width=32,hidden=128,anchor_samples=64,box_samples=16,train_candidates=100,"
        "candidates=50,proposals=50,detections=30)"
    )
    config.model.options = "patch_size=8,width=96,depth=4,heads=3"

    config.data.source = "scenes"
    config.data.image_size = 64
    config.data.max_boxes = 6

    config.optim.learning_rate = 1e-3
    config.optim.warmup_steps = 100
    config.optim.b2 = 0.99
    config.optim.weight_decay = 0.05
    config.optim.clip_norm = 1.0

    config.eval.resolutions = (96,)
    config.eval.batch_size = 50
    return config
