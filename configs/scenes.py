"""Segmentation of scenes of handwritten digits on two CPU cores, without a download.

    rope_jax train --config=scenes --workdir=runs/scenes
    rope_jax train --config=scenes:position=ape --workdir=runs/scenes_ape

Three minutes on two CPU cores. A ViT with patches of 8 pixels predicts 4 x 4 cells of each patch.
It is trained at 64 pixels, and evaluated with digits of the same size at four other sizes, where
the positional scheme matters most. Small batches and crops of the scenes matter in so short a run:
with batches of 16 whole scenes it only begins to distinguish digits.
`rope_jax compare --config=scenes --positions=none,ape,rope_mixed --seeds=3` compares schemes.

Expected mIoU of rope_mixed, in percent: 62 at 64 pixels, 63 at 48, 57 at 96, 52 at 128 and 59 at
64 x 128 (mean of three seeds, experiments/results/scenes_cpu.json).
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: position (a scheme), head, epochs, seed."""
    _, config = cfg.recipe_arguments(
        arguments, position="rope_mixed", head="linear(cells=4)", epochs=40.0, seed=0
    )
    config.batch_size = 8
    config.log_every = 500
    config.checkpoint_every = 2500

    config.model.name = "vit_digits"
    config.model.options = "patch_size=8,width=96,depth=4,heads=3"

    config.data.source = "scenes"
    config.data.image_size = 64
    config.data.augment = "resized_crop(scale_min=0.5)"

    config.optim.learning_rate = 2e-3
    config.optim.warmup_epochs = 1.0
    config.optim.b2 = 0.99
    config.optim.weight_decay = 0.05

    config.eval.resolutions = (48, 96, 128, (64, 128))
    config.eval.batch_size = 25
    return config
