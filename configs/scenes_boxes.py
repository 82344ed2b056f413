"""Detection of the digits of scenes on two CPU cores, without a download.

    rope_jax train --config=scenes_boxes --workdir=runs/scenes_boxes
    rope_jax train --config=scenes_boxes:position=ape --workdir=runs/scenes_boxes_ape

A small transformer with tokens of 8 pixels from three convolutions (CCT), and DINO with one map of
stride 4, one layer of the encoder and two of the decoder. A ViT whose tokens are patches finds the
digits, too, but could not tell them apart after 950 steps. The schedule is short: boxes are
exact long before classes are.
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: position (a scheme), epochs, seed."""
    args = cfg.recipe_arguments(arguments, position="rope_mixed", epochs=16.0, seed=0)
    config = cfg.default()
    config.seed = args.seed
    config.epochs = args.epochs
    config.batch_size = 16
    config.log_every = 100
    config.checkpoint_every = 1000

    config.model.name = "cct_7_3x1"
    config.model.position = args.position
    config.model.head = (
        "dino(width=64,levels=1,groups=8,heads=4,points=2,encoder_depth=1,decoder_depth=2,"
        "hidden=128,queries=30,denoising=12,detections=60)"
    )
    config.model.options = (
        "conv_layers=3,patch_size=8,conv_width=24,width=96,depth=3,heads=3,drop_path=0.0,"
        "attention_dropout=0.0"
    )

    config.data.source = "scenes"
    config.data.image_size = 64
    config.data.max_boxes = 6

    config.optim.learning_rate = 1e-3
    config.optim.warmup_steps = 100
    config.optim.weight_decay = 0.05
    config.optim.clip_norm = 1.0

    config.mesh.cpu_devices = 2  # each with 8 images

    config.eval.resolutions = (80, 96)
    config.eval.batch_size = 50
    return config
