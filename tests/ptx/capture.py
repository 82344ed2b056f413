"""Evaluates a function as traced for an absent GPU, with its kernels compiled for it and emulated.

What is not a kernel (tables of angles, sums of partial gradients) is evaluated by JAX on the CPU.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import re
import tempfile
from unittest import mock

import jax
import jax.extend
import numpy as np
from jax.experimental.mosaic.gpu import launch_context
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from tests.aot.program import compile_ahead
from tests.ptx.launch import Launch, Partial, Tensor, emulate
from tests.ptx.order import Findings

KERNELS = ("pallas_call", "mpmd_map")  # primitives of Triton's kernels and of Mosaic GPU's
HAS_KERNELS = re.compile("|".join([*KERNELS, "new_ref", "freeze"]))
PLACES = ("reshape", "squeeze", "slice", "transpose")  # move elements, and do nothing else
CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")  # parameters that hold what is called


class Reference:
    """A mutable array, of `jax.new_ref`."""

    def __init__(self, value):
        self.value = value


class Emulator:
    """Emulates the kernels of traced functions.

    Args:
        device: for which they are compiled.

    Attributes:
        findings: errors of all kernels that have run.
        launches: (launch, inputs) of each.
    """

    def __init__(self, device: jax.Device):
        self.device, self.findings, self.launches = device, Findings(), []

    def __call__(self, f, *args):
        """f(*args); the arguments are trees of arrays."""
        traced = trace(self.device, f, args)
        closed = traced.jaxpr
        out = self._evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        out = [np.asarray(self._whole(x, "the end")) for x in out]
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), out)

    def _evaluate(self, jaxpr, consts, args):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda x: x.val if isinstance(x, jax.extend.core.Literal) else values[x]
        for eqn in jaxpr.eqns:
            results = self._apply(eqn, [read(x) for x in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _apply(self, eqn, operands):
        name = eqn.primitive.name
        called = next((eqn.params[x] for x in CALLS if x in eqn.params and name != "scan"), None)
        if name in KERNELS:
            return self._launch(eqn, operands)
        if name == "new_ref":
            return [Reference(operands[0])]
        if name == "freeze":
            return [operands[0].value]
        if name in PLACES and is_partial(operands):
            parts = operands[0].value, operands[0].written
            value, written = (np.asarray(eqn.primitive.bind(x, **eqn.params)) for x in parts)
            return [value if written.all() else Partial(value, written)]
        # A function with a derivative of its own is not bound to its primitive in the same way.
        inside = name == "custom_jvp_call" or HAS_KERNELS.search(str(called))
        if called is not None and (inside or is_partial(operands)):
            closed = (
                called if hasattr(called, "consts") else jax.extend.core.ClosedJaxpr(called, [])
            )
            return self._evaluate(closed.jaxpr, closed.consts, operands)
        out = eqn.primitive.bind(*(self._whole(x, name) for x in operands), **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    def _whole(self, x, where):
        """The value of an array that is used, or returned, outside of kernels."""
        self.findings.add(isinstance(x, Partial), "memory that nothing has written is used", where)
        return x.value if isinstance(x, Partial) else x

    def _launch(self, eqn, operands):
        references = [i for i, x in enumerate(operands) if isinstance(x, Reference)]
        inputs = [x.value if isinstance(x, Reference) else x for x in operands]
        inputs = [x if isinstance(x, Partial) else np.asarray(x) for x in inputs]
        values = [x.value if isinstance(x, Partial) else x for x in inputs]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
        launch = compile_kernel(eqn, shapes, tuple(references), self.device)
        self.launches.append((launch, inputs))
        out = emulate(launch, inputs, self.findings)
        for i in reversed(references):
            operands[i].value = out.pop()
        return out


def trace(device, f, args):
    """Traces f as for the device; the arguments are trees of arrays or of their shapes."""
    mesh = Mesh(np.array([device]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    shape_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(f).trace(*jax.tree.map(shape_of, args))


def compile_kernels(device: jax.Device, f, *shapes) -> list[tuple[Launch, list]]:
    """The kernels of f, each compiled alone, and the shapes and dtypes of its inputs."""

    def find(jaxpr):
        for eqn in jaxpr.eqns:
            called = next((eqn.params[x] for x in CALLS if x in eqn.params), None)
            if eqn.primitive.name in KERNELS:
                references = [hasattr(x.aval, "inner_aval") for x in eqn.invars]
                inputs = [getattr(x.aval, "inner_aval", x.aval) for x in eqn.invars]
                inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
                mutable = tuple(np.flatnonzero(references).tolist())
                yield compile_kernel(eqn, inputs, mutable, device), inputs
            elif called is not None:
                yield from find(getattr(called, "jaxpr", called))

    return list(find(trace(device, f, shapes).jaxpr.jaxpr))


def is_partial(operands):
    return any(isinstance(x, Partial) for x in operands)


def compile_kernel(eqn, shapes: list, references: tuple, device: jax.Device) -> Launch:
    """Compiles the kernel of an equation alone, for operands of these shapes and dtypes.

    Those numbered in `references` are mutable arrays.
    """

    def alone(*args):
        operands = [jax.new_ref(x) if i in references else x for i, x in enumerate(args)]
        out = eqn.primitive.bind(*operands, **eqn.params)
        return [*out, *(jax.freeze(operands[i]) for i in references)]

    with tempfile.TemporaryDirectory() as folder, recorded_tensors() as tensors:
        dump = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        with mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=folder):
            compile_ahead(alone, shapes, device, options=dump)
        texts = {x.name: x.read_text() for x in pathlib.Path(folder).iterdir() if x.is_file()}
    kernels = [x for name, x in texts.items() if name.endswith(".ptx")]
    ptx = next(x for x in kernels if re.search(r"\.entry \w*(?:rotary|attention)", x))
    outputs = tuple((x.aval.shape, x.aval.dtype) for x in eqn.outvars)
    if eqn.primitive.name == "mpmd_map":
        launch = _launch_of_mosaic(eqn, ptx, texts, outputs)
        return dataclasses.replace(launch, tensors=tuple(tensors), mutable=references)
    name = re.search(r"\.entry (\w+)", ptx)[1]
    thunks = "\n".join(x for y, x in texts.items() if y.endswith("thunk_sequence.txt"))
    sizes = rf"{name} grid: \[(.*?)\] threads: \[(.*?)\]\s+shared_memory: (\d+)"
    grid, threads, shared = re.search(sizes, thunks).groups()
    aliases = dict(eqn.params["input_output_aliases"])
    numbers = lambda text: tuple(map(int, text.split(",")))
    return Launch(ptx, numbers(grid), math.prod(numbers(threads)), int(shared), outputs, aliases)


def _launch_of_mosaic(eqn, ptx, texts, outputs):
    resources = next(x for name, x in texts.items() if name.endswith("resources.txt"))
    shared = int(re.search(r"smem_scratch_bytes=(\d+)", resources)[1])
    barriers = re.findall(r"num_barriers=(\d+), orders_tensor_core=\w+\): (\d+)", resources)
    shared += 8 * sum(int(number) * int(count) for number, count in barriers)
    (mesh,) = eqn.params["meshes"]
    threads = math.prod(map(int, re.search(r"\.maxntid (\d+), (\d+), (\d+)", ptx).groups()))
    pointers = pointers_of_mosaic(next(x for name, x in texts.items() if name.endswith("log")))
    return Launch(ptx, tuple(mesh.grid), threads, shared, outputs, pointers=pointers)


def pointers_of_mosaic(log):
    """The operands of a kernel's pointers, in the order of its first uses of them.

    `log` has the module after each of the compiler's passes; the host loads all operands' addresses
    from one array, and launches the kernel with some of them.
    """
    host, launched = re.split(r"= gpu\.launch_func ", log, maxsplit=1)
    host = host[host.rindex("\n// ") :] if "\n// " in host else host
    names = re.findall(r"(%\w+) : !llvm\.ptr", re.search(r" args\((.*)\)", launched)[1])
    places = [re.search(rf"{x} = llvm\.load (%\w+) ", host)[1] for x in names]
    return tuple(
        int(re.search(rf"{x} = llvm\.getelementptr %\w+\[(\d+)\]", host)[1]) for x in places
    )


@contextlib.contextmanager
def recorded_tensors():
    """Notes the tensor maps that Mosaic GPU makes on the host while it lowers a kernel."""
    tensors, make = [], launch_context.LaunchContext._get_tma_desc

    def recorded(context, ref, transforms, peer, box, swizzle, *rest):
        before = len(context.tma_descriptors)
        out = make(context, ref, transforms, peer, box, swizzle, *rest)
        if len(context.tma_descriptors) > before:
            argument = launch_context._find_kernel_argument_for_gmem_ref(ref)
            sizes, strides = describe(ir.MemRefType(argument.type), transforms)
            bytes_swizzled = int(swizzle or 16)
            tensors.append(Tensor(number_of(argument), sizes, strides, tuple(box), bytes_swizzled))
        return out

    with mock.patch.object(launch_context.LaunchContext, "_get_tma_desc", recorded):
        yield tensors


def describe(kind, transforms):
    """Sizes and strides of a tensor map of an array, as it is transformed."""
    sizes, (strides, _) = tuple(kind.shape), kind.get_strides_and_offset()
    for transform in transforms:
        match type(transform).__name__:
            case "TransposeTransform":
                strides = [strides[i] for i in transform.permutation]
            case "DropUnitDimsTransform":
                strides = [x for i, x in enumerate(strides) if i not in transform.unit_dims]
            case _:
                strides = transform.transform_strides(strides)
        sizes = transform.transform_gmem_shape(sizes)
    return tuple(sizes), tuple(strides)


def number_of(argument):
    """Which operand of the kernel a memory reference is."""
    if isinstance(argument.owner, ir.Block):
        return ir.BlockArgument(argument).arg_number
    block = getattr(argument.owner, "operation", argument.owner).block
    marked = launch_context.ORIGINAL_KERNEL_ARG_ATTR
    operations = [x.operation for x in block.operations if marked in x.operation.attributes]
    return [x.results[0] for x in operations].index(argument)
