"""The settings of a run, each declared once with its type, default, meaning and allowed values.

`python -m rope_jax.config` prints them. To add one, add its line here.
"""

import dataclasses
from typing import Annotated, Any, Literal

from rope_jax.names.options import (
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Probability,
    Range,
    Rate,
    Share,
    Words,
)
from rope_jax.names.text import image_pair

# Images of a batch, or copies of an image: the bound exceeds any use, and is safe in arithmetic.
_Images = Annotated[int, Range(low=1, high=2**24)]
_Pixels = Words("a number of pixels or a pair (height, width)")
Size = Annotated[Count | tuple[Count, Count], _Pixels]

# Mean and standard deviation of ImageNet's training images, per channel, of values in [0, 1].
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def _setting(default: Any, help: str, *, hint: str = "", resumable: bool = False) -> Any:
    """Declares a setting, whose annotation defines the allowed values.

    Args:
        default: its value if none is given.
        help: its meaning.
        hint: added to the error for any other value.
        resumable: True if a resumed run may change it. Such settings do not affect the results of a
            run; changing any other needs --resume_override.
    """
    metadata = {"help": help, "hint": hint, "resumable": resumable}
    return dataclasses.field(default=default, metadata=metadata)


def _section(cls: type) -> Any:
    return dataclasses.field(default=cls())


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model."""

    name: str = _setting("vit_digits", "one of rope_jax.list_models()")
    position: str | None = _setting(
        None, "positional scheme, as in rope_jax.positions; None for the model's default"
    )
    head: str | None = _setting(
        None, "head of dense prediction, with options if any: upernet(width=512); None to classify"
    )
    num_classes: Count | None = _setting(None, "outputs of the head; None for the data's")
    options: str = _setting("", "overrides of the model's options: depth=6,drop_path=0.1")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The images."""

    source: str = _setting(
        "digits",
        "digits, scenes, npz, idx, folder, tfds, huggingface, packed, imagenet, masks, ade20k or "
        "coco, see rope_jax.data.load",
    )
    path: str | None = _setting(
        None, "file or folder of the source; none for digits and scenes", resumable=True
    )
    image_size: Size | None = _setting(
        None, "training resolution in pixels, int or (height, width); None for the images' own"
    )
    more_sizes: tuple[Size, ...] = _setting(
        (),
        "classification: further training resolutions in pixels, int or (height, width); in each "
        "step every example is trained at all of them, augmented for each separately",
    )
    canvases: tuple[Size, ...] = _setting(
        (),
        "images with boxes that differ in size: pixels, int or (height, width); a batch is padded "
        "to the smallest of these sizes that holds its images; none for data.image_size alone",
    )
    max_boxes: Annotated[int, Range(low=1, high=10_000)] = _setting(
        100, "images with boxes: largest number in an image of a batch"
    )
    mean: tuple[Probability, Probability, Probability] = _setting(
        (0.5, 0.5, 0.5),
        "mean per channel for normalisation, of values in [0, 1]",
        hint="values are in [0, 1]; divide means of 0 to 255 by 255",
    )
    std: tuple[Positive, Positive, Positive] = _setting(
        (0.5, 0.5, 0.5), "standard deviation per channel for normalisation"
    )
    augment: str = _setting(
        "none",
        "augmentations in the order of application, those of the loader first: "
        "resized_crop+flip+rand_augment(m=9)+erase(p=0.25), see rope_jax.data.images",
    )
    repeats: _Images = _setting(
        1,
        "copies of each image in a row, each augmented separately (repeated augmentation); an "
        "epoch keeps its number of steps",
    )
    bad_images: Literal["error", "skip"] = _setting(
        "error",
        "images that cannot be decoded: stop with an error, or skip and replace up to 1 in 1,000",
        resumable=True,
    )
    allow_empty: bool = _setting(
        False,
        "accept class folders without images, which are otherwise an error",
        resumable=True,
    )
    workers: CountOrZero | None = _setting(
        None,
        "processes that decode images (needs the extra `data`); None for one per core, 0 for the "
        "main process alone",
        resumable=True,
    )
    on_device: bool = _setting(
        False, "keep the whole set on the device; for small sets", resumable=True
    )

    @property
    def other_sizes(self) -> tuple[tuple[int, int], ...]:
        """`more_sizes` as (height, width)."""
        return tuple(map(image_pair, self.more_sizes))

    @property
    def canvas_sizes(self) -> tuple[tuple[int, int], ...]:
        """`canvases` as (height, width)."""
        return tuple(map(image_pair, self.canvases))


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899), with one draw per group."""

    mixup: NotNegative = _setting(0.0, "alpha of mixup's Beta(alpha, alpha); 0 for none")
    cutmix: NotNegative = _setting(0.0, "alpha of CutMix's Beta(alpha, alpha); 0 for none")
    prob: Probability = _setting(1.0, "probability that a group is mixed")
    switch_prob: Probability = _setting(
        0.5, "probability of CutMix rather than mixup, where both are on"
    )
    groups: Count = _setting(
        1,
        "equal parts of a batch, each mixed within itself with a separate draw; official runs have "
        "one per GPU, here the number of devices does not matter",
    )
    off_epoch: NotNegative | None = _setting(None, "epoch after which nothing is mixed")
    before_erasing: bool = _setting(
        False, "mix before random erasing (timm's loaders) or after it (DeiT, Swin)"
    )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate, see `rope_jax.training.optim`."""

    name: Literal["adamw", "lamb", "sgd"] = _setting("adamw", "optimizer; LAMB as in DeiT-III")
    learning_rate: NotNegative = _setting(1e-3, "peak learning rate")
    min_learning_rate: NotNegative = _setting(1e-5, "learning rate at the end")
    schedule: Literal["cosine", "constant", "poly", "step"] = _setting(
        "cosine",
        "learning rate after the warmup; poly: a power of the remaining fraction of the run; step: "
        "a tenth from each of `milestones` on. The warmup of these two is a factor on the rate, as "
        "in mmcv",
    )
    power: Positive = _setting(0.9, "of the schedule poly")
    milestones: tuple[Positive, ...] = _setting(
        (), "of the schedule step, in epochs, or in steps where `steps` is set"
    )
    schedule_step: Literal["iteration", "epoch", "late_epoch"] = _setting(
        "iteration",
        "when the rate changes: each iteration; each epoch; or each epoch, counted from the "
        "second on (late_epoch: the first two share a rate, as in DeiT and DeiT-III)",
    )
    warmup_epochs: NotNegative = _setting(
        5.0,
        "linear warmup; a warmup and a cooldown that do not fit into the run become a tenth of it",
    )
    warmup_steps: CountOrZero | None = _setting(
        None, "length of the warmup in steps, instead of warmup_epochs"
    )
    warmup_learning_rate: NotNegative = _setting(
        0.0,
        "learning rate at the start of the warmup; of the whole first epoch if it changes by epoch",
    )
    warmup_prefix: bool = _setting(
        True, "start the cosine after the warmup (Swin), or at step 0 (timm's default)"
    )
    cooldown_epochs: NotNegative = _setting(
        0.0,
        "length of the last part of the run, in epochs, also where `steps` is set, at "
        "`min_learning_rate`; of the schedules cosine and poly",
    )
    weight_decay: NotNegative = _setting(0.05, "of all parameters that `exempt` does not exempt")
    exempt: Literal["declared", "norms", "vectors", "nothing"] = _setting(
        "declared",
        "parameters without decay. declared: biases, norms, and those that models and schemes "
        "declare (positions, class tokens); norms: as declared, except biases of layers "
        "(detectron2); vectors: biases and norms only; nothing: everything is decayed",
    )
    layer_decay: Share = _setting(
        1.0, "factor on the learning rate from each block to the one below"
    )
    backbone_rate: NotNegative = _setting(
        1.0,
        "dense prediction: factor on the learning rate of everything before the head",
    )
    last_norm: Literal["head", "block"] = _setting(
        "head",
        "with layer_decay, the last norm has the rate of the head (BEiT, MAE, timm's fc_norm) or "
        "of the last block (timm's norm)",
    )
    b1: Rate = _setting(0.9, "decay of the first moment (AdamW, LAMB)")
    b2: Rate = _setting(0.999, "decay of the second moment (AdamW, LAMB)")
    eps: NotNegative = _setting(1e-8, "added to the denominator (AdamW, LAMB)")
    momentum: Rate = _setting(0.9, "momentum of SGD")
    nesterov: bool = _setting(False, "Nesterov momentum of SGD")
    clip_norm: Positive | None = _setting(1.0, "maximum of the global gradient norm")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluation after training."""

    resolutions: tuple[Size, ...] = _setting(
        (), "pixels, int or (height, width), after the training resolution", resumable=True
    )
    batch_size: _Images = _setting(256, "images per step on all devices together", resumable=True)
    ema: bool = _setting(
        True, "evaluate the moving average of the weights, where there is one", resumable=True
    )
    frame: str = _setting(
        "centre",
        "crop of images that are read one at a time: centre(crop=0.875,interpolation=bicubic), "
        "with the fraction of the resized image to keep, or stretch(interpolation=bilinear); of "
        "images with boxes fit(short=800,long=1333)",
        resumable=True,
    )
    frames: tuple[str, ...] = _setting(
        (),
        "more crops; every resolution is evaluated with each of them, too",
        resumable=True,
    )
    scale_windows: bool = _setting(
        False,
        "Swin: evaluate with windows of a thirty-second of the image (Heo et al.), not with the "
        "training windows and padded maps",
        resumable=True,
    )
    extend: str | None = _setting(
        None,
        "rotary schemes: the rule at other sizes than the training resolution: none, extrapolate, "
        "interpolate, ntk or yarn(alpha=1,beta=32), see rope_jax.positions.extension; None for "
        "the scheme's own",
        resumable=True,
    )
    log_scale: bool = _setting(
        False,
        "rotary schemes: scale logits by ln L / ln L_trained, for L tokens in attention",
        resumable=True,
    )

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """`resolutions` as (height, width)."""
        return tuple(map(image_pair, self.resolutions))


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Layout on the devices, see `rope_jax.system.sharding`; batches are sharded over all."""

    fsdp: Count = _setting(
        1,
        "devices over which each parameter and its optimizer state is divided; 1 for a copy on "
        "every device",
        resumable=True,
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """A run."""

    model: ModelConfig = _section(ModelConfig)
    data: DataConfig = _section(DataConfig)
    mix: MixConfig = _section(MixConfig)
    optim: OptimConfig = _section(OptimConfig)
    eval: EvalConfig = _section(EvalConfig)
    mesh: MeshConfig = _section(MeshConfig)
    seed: Annotated[int, Range(low=0, below=2**32)] = _setting(
        0,
        "random seed of initial weights, data order, augmentation and drop path",
    )
    seeds: Count = _setting(
        1,
        "models trained at once, with the seeds seed, seed + 1, ...; each as if trained alone, up "
        "to rounding; needs data.on_device, see rope_jax.tasks.seeds",
    )
    epochs: Positive = _setting(
        1.0,
        "passes over the training images",
        hint="to evaluate without training, use --mode=evaluate",
    )
    steps: Annotated[int, Range(low=1, high=2**31 - 1)] | None = _setting(
        None, "length of the run in steps, instead of epochs"
    )
    batch_size: _Images = _setting(128, "images per step on all devices together")
    accumulate: Count = _setting(
        1,
        "parts of a batch that are computed one after the other, to save memory; batch statistics, "
        "and groups of denoising of the head dino, are those of a part",
    )
    dtype: Literal["float32", "bfloat16"] = _setting(
        "float32",
        "dtype of activations; parameters are float32",
        hint="gradients in float16 need a scaled loss, those in bfloat16 have float32's range",
    )
    kernels: Literal["tuned", "default", "xla", "cudnn", "triton", "mosaic"] = _setting(
        "tuned",
        "implementations of attention and rotation: measured at the start on a GPU and kept in "
        "the workdir; the built-in preferences; or one of them wherever it supports the call",
    )
    loss: Literal["softmax", "binary"] = _setting(
        "softmax",
        "cross entropy of the softmax, or of each class (binary), see rope_jax.tasks",
    )
    distill: Literal["smooth_l1", "l2", "cosine"] | None = _setting(
        None,
        "with data.more_sizes: distance of the features of each resolution from those of the next "
        "larger one, added to its loss (ResFormer), see rope_jax.tasks.classification",
    )
    distill_from: Literal["feature", "tokens", "logits"] = _setting(
        "feature",
        "features for distill: what the head reads, the mean of the normalised tokens of patches, "
        "or the logits",
    )
    loss_pixels: Literal["all", "valid"] = _setting(
        "all",
        "segmentation: divisor of the sum of the loss over pixels with a class: the number of all "
        "pixels (mmsegmentation) or of those with a class (valid, Segmenter)",
    )
    label_smoothing: Rate = _setting(0.0, "label smoothing of the targets")
    ema_decay: Rate | None = _setting(
        None, "decay per step of the moving average of the weights; None for none"
    )
    init_from: str | None = _setting(
        None,
        "weights to start from: released (those of the authors) or released:TAG, workdir of "
        "a run, .safetensors, .npz or .pth file, hub id; position tables are resized, a head for "
        "another number of classes is new",
    )
    log_every: Count = _setting(50, "steps between lines of metrics", resumable=True)
    checkpoint_every: Count = _setting(
        1000,
        "steps between checkpoints; also saved at the end and when a run is stopped",
        resumable=True,
    )
    keep_checkpoints: Annotated[int, Range(low=2)] = _setting(
        2, "newest valid checkpoints to keep", resumable=True
    )
    non_finite: Literal["stop", "skip"] = _setting(
        "stop",
        "on a loss or gradient that is not finite: stop, or skip the update, up to 10 in a row",
        resumable=True,
    )
    profile_at: Count | None = _setting(
        None,
        "step at which to profile a few steps; SIGUSR2 also starts a profile",
        resumable=True,
    )
    plugins: tuple[str, ...] = _setting(
        (),
        "modules that register schemes, models and image sources, see rope_jax.names.plugins; "
        "--plugins=NAME adds one",
        resumable=True,
    )
    tensorboard: bool = _setting(
        False,
        "also write metrics, results and pictures for TensorBoard (needs the extra `log`)",
        resumable=True,
    )

    @property
    def all_seeds(self) -> range:
        """The seeds of the models that are trained."""
        return range(self.seed, self.seed + self.seeds)

    @property
    def averaged(self) -> bool:
        """True if the moving average of the weights is evaluated."""
        return self.ema_decay is not None and self.eval.ema

    @property
    def test_sizes(self) -> list[tuple[int, int]]:
        """The training resolution and `eval.resolutions`, (height, width), without duplicates.

        >>> evaluation = EvalConfig(resolutions=(12, (8, 12), 8))
        >>> Config(data=DataConfig(image_size=8), eval=evaluation).test_sizes
        [(8, 8), (12, 12), (8, 12)]
        """
        return list(dict.fromkeys((image_pair(self.data.image_size), *self.eval.sizes)))

    def single(self, seed: int | None = None) -> "Config":
        """The config of a run of one of the models alone.

        Args:
            seed: of the model; None for the first.

        Raises:
            ValueError: the run has no such seed.
        """
        if seed is not None and seed not in self.all_seeds:
            first, last = self.all_seeds[0], self.all_seeds[-1]
            existing = f"seed {first} alone" if first == last else f"seeds {first} to {last}"
            raise ValueError(f"seed={seed}, but the run has {existing}: use one of them, or None")
        return dataclasses.replace(self, seed=self.seed if seed is None else seed, seeds=1)
