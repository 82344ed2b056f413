"""Mask2Former on Heo et al.'s Swins, ADE20k (arXiv 2403.13298, table 4).

    rope_jax train --workdir=runs/mask2former \\
        --config=mask2former:variant=swin_s,position=rope_mixed,path=ADE20K \\
        --config.init_from=runs/swin/s
    rope_jax evaluate runs/mask2former --window=whole

ADE20K is the official folder ADEChallengeData2016; `source=masks` takes images of your own, see
docs/segmentation.md. The weights of `init_from` are those of a classifier with the same scheme.

Hardware: 8 GPUs of the A100 class. Hours: estimated, not measured, from six times the multiply-adds
of backbone and head per image at 20 % of an A100's 312 TFLOP/s on each of 8 GPUs: swin_s 0.8,
swin_b 1.1. Deformable attention, matching and the loss at sampled points add to that.

Published mIoU: `rope_jax reproduce heo/table_4`.

Mask2Former's own models reach 51.3 (Swin-S) and 52.4 (Swin-B, pre-trained at 384 pixels, with crops
of 640).

Known deviations from the original:

- Heo et al. published no code for these runs: what their text leaves open, including crops of 512
  pixels, follows Mask2Former's.
- Images are resized by any ratio of 0.5 to 2, not by one of 16.
- Activations are bfloat16; the original has float16, and float32 in the pixel decoder. Batches
  cross the ends of epochs.
- The loss of classes is averaged over the batch, not over the images of each GPU.
"""

from rope_jax import config as cfg

VARIANTS = ("swin_s", "swin_b")


def get_config(arguments: str | None = None):
    """Arguments: variant, position, resolution, steps, source, path, seed.

    variant is swin_s or swin_b; resolution is the side of the crop.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        {"variant": VARIANTS},
        variant="swin_s",
        position="rope_mixed",
        resolution=512,
        steps=160_000,
        source="ade20k",
        path=None,
        seed=0,
    )
    config.batch_size = 16
    config.dtype = "bfloat16"

    config.model.head = "mask2former"
    config.model.options = "drop_path=0.3,window_padding=tokens"

    config.data.update(cfg.IMAGENET)
    config.data.augment = (
        f"scaled_crop(low=0.5,high=2.0,short={args.resolution},long={4 * args.resolution},"
        "share=1.0)+flip+photometric"
    )

    config.optim.name = "adamw"
    config.optim.learning_rate = 1e-4
    config.optim.backbone_rate = 0.1
    config.optim.min_learning_rate = 0.0
    config.optim.schedule = "poly"
    config.optim.power = 0.9
    config.optim.warmup_steps = 0
    config.optim.weight_decay = 0.05
    config.optim.exempt = "norms"
    config.optim.clip_norm = 0.01

    config.eval.batch_size = 16
    return config
