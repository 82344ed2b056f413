"""The tasks that models are trained for, one object per task.

Training calls

- `check(config, images)`: raises ConfigError for settings and images that do not suit the task.
- `prepare_batch(batch, config, *, seed, key)`: augments and normalises a batch of the loader in the
  step, and adds the targets of the loss. `seed` is of the run and `key` of the step; augmentation
  is a function of (seed, epoch, index). The result has `image`, float32 [B, H, W, 3].
- `loss(model, batch, config, *, key)`: the loss of a prepared batch, and a metric for the progress
  line. It calls the model, so that a task may give it more than images.

An `Evaluator` calls

- `count(outputs, batch, images)`: the contribution of an evaluation batch to the scores: a tree of
  arrays, from the outputs of the model for its images. `mask` of the batch is False for padding,
  and `index` is the number of each image.
- `collect(part)`, if there is one: what is kept of such a tree on the host, such as the run lengths
  of masks in place of their pixels.
- `scores(parts, images)`: the scores of a set by name, from these trees of all its batches, or what
  is kept of them.

`python -m rope_jax.evaluate` calls

- `open(dataset, folder, size, crop)`: the images of one of `sets`, the task's names for --dataset.
- `frame_images(images, size, frame)`, for images that differ in size: the images at the sizes for
  evaluation; `size` is the requested one, or None, and `frame` that of the run's own evaluation, or
  None.
- `identity(images, folder, model, preprocessing, options)`: the identity of a row, next to the
  settings of all tasks. `options` has the arguments that are for the task alone (`flags`).
- `evaluate(evaluator, model, images, pictures, options)`: a row, and predictions for the first
  images. `protocol` of the row describes the evaluated images, and `note`, if any, is the end of
  its protocol.
- `draw(predictions, class_names, classes, path)`: writes a picture of these predictions.

When training ends, a run of a task with a `picture`, the name of a file, calls `predict(evaluator,
images, count)`, which returns predictions for the first images of a set, for `draw`.

A task also has

- `labels`, the kind of labels that it needs, and `does`, a description of its models;
- `sets`, `flags` and `batch_size` of the command;
- for tables `titles`, the scores that they show by name, of which the first is the main one;
  `score_name`, the main one in a sentence; `class_score`, the name of a list of scores of the
  classes and its name in a sentence, or None;
- `picture`, None for a task without `predict` and `draw`. Only a task of images that differ in size
  needs `frame_images`.

It documents the fields of its batches. The task of a model is that of its head: a new task needs
`TASKS.register`, and `rope_jax.models.heads.register_head` of a family that names it. Its `loss`
gets from the model what `head.loss` takes.
"""

from flax import nnx

from rope_jax.data.labels import find_labels
from rope_jax.models.dense import parse_head
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
        "instances": Detection(find_labels("masks")),
    },
)


def find_task(model: nnx.Module) -> Task:
    """Finds the task of a model.

    >>> import rope_jax
    >>> find_task(rope_jax.create_model("vit_digits", depth=1))
    Classification()
    """
    return TASKS[model.task]


def task_for(head: str | None) -> Task:
    """The task of models with a head.

    >>> task_for("upernet(width=64)"), task_for(None)
    (Segmentation(), Classification())

    Args:
        head: as for `create_model`; None for models that classify images.

    Raises:
        ValueError: there is no such head or option.
    """
    return TASKS["classification" if head is None else parse_head(head)[1].task]
