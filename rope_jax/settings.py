"""The settings of a run: every field with its default and its meaning, what it may be, and whether a run may be resumed with another one.

This is the one list of them. `rope_jax.config` reads them from recipes and the command line, and compares those of two runs.
"""

import dataclasses

Size = int | tuple[int, int]

# Mean and standard deviation of ImageNet's training images, in [0, 1], as its recipes use them.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which model.

    Attributes:
        name: one of `rope_jax.list_models()`.
        position: a scheme as written in `rope_jax.positions`; None for the model's own.
        num_classes: outputs of the head; None for as many as the data has.
        options: overrides of the model's options, as "depth=6,drop_path=0.1".
    """

    name: str = "vit_digits"
    position: str | None = None
    num_classes: int | None = None
    options: str = ""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which images, and how they reach the model.

    Attributes:
        source: "digits", "npz", "idx", "folder", "tfds", "packed" or "imagenet", see `rope_jax.data.load`.
        path: file or folder of the source; digits needs none.
        image_size: training resolution in pixels, int or (height, width); None for the images' own.
        mean, std: normalisation per channel, of values in [0, 1].
        augment: augmentations with their options, "none" for none: those of the loader (`rope_jax.data.augment`), then those of the step
            (`rope_jax.data.on_device`), as "resized_crop+flip+rand_augment(m=9)+erase(p=0.25)".
        repeats: times that an example comes in a row, each time augmented anew; an epoch then has as many steps as without, over fewer
            examples (repeated augmentation, see `rope_jax.data.epoch_length`).
        bad_images: what an image that cannot be decoded is: an "error", or to "skip" and replace (up to one in a thousand).
        workers: processes that decode images which are read one at a time (needs the extra `data`); 0 for the process itself.
        on_device: whether the whole set lies on the device, for sets that are small.
    """

    source: str = "digits"
    path: str | None = None
    image_size: Size | None = None
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    augment: str = "none"
    repeats: int = 1
    bad_images: str = "error"
    workers: int = 0
    on_device: bool = False


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its learning rate, see `rope_jax.optim`.

    Attributes:
        name: "adamw", "lamb" (as in DeiT-III) or "sgd".
        learning_rate: peak.
        min_learning_rate: at the end.
        schedule: "cosine" decay after the warmup, or "constant".
        schedule_step: how often the rate changes: each "iteration"; each "epoch"; or each epoch by the count of epochs that are over when
            it begins, less one ("late_epoch": the first two epochs share a rate, as in DeiT and DeiT-III).
        warmup_epochs: linear from `warmup_learning_rate`; in a run that is no longer than that, up to its last step or epoch.
        warmup_learning_rate: at which the warmup starts.
        warmup_prefix: whether the cosine starts where the warmup ends (Swin), or has run since the start of training (timm's default).
        cooldown_epochs: at the end of the run, at `min_learning_rate`; the last of `epochs`.
        weight_decay: on matrices; never on biases, norms, and what a positional scheme exempts.
        layer_decay: factor on the learning rate from each block to the one below it, 1 for none.
        b1, b2, eps: of AdamW and LAMB.
        momentum, nesterov: of SGD.
        clip_norm: global gradient norm above which gradients are scaled down; None for no clipping.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-5
    schedule: str = "cosine"
    schedule_step: str = "iteration"
    warmup_epochs: float = 5.0
    warmup_learning_rate: float = 0.0
    warmup_prefix: bool = True
    cooldown_epochs: float = 0.0
    weight_decay: float = 0.05
    layer_decay: float = 1.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = False
    clip_norm: float | None = 1.0


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Mixing of the images of a batch and of their labels, with one draw a batch (arXiv 1710.09412, 1905.04899).

    Attributes:
        mixup: alpha of the Beta(alpha, alpha) of which mixup draws the share of the first image; 0 for no mixup.
        cutmix: the same of cutmix.
        prob: that a batch is mixed at all.
        switch_prob: that it is cutmix rather than mixup, where there are both.
        off_epoch: epochs after which nothing is mixed any more; None for never.
        before_erasing: whether images are mixed before random erasing (timm's loaders) or after it (DeiT, Swin).
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0
    switch_prob: float = 0.5
    off_epoch: float | None = None
    before_erasing: bool = False


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluation.

    Attributes:
        resolutions: pixels, each an int or (height, width); the training resolution is always evaluated first.
        batch_size: images per step on all devices together.
        ema: whether the moving average of the weights is evaluated, where there is one, or the weights themselves.
        frame: how images that are read one at a time are brought to a resolution: "centre(crop=0.875,interpolation=bicubic)", with the
            share of the resized image that is kept, or "stretch(interpolation=bilinear)".
    """

    resolutions: tuple[Size, ...] = ()
    batch_size: int = 256
    ema: bool = True
    frame: str = "centre"


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How a run lies on its devices, see `rope_jax.sharding`. Batches are always divided over all of them.

    Attributes:
        fsdp: over how many devices each parameter, its optimiser state and its average are divided; 1 for a copy on every device. A run
            may be resumed with another number.
    """

    fsdp: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """One run.

    Attributes:
        seed: of initial weights, order of the data, augmentation, and drop path.
        seeds: how many models are trained at once, with the seeds seed, seed + 1, ...; each becomes what it would become alone, up to
            rounding. For small models on sets that lie on the device (`data.on_device`), see `rope_jax.members`.
        epochs: passes over the training images.
        batch_size: images per step on all devices together.
        accumulate: parts into which a batch is cut to save memory; the gradient is that of the whole.
        dtype: in which activations are computed, "float32" or "bfloat16"; parameters are float32.
        loss: "softmax" cross entropy, or "binary" cross entropy of each class, see `rope_jax.losses`.
        label_smoothing: in [0, 1).
        ema_decay: of the moving average of the weights, per step; None for none.
        init_from: a workdir of another run, or a weights file (.npz), whose weights are the start; position tables of another
            resolution are resized by their scheme's rule, a head for other classes stays fresh.
        log_every, checkpoint_every: steps; a checkpoint is also written at the end and when the run is interrupted.
        keep_checkpoints: how many of the newest that verify stay, at least 2.
        non_finite: what to do when a loss or gradient is not finite: "stop", or "skip" the update of that step (the state stays what it
            was, but for the count of steps), up to 10 times in a row.
        profile_at: the step at which jax's profiler records a few steps into the workdir; None for only when SIGUSR2 asks.
        tensorboard: also write TensorBoard files into the workdir (needs the extra `log`).
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mix: MixConfig = MixConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    mesh: MeshConfig = MeshConfig()
    seed: int = 0
    seeds: int = 1
    epochs: float = 1.0
    batch_size: int = 128
    accumulate: int = 1
    dtype: str = "float32"
    loss: str = "softmax"
    label_smoothing: float = 0.0
    ema_decay: float | None = None
    init_from: str | None = None
    log_every: int = 50
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2
    non_finite: str = "stop"
    profile_at: int | None = None
    tensorboard: bool = False

    @property
    def averaged(self) -> bool:
        """Whether the moving average of the weights is what is evaluated."""
        return self.ema_decay is not None and self.eval.ema


# Every field is in one of two lists. These may change when a run is resumed: they do not change what is computed as long as all goes well.
COSMETIC = (
    "data.path",
    "data.bad_images",
    "data.workers",
    "data.on_device",
    "eval.resolutions",
    "eval.batch_size",
    "eval.ema",
    "eval.frame",
    "mesh.fsdp",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
    "non_finite",
    "profile_at",
    "tensorboard",
)
# And these may not, unless --resume_override names them.
SEMANTIC = (
    "model.name", "model.position", "model.num_classes", "model.options",
    "data.source", "data.image_size", "data.mean", "data.std", "data.augment", "data.repeats",
    "mix.mixup", "mix.cutmix", "mix.prob", "mix.switch_prob", "mix.off_epoch", "mix.before_erasing",
    "optim.name", "optim.learning_rate", "optim.min_learning_rate", "optim.schedule", "optim.schedule_step", "optim.warmup_epochs",
    "optim.warmup_learning_rate", "optim.warmup_prefix", "optim.cooldown_epochs", "optim.weight_decay", "optim.layer_decay", "optim.b1",
    "optim.b2", "optim.eps", "optim.momentum", "optim.nesterov", "optim.clip_norm",
    "seed", "seeds", "epochs", "batch_size", "accumulate", "dtype", "loss", "label_smoothing", "ema_decay", "init_from",
)  # fmt: skip

# Least value, and the one that it must stay below.
RANGES = {
    "batch_size": (1, None), "epochs": (0, None), "label_smoothing": (0, 1), "ema_decay": (0, 1), "log_every": (1, None),
    "checkpoint_every": (1, None), "keep_checkpoints": (2, None), "eval.batch_size": (1, None), "optim.learning_rate": (0, None),
    "optim.min_learning_rate": (0, None), "optim.warmup_epochs": (0, None), "optim.weight_decay": (0, None), "optim.eps": (0, None),
    "optim.b1": (0, 1), "optim.b2": (0, 1), "optim.clip_norm": (0, None), "model.num_classes": (1, None),
    "seed": (0, 2**32), "seeds": (1, None),
    "mesh.fsdp": (1, None), "profile_at": (1, None),
    "data.repeats": (1, None), "data.workers": (0, None),
    "accumulate": (1, None), "optim.warmup_learning_rate": (0, None), "optim.cooldown_epochs": (0, None), "optim.momentum": (0, 1),
    "mix.mixup": (0, None), "mix.cutmix": (0, None), "mix.off_epoch": (0, None),
}  # fmt: skip

# The words that a field may have.
WORDS = {
    "dtype": ("float32", "bfloat16"),
    "data.bad_images": ("error", "skip"),
    "loss": ("softmax", "binary"),
    "non_finite": ("stop", "skip"),
    "optim.name": ("adamw", "lamb", "sgd"),
    "optim.schedule": ("cosine", "constant"),
    "optim.schedule_step": ("iteration", "epoch", "late_epoch"),
}
