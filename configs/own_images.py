"""A vision transformer from scratch on your own images, in folders or an .npz file.

    rope_jax train --config=own_images:path=IMAGES --workdir=runs/own
    rope_jax compare --path=IMAGES --positions=ape,rope_mixed,axial_rope --seeds=3

IMAGES has folders train/CLASS/*.jpg and val/CLASS/*.jpg, or is a file of arrays, NAME.npz, see
`rope_jax.data.load`. Hardware: one GPU; on a CPU choose a small resolution. Hours and accuracy
depend on the images. The augmentation is DeiT-III's with mixup and CutMix, for some thousand images
and more.

It is also the recipe of `rope_jax compare`, which trains it with several schemes and seeds.
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: path, source, model, position, resolution, epochs, batch, seed.

    source is that of `rope_jax.data.load`, None for "npz" if the path ends in .npz and "folder"
    otherwise; position None is the model's own scheme, batch the images in a step; the learning
    rate, 1e-3 for 512 of them, is scaled with it.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        path=None,
        source=None,
        model="deit3_ti16",
        position=None,
        resolution=224,
        epochs=100.0,
        batch=256,
        seed=0,
    )
    config.batch_size = args.batch
    config.label_smoothing = 0.1

    default = "npz" if str(args.path).endswith(".npz") else "folder"
    config.data.source = args.source or default
    config.data.update(cfg.IMAGENET)
    config.data.augment = "resized_crop(scale_min=0.35)+flip+three_augment+color_jitter"

    config.mix.mixup = 0.8
    config.mix.cutmix = 1.0

    batch = config.get_ref("batch_size").to_float()  # as --config.batch_size changes it
    config.optim.learning_rate = 1e-3 * batch / 512
    config.optim.min_learning_rate = 1e-6
    config.optim.warmup_epochs = 5.0

    # Multiples of 32 near 0.75, 1.25 and 1.5 times the training size.
    sides = (32 * round(scale * args.resolution / 32) for scale in (0.75, 1.25, 1.5))
    config.eval.resolutions = tuple(side for side in sides if side > 0)
    return config
