"""Programs that the GPU tests run. tests/aot compiles them without a GPU.

With ROPE_JAX_REHEARSE_GPU_TESTS=1 the GPU tests run on a CPU at small sizes, with interpreted
kernels, which shows that the tests themselves work.
"""

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._model_shapes import Layer
from benchmarks._timing import torch_on_gpu
from rope_jax_kernels import Global, Neighborhood, Rotation, Window, attention_qkv, rotate_qkv

REHEARSING = os.environ.get("ROPE_JAX_REHEARSE_GPU_TESTS") == "1"


def at(full, rehearsed):
    """Returns the first value on a GPU, and the second in a rehearsal."""
    return rehearsed if REHEARSING else full


@dataclasses.dataclass(frozen=True)
class Run:
    """A rotation (without a pattern) or attention, with its gradient, by an implementation."""

    implementation: str
    pattern: object
    places: tuple
    heads: int = 2
    head_dim: int = 64
    pairs: int = 16
    batch: int = 2
    dtype: str = "bfloat16"

    def __str__(self):
        kind = "rotation" if self.pattern is None else str(self.pattern)
        return f"{self.implementation} {kind} {self.places}"

    def shapes(self):
        """Shapes of qkv, coords and freqs."""
        sizes = self.places, self.heads, self.head_dim, self.pairs
        layer = Layer(self.pattern or Global(), *sizes)
        return list(layer.shapes(self.batch, self.dtype).values())[:3]

    def __call__(self, qkv, coords, freqs):
        """The output, and the gradients of qkv and freqs."""
        options = {"implementation": self.implementation}

        def outputs(qkv, freqs):
            rotation = Rotation(coords, freqs)
            if self.pattern is None:
                return rotate_qkv(qkv, rotation, **options)
            return attention_qkv(qkv, pattern=self.pattern, rotation=rotation, **options)

        out, pull = jax.vjp(outputs, qkv, freqs)
        like_qkv, like_freqs = pull(qkv if self.pattern is None else qkv[..., 2, :, :])
        return {"out": out, "qkv": like_qkv, "freqs": like_freqs}

    def operands(self):
        """Operands made on the device. No two of 56 examples in a row are equal."""

        @jax.jit
        def make():
            shape, coords, freqs = self.shapes()
            few = jax.random.normal(jax.random.key(0), (8, *shape.shape[1:]))
            factor = 1 + jnp.arange(self.batch) % 7 / 8
            qkv = jnp.tile(few, (-(-self.batch // 8), *[1] * (few.ndim - 1)))[: self.batch]
            qkv *= factor.reshape(-1, *[1] * (few.ndim - 1))
            coords = jax.random.normal(jax.random.key(1), coords.shape)
            return qkv.astype(self.dtype), coords, jax.random.normal(jax.random.key(2), freqs.shape)

        return make()


# Odd sizes: tiles, windows and the map are partly filled.
RUNS = [
    Run("triton", None, (53,)),
    Run("mosaic", None, (53,)),
    Run("triton", Global(), (197,)),
    Run("mosaic", Global(), (197,)),
    Run("cudnn", Global(), (197,)),
    Run("triton", Window((7, 7), (3, 3)), (17, 18), head_dim=32, pairs=8),
    Run("mosaic", Window((7, 7), (3, 3)), (17, 18), head_dim=32, pairs=8),
    Run("triton", Neighborhood((7, 7)), (17, 18), head_dim=32, pairs=8),
    Run("triton", Neighborhood((3, 5), (2, 3)), (9, 20), head_dim=32, pairs=8),
]
OURS = [run for run in RUNS if run.implementation != "cudnn"]
# A grid of more than 65,535 programs along its second or third axis is not launched.
MANY = at(66_000, 60)
SMALL_PLACES = {1: (16,), 2: (4, 4)}
MANY_EXAMPLES = [
    dataclasses.replace(run, batch=MANY, places=SMALL_PLACES[len(run.places)]) for run in OURS[:-1]
]


def beyond_31_bits(run):
    """The run with more than 2**31 elements of qkv."""
    per_example = math.prod(run.places) * 3 * run.heads * run.head_dim
    return dataclasses.replace(run, batch=at(2**31 // per_example + 8, 60))


MANY_ELEMENTS = [beyond_31_bits(run) for run in OURS[:-1]]


@contextlib.contextmanager
def other_work():
    """Keeps other streams of the device busy: copies to it and, with torch, matrix products."""
    ended, copied = threading.Event(), np.ones(at(2**26, 2**10), np.float32)
    products = [lambda: jax.block_until_ready(jax.device_put(copied))]
    if torch_on_gpu() and not REHEARSING:
        import torch

        x, stream = torch.ones(4096, 4096, device="cuda").bfloat16(), torch.cuda.Stream()

        def multiply():
            with torch.cuda.stream(stream):
                for _ in range(8):
                    x @ x
                stream.synchronize()

        products.append(multiply)

    def repeat(work):
        while not ended.is_set():
            work()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        repeated = [pool.submit(repeat, work) for work in products]
        try:
            yield
        finally:
            ended.set()
    for work in repeated:
        work.result()
