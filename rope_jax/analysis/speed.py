"""Speed of rotations and of whole models, as tables A.2, 4.4 and D.1 of Kane's thesis measure it.

The thesis used an A100. Kernels are timed on a GPU only: on a CPU they are interpreted, and such
times mean nothing.
"""

import concurrent.futures
import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.analysis.timing import (
    Start,
    Timer,
    compile_loop,
    compile_program,
    measure_call,
    sample,
    take_turns,
)
from rope_jax.names.text import image_pair
from rope_jax.positions.grids import Grid
from rope_jax.system.sharding import make_mesh, use_mesh
from rope_jax.weights.create import create_model
from rope_jax_kernels import Choices, device, rotate_by_angles
from rope_jax_kernels.accuracy import error

Size = tuple[int, int, int, int]  # batch, heads, side of the map, channels of a head

# Table A.1: batches, heads, sides and channels.
SIZES = ((1, 16, 32, 64, 128), (1, 3, 4, 6, 8), (56, 28, 14, 7), (32, 64, 128))
SMALL_SIZES = ((1, 2), (3,), (7,), (32,))  # for a CPU
# Table A.2: dtypes of features and angles.
PRECISIONS = {
    "16-16": ("float16", "float16"),
    "16-32": ("float16", "float32"),
    "32-32": ("float32", "float32"),
}
ROUNDINGS = 8  # of the largest element, by which two forms may differ


def rotation_sizes(small: bool) -> list[Size]:
    """The sizes (batch, heads, side, channels) of table A.1.

    >>> len(rotation_sizes(small=False)), rotation_sizes(small=True)
    (300, [(1, 3, 7, 32), (2, 3, 7, 32)])

    Args:
        small: returns two small sizes instead, for a CPU.
    """
    return list(itertools.product(*(SMALL_SIZES if small else SIZES)))


def rotation_operands(
    size: Size, dtypes: tuple[str, str], *, tables: bool, k_rope: int = 2, copies: int = 1
) -> tuple:
    """Makes the operands of a rotation in which each head and token has its own angles.

    Args:
        size: batch B, heads N, side H = W, channels C.
        dtypes: of features and angles.
        tables: whether to return cosines and sines of the angles, in float32.
        k_rope: 1 / k_rope of the channels are turned; see `time_rotation`.
        copies: number of arrays of features.

    Returns:
        `copies` random features [B, 1, N*H*W, C] as a tuple; and, with R = C / k_rope / 2 pairs,
        theta [1, N*H*W, R], from 0 to 10, or its cosines and sines.
    """
    batch, heads, side, channels = size
    rows, pairs = heads * side**2, channels // k_rope // 2
    # Multiples of 1/64, which no form's compiler can round in its own way.
    draw = functools.partial(
        jax.random.randint, shape=(batch, 1, rows, channels), minval=-256, maxval=257
    )
    features = tuple((draw(jax.random.key(n)) / 64).astype(dtypes[0]) for n in range(copies))
    theta = (jnp.arange(rows * pairs) % 641 / 64).reshape(1, rows, pairs).astype(dtypes[1])
    exact = theta.astype("float32")
    return (features, jnp.cos(exact), jnp.sin(exact)) if tables else (features, theta)


def rotate_by_tables(
    x: Float[Array, "B N L D"], cos: Float[Array, "_ L R"], sin: Float[Array, "_ L R"]
) -> Float[Array, "B N L D"]:
    """The rotation that XLA compiles to the fastest program, with tables of cosines and sines.

    Given theta instead of tables, XLA would launch three kernels.
    """
    pairs = cos.shape[-1]
    a, b = x[..., :pairs].astype(cos.dtype), x[..., pairs : 2 * pairs].astype(cos.dtype)
    rotated = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*rotated, x[..., 2 * pairs :]], axis=-1)


def rotation_forms(size: Size, precision: str, k_rope: int) -> dict[str, Start]:
    """Compiles the forms of a rotation side by side; see `time_rotation`."""
    operands = functools.partial(rotation_operands, size, PRECISIONS[precision], k_rope=k_rope)
    turn = functools.partial(rotate_by_angles, layout="BNLD")
    steps: dict[str, Callable] = {"compiled": rotate_by_tables}
    if device.is_gpu():
        steps["fused"] = functools.partial(turn, implementation="triton")

    def start_eager() -> tuple[list[np.ndarray], Timer]:
        (x,), theta = operands(tables=False)
        step = functools.partial(turn, x, theta, implementation="xla")
        return sample(step()), functools.partial(measure_call, step)

    def compile_form(form: str) -> Start:
        make = functools.partial(operands, tables=form == "compiled")
        return compile_loop(steps[form], make, in_place=True)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = pool.map(compile_form, steps)
    return {"eager": start_eager} | dict(zip(steps, compiled, strict=True))


