"""Segmenter with mask transformer on ADE20k, as LaPE trains it (arXiv 2212.05262, table S.III).

    rope_jax train --workdir=runs/segmenter \\
        "--config=segmenter:variant=deit_ti16,position=lape(ape),path=ADE20K" \\
        --config.init_from=runs/lape/deit_ti
    rope_jax evaluate runs/segmenter --scales=0.5,0.75,1,1.25,1.5,1.75 --flip

ADE20K is the official folder ADEChallengeData2016; `source=masks` takes images of your own, see
docs/segmentation.md. The weights of `init_from` are those of a classifier with the same scheme.

Hardware: one GPU of the A100 class. Hours: estimated, not measured, from six times the model's
multiply-adds per image at 40 % of an A100's 312 TFLOP/s: deit_ti16 0.2, deit_s16 0.7, deit_b16 2;
with few CPU cores the decoding takes longer.

Published: LaPE's abstract reports a gain of 1.37 mIoU over ape (deit_ti16), and its supplement
settings only: `rope_jax reproduce lape/table_III`. Segmenter's own code starts from other weights,
of AugReg.

Known deviations from the original:

- Weights come from DeiT's recipe in configs/lape.py.
- Activations are bfloat16, not float32; batches cross the ends of epochs.
- The encoder's layer norms have epsilon 1e-5, as in Segmenter's code, and the weights of
  `init_from`, if they are DeiT's, were trained with 1e-6. The run reports this when it starts;
  `--config.model.options=drop_path=0.1` keeps the model's 1e-6.
- The default scheme resizes its table bilinearly, as Segmenter does; DeiT's is bicubic.
"""

from rope_jax import config as cfg


def get_config(arguments: str | None = None):
    """Arguments: variant, position, resolution, steps, source, path, seed.

    variant is a model of DeiT; resolution is the side of the crop.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        variant="deit_ti16",
        position="ape",
        resolution=512,
        steps=160_000,
        source="ade20k",
        path=None,
        seed=0,
    )
    config.batch_size = 8
    config.dtype = "bfloat16"
    config.loss_pixels = "valid"

    config.model.position = cfg.with_options(args.position, "ape", resize="bilinear")
    config.model.head = "segmenter"
    config.model.options = "norm_epsilon=1e-5,drop_path=0.1"

    config.data.update(cfg.IMAGENET)
    config.data.augment = (
        f"scaled_crop(low=0.5,high=2.0,short={args.resolution},long={4 * args.resolution},"
        "share=0.75)+flip+photometric"
    )

    config.optim.name = "sgd"
    config.optim.learning_rate = 1e-3
    config.optim.min_learning_rate = 1e-5
    config.optim.momentum = 0.9
    config.optim.nesterov = True
    config.optim.schedule = "poly"
    config.optim.power = 0.9
    config.optim.warmup_steps = 0
    config.optim.weight_decay = 0.0
    config.optim.clip_norm = None

    config.eval.batch_size = 16
    return config
