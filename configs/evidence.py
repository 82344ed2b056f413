"""Small models on a part of Fashion-MNIST, to compare positional schemes on two CPU cores.

    rope_jax train --workdir=runs/evidence/one \\
        --config=evidence:path=FILE.npz,backbone=vit,position=rope2d

`python -m experiments evidence` runs every scheme. FILE.npz holds 10,000 training and 5,000 test
images, which it takes from the official files. About 100 s on one CPU core. The schedule is short:
accuracies compare schemes, and are not what these models can reach; docs/evidence.md has them.
"""

from rope_jax import config as cfg

# Maps of 25 (vit) to 64 tokens in training, so that a run takes about a minute and a half.
_STAGES = "width=32,depths=(2,2),heads=(1,2),mlp_ratio=2.0,drop_path=0.0"
_CAT = "patch_size=4,width=64,depth=4,heads=2"
# Backbone -> model, its options, side in pixels for training, sides for evaluation.
BACKBONES = {
    "vit": (
        "vit_digits",
        "patch_size=4,width=64,depth=4,heads=2,mlp_ratio=2.0",
        20,
        (12, 16, 24, 28, 32),
    ),
    "swin": ("swin_t", f"{_STAGES},window_size=4", 32, (24, 28, 40)),
    "nat": ("nat_mini", f"{_STAGES},kernel_size=3", 32, (24, 28, 40)),
    "dinat": ("dinat_mini", f"{_STAGES},kernel_size=3,dilations=(2,1)", 32, (24, 28, 40)),
    "cct": (
        "cct_2_3x2",
        "width=64,depth=4,heads=2,conv_width=32,attention_dropout=0.0,drop_path=0.0",
        20,
        (16, 24, 28),
    ),
    "cat": ("cat_5", _CAT, 20, (16, 24, 28)),
    "cat_no_imprint": ("cat_5", f"{_CAT},imprint=none", 20, (16, 24, 28)),
    "cat_vit": ("cat_vit_5", _CAT, 20, (16, 24, 28)),
}


def get_config(arguments: str | None = None):
    """Arguments: path, backbone, position, epochs, seed.

    path is the .npz file, backbone one of BACKBONES; position None is the model's own scheme.
    """
    args = cfg.recipe_arguments(
        arguments, path=None, backbone="vit", position=None, epochs=6.0, seed=0
    )
    if args.backbone not in BACKBONES:
        raise cfg.ConfigError(
            f"recipe argument backbone={args.backbone!r} is unknown; "
            f"known are {', '.join(BACKBONES)}"
        )
    name, options, image_size, resolutions = BACKBONES[args.backbone]
    config = cfg.default()
    config.seed = args.seed
    config.epochs = args.epochs
    config.batch_size = 64
    config.label_smoothing = 0.1
    config.log_every = 100

    config.model.name = name
    config.model.options = options
    config.model.position = args.position

    config.data.source = "npz"
    config.data.path = args.path
    config.data.image_size = image_size
    config.data.augment = "crop(pad=2)+flip"

    config.optim.learning_rate = 2e-3
    config.optim.warmup_epochs = 1.0

    config.eval.resolutions = resolutions
    return config
