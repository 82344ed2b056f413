"""UperNet on ADE20k: Heo et al.'s ViTs (arXiv 2403.13298, table 3), and LaPE's ViT-Adapters.

    rope_jax train --workdir=runs/upernet \\
        --config=upernet:variant=b,position=rope_mixed,path=ADE20K \\
        --config.init_from=runs/deit3/b
    rope_jax train --workdir=runs/adapter \\
        --config=upernet:variant=adapter_s,path=ADE20K \\
        --config.init_from=runs/lape/deit_s
    rope_jax evaluate runs/upernet --scales=0.5,0.75,1,1.25,1.5,1.75 --flip

ADE20K is the official folder ADEChallengeData2016; `source=masks` takes images of your own, see
docs/segmentation.md. The weights of `init_from` are those of a classifier with the same scheme.

Hardware: 8 GPUs of the A100 class. Hours: estimated, not measured, from six times the model's
multiply-adds per image at 40 % of an A100's 312 TFLOP/s on each of 8 GPUs: b 2.5, l 5,
adapter_ti and adapter_s 0.6.

Published mIoU: `rope_jax reproduce heo/table_3`.

LaPE's supplement reports gains with ViT-Adapter, but no numbers to compare with:
`rope_jax reproduce lape/table_III`.

Known deviations from the original:

- Heo et al. published no code for these runs: what their text leaves open follows BEiT v2's.
- LaPE's table has rate, weight decay, batch and steps of ViT-Adapter; the rest is as in the
  official code of ViT-Adapter, with its layer decay of 0.95.
- Activations are bfloat16, not float16; batches cross the ends of epochs.
- Batch norms see the whole batch, as with the original's synchronised ones.
"""

from rope_jax import config as cfg

# Variant -> model, options of UperNet, batch, rate, layer decay, drop path (None for the model's).
VARIANTS = {
    "b": ("deit3_b16", "upernet", 16, 5e-5, 0.75, 0.15),
    "l": ("deit3_l16", "upernet", 16, 4e-5, 0.9, 0.2),
    "adapter_ti": ("vit_adapter_ti16", "upernet(width=512)", 8, 2e-5, 0.95, None),
    "adapter_s": ("vit_adapter_s16", "upernet(width=512)", 8, 2e-5, 0.95, None),
}


def get_config(arguments: str | None = None):
    """Arguments: variant, position, resolution, steps, source, path, seed.

    variant is b, l, adapter_ti or adapter_s; position None is rope_mixed for Heo et al.'s ViTs and
    lape(ape) for LaPE's adapters; resolution is the side of the crop.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        {"variant": VARIANTS},
        variant="b",
        position=None,
        resolution=512,
        steps=160_000,
        source="ade20k",
        path=None,
        seed=0,
    )
    model, head, batch_size, rate, layer_decay, drop_path = VARIANTS[args.variant]
    config.batch_size = batch_size
    config.dtype = "bfloat16"
    config.loss_pixels = "all"

    config.model.name = model
    adapter = args.variant.startswith("adapter")
    config.model.position = args.position or ("lape(ape)" if adapter else "rope_mixed")
    config.model.head = head
    config.model.options = "" if drop_path is None else f"drop_path={drop_path}"

    config.data.update(cfg.IMAGENET)
    config.data.augment = (
        f"scaled_crop(low=0.5,high=2.0,short={args.resolution},long={4 * args.resolution},"
        "share=0.75)+flip+photometric"
    )

    config.optim.name = "adamw"
    config.optim.learning_rate = rate
    config.optim.min_learning_rate = 0.0
    config.optim.schedule = "poly"
    config.optim.power = 1.0
    config.optim.warmup_steps = 1500
    config.optim.warmup_learning_rate = 1e-6 * rate
    config.optim.weight_decay = 0.05
    config.optim.exempt = "vectors"  # the exempt names of both codes lack the prefix "backbone."
    config.optim.layer_decay = layer_decay
    config.optim.clip_norm = None

    config.eval.batch_size = 16
    return config
