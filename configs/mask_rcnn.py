"""Mask R-CNN on COCO behind ViT-Adapters (LaPE, arXiv 2212.05262, table II).

    rope_jax train --workdir=runs/mask_rcnn \\
        "--config=mask_rcnn:variant=adapter_s,position=lape(ape),path=COCO" \\
        --config.init_from=runs/lape/deit_s
    rope_jax evaluate runs/mask_rcnn

COCO is the official folder, see docs/detection.md. The weights of `init_from` are those of a
classifier with the same scheme, trained by `configs/lape.py`.

Hardware: 4 GPUs of the A100 class, 2 images each. Hours: estimated, not measured, from six times
the multiply-adds of backbone and head per image of 1024 x 1024 pixels, at 20 % of an A100's 156
TFLOP/s (TF32) on each of 4 GPUs: adapter_ti 22, adapter_s 30. RoIAlign's products are in full
float32, which adds to that.

LaPE's supplement reports settings, but no AP: `rope_jax reproduce lape/table_II`. ViT-Adapter
(arXiv 2205.08534) reaches a box AP of 46.0 and a mask AP of 41.0 with adapter_ti, 48.2 and 42.8
with adapter_s, in as many epochs with batches of 16.

Known deviations from the original:

- What LaPE's table leaves open, including windows and drop path, follows ViT-Adapter's code.
- Images are resized with antialiasing where they shrink, to sizes rounded as in detectron2; before
  a part is cut out they have no largest side. They are flipped last.
- Training images with crowds only are left out, and those with a side below 32 pixels are not.
- The gates of injectors and the batch norms of the convolutional branch are not decayed.
- A batch has portrait or landscape images, and is padded to one of few canvases. Losses are divided
  by the samples of the whole batch, not of the two images of a GPU; with `--config.accumulate=4`
  by those of two images. Batches cross the ends of epochs.
"""

from rope_jax import config as cfg

# Variant -> model, drop path.
VARIANTS = {
    "adapter_ti": ("vit_adapter_ti16", 0.1),
    "adapter_s": ("vit_adapter_s16", 0.2),
}


def get_config(arguments: str | None = None):
    """Arguments: variant, position, resolution, epochs, source, path, seed.

    variant is adapter_ti or adapter_s; resolution is that of the weights to start from, for which
    tables of positions are made. Images have the sizes of `canvases`.
    """
    args, config = cfg.recipe_arguments(
        arguments,
        {"variant": VARIANTS},
        variant="adapter_s",
        position="ape",
        resolution=224,
        epochs=36.0,
        source="coco",
        path=None,
        seed=0,
    )
    model, drop_path = VARIANTS[args.variant]
    config.batch_size = 8

    config.model.name = model
    config.model.head = "mask_rcnn"
    config.model.options = (
        "attention=window,window_size=14,window_padding=qkv,global_blocks=(2,5,8,11),added=last,"
        f"drop_path={drop_path}"
    )

    # Training images have up to 1,024 pixels a side, those of an evaluation 1,333.
    config.data.canvases = ((800, 1024), (1024, 800), 1024, (800, 1344), (1344, 800), 1344)
    config.data.max_boxes = 100
    config.data.update(cfg.IMAGENET)
    config.data.augment = "detr_crop(window=1024)+flip"

    config.optim.name = "adamw"
    config.optim.learning_rate = 1e-4
    config.optim.schedule = "step"
    config.optim.milestones = (args.epochs * 3 / 4, args.epochs * 11 / 12)  # 27 and 33 of 36
    config.optim.warmup_steps = 500
    config.optim.warmup_learning_rate = 1e-7
    config.optim.weight_decay = 0.05
    config.optim.clip_norm = None

    config.eval.frame = "fit(short=800,long=1333)"
    config.eval.batch_size = 8
    return config
