"""What models are trained for, one module a task.

The training step and the evaluation call a task through five functions:

- `check(config, images)`: raises ConfigError for settings and images that do not suit the task.
- `prepare_batch(batch, config, *, seed, key)`: augments and normalises a batch of the loader in the
  step, and adds the targets of the loss. The result has `image`, float32 [B, H, W, 3].
- `loss(model, batch, config, *, key)`: the loss of a prepared batch, and a metric for the progress
  line. It calls the model, so that a task may give it more than images.
- `count(outputs, batch, images)`: what the scores need of an evaluation batch: a tree of arrays,
  from the outputs of the model for its images. `mask` of the batch is False for padding, and
  `index` is the number of each image.
- `scores(parts, images)`: the scores of a set by name, from these trees of all its batches.

A module also has `LABELS_OF`, what its labels are of ("images", "pixels" or "boxes"), and documents
the fields of its batches. The task of a model is that of its head.
"""

from types import ModuleType

from flax import nnx

from rope_jax.models.dense import head_call
from rope_jax.models.heads import find_head
from rope_jax.names.registry import Registry
from rope_jax.tasks import classification, detection, segmentation

TASKS: Registry[ModuleType] = Registry(
    "task",
    {
        "classification": classification,
        "detection": detection,
        "segmentation": segmentation,
    },
)


def task_of(model: nnx.Module) -> ModuleType:
    """The task that a model is for.

    >>> import rope_jax
    >>> task_of(rope_jax.create_model("vit_digits", depth=1)).__name__
    'rope_jax.tasks.classification'
    """
    return TASKS[model.task]


def task_for(head: str | None) -> ModuleType:
    """The task that models with a head are for.

    >>> task_for("upernet(width=64)").LABELS_OF, task_for(None).LABELS_OF
    ('pixels', 'images')

    Args:
        head: as for `create_model`; None for models that classify images.

    Raises:
        ValueError: there is no such head.
    """
    return TASKS["classification" if head is None else find_head(head_call(head).name).family.task]
