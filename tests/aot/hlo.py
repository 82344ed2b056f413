"""Launches and bytes of compiled GPU programs, read from their optimised HLO."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks._hlo import Operation, operations
from benchmarks._program import compile_ahead
from rope_jax_kernels import Rotation, rotate_qkv
from rope_jax_kernels.rotary import unpack_and_rotate
from tests.aot.program import TARGETS

# A layer of a ViT-S in front of cuDNN; a unit is q, k or v, read or written once.
B, L, N, D, A = 128, 196, 6, 64, 2
UNIT = 2 * B * L * N * D


def unpacked(form: str, qkv: jax.Array, rotation: Rotation) -> tuple[jax.Array, ...]:
    """q, k and v, rotated, by one of these forms.

    - "none": no rotation; XLA unpacks the projection.
    - "xla": jnp's rotation, which XLA fuses into the passes that unpack.
    - "in_place": the kernel rotates q and k inside the projection, then XLA unpacks it.
    - "unpack": one kernel; its gradient is XLA's pass (a kernel where the frequencies learn).
    - "unpack_pack": one kernel each way.
    """
    if form == "none":
        return unpack_and_rotate(qkv, None)
    if form == "in_place":
        return unpack_and_rotate(rotate_qkv(qkv, rotation, implementation="triton"), None)
    backward = "triton" if form == "unpack_pack" else "xla"
    kernel = "xla" if form == "xla" else "triton"
    return unpack_and_rotate(qkv, rotation, implementation=kernel, backward=backward)


def layer_of(form: str, trained: str) -> Callable:
    """Projection, rotation, cuDNN's attention, projection, and the gradients of what is trained.

    `trained` is "" for the forward pass, "fixed" for training with fixed frequencies, or "learned".
    """

    def layer(x, w, b, wo, freqs, coords):
        qkv = (x @ w + b).reshape(B, L, 3, N, D)
        q, k, v = unpacked(form, qkv, Rotation(coords, freqs))
        out = jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
        return out.reshape(B, L, N * D) @ wo

    def training(*arguments_and_cotangent):
        *arguments, cotangent = arguments_and_cotangent
        learned = 5 if trained == "learned" else 4
        rest = arguments[learned:]
        out, pull_back = jax.vjp(lambda *some: layer(*some, *rest), *arguments[:learned])
        return out, pull_back(cotangent)

    return training if trained else layer


def moved_bytes(operation: Operation, pairs: int) -> float:
    """Bytes that an operation reads and writes; a kernel reads some of its operands in part."""
    if operation.kind != TARGETS["triton"]:
        return sum(operation.read) + sum(operation.written)

    def part(size: int) -> float:  # 2 * pairs of D channels, and of a packed array q and k
        return size * 2 * pairs / D * (2 / 3 if size == 3 * UNIT else 1)

    arrays = [size for size in operation.written if size >= UNIT]
    outputs = sum(map(part, arrays)) if operation.in_place else sum(arrays)
    total = 2 * outputs + sum(size for size in operation.written if size < UNIT)
    moved = 0
    for size in operation.read:
        if size < UNIT:
            total += size
        elif moved < sum(arrays):
            moved += size  # counted above as the input of an output
        else:
            total += part(size)  # inputs of the forward pass, for the gradient of the frequencies
    return total


def count(form: str, pairs: int, trained: str, device: jax.Device) -> dict[str, float]:
    """Launches, and units moved, between the matrix products and cuDNN."""
    channels = N * D
    x = jax.ShapeDtypeStruct((B, L, channels), jnp.bfloat16)
    shapes = [(channels, 3 * channels), (3 * channels,), (channels, channels)]
    weights = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    angles = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((N, A, pairs), (L, A))]
    arguments = [x, *weights, *angles, *([x] if trained else [])]
    text = compile_ahead(layer_of(form, trained), arguments, device).as_text()
    between = [x for x in operations(text) if "cublas" not in x.kind and "cudnn" not in x.kind]
    return {"launches": len(between), "units": sum(moved_bytes(x, pairs) for x in between) / UNIT}
