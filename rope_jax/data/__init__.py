"""Images for training and evaluation: sources in memory, a stream that is a pure function of (seed, step), decoding of untrusted files."""

from rope_jax.data.decode import decode_image
from rope_jax.data.pipeline import batches, evaluation_batches
from rope_jax.data.resize import resize
from rope_jax.data.sources import Images, fingerprint, load

__all__ = ["Images", "batches", "decode_image", "evaluation_batches", "fingerprint", "load", "resize"]
