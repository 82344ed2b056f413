"""DeiT-III for 400 epochs, as Heo et al. train ViTs with rotary embeddings (arXiv 2403.13298).

    rope_jax train --workdir=runs/deit3/s \\
        --config=deit3:variant=s,position=rope_mixed,path=FOLDER

B and L are trained at 192 pixels, and then for 20 epochs at 224:

    rope_jax train --workdir=runs/deit3/b192 \\
        --config=deit3:variant=b,path=FOLDER
    rope_jax train --workdir=runs/deit3/b \\
        --config=deit3:variant=b,stage=finetune,init_from=runs/deit3/b192,path=FOLDER

Hardware: 8 GPUs of the A100 class with 256 images each (variant l: 64 GPUs with 32 images in the
original; `--config.accumulate=8` on 8). Hours: estimated, not measured, from six times the model's
multiply-adds per image at 40 % of an A100's 312 TFLOP/s on each of 8 GPUs: s 4, b 11 and 0.8 to
finetune, l 39 and 2.6. Where memory is short, add `remat=blocks` to the recipe's `model.options`:
`--config.model.options=drop_path=0.4,remat=blocks` for l at 192 pixels.

Published accuracies: `rope_jax reproduce heo/figure_4` (224 and 384 pixels), `heo/table_5` (S at
nine test sizes).

Known deviations from the original:

- Activations are bfloat16, not float16; batches cross the ends of epochs.
- Variant ti has the settings of s; the original has none.

As in the original, the raw weights are evaluated, although averaged weights are kept, and the
learning rate changes after each epoch, so that the first two share it.
"""

from rope_jax import config as cfg

PRETRAIN = {
    "ti": (224, 4e-3, 0.0),
    "s": (224, 4e-3, 0.0),
    "b": (192, 3e-3, 0.1),
    "l": (192, 3e-3, 0.4),
}  # resolution, rate, drop path
FINETUNE = {"b": 0.2, "l": 0.45}  # drop path


def get_config(arguments: str | None = None):
    """Arguments: variant, position, stage, init_from, resolution, epochs, source, path, seed.

    variant is ti, s, b or l; stage is pretrain or finetune.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        variant="s",
        position="rope_mixed",
        stage="pretrain",
        init_from=None,
        resolution=0,
        epochs=0.0,
        source="folder",
        path=None,
        seed=0,
    )
    stages = {"pretrain": PRETRAIN, "finetune": FINETUNE}
    if args.stage not in stages or args.variant not in stages[args.stage]:
        choices = "; ".join(
            f"stage={stage} with variant {', '.join(variants)}"
            for stage, variants in stages.items()
        )
        raise cfg.ConfigError(
            f"recipe arguments stage={args.stage},variant={args.variant}: there are {choices}"
        )
    finetune = args.stage == "finetune"
    if finetune and args.init_from is None:
        raise cfg.ConfigError(
            "recipe argument stage=finetune starts from a trained model: "
            "add init_from=, the workdir of stage=pretrain"
        )
    resolution, rate, drop_path = (
        (224, 1e-5, FINETUNE[args.variant]) if finetune else PRETRAIN[args.variant]
    )
    config.epochs = args.epochs or (20.0 if finetune else 400.0)
    config.batch_size = 512 if finetune else 2048
    config.dtype = "bfloat16"
    config.loss = "softmax" if finetune else "binary"
    config.label_smoothing = 0.1 if finetune else 0.0
    config.ema_decay = 0.99996

    config.model.name = f"deit3_{args.variant}16"
    config.model.options = f"drop_path={drop_path}"

    config.data.image_size = args.resolution or resolution
    config.data.update(cfg.IMAGENET)
    config.data.repeats = 1 if finetune else 3
    if finetune:
        config.data.augment = (
            "resized_crop(interpolation=bicubic)+flip"
            "+rand_augment(m=9,mstd=0.5,inc=True,interpolation=bicubic)"
        )
    else:
        config.data.augment = "resized_crop(interpolation=bicubic)+flip+three_augment+color_jitter"

    config.mix.mixup = 0.8
    config.mix.cutmix = 1.0
    config.mix.groups = 64 if args.variant == "l" else 8  # GPUs of the original

    config.optim.name = "adamw" if finetune else "lamb"
    config.optim.learning_rate = rate
    config.optim.min_learning_rate = 1e-5
    config.optim.schedule_step = "late_epoch"
    config.optim.warmup_epochs = 5.0
    config.optim.warmup_learning_rate = 1e-6
    config.optim.warmup_prefix = False
    config.optim.weight_decay = 0.1 if finetune else 0.03
    config.optim.clip_norm = None if finetune else 1.0  # LAMB's own

    config.eval.ema = False
    config.eval.frame = "centre(crop=1.0,interpolation=bicubic)"
    config.eval.resolutions = (144, 192, 256, 320, 384, 448, 512)
    return config
