"""Tiny-ImageNet at 64 pixels: every scheme on small ViT, Swin and NAT, evaluated at 32 to 160.

    rope_jax train --workdir=runs/tiny/one \\
        --config=tiny_imagenet:path=FILE.npz,backbone=swin,position=rope2d

FILE.npz holds train_images uint8 [n, 64, 64, 3], train_labels, test_images and test_labels, of all
classes or some. The images are kept on the device, so that only the GPU limits the speed. They are
not shipped and are for research only.

Hardware: one GPU. Seconds: estimated, not measured: 100 epochs of 25,000 images are 2.5 million
images, and six times the 0.37 (vit), 0.24 (swin) and 0.23 (nat) billion multiply-adds for each are
70 and 45 seconds at 10 % of an H200's 790 TFLOP/s, per seed. Accuracy: no source.
"""

from rope_jax import config as cfg

# Maps of 8x8 tokens (vit), and of 16x16, 8x8 and 4x4 (swin, nat) in training; from 4x4 and 8x8 at
# 32 pixels to 20x20 and 40x40 at 160.
_STAGES = "width=96,depths=(2,4,2),heads=(3,6,12),drop_path=0.1"
# Backbone -> model and its options.
BACKBONES = {
    "vit": ("deit3_ti16", "patch_size=8,drop_path=0.1"),
    "swin": ("swin_t", f"{_STAGES},window_size=4"),
    "nat": ("nat_mini", f"{_STAGES},kernel_size=5"),
}
RESOLUTIONS = (32, 48, 80, 96, 112, 128, 144, 160)


def get_config(arguments: str | None = None):
    """Arguments: path, backbone, position, epochs, seed.

    path is the .npz file, backbone one of BACKBONES; position None is the model's own scheme.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        {"backbone": BACKBONES},
        path=None,
        backbone="vit",
        position=None,
        epochs=100.0,
        seed=0,
    )
    name, options = BACKBONES[args.backbone]
    config.batch_size = 256
    config.dtype = "bfloat16"
    config.label_smoothing = 0.1

    config.model.name = name
    config.model.options = options

    config.data.source = "npz"
    config.data.image_size = 64
    config.data.update(cfg.IMAGENET)
    config.data.augment = (
        "resized_crop(scale_min=0.35)+flip+rand_augment(m=9,mstd=0.5,inc=True)+erase(p=0.25)"
    )
    config.data.on_device = True

    config.mix.mixup = 0.8
    config.mix.cutmix = 1.0

    config.optim.learning_rate = 1e-3
    config.optim.warmup_epochs = 10.0

    config.eval.resolutions = RESOLUTIONS
    config.eval.batch_size = 500
    return config
