"""Rotations of q and k by us and by others, and the packing of gradients: parts of `rotary`."""

import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._timing import (
    REPEATS,
    Timer,
    compile_loop,
    copies_beyond_cache,
    serves,
    take_turns,
    torch_on_gpu,
    working,
)
from rope_jax_kernels import Rotation, rotate, rotate_by_angles
from rope_jax_kernels.rotary import rotate_back_and_pack

# [B, L, N, C]
_VITS = [(batch, 196, 6, 64) for batch in (1, 16, 128)]
PEER_SHAPES = [*_VITS, (16, 3136, 6, 64), (128, 196, 12, 32)]
PEER_ROUNDS = 8
PACK_SHAPES = [(64, 196, 6, 64), (128, 196, 6, 64), (256, 196, 6, 64), (128, 196, 12, 64)]


def rotate_by_tables(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The rotation that XLA compiles to the fastest program, with tables [N, L, R].

    Given theta instead of tables, XLA would launch three kernels.
    """
    pairs = cos.shape[-1]
    a, b = x[..., :pairs].astype(cos.dtype), x[..., pairs : 2 * pairs].astype(cos.dtype)
    rotated = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*rotated, x[..., 2 * pairs :]], axis=-1)


def rotate_back_by_tables(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Gradient of `rotate_by_tables` in the same form; autodiff would add two padded halves."""
    return rotate_by_tables(x, cos, -sin)


def rotate_both(
    form: str | None, qk: tuple[jax.Array, jax.Array], first: jax.Array, second: jax.Array
) -> tuple[jax.Array, ...]:
    """Rotates q and k [B, L, N, C] with tables (form "xla") or with coords and freqs."""
    if form == "xla":
        return tuple(rotate_by_tables(x, first, second) for x in qk)
    return rotate(*qk, Rotation(first, second), implementation=form)


def qk_and_angles(shape: tuple[int, ...], copies: int, angles: tuple) -> tuple:
    """Returns `copies` pairs of q and k, and the angles."""
    pairs = [tuple(jnp.full(shape, 1 + i, jnp.bfloat16) for i in range(2)) for _ in range(copies)]
    return tuple(pairs), *map(jnp.asarray, angles)


def peer_rows(
    kernels: Sequence[str], turns: int, done: Collection[tuple] = ()
) -> Iterator[dict[str, Any]]:
    """Measures our rotations of q and k and those of other libraries, at PEER_SHAPES.

    Args:
        kernels: our implementations, besides "xla".
        turns: timed turns.
        done: shape and temperature of rows to omit.
    """
    for shape, temperature in itertools.product(PEER_SHAPES, ("hot", "cold")):
        size = 2 * 2 * math.prod(shape)
        copies = 1 if temperature == "hot" else copies_beyond_cache(size)
        if copies is None or (shape, temperature) in done:
            continue
        _, tokens, _, channels = shape
        coords = np.linspace(0, 1, tokens, dtype=np.float32)[:, None]
        freqs = np.linspace(1, 10, channels // 4, dtype=np.float32)
        theta = coords * freqs
        makers: dict[str, Callable[[], Timer]] = {}
        for form in ("xla", *kernels):
            # Tables [L, 1, R], or coords [L, 1] and freqs [1, 1, R].
            tables = (np.cos(theta)[:, None], np.sin(theta)[:, None])
            angles = tables if form == "xla" else (coords, freqs[None, None])
            step = functools.partial(rotate_both, form)
            arguments = functools.partial(qk_and_angles, shape, copies, angles)
            (qk, *_), *where = jax.eval_shape(arguments)
            if form == "xla" or serves(form, rotate, *qk, Rotation(*where)):
                options = (step, arguments, PEER_ROUNDS, REPEATS[temperature])
                makers[form] = lambda options=options: compile_loop(*options).timer()
        if torch_on_gpu():
            from benchmarks import _torch

            steps = PEER_ROUNDS * REPEATS[temperature]
            makers |= _torch.rotations(shape, theta.tolist(), copies, steps)
        timers, left_out = working(makers)
        row = {"shape": shape, "temperature": temperature}
        yield row | {"microseconds": take_turns(timers, turns), "left_out": left_out}


def pack_separately(q: jax.Array, k: jax.Array, v: jax.Array, rotation: Rotation) -> jax.Array:
    """Packs in separate passes, as with a library's rotation and a concatenation."""
    rotated = []
    for x in (q, k):
        back = rotate_by_angles(
            x, -rotation.angles(), pairing=rotation.pairing, implementation="xla"
        )
        rotated.append(jax.lax.optimization_barrier(back))
    return jnp.stack([*rotated, v], axis=2)


PACKS = {
    "separate": pack_separately,
    "xla": functools.partial(rotate_back_and_pack, implementation="xla"),
    "triton": functools.partial(rotate_back_and_pack, implementation="triton"),
}


def pack_all(
    pack: Callable, gradients: list[tuple], coords: jax.Array, freqs: jax.Array
) -> list[jax.Array]:
    """Packs several triples (q, k, v), one after the other."""
    packed = []
    for gs in gradients:
        # Depends on the previous one; otherwise XLA would fuse them.
        gs, packed = jax.lax.optimization_barrier((gs, packed))
        packed.append(pack(*gs, Rotation(coords, freqs)))
    return packed


def pack_timer(pack: Callable, arguments: tuple, passes: int = 4) -> Timer:
    """Returns a timer of the packing of one triple."""
    run = jax.jit(functools.partial(pack_all, pack))
    jax.block_until_ready(run(*arguments))

    def elapsed() -> float:
        start = time.perf_counter()
        jax.block_until_ready([run(*arguments) for _ in range(passes)])
        return 1e6 * (time.perf_counter() - start) / passes / len(arguments[0])

    return elapsed


def pack_rows(
    turns: int, done: Collection[tuple] = (), copies: int = 8
) -> Iterator[dict[str, Any]]:
    """Measures the packing of the gradients of q, k and v, at PACK_SHAPES.

    Args:
        turns: timed turns.
        done: shape and pairs of rows to omit.
        copies: triples, which exceed every cache together.
    """
    for shape, share in itertools.product(PACK_SHAPES, (2, 1)):
        _, tokens, heads, channels = shape
        pairs = channels // 2 // share
        if (shape, pairs) in done:
            continue
        coords = jnp.linspace(-1, 1, tokens)[:, None]
        freqs = jnp.linspace(1, 10, heads * pairs).reshape(heads, 1, -1)
        triples = [
            tuple(jnp.full(shape, i + n, jnp.bfloat16) for n in range(3)) for i in range(copies)
        ]
        arguments = (triples, coords, freqs)
        timers, left_out = working(
            {name: functools.partial(pack_timer, pack, arguments) for name, pack in PACKS.items()}
        )
        row = {"shape": shape, "pairs": pairs, "left_out": left_out}
        yield row | {"microseconds": take_turns(timers, turns)}
