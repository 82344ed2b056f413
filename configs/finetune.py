"""Official weights, fine-tuned on your own photographs.

    rope_jax train --workdir=runs/flowers \\
        --config=finetune:model=deit3_s16,weights=FILE,path=IMAGES

FILE is `released` for the authors' weights, a .safetensors, .npz or .pth file, a hub id, a folder
that `rope_jax.save_pretrained` wrote, or the workdir of a run; IMAGES has train/CLASS/*.jpg and
val/CLASS/*.jpg, or CLASS/*.jpg, of which every fifth is a test image. The head starts anew if
IMAGES has another number of classes, and position tables are resized to `resolution` by their
scheme's rule. Each block learns at `layer_decay` times the rate of the block above it, so that the
first ones hardly move.
docs/own_images.md explains what to change.

Hardware: one GPU. Hours: not measured; they depend on the number of images and, with few CPU cores,
on the decoding (`--config.data.workers`). Accuracy: it depends on the images. Rate and layer decay
are those of MAE's ViT-L and ViT-H (FINETUNE.md of its code; arXiv 2111.06377), which are fine-tuned
for 50 epochs with mixup; here for 20 without. Its ViT-B has 5e-4 and 0.65, and 100 epochs.
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: model, weights, position, resolution, path, source, epochs, rate, layer_decay, ...

    Also batch_size and seed. rate is the learning rate for a batch of 256; position None is the
    model's own scheme, which must be that of the weights.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        model="deit3_s16",
        weights=None,
        position=None,
        resolution=224,
        path=None,
        source="folder",
        epochs=20.0,
        rate=1e-3,
        layer_decay=0.75,
        batch_size=64,
        seed=0,
    )
    if args.weights is None:
        raise cfg.ConfigError(
            "recipe argument weights= is missing: the weights to start from, `released` for the "
            "authors', a file, a hub id, or the workdir of a run"
        )
    config.dtype = "bfloat16"
    config.label_smoothing = 0.1
    config.init_from = args.weights
    config.log_every = 10

    config.model.options = "drop_path=0.1"

    config.data.update(cfg.IMAGENET)
    config.data.augment = (
        "resized_crop(scale_min=0.35,interpolation=bicubic)+flip"
        "+rand_augment(m=9,mstd=0.5,inc=True)+erase(p=0.25)"
    )

    config.optim.name = "adamw"
    batch = config.get_ref("batch_size").to_float()  # as --config.batch_size changes it
    config.optim.learning_rate = args.rate * batch / 256
    config.optim.min_learning_rate = 1e-6
    config.optim.warmup_epochs = 2.0
    config.optim.weight_decay = 0.05
    config.optim.layer_decay = args.layer_decay

    config.eval.frame = "centre(crop=0.9,interpolation=bicubic)"
    return config
