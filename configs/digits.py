"""Handwritten digits in a minute: scikit-learn's 1,797 images of 8x8 pixels.

    rope_jax train --config=digits --workdir=runs/digits
    rope_jax train --config=digits:position=none --workdir=runs/digits_none
    rope_jax train --config=digits:resolutions=8+6+12 --workdir=runs/digits_sizes

One minute on two CPU cores. The held-out accuracies of six positional schemes are in the README,
from experiments/results/digits_cpu.json. RoPE-Mixed is the default: the most accurate at 8 pixels,
and still 81 to 98 % at the other sizes, where Axial RoPE falls to 13 to 34 %. The fastest
frequencies of Axial RoPE, up to 20 pi across the map, alias on a map of 4x4 patches.
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: position (a scheme), epochs, seed, and resolutions.

    These are pixels joined by +, at all of which each example is trained in a step; the first is
    that of the model and of the evaluation.
    """
    settings = {"position": "rope_mixed", "epochs": 60.0, "seed": 0, "resolutions": "8"}
    args, config = cfg.recipe_arguments(arguments, **settings)
    first, *others = cfg.recipe_sides(args.resolutions)
    config.batch_size = 128
    config.label_smoothing = 0.1
    config.log_every = 50
    config.checkpoint_every = 200

    config.model.name = "vit_digits"

    config.data.source = "digits"
    config.data.image_size = first
    config.data.more_sizes = tuple(others)
    # Digits of slightly different sizes, at slightly different places.
    config.data.augment = "resized_crop(scale_min=0.8)+crop(pad=1)"

    config.optim.learning_rate = 3e-3
    config.optim.warmup_epochs = 5.0
    config.optim.weight_decay = 0.3

    config.eval.resolutions = (6, 10, 12, (8, 12))
    return config
