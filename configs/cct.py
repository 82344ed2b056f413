"""ViT-Lite, CVT and CCT on CIFAR-10 and CIFAR-100 for 310 epochs (arXiv 2104.05704).

    rope_jax train --workdir=runs/cct/cifar10 \\
        "--config=cct:variant=cct_7_3x1,position=lape(ape),path=cifar10.npz"

The file holds train_images uint8 [50000, 32, 32, 3], train_labels, test_images and test_labels.
`--config.data.on_device=True` keeps them on the GPU, and `--config.seeds=5` then trains five seeds
at once. The settings are those of the authors' configs/datasets/cifar10.yml and cifar100.yml.

Hardware: one GPU. Hours: estimated, not measured, from six times the multiply-adds per image at
10 % of an A100's 312 TFLOP/s, because small images utilise it poorly: cct_7_3x1 1, vit_lite_7_4 and
cvt_7_4 0.25.

Published accuracies, means of seeds 121 to 125: `rope_jax reproduce lape/table_I`.

`ape` is `ape(std=0.2,resize=bilinear)` here, the models' own embedding, alone, in sums and in
`lape(ape)`, unless these options are given.

Known deviations from the original:

- LaPE's supplement names SGD (`optimizer=sgd`), but the settings and rates that it lists are those
  of the authors' AdamW.
- Random erasing: on CIFAR-10, the file of the training command (configs/datasets/cifar10.yml) has
  0.25, the published file of the 300 epochs has none (`erasing=0.0`). The paper does not choose.
- Activations are bfloat16, not float16; batches cross the ends of epochs.
"""

from rope_jax import config as cfg

# Learning rate, rate at the start of the warmup, epochs with mixing, mean and standard deviation.
SETS = {
    "cifar10": (5.5e-4, 1e-5, 175.0, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": (6e-4, 1e-6, None, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}


def get_config(arguments: str | None = None):
    """Arguments: variant, dataset, position, optimizer, erasing, resolution, epochs, source, path,
    seed.

    variant is a model, dataset cifar10 or cifar100, optimizer adamw or sgd (with momentum 0.9),
    erasing the probability of random erasing, epochs those of the cosine; position None is the
    model's own scheme.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        {"dataset": SETS, "optimizer": ("adamw", "sgd")},
        variant="cct_7_3x1",
        dataset="cifar10",
        position=None,
        optimizer="adamw",
        erasing=0.25,
        resolution=32,
        epochs=300.0,
        source="npz",
        path=None,
        seed=121,
    )
    rate, start, mixed, mean, std = SETS[args.dataset]
    config.epochs = args.epochs + 10
    config.batch_size = 128
    config.dtype = "bfloat16"
    config.label_smoothing = 0.1

    if args.position is not None:
        config.model.position = cfg.with_options(args.position, "ape", std=0.2, resize="bilinear")

    config.data.mean = mean
    config.data.std = std
    config.data.augment = (
        "resized_crop(scale_min=0.8,interpolation=random)+flip+rand_augment(m=9,mstd=0.5,inc=True)"
    )
    if args.erasing:
        config.data.augment += f"+erase(p={args.erasing})"

    config.mix.mixup = 0.8
    config.mix.cutmix = 1.0
    config.mix.off_epoch = mixed
    config.mix.before_erasing = True

    config.optim.name = args.optimizer
    config.optim.learning_rate = rate
    config.optim.min_learning_rate = 1e-5
    config.optim.schedule_step = "epoch"
    config.optim.warmup_epochs = 10.0
    config.optim.warmup_learning_rate = start
    config.optim.warmup_prefix = False
    config.optim.cooldown_epochs = 10.0
    config.optim.weight_decay = 0.06
    config.optim.exempt = "vectors"  # positions and class tokens are decayed
    config.optim.clip_norm = None

    config.eval.resolutions = (24, 40, 48, 64)
    return config
