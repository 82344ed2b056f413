"""Segmentation of scenes of handwritten digits on two CPU cores, without a download.

python -m rope_jax.main --config=configs/scenes.py --workdir=runs/scenes
python -m rope_jax.main --config=configs/scenes.py:position=ape --workdir=runs/scenes_ape
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: position (a scheme), head, epochs, seed."""
    args = cfg.recipe_arguments(
        arguments, position="rope_mixed", head="linear", epochs=12.0, seed=0
    )
    config = cfg.default()
    config.seed = args.seed
    config.epochs = args.epochs
    config.batch_size = 20
    config.log_every = 50
    config.checkpoint_every = 500

    config.model.name = "vit_digits"
    config.model.position = args.position
    config.model.head = args.head
    config.model.options = "patch_size=4,width=64,depth=4,heads=2"

    config.data.source = "scenes"
    config.data.image_size = 64
    config.data.on_device = True

    config.optim.learning_rate = 2e-3
    config.optim.warmup_epochs = 1.0
    config.optim.weight_decay = 0.05

    config.eval.resolutions = (48, 96, 128, (64, 128))
    config.eval.batch_size = 20
    return config
