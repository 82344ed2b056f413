"""LaPE's ImageNet-1k experiments (arXiv 2212.05262, supplement, Table I); CIFAR's are in cct.py.

    rope_jax train --workdir=runs/lape/deit_ti \\
        "--config=lape:variant=deit_ti16,position=lape(ape),path=FOLDER"

Hardware: 8 GPUs of the A100 class, 128 images each (Swin 64). Hours: estimated, not measured, from
six times the model's multiply-adds per image at 40 % of an A100's 312 TFLOP/s for DeiT and half of
that for the others: deit_ti16 1, deit_s16 3, deit_b16 11, t2t_vit_7 2, ceit_t 2, ceit_s 6,
swin_t 6, swin_s 11.

Published accuracies: `rope_jax reproduce lape/table_I`.

Known deviations from the original:

- The paper does not define LaPE in Swin: each stage has an embedding of its own map here.
- DeiT's and CeiT's rate is 5e-4 x 1024 / 512, as their scripts scale the table's 5e-4.
- T2T-ViT's batches are the table's 1024; its script has 512.
- The released evaluation keeps all of the resized image (crop=1.0); the second row of the results
  keeps the fraction in the family's own script (0.875; T2T-ViT 0.9).
- Batch norms of CeiT see the whole batch, not that of one GPU.
- Swin's rate does not lag one step behind, as in its loop.
- Activations are bfloat16, not float16; batches cross the ends of epochs.
"""

from rope_jax import config as cfg

# Family -> batch size, learning rate and its minimum, weight decay, epochs of warmup and of
# cooldown, evaluation crop.
FAMILIES = {
    "deit": (1024, 1e-3, 1e-5, 0.05, 5.0, 0.0, 0.875),
    "ceit": (1024, 1e-3, 1e-5, 0.05, 5.0, 0.0, 0.875),
    "t2t": (1024, 1e-3, 1e-5, 0.03, 10.0, 10.0, 0.9),
    "swin": (512, 5e-4, 5e-6, 0.05, 20.0, 0.0, 0.875),
}


def get_config(arguments: str | None = None):
    """Arguments: variant, position, resolution, epochs, source, path, seed.

    variant is a model of the four families; position None is the family's embedding in LaPE;
    epochs are those of the cosine.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        variant="deit_ti16",
        position=None,
        resolution=224,
        epochs=300.0,
        source="folder",
        path=None,
        seed=0,
    )
    family = args.variant.split("_")[0]
    if family not in FAMILIES:
        raise cfg.ConfigError(
            f"recipe argument variant={args.variant}: "
            f"its family is not one of {', '.join(FAMILIES)}"
        )
    batch_size, rate, least, decay, warmup, cooldown, crop = FAMILIES[family]
    config.epochs = args.epochs + cooldown
    config.batch_size = batch_size
    config.dtype = "bfloat16"
    config.label_smoothing = 0.1
    config.ema_decay = 0.99996 if family == "t2t" else None

    inner = "sincos1d" if family == "t2t" else "ape"  # T2T-ViT's is a frozen sinusoid
    config.model.position = args.position or f"lape({inner})"

    config.data.update(cfg.IMAGENET)
    config.data.repeats = 3 if family in ("deit", "ceit") else 1
    kernel = "random" if family == "t2t" else "bicubic"
    config.data.augment = (
        f"resized_crop(interpolation={kernel})+flip"
        f"+rand_augment(m=9,mstd=0.5,inc=True,interpolation={kernel})+erase(p=0.25)"
    )

    config.mix.mixup = 0.8
    config.mix.cutmix = 1.0
    config.mix.groups = 8  # GPUs of the original
    config.mix.before_erasing = family == "t2t"

    config.optim.learning_rate = rate
    config.optim.min_learning_rate = least
    config.optim.schedule_step = {"swin": "iteration", "t2t": "epoch"}.get(family, "late_epoch")
    config.optim.warmup_epochs = warmup
    config.optim.warmup_learning_rate = 5e-7 if family == "swin" else 1e-6
    config.optim.warmup_prefix = family == "swin"
    config.optim.cooldown_epochs = cooldown
    config.optim.weight_decay = decay
    config.optim.clip_norm = 5.0 if family == "swin" else None

    config.eval.frame = "centre(crop=1.0,interpolation=bicubic)"
    config.eval.frames = (f"centre(crop={crop},interpolation=bicubic)",)
    return config
