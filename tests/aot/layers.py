"""Attention at the layers of models, forward and with gradients, and shapes of rotations."""

import dataclasses

import jax

from benchmarks._model_shapes import LAYERS
from rope_jax_kernels import Rotation, attention_qkv


def make_layer(name, **changes):
    """A model's layer with some fields changed."""
    return dataclasses.replace(LAYERS[name], **changes)


def attend(layer, implementation, qkv, coords, freqs, bias=None, cotangent=None):
    """The output alone; `cotangent` matches the signature of `train`."""
    return attention_qkv(
        qkv,
        pattern=layer.pattern,
        rotation=Rotation(coords, freqs) if layer.pairs else None,
        bias=bias if layer.bias else None,
        implementation=implementation,
    )


def train(layer, implementation, qkv, coords, freqs, bias, cotangent):
    """The output and the gradients of qkv, freqs and the bias, if any."""
    learned = (qkv, freqs, bias) if layer.bias else (qkv, freqs)
    out, pull_back = jax.vjp(
        lambda qkv, freqs, bias=None: attend(layer, implementation, qkv, coords, freqs, bias),
        *learned,
    )
    return out, pull_back(cotangent)


def rotation_shapes(case):
    """Shapes of q (or k), coords and freqs of a case of `rotary_cases`."""
    q = jax.ShapeDtypeStruct(case.shape(), case.dtype)
    return q, *jax.tree.map(jax.typeof, case.coords_and_freqs())
