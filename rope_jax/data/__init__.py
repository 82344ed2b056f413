"""Images for training and evaluation.

Sources of images, a training stream that is a pure function of (seed, step), and the decoding of
untrusted image files.
"""

from rope_jax.data.examples import (
    EPOCHS_OF_A_COPY,
    batch_ids,
    canvases_of,
    check_canvases,
    check_labels,
    loader_of,
)
from rope_jax.data.images.augment import AugmentSplit, split_augment
from rope_jax.data.images.crops import resize
from rope_jax.data.images.decode import decode_image
from rope_jax.data.order import batch_examples, epoch_length
from rope_jax.data.pipeline import Batches, SeveralSizes, batches, evaluation_batches, worker_count
from rope_jax.data.sources import Images, Streamed, load, open_source, register_source
from rope_jax.data.sources.boxes import (
    BoxImages,
    StreamedBoxes,
    Truth,
    check_boxes,
    check_objects,
)
from rope_jax.data.sources.evaluation_sets import EVALUATION_SETS, EvaluationSet
from rope_jax.data.sources.index import BadImages, BadSet
from rope_jax.data.sources.pairs import StreamedMaps
from rope_jax.data.sources.scenes import LabelMaps

__all__ = [
    "EPOCHS_OF_A_COPY",
    "EVALUATION_SETS",
    "AugmentSplit",
    "BadImages",
    "BadSet",
    "Batches",
    "BoxImages",
    "EvaluationSet",
    "Images",
    "LabelMaps",
    "SeveralSizes",
    "Streamed",
    "StreamedBoxes",
    "StreamedMaps",
    "Truth",
    "batch_examples",
    "batch_ids",
    "batches",
    "canvases_of",
    "check_boxes",
    "check_canvases",
    "check_labels",
    "check_objects",
    "decode_image",
    "epoch_length",
    "evaluation_batches",
    "load",
    "loader_of",
    "open_source",
    "register_source",
    "resize",
    "split_augment",
    "worker_count",
]
