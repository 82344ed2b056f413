"""The Cross-Axis Transformer and its baselines on ImageNet-1k: 10 epochs, no augmentation.

    rope_jax train --config=cat:variant=cat_5,path=FOLDER --workdir=runs/cat_5

The paper also mentions Swin V2, without size and settings: `variant=swinv2_t`, with windows of 7
tokens, is this library's counterpart.

Hardware: one GPU of the A100 class. Hours: estimated, not measured, from six times the model's
multiply-adds per image (24.9 billion for cat_5) at 30 % of an A100's 312 TFLOP/s: cat_5 6, vit and
dinov2 9, beit 6, swinv2_t 1.

Published accuracies: `rope_jax reproduce cat/table_1`, and `cat/table_4`, whose rows are options of
cat_5 (`--config.model.options=imprint=none`).

Known deviations from the original:

- The batch size of cat_5 is the paper's 128 (its train.py has 64), as is that of swinv2_t; vit,
  dinov2 and beit have the text's 32, 64 and 32. Batches cross the ends of epochs.
- Attention, imprint and rotation are the paper's, not those of the released code, which are the
  options operator, imprint and pool of the model, and `cat_rope(mode=released)`.
- What the paper does not print of its baselines: epsilon, pooling and position of vit are those of
  this library's cat_vit_5; dinov2 and beit have the sizes that its counts of operations and
  parameters imply (`rope_jax reproduce cat/table_1`).
"""

from rope_jax import config as cfg

_PRINTED = "patch_size=8,width=1024,depth=5,heads=8"
# Table 1's baselines: model, its options, and the batch size of the text; and Swin V2 with windows
# of a thirty-second of the image, 7 tokens at 224 pixels.
BASELINES = {
    "vit": ("cat_vit_5", "", 32),
    "dinov2": ("dinov2_s14", f"{_PRINTED},mlp_ratio=2.5,qkv_bias=False", 64),
    "beit": ("beit_b16", f"{_PRINTED},mlp_ratio=1.0", 32),
    "swinv2_t": ("swinv2_t", "window_size=None", 128),
}


def get_config(arguments: str | None = None):
    """Arguments: variant, position, resolution, epochs, source, path, seed.

    variant is cat_5, a baseline of table 1 (vit, dinov2 or beit), swinv2_t, or another
    model; position None is the model's own scheme.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        variant="cat_5",
        position=None,
        resolution=224,
        epochs=10.0,
        source="folder",
        path=None,
        seed=234,
    )
    model, options, batch = BASELINES.get(args.variant, (args.variant, "", 128))
    config.batch_size = batch
    config.dtype = "bfloat16"

    config.model.name = model
    config.model.options = options

    config.data.mean = (0.0, 0.0, 0.0)
    config.data.std = (1.0, 1.0, 1.0)
    config.data.augment = "stretch(interpolation=bilinear)"

    config.optim.learning_rate = 3e-4
    config.optim.min_learning_rate = 0.0
    config.optim.warmup_epochs = 0.0
    config.optim.weight_decay = 0.01
    config.optim.exempt = "nothing"  # torch's AdamW with all parameters in one group
    config.optim.clip_norm = None

    config.eval.frame = "stretch(interpolation=bilinear)"
    return config
