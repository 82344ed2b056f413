"""Swin on ImageNet-1k for 300 epochs (arXiv 2103.14030), also with Heo et al.'s rotary embeddings.

    rope_jax train --workdir=runs/swin/t \\
        --config=swin:variant=swin_t,position=rope_mixed,path=FOLDER

Swin V2 (arXiv 2111.09883) is trained in the same way at 256 pixels, with windows of 8 tokens:

    rope_jax train --workdir=runs/swinv2/t --config=swin:variant=swinv2_t,path=FOLDER

Hardware: 8 GPUs of the A100 class, 128 images each. Hours: estimated, not measured, from six times
the model's multiply-adds per image at 20 % of an A100's 312 TFLOP/s: swin_t 6, swin_s 11,
swin_b 20, swinv2_t 8, swinv2_s 15, swinv2_b 26.

Published accuracies: `rope_jax reproduce heo/figure_5`; of swinv2_t, _s and _b at 256 pixels 81.8,
83.7 and 84.2, and with windows of 16 (`--config.model.options=window_size=16
--config.eval.scale_windows=False`) 82.8, 84.1 and 84.6 (MODELHUB of the official code).

Known deviations from the original:

- The rate does not lag one step behind, as in the official loop.
- Activations are bfloat16, not float16; batches cross the ends of epochs.

At other resolutions windows are a thirty-second of the image: in evaluation as in Heo et al.
(`--config.eval.scale_windows=False` keeps those of training and pads the maps), and in training as
in the official models of 384 pixels.
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: variant, position, resolution, epochs, batch_size, source, path, seed.

    position None is the model's own scheme, and resolution 0 that of the original.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        variant="swin_t",
        position=None,
        resolution=0,
        epochs=300.0,
        batch_size=1024,
        source="folder",
        path=None,
        seed=0,
    )
    native, position = (256, "cpb") if args.variant.startswith("swinv2") else (224, "rpb")
    resolution = args.resolution or native
    config.dtype = "bfloat16"
    config.label_smoothing = 0.1

    config.model.position = args.position or position
    if resolution != native:
        config.model.options = "window_size=None"  # a thirty-second of the image: 12 tokens at 384

    config.data.image_size = resolution
    config.data.update(cfg.IMAGENET)
    config.data.augment = (
        "resized_crop(interpolation=bicubic)+flip"
        "+rand_augment(m=9,mstd=0.5,inc=True,interpolation=bicubic)+erase(p=0.25)"
    )

    config.mix.mixup = 0.8
    config.mix.cutmix = 1.0
    config.mix.groups = 8  # GPUs of the original

    # Of all three rates, as --config.batch_size changes them.
    scale = config.get_ref("batch_size").to_float() / 512
    config.optim.learning_rate = 5e-4 * scale
    config.optim.min_learning_rate = 5e-6 * scale
    config.optim.warmup_epochs = 20.0
    config.optim.warmup_learning_rate = 5e-7 * scale
    config.optim.weight_decay = 0.05
    config.optim.clip_norm = 5.0

    config.eval.frame = "centre(crop=0.875,interpolation=bicubic)"
    config.eval.scale_windows = True
    config.eval.resolutions = (160, 192, 224, 256, 320, 384, 448, 512)
    return config
