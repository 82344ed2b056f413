"""The Cross-Axis Transformer and its baseline on ImageNet-1k for 10 epochs without augmentation, as its train.py does.

    python -m rope_jax.main --config=configs/cat.py:variant=cat_5,path=FOLDER --workdir=runs/cat/cat_5

Hardware: one GPU of the A100 class. Hours: estimated, not measured, from six times the model's multiply-adds (24.9 billion for cat_5) for
each image at 30 % of an A100's 312 TFLOP/s: cat_5 6, cat_vit_5 9.

Expected top-1 in percent on training and validation images (the paper): cat_5 64.1, 38.9 with the imprint, 63.8, 38.3 without
(`--config.model.options=imprint=none`). Not trained here. The published code has batches of 64, the paper says 128, which is taken. Its
weight decay is on biases and norms too, here it is not.
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: variant (cat_5, cat_vit_5), position (None for the model's own), resolution, epochs, source, path, seed."""
    args = cfg.recipe_arguments(
        arguments, variant="cat_5", position=None, resolution=224, epochs=10.0, source="folder", path=None, seed=234
    )
    config = cfg.default()
    config.seed = args.seed
    config.epochs = args.epochs
    config.batch_size = 128
    config.dtype = "bfloat16"

    config.model.name = args.variant
    config.model.position = args.position

    config.data.source = args.source
    config.data.path = args.path
    config.data.image_size = args.resolution
    config.data.mean = (0.0, 0.0, 0.0)
    config.data.std = (1.0, 1.0, 1.0)
    config.data.workers = 16
    config.data.augment = "stretch(interpolation=bilinear)"

    config.optim.learning_rate = 3e-4
    config.optim.min_learning_rate = 0.0
    config.optim.warmup_epochs = 0.0
    config.optim.weight_decay = 0.01
    config.optim.clip_norm = None

    config.eval.frame = "stretch(interpolation=bilinear)"
    return config
