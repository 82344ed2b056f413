"""DINO on COCO behind Heo et al.'s ViTs and Swins (arXiv 2403.13298, tables 1 and 2).

    rope_jax train --workdir=runs/dino_vit \\
        --config=dino:variant=vit_b,position=rope_mixed,path=COCO \\
        --config.init_from=runs/deit3/b
    rope_jax train --workdir=runs/dino_swin \\
        --config=dino:variant=swin_s,position=rope_mixed+rpb,path=COCO \\
        --config.init_from=runs/swin/s_rpb
    rope_jax evaluate runs/dino_vit

COCO is the official folder, see docs/detection.md. The weights of `init_from` are those of a
classifier with the same scheme. vit_b and vit_l are ViTDet: windows of 14 tokens in all but four
blocks, without class token and last norm, and maps made from the last one.

Hardware: 8 GPUs of the A100 class, 2 images each. Hours: estimated, not measured, from six times
the multiply-adds of backbone, maps and head per image of 1344 x 1344 pixels, the largest canvas, at
20 % of an A100's 312 TFLOP/s on each of 8 GPUs: vit_b 6, vit_l 14, swin_t 2.3, swin_s 3, swin_b 4.
Deformable attention's gathers, matching and loss add to that. Where memory is short, add
`remat=blocks` to `model.options`, which recomputes the backbone's blocks.

Published box AP: `rope_jax reproduce heo/table_1` (ViTDet), `heo/table_2` (Swin).

With `rpb`, swin_t and swin_s have the AP of detrex's own models, which start from ImageNet-1k.
detrex's DINO-ViTDet, with weights of MAE and decomposed relative positions, reaches 50.2 (B) and
52.9 (L).

Known deviations from the original:

- Heo et al. published no code for these runs: what their text leaves open, including drop path,
  follows detrex. Whether their ViTs had windows of 14 tokens and layer scale, and their positions
  in windows, is not known; here schemes that count patches count them in each window.
- Training without a warmup is said to be unstable in detrex, whose ViTDet-L has one:
  `--config.optim.warmup_steps=250 --config.optim.warmup_learning_rate=1e-7`.
- A batch has portrait or landscape images, as they are after the crop, and is padded to one of five
  canvases. detrex groups the images of each GPU by their orientation before the crop, and pads
  them to the largest of them. In both, ViTDet's images are not padded to 1024 x 1024 pixels.
- The number of groups of denoising is chosen for the whole batch, in detrex for the two images of a
  GPU, and here with `--config.accumulate=8`.
- Tables of positions, and whatever else a scheme exempts, are not decayed; detrex exempts norms
  only.
- Activations are bfloat16, detrex's float32; batches cross the ends of epochs.
"""

from rope_jax import config as cfg

_WINDOWS = "class_token=False,attention=window,drop_path_schedule=linear"
# Variant -> model, its options, drop path.
VARIANTS = {
    "vit_b": ("deit3_b16", f"{_WINDOWS},global_blocks=(2,5,8,11)", 0.1),
    "vit_l": ("deit3_l16", f"{_WINDOWS},global_blocks=(5,11,17,23)", 0.4),
    "swin_t": ("swin_t", "", 0.1),
    "swin_s": ("swin_s", "", 0.2),
    "swin_b": ("swin_b", "", 0.2),
}


def get_config(arguments: str | None = None):
    """Arguments: variant, position, window_size, resolution, steps, source, path, seed.

    variant is vit_b, vit_l, swin_t, swin_s or swin_b; window_size is the side of windows in tokens,
    None for 14 (ViT) or 7 (Swin); resolution is that of the weights to start from, for which tables
    of positions are made. Images have the sizes of `canvases`.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        {"variant": VARIANTS},
        variant="vit_b",
        position="rope_mixed",
        window_size=None,
        resolution=224,
        steps=90_000,
        source="coco",
        path=None,
        seed=0,
    )
    model, options, drop_path = VARIANTS[args.variant]
    window = f"window_size={args.window_size or (7 if model.startswith('swin') else 14)}"
    model_options = (options, window, "window_padding=tokens", f"drop_path={drop_path}")
    config.batch_size = 16
    config.dtype = "bfloat16"

    config.model.name = model
    config.model.head = "dino"
    config.model.options = ",".join(filter(None, model_options))

    config.data.canvases = ((800, 1344), (1344, 800), 1088, 1216, 1344)
    config.data.max_boxes = 100
    config.data.update(cfg.IMAGENET)
    config.data.augment = "detr_crop+flip"

    config.optim.name = "adamw"
    config.optim.learning_rate = 1e-4
    config.optim.backbone_rate = 0.1
    config.optim.schedule = "step"
    config.optim.milestones = (args.steps * 11 / 12,)  # 82,500 of 90,000
    config.optim.warmup_steps = 0
    config.optim.weight_decay = 1e-4
    config.optim.exempt = "norms"
    config.optim.clip_norm = 0.1

    config.eval.frame = "fit(short=800,long=1333)"
    config.eval.batch_size = 16
    return config
