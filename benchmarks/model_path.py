"""What stands between the QKV projection and cuDNN's attention, by form of the rotation: launches and bytes.

    python -m benchmarks model_path --out benchmarks/results/model_path_h200.json

Compiles an attention layer of a ViT-S (projection with bias, rotation, cuDNN's attention, projection), forward alone and with its
backward pass, and counts in the optimised HLO every operation that is neither a matrix product nor cuDNN's. Without a GPU it compiles for
an H200: this needs jax[cuda13], JAX_PLATFORMS=cpu and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1. On a GPU the layer is timed, too. The forms:

    none            no rotation: XLA takes q, k and v out of the packed projection
    xla             jnp, as XLA fuses it into the passes that take them out
    in_place        the kernel turns q and k inside the packed projection, then XLA takes them out
    unpack          unpack_and_rotate as a kernel, its gradient as XLA's pass (as a kernel where the frequencies learn)
    unpack_pack     unpack_and_rotate as a kernel, its gradient as the kernel that packs

A unit is one of q, k and v, read or written once: 2 B L N D bytes.
"""

import argparse
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks._program import Operation, absent_gpus, compile_ahead, operations
from benchmarks._record import record, write
from rope_jax_kernels import Rotation, rotate_qkv
from rope_jax_kernels.rotary.unpack import unpack_and_rotate

B, L, N, D, A = 128, 196, 6, 64, 2
UNIT = 2 * B * L * N * D
BF16, F32 = jnp.bfloat16, jnp.float32
FORMS = {
    "none": lambda qkv, rotation: unpack_and_rotate(qkv, None),
    "xla": lambda qkv, rotation: unpack_and_rotate(qkv, rotation, implementation="xla"),
    "in_place": lambda qkv, rotation: unpack_and_rotate(rotate_qkv(qkv, rotation, implementation="triton"), None),
    "unpack": lambda qkv, rotation: unpack_and_rotate(qkv, rotation, implementation="triton"),
    "unpack_pack": lambda qkv, rotation: unpack_and_rotate(qkv, rotation, implementation="triton", backward="triton"),
}


def layer_of(form: str) -> Callable:
    """(x, w, b, wo, freqs, coords) -> [B, L, N * D]."""

    def layer(x, w, b, wo, freqs, coords):
        qkv = (x @ w + b).reshape(B, L, 3, N, D)
        out = jax.nn.dot_product_attention(*FORMS[form](qkv, Rotation(coords, freqs)), implementation="cudnn")
        return out.reshape(B, L, N * D) @ wo

    return layer


def program_of(form: str, trained: str) -> Callable:
    """The layer alone (trained ""), or with its gradients, those of the frequencies included where they are "learned"."""
    layer = layer_of(form)
    if not trained:
        return layer

    def training(x, w, b, wo, freqs, coords, cotangent):
        learned = 5 if trained == "learned" else 4
        arguments = (x, w, b, wo, freqs, coords)
        out, pull_back = jax.vjp(lambda *some: layer(*some, *arguments[learned:]), *arguments[:learned])
        return out, pull_back(cotangent)

    return training


def shapes_of(pairs: int, trained: str) -> list[jax.ShapeDtypeStruct]:
    """Of the arguments of `program_of`."""
    channels = N * D
    x = jax.ShapeDtypeStruct((B, L, channels), BF16)
    weights = [((channels, 3 * channels), BF16), ((3 * channels,), BF16), ((channels, channels), BF16), ((N, A, pairs), F32), ((L, A), F32)]
    return [x, *(jax.ShapeDtypeStruct(*weight) for weight in weights), *([x] if trained else [])]


def moved_bytes(operation: Operation, pairs: int) -> float:
    """Bytes that an operation reads and writes. Of a kernel's operands the HLO says their size; some it reads in part."""
    if operation.kind != "__gpu$xla.gpu.triton":
        return sum(operation.read) + sum(operation.written)
    # q and k turn, of 2 pairs of D channels; packed, they are two of three.
    part = lambda size: size * 2 * pairs / D * (2 / 3 if size == 3 * UNIT else 1)
    whole = (lambda size: size) if not operation.in_place else part
    arrays = [size for size in operation.written if size >= UNIT]
    total = 2 * sum(map(whole, arrays)) + sum(size for size in operation.written if size < UNIT)
    moved = 0
    for size in operation.read:
        if size < UNIT:
            total += size
        elif moved < sum(arrays):
            moved += size  # counted above: what comes in goes out
        else:
            total += part(size)  # inputs of the forward pass, kept for the gradient of the frequencies
    return total


def count(form: str, pairs: int, trained: str, device: jax.Device) -> dict[str, float]:
    """Launches, and units moved, between the matrix products and cuDNN."""
    text = compile_ahead(program_of(form, trained), shapes_of(pairs, trained), device).as_text()
    between = [x for x in operations(text) if "cublas" not in x.kind and "cudnn" not in x.kind]
    return {"launches": len(between), "units": sum(moved_bytes(x, pairs) for x in between) / UNIT}


def measure(pairs: int, trained: str, turns: int, passes: int = 20) -> dict[str, float]:
    """Median microseconds of the whole layer, by form; the forms take turns. XLA tunes its matrix products."""
    arguments = [jnp.full(x.shape, 0.02, x.dtype) for x in shapes_of(pairs, trained)]
    runs = {form: jax.jit(program_of(form, trained)) for form in FORMS}
    times = {form: [] for form in runs}
    for turn, (form, run) in itertools.product(range(turns + 1), runs.items()):
        jax.block_until_ready(run(*arguments))
        start = time.perf_counter()
        outputs = [run(*arguments) for _ in range(passes)]
        jax.block_until_ready(outputs)
        if turn:  # the first one compiles and warms up
            times[form].append(1e6 * (time.perf_counter() - start) / passes)
    return {form: statistics.median(values) for form, values in times.items()}


def run(args: argparse.Namespace) -> dict:
    """Counts all forms, and measures them where there is a GPU."""
    on_gpu = jax.default_backend() == "gpu"
    device = jax.devices()[0] if on_gpu else absent_gpus()[0]
    rows = []
    for pairs, trained in itertools.product(args.pairs, ("", "fixed", "learned")):
        times = measure(pairs, trained, args.turns) if on_gpu else {}
        for form in FORMS:
            row = {"form": form, "pairs": pairs, "trained": trained} | count(form, pairs, trained, device)
            rows.append(row | ({"microseconds": times[form]} if on_gpu else {}))
    return record("model_path", vars(args), compiled_for=device.device_kind, rows=rows)


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks model_path", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, nargs="+", default=[16, 32], help="rotated pairs of the 32 that a head of 64 channels has")
    parser.add_argument("--turns", type=int, default=9, help="how often the forms take turns, on a GPU")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Prints a table, and writes it where --out says."""
    args = parse(argv)
    result = run(args)
    print(f"between the projection and cuDNN, ViT-S, batch {B}, compiled for {result['compiled_for']}")
    print(f"{'pairs':>5} {'program':20}{'form':12}{'launches':>9}{'units':>7}{'layer us':>10}")
    for row in result["rows"]:
        program = f"training, {row['trained']}" if row["trained"] else "forward"
        measured = f"{row['microseconds']:10.1f}" if "microseconds" in row else f"{'-':>10}"
        print(f"{row['pairs']:5} {program:20}{row['form']:12}{row['launches']:9}{row['units']:7.2f}{measured}")
    write(result, args.out)
