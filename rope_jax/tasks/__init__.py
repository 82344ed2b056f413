"""The tasks that models are trained for, one object per task.

Training calls

- `check(config, images)`: raises ConfigError for settings and images that do not suit the task.
- `prepare_batch(batch, config, *, seed, key)`: augments and normalises a batch of the loader in the
  step, and adds the targets of the loss. `seed` is of the run and `key` of the step; augmentation
  is a function of (seed, epoch, index). The result has `image`, float32 [B, H, W, 3].
- `loss(model, batch, config, *, key)`: the loss of a prepared batch, and a metric for the progress
  line. It calls the model, so that a task may give it more than images.

An `Evaluator` calls

- `count(outputs, batch, images)`: what the scores need of an evaluation batch: a tree of arrays,
  from the outputs of the model for its images. `mask` of the batch is False for padding, and
  `index` is the number of each image.
- `scores(parts, images)`: the scores of a set by name, from these trees of all its batches.

`python -m rope_jax.evaluate` calls

- `open(dataset, folder, size, crop)`: the images of one of `sets`, the task's names for --dataset.
- `framed(images, size, frame)`, of images that differ in size: these as they are evaluated; `size`
  is the one that is asked for, or None, and `frame` that of the run's own evaluation, or None.
- `identity(images, folder, model, preprocessing, asked)`: what identifies a row, next to the
  settings of all tasks. `asked` has the arguments that are for the task alone (`flags`).
- `evaluate(evaluator, model, images, pictures, asked)`: a row, and what was predicted for the
  first images. `protocol` of the row says how images were seen, and `note`, where there is one,
  what its protocol ends with.
- `draw(found, class_names, classes, path)`: writes a picture of these predictions.

At its end, a run of a task with a `picture`, which is the name of a file, calls `predict(evaluator,
images, count)`, what is predicted for the first images of a set, for `draw`.

A task also has

- `labels`, the kind of labels that it needs, and `does`, words for what its models do;
- `sets`, `flags` and `batch_size` of the command;
- for tables `titles`, the scores that they show by name, of which the first is the main one;
  `score_name`, the main one in a sentence; `class_score`, the name of a list of scores of the
  classes and its name in a sentence, or None;
- `picture`, None for a task without `predict` and `draw`. Only a task of images that differ in size
  needs `framed`.

It documents the fields of its batches. The task of a model is that of its head: a new task needs
`TASKS.register`, and `rope_jax.models.heads.register_head` of a family that names it. Its `loss`
gets from the model what `head.loss` takes.
"""

from flax import nnx

from rope_jax.models.dense import head_call
from rope_jax.models.heads import find_head
from rope_jax.names.registry import Registry
from rope_jax.tasks.classification import Classification
from rope_jax.tasks.detection import Detection
from rope_jax.tasks.segmentation import Segmentation

Task = Classification | Segmentation | Detection
TASKS: Registry[Task] = Registry(
    "task",
    {
        "classification": Classification(),
        "segmentation": Segmentation(),
        "detection": Detection(),
    },
)


def task_of(model: nnx.Module) -> Task:
    """The task that a model is for.

    >>> import rope_jax
    >>> task_of(rope_jax.create_model("vit_digits", depth=1))
    Classification()
    """
    return TASKS[model.task]


def task_for(head: str | None) -> Task:
    """The task that models with a head are for.

    >>> task_for("upernet(width=64)"), task_for(None)
    (Segmentation(), Classification())

    Args:
        head: as for `create_model`; None for models that classify images.

    Raises:
        ValueError: there is no such head.
    """
    return TASKS["classification" if head is None else find_head(head_call(head).name).family.task]
