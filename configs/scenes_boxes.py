"""Detection of the digits of scenes on two CPU cores, without a download.

    rope_jax train --config=scenes --workdir=runs/scenes
    rope_jax train --config=scenes_boxes --workdir=runs/scenes_boxes

The first command trains the backbone by segmentation of the scenes, the second starts from it and
trains a DINO with one map, one layer of the encoder and two of the decoder. Both take five
minutes on two CPU cores (`make detect`). Expected: an AP50 of 71 % at 64 pixels, 63 % at 80 and
49 % at 96 (measured once, seed 0).

From new weights, a ViT could not distinguish digits after 950 steps of 16 images, and a transformer
with convolutions (CCT) had an AP50 of 30 % after 2,000.
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: position (a scheme), init_from (a run of `scenes` with it), epochs, seed."""
    _, config = cfg.recipe_arguments(
        arguments, position="rope_mixed", init_from="runs/scenes", epochs=8.0, seed=0
    )
    config.batch_size = 8
    config.log_every = 250
    config.checkpoint_every = 1000

    config.model.name = "vit_digits"
    config.model.head = (
        "dino(width=64,levels=1,groups=8,heads=4,points=2,encoder_depth=1,decoder_depth=2,"
        "hidden=128,queries=30,denoising=12,detections=60)"
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

    config.eval.resolutions = (80, 96)
    config.eval.batch_size = 50
    return config
