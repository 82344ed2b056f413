"""What a compiled GPU program launches and moves, read from its optimised HLO."""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Operations that take no time on a GPU.
FREE = ("parameter", "bitcast", "tuple", "get-tuple-element", "constant")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\((.*?)\)(.*)")
TARGET = pathlib.Path(__file__).parents[1] / "tests" / "data" / "h200.txtpb"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        kind: its HLO name, or for a custom call its target.
        read: bytes of each operand that it reads; of one that is only sliced, the slices.
        written: bytes of each result.
        in_place: whether results take the place of operands.
    """

    kind: str
    read: tuple[int, ...]
    written: tuple[int, ...]
    in_place: bool


def absent_gpus() -> list:
    """H200s to compile for on a machine that has jax's CUDA plugin and no GPU."""
    if os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") != "1":
        raise RuntimeError("there is no GPU; to compile for one set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 and install jax[cuda13]")
    return topologies.get_topology_desc(platform="cuda", topology_name="h200", topology="1x1x1", target_config=TARGET.read_text()).devices


def compile_ahead(f: Callable, shapes: Sequence[Any], device: jax.Device, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """Compiles f for a GPU, which need not be there; nothing is tuned, so that the program is the same on every machine.

    Args:
        f: the function.
        shapes: of its arguments, trees of `jax.ShapeDtypeStruct`.
        device: the GPU.
        donate: which arguments it may overwrite.
    """
    mesh = Mesh(np.array([device]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tuple(shapes))
    options = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(f, donate_argnums=donate).trace(*shapes).lower().compile(compiler_options=options)


def sizes(shape: str) -> tuple[int, ...]:
    """Bytes of each array of an HLO type: of one, or of those of a tuple."""
    arrays = re.findall(r"\b([a-z]+)(\d*)\[([\d,]*)\]", shape)
    return tuple(int(bits or 8) // 8 * math.prod(int(n) for n in extents.split(",") if n) for _, bits, extents in arrays)


def computations(text: str) -> dict[str, list[tuple[str, ...]]]:
    """Name -> (name, type, operation, operands, attributes) of its instructions; the entry is called ENTRY."""
    found, lines = {}, []
    for line in text.splitlines():
        if start := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
            lines = found["ENTRY" if start[1] else start[2]] = []
        elif instruction := INSTRUCTION.match(line):
            lines.append(instruction.groups())
    return found


def read_bytes(body: list[tuple[str, ...]], name: str, whole: int) -> int:
    """Bytes that a fusion reads of its parameter `name` of `whole` bytes: its slices, where nothing else is done with it."""
    users = [user for user in body if name in re.findall(r"%([\w.-]+)", user[3])]
    if any(operation not in ("slice", "bitcast") for _, _, operation, _, _ in users):
        return whole
    slices = {rest.split(", metadata=")[0]: sum(sizes(shape)) for _, shape, operation, _, rest in users if operation == "slice"}
    return min(whole, sum(slices.values()) + sum(read_bytes(body, user[0], whole) for user in users if user[2] == "bitcast"))


def operations(text: str, computation: str = "ENTRY") -> list[Operation]:
    """The operations of a program's entry, or of a computation inside, that take time."""
    found = computations(text)
    written = {name: sizes(shape) for name, shape, *_ in found[computation]}
    result = []
    for name, _, operation, operands, rest in found[computation]:
        if operation in FREE:
            continue
        target = re.search(r'custom_call_target="([^"]*)"', rest)
        names = re.findall(r"%([\w.-]+)", operands)
        read = [sum(written[x]) for x in names]
        if fused := re.search(r"calls=%([\w.-]+)", rest):
            body = found[fused[1]]
            parameters = {int(number): parameter for parameter, _, op, number, _ in body if op == "parameter"}
            read = [read_bytes(body, parameters[i], whole) for i, whole in enumerate(read)]
        result.append(Operation(target[1] if target else operation, tuple(read), written[name], "output_to_operand_aliasing" in rest))
    return result
