"""The Cross-Axis Transformer and its ViT baseline on ImageNet-1k: 10 epochs, no augmentation.

    rope_jax train --config=cat:variant=cat_5,path=FOLDER --workdir=runs/cat_5

The paper also mentions Swin V2, without size and settings: `variant=swinv2_t`, with windows of 7
tokens, is this library's counterpart.

Hardware: one GPU of the A100 class. Hours: estimated, not measured, from six times the model's
multiply-adds per image (24.9 billion for cat_5) at 30 % of an A100's 312 TFLOP/s: cat_5 6,
cat_vit_5 9, swinv2_t 1.

Published accuracies: `rope_jax reproduce cat/table_1`, and `cat/table_4`, whose rows are options of
cat_5 (`--config.model.options=imprint=none`).

Known deviations from the original:

- The batch size is the paper's 128; its train.py has 64. Batches cross the ends of epochs.
- Attention, imprint and rotation are the paper's, not those of the released code, which are the
  options operator, imprint and pool of the model, and `cat_rope(mode=released)`.
- The baseline's epsilon, pooling and position are those of this library's cat_vit_5; the paper does
  not print them.
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: variant, position, resolution, epochs, source, path, seed.

    variant is cat_5, cat_vit_5 or swinv2_t; position None is the model's own scheme.
    """
    args = cfg.recipe_arguments(
        arguments,
        variant="cat_5",
        position=None,
        resolution=224,
        epochs=10.0,
        source="folder",
        path=None,
        seed=234,
    )
    config = cfg.default()
    config.seed = args.seed
    config.epochs = args.epochs
    config.batch_size = 128
    config.dtype = "bfloat16"

    config.model.name = args.variant
    config.model.position = args.position
    if args.variant.startswith("swinv2"):
        config.model.options = "window_size=None"  # a thirty-second of the image: 7 tokens at 224

    config.data.source = args.source
    config.data.path = args.path
    config.data.image_size = args.resolution
    config.data.mean = (0.0, 0.0, 0.0)
    config.data.std = (1.0, 1.0, 1.0)
    config.data.workers = 16
    config.data.augment = "stretch(interpolation=bilinear)"

    config.optim.learning_rate = 3e-4
    config.optim.min_learning_rate = 0.0
    config.optim.warmup_epochs = 0.0
    config.optim.weight_decay = 0.01
    config.optim.exempt = "nothing"  # torch's AdamW with all parameters in one group
    config.optim.clip_norm = None

    config.eval.frame = "stretch(interpolation=bilinear)"
    return config
