"""Fashion-MNIST: small models that a core of a CPU trains in minutes, to compare schemes.

    rope_jax train --config=fashion_mnist:path=FOLDER --workdir=runs/fashion
    rope_jax train --config=fashion_mnist:path=FOLDER,backbone=swin,position=rpb \\
        --workdir=runs/fashion_swin

FOLDER holds the four official idx files, 60,000 grey images of 28x28 pixels for training and 10,000
for testing, compressed or not; they are not shipped. docs/evidence.md has the accuracies of every
model with five seeds.
"""

from rope_jax import config as cfg

_SMALL = "patch_size=4,width=64,depth=4,heads=2"
# Maps have 7x7 patches in training. Relative to that, the other sides are those of the papers: 128
# to 384 pixels for a model trained at 224. Maps of swin have 8x8 and 4x4, with windows of 4x4.
_SIDES = (16, 20, 24, 32, 40, 48)
_STAGES = "width=64,depths=(2,2),heads=(2,4),mlp_ratio=2.0,drop_path=0.0,window_size=4"
# Backbone -> model, its options, side in pixels for training, sides for evaluation.
BACKBONES = {
    "vit": ("vit_digits", f"{_SMALL},mlp_ratio=2.0", 28, _SIDES),
    "swin": ("swin_t", _STAGES, 32, ()),
    "cat": ("cat_5", _SMALL, 28, ()),
    "cat_no_imprint": ("cat_5", f"{_SMALL},imprint=none", 28, ()),
    "cat_vit": ("cat_vit_5", _SMALL, 28, ()),
}


def get_config(arguments: str | None = None):
    """Arguments: path, backbone, position, augment, epochs, seed.

    path is the folder of the four files, backbone one of BACKBONES; position None is rope_mixed for
    the ViT and the model's own scheme for others. augment is the setting data.augment.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        {"backbone": BACKBONES},
        path=None,
        backbone="vit",
        position=None,
        augment="none",
        epochs=6.0,
        seed=0,
    )
    name, options, image_size, resolutions = BACKBONES[args.backbone]
    config.batch_size = 48
    config.label_smoothing = 0.1
    config.log_every = 100

    config.model.name = name
    config.model.options = options
    default = "rope_mixed" if args.backbone == "vit" else None
    config.model.position = args.position or default

    config.data.source = "idx"
    config.data.image_size = image_size

    config.optim.learning_rate = 2e-3
    config.optim.warmup_epochs = 0.5

    config.eval.resolutions = resolutions
    config.eval.batch_size = 100
    return config
