"""Launches and bytes of compiled GPU programs, read from their optimised HLO."""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks._program import compile_ahead, sizes
from rope_jax_kernels import Rotation, rotate_qkv
from rope_jax_kernels.rotary import unpack_and_rotate
from tests.aot.program import FREE, TARGETS

INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\((.*?)\)(.*)")


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        kind: its HLO name, or for a custom call its target.
        read: bytes of each operand that it reads; of a sliced operand, of the slices.
        written: bytes of each result.
        in_place: whether results alias operands.
    """

    kind: str
    read: tuple[int, ...]
    written: tuple[int, ...]
    in_place: bool


def computations(text: str) -> dict[str, list[tuple[str, ...]]]:
    """Name (or ENTRY) -> (name, type, operation, operands, attributes) of its instructions."""
    found, lines = {}, []
    for line in text.splitlines():
        if start := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
            lines = found["ENTRY" if start[1] else start[2]] = []
        elif instruction := INSTRUCTION.match(line):
            lines.append(instruction.groups())
    return found


def read_bytes(body: list[tuple[str, ...]], name: str, whole: int) -> int:
    """Bytes that a fusion reads of its parameter `name` of `whole` bytes; only slices if it can."""
    users = [user for user in body if name in re.findall(r"%([\w.-]+)", user[3])]
    if any(operation not in ("slice", "bitcast") for _, _, operation, _, _ in users):
        return whole
    slices, through = {}, 0
    for user, shape, operation, _, rest in users:
        if operation == "slice":
            slices[rest.split(", metadata=")[0]] = sum(sizes(shape))
        else:
            through += read_bytes(body, user, whole)
    return min(whole, sum(slices.values()) + through)


def operations(text: str, computation: str = "ENTRY") -> list[Operation]:
    """The operations of a program's entry, or of a computation inside it, that take time."""
    found = computations(text)
    written = {name: sizes(shape) for name, shape, *_ in found[computation]}
    result = []
    for name, _, operation, operands, rest in found[computation]:
        if operation in FREE:
            continue
        target = re.search(r'custom_call_target="([^"]*)"', rest)
        read = [sum(written[x]) for x in re.findall(r"%([\w.-]+)", operands)]
        if fused := re.search(r"calls=%([\w.-]+)", rest):
            body = found[fused[1]]
            parameters = {int(number): x for x, _, op, number, _ in body if op == "parameter"}
            read = [read_bytes(body, parameters[i], whole) for i, whole in enumerate(read)]
        kind, in_place = target[1] if target else operation, "output_to_operand_aliasing" in rest
        result.append(Operation(kind, tuple(read), written[name], in_place))
    return result


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