def time_rotation(
    size: Size, precision: str, *, k_rope: int = 2, turns: int = 9
) -> dict[str, float]:
    """Times a rotation in several forms, in turns in this process, with warm caches.

    Args:
        size: batch, heads, side of the map, channels; see `rotation_sizes`.
        precision: one of `PRECISIONS`.
        k_rope: 1 / k_rope of the channels are turned, whole pairs; the thesis turned half of them.
        turns: timed turns of each form.

    Returns:
        Median microseconds of "eager", jax.numpy without jit; of "compiled", jax.numpy with jit in
        its fastest form, with tables of cosines and sines; and, on a GPU, of "fused", our kernel.
        On a GPU those of the last two are of a step in a compiled loop, without launches from
        Python.

    Raises:
        RuntimeError: the results of two forms differ by more than roundings.
    """
    starts = rotation_forms(size, precision, k_rope)
    results, timers = zip(*(start() for start in starts.values()), strict=True)
    allowed = ROUNDINGS * float(jnp.finfo(PRECISIONS[precision][0]).eps)
    for form, result in zip(starts, results, strict=True):
        if not (off := error(result, results[0])) <= allowed:  # also NaN
            raise RuntimeError(
                f"rotation {size}, {precision}: {form!r} differs from 'eager' by {off:.2g} of the "
                f"largest element, and {allowed:.2g} is allowed; its time would mean nothing"
            )
    return take_turns(dict(zip(starts, timers, strict=True)), turns)


def compile_forward(
    model: str, position: str, images: jax.ShapeDtypeStruct, **options: Any
) -> Start:
    """Compiles the forward pass of a model with random weights, cast to the dtype of the images.

    Args:
        model: name of the model.
        position: its scheme, whose own weights are not cast.
        images: [B, H, W, 3], in the dtype of the computation.
        **options: further options of `create_model`.
    """
    new_model = functools.partial(
        create_model,
        model,
        position=position,
        image_size=images.shape[1:3],
        dtype=images.dtype,
        **options,
    )
    graph, *_ = nnx.split(nnx.eval_shape(new_model), nnx.Param, ...)

    def cast(path: Sequence[Any], x: Array) -> Array:
        is_position = any(getattr(key, "key", None) == "position" for key in path)
        return x if is_position else x.astype(images.dtype)

    def new_state() -> tuple[Any, Any]:
        _, params, rest = nnx.split(new_model(), nnx.Param, ...)
        return jax.tree.map_with_path(cast, nnx.to_pure_dict(params)), rest

    def step(params: Any, rest: Any, images: Array) -> tuple[Any, Array]:
        return params, nnx.merge(graph, params, rest)(images)

    return compile_program(step, new_state, images)


def images_per_second(
    model: str,
    position: str,
    *,
    fused: bool,
    batch: int,
    dtype: str = "float16",
    image_size: int | Grid = 224,
    turns: int = 5,
    **options: Any,
) -> float:
    """Measures the throughput of a model's forward pass on one device: the median of `turns`.

    Args:
        model: name of the model, see `rope_jax.list_models`.
        position: its positional scheme.
        fused: True for the kernels that the library takes by default on this GPU, measured choices
            included (where it prefers none, as for windows and neighbourhoods before Hopper, the
            program is that of False); False for attention and rotation in plain XLA, with logits
            in memory, like the BMM-style kernels of the thesis.
        batch: images of a call.
        dtype: of images, weights and activations.
        image_size: pixels, a side or (height, width).
        turns: timed turns.
        **options: further options of `create_model`.

    Raises:
        ValueError: `fused` without a GPU, or the model, scheme or options do not exist.
    """
    if fused and not device.is_gpu():
        raise ValueError(
            f"fused=True needs a GPU, and this is {device.kind()}: interpreted kernels are not "
            "timed; use fused=False"
        )
    images = jax.ShapeDtypeStruct((batch, *image_pair(image_size), 3), dtype)
    # On one of several devices, because XLA cannot partition kernels, and would not take them.
    with (
        use_mesh(make_mesh(devices=jax.devices()[:1])),
        contextlib.nullcontext() if fused else Choices(everywhere="xla"),
    ):
        _, timer = compile_forward(model, position, images, **options)()
    return 1e6 * batch / take_turns({model: timer}, turns)[model]
