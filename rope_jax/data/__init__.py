"""Images for training and evaluation: sources, a stream that is a pure function of (seed, step), decoding of untrusted files."""

from rope_jax.data.decode import decode_image
from rope_jax.data.order import epoch_length, places
from rope_jax.data.pipeline import BadImages, Batches, batches, evaluation_batches
from rope_jax.data.resize import resize
from rope_jax.data.sources import Images, Streamed, fingerprint, load

__all__ = [
    "BadImages",
    "Batches",
    "Images",
    "Streamed",
    "batches",
    "decode_image",
    "epoch_length",
    "evaluation_batches",
    "fingerprint",
    "load",
    "places",
    "resize",
]
