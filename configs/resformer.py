"""ResFormer on ImageNet-1k, at one or several resolutions in a step (arXiv 2212.00776).

    rope_jax train --config=resformer:variant=s,path=FOLDER --workdir=runs/resformer/s_224
    rope_jax train --config=resformer:variant=s,resolutions=224+160+128,path=FOLDER \\
        --workdir=runs/resformer/s_multi

The first is the row "ResFormer-S-224" of Heo et al., table 5.

Hardware: 8 GPUs of the A100 class, 128 images each. Hours: estimated, not measured, from six times
the model's multiply-adds per image at 40 % of an A100's 312 TFLOP/s: ti 1, s 3, b 8 at 224 pixels;
at 224, 160 and 128 pixels 1.8 times as many.

Published accuracies: `rope_jax reproduce heo/table_5`; of several resolutions, in the repository of
the official code at 96, 128, 160, 224, 384 and 512 pixels: ti 61.4, 67.8, 71.1, 73.9, 75.0, 73.8;
s 73.6, 78.2, 80.4, 82.2, 82.7, 82.0; b 75.9, 79.7, 81.5, 82.7, 83.3, 82.6.

Heo et al. do not state how that row was trained; this is ResFormer's recipe at one resolution,
which has no larger one to distil from.

Known deviations from the original:

- Activations are bfloat16, not float16; batches cross the ends of epochs.
"""

from rope_jax import config as cfg

# Learning rate, epochs, epochs of warmup, drop path, largest norm of the gradient.
VARIANTS = {
    "ti": (1e-3, 300.0, 5.0, 0.1, None),
    "s": (1e-3, 300.0, 5.0, 0.1, None),
    "b": (1.6e-3, 200.0, 20.0, 0.2, 5.0),
}


def get_config(arguments: str | None = None):
    """Arguments: variant, resolutions, position, epochs, source, path, seed.

    variant is ti, s or b; resolutions are pixels joined by +, of which the first is that of the
    evaluation; position None is the model's own; epochs 0 are those of the variant.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        {"variant": VARIANTS},
        variant="s",
        resolutions="224",
        position=None,
        epochs=0.0,
        source="folder",
        path=None,
        seed=0,
    )
    rate, epochs, warmup, drop_path, clip = VARIANTS[args.variant]
    first, *others = cfg.recipe_sides(args.resolutions)
    config.epochs = args.epochs or epochs
    config.batch_size = 1024
    config.dtype = "bfloat16"
    config.label_smoothing = 0.1
    if others:
        config.distill = "smooth_l1"

    config.model.name = f"resformer_{args.variant}16"
    config.model.options = f"drop_path={drop_path}"

    config.data.image_size = first
    config.data.more_sizes = tuple(others)
    config.data.update(cfg.IMAGENET)
    config.data.repeats = 3
    config.data.augment = (
        "resized_crop(interpolation=bicubic)+flip"
        "+rand_augment(m=9,mstd=0.5,inc=True,interpolation=bicubic)+erase(p=0.25)"
    )

    config.mix.mixup = 0.8
    config.mix.cutmix = 1.0
    config.mix.groups = 8  # GPUs of the original

    config.optim.learning_rate = rate
    config.optim.min_learning_rate = 1e-5
    config.optim.schedule_step = "iteration"
    config.optim.warmup_epochs = warmup
    config.optim.warmup_learning_rate = 0.0
    config.optim.warmup_prefix = True
    config.optim.weight_decay = 0.05
    config.optim.clip_norm = clip

    config.eval.frame = "centre(crop=0.875,interpolation=bicubic)"
    sides = (96, 128, 160, 192, 224, 288, 384, 448, 512)
    config.eval.resolutions = tuple(side for side in sides if side != first)
    return config
