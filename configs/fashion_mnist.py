"""Fashion-MNIST: 60,000 grey images of 28x28 pixels, from its four official idx files.

    rope_jax train --config=fashion_mnist:path=FOLDER --workdir=runs/fashion

FOLDER holds the files, compressed or not; they are not shipped. Hardware: one GPU. Time and
accuracy over the 30 epochs: no source. RoPE-Mixed is the default, as in configs/digits.py: its
angle per patch is the same at every size, while the fastest frequencies of Axial RoPE, up to 10 pi
across the map, alias on a map of 7x7 patches, differently at every size.
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: path (the folder with the four idx files), position (a scheme), epochs, seed."""
    args = cfg.recipe_arguments(arguments, path=None, position="rope_mixed", epochs=30.0, seed=0)
    config = cfg.default()
    config.seed = args.seed
    config.epochs = args.epochs
    config.batch_size = 256
    config.label_smoothing = 0.1

    config.model.name = "vit_digits"
    config.model.position = args.position
    config.model.options = "patch_size=4,width=128,depth=6,heads=4,drop_path=0.1"

    config.data.source = "idx"
    config.data.path = args.path
    config.data.augment = "crop(pad=2)+flip"

    config.optim.learning_rate = 1e-3
    config.optim.warmup_epochs = 2.0
    config.optim.weight_decay = 0.05

    config.eval.resolutions = (20, 24, 32, 40, (28, 40))
    return config
