"""Memory, launches and bytes moved of training steps on GPUs as planned by XLA, and collectives.

    python -m benchmarks memory --out benchmarks/results/memory_h200.json

Compiles the training step (bfloat16, AdamW, averaged weights, 224 pixels) ahead of time for H200s.
No GPU is needed, but jax[cuda13], JAX_PLATFORMS=cpu and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 are. A
running process needs somewhat more memory. What counts as a launch and as bytes is described in
`benchmarks/_hlo.py`. With --models or --parts, the other rows of an existing file are kept.
"""

import collections
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import _hlo
from benchmarks._planned import SIZE, compile_step, gpus
from benchmarks._program import compile_ahead
from benchmarks._runner import Keep, record
from rope_jax.models import attention as model_attention
from rope_jax.models.create import create_model
from rope_jax.sharding import make_mesh
from rope_jax_kernels import attention_qkv, dispatch

FITS = 0.9 * 139.8 * 2**30  # bytes of an H200, less a tenth for allocations outside XLA's plan
MODELS = {
    "ViT-L": "deit3_l16",
    "Swin-B": "swin_b",
    "ViT-S": "vit_s16",
    "Swin-T": "swin_t",
    "NAT-Mini": "nat_mini",
}
LARGE = ("ViT-L", "Swin-B")  # also on 256 GPUs and with sharded parameters
BATCHES = {"ViT-S": 256, "Swin-T": 128, "NAT-Mini": 128}  # whose launches are counted
# Part -> names in the result.
PARTS = {
    "steps": ("rows", "against_xla"),
    "attention": ("attention",),
    "launches": ("launches",),
}


def forward_text(name: str, device: jax.Device, batch: int) -> str:
    """The optimised HLO of a model's forward pass in bfloat16, with float32 parameters."""

    def make() -> nnx.Module:
        return create_model(name, dtype=jnp.bfloat16)

    graph, state = nnx.split(nnx.eval_shape(make))
    images = jax.ShapeDtypeStruct((batch, SIZE, SIZE, 3), jnp.bfloat16)

    def forward(state: nnx.State, images: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(images)

    return _hlo.text_of(compile_ahead(forward, (state, images), device))


def launch_rows(label: str) -> list[dict[str, Any]]:
    """Launches and bytes by kind of a training step and of a forward pass on one GPU."""
    name, batch, devices = MODELS[label], BATCHES[label], gpus(1)[:1]
    texts = {
        "training step": compile_step(name, devices, batch).text,
        "forward": forward_text(name, devices[0], batch),
    }
    row = {"model": label, "batch": batch}
    return [
        row | {"pass": what, "kinds": _hlo.by_kind(_hlo.operations(text))}
        for what, text in texts.items()
    ]


def largest_batch(first: tuple[int, int], second: tuple[int, int], state: int) -> int:
    """The largest multiple of 8 that fits, as all but the state grows linearly with the batch.

    Args:
        first: (images, bytes besides the state).
        second: the same for a larger batch.
        state: bytes of the state.
    """
    (small, few), (large, many) = first, second
    slope = (many - few) / (large - small)
    return max(0, math.floor((FITS - state - few + slope * small) / slope / 8) * 8)


def step_row(label: str, hosts: int, fsdp: int, batches: tuple[int, int] = (32, 64)) -> dict:
    """Memory, largest batch and collectives of a training step on eight GPUs per host."""
    devices = gpus(hosts)
    small, large = (
        compile_step(MODELS[label], devices, batch, fsdp=fsdp, scan_layers=True)
        for batch in batches
    )
    rest = {batches[0]: small.rest, batches[1]: large.rest}
    return {
        "model": label,
        "gpus": 8 * hosts,
        "fsdp": fsdp,
        "largest_batch": largest_batch(*rest.items(), large.state),
        "collectives": collections.Counter(kind for kind, _ in large.collectives),
        "state_bytes": large.state,
        "rest_bytes": {str(batch): count for batch, count in rest.items()},
    }


def against_xla(label: str, batch: int = 128) -> dict[str, Any]:
    """Bytes besides the state, with the attention kernels and with XLA's attention."""
    kernels, xla = (
        compile_step(MODELS[label], gpus(1), batch, implementation=x, scan_layers=True).rest
        for x in (None, "xla")
    )
    return {"model": label, "batch": batch, "kernels_bytes": kernels, "xla_bytes": xla}


def attention_calls(name: str, batch: int) -> collections.Counter:
    """Number of layers by call of attention: (pattern, shapes of qkv, rotation, bias, scale)."""
    calls: collections.Counter = collections.Counter()

    def attend(qkv: jax.Array, *, pattern: Any, scale: float | None, **terms: Any) -> jax.Array:
        operands = (qkv, terms["rotation"], terms["bias"])
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
        calls[pattern, *shapes, scale] += 1
        return qkv[..., 0, :, :]

    images = jax.ShapeDtypeStruct((batch, SIZE, SIZE, 3), jnp.bfloat16)
    with mock.patch.object(model_attention, "attention_qkv", attend):
        jax.eval_shape(lambda images: create_model(name, dtype=jnp.bfloat16)(images), images)
    return calls


def passes(call: tuple, implementation: str | None) -> tuple[Callable, Callable, tuple]:
    """Returns a layer's forward pass, its forward and backward pass, and shapes of their operands.

    Frequencies are constants. The forward pass takes all operands but the last, and returns the
    output and its vjp function.
    """
    pattern, qkv, rotation, bias, scale = call
    options = {"pattern": pattern, "scale": scale, "implementation": implementation}
    learned = {"qkv": qkv} | ({} if bias is None else {"bias": bias})

    def forward(rotation: Any, learned: dict) -> tuple[jax.Array, Callable]:
        def attend(learned: dict) -> jax.Array:
            bias = learned.get("bias")
            return attention_qkv(learned["qkv"], rotation=rotation, bias=bias, **options)

        return jax.vjp(attend, learned)

    def both(rotation: Any, learned: dict, cotangent: jax.Array) -> tuple:
        out, pull_back = forward(rotation, learned)
        return out, pull_back(cotangent)

    cotangent = jax.ShapeDtypeStruct((*qkv.shape[:-3], *qkv.shape[-2:]), qkv.dtype)
    return forward, both, (rotation, learned, cotangent)


def chosen(call: tuple) -> str:
    """The implementation that None resolves to in a program for the target.

    A call with None also lists what a CPU would save, which no program for a GPU does.
    """
    pattern, *operands, scale = call
    names = []

    def choose(qkv: jax.Array, rotation: Any, bias: jax.Array | None) -> None:
        arguments = {"qkv": qkv, "pattern": pattern, "rotation": rotation, "bias": bias}
        names.append(dispatch.resolve("attention_qkv", arguments | {"scale": scale}))

    jax.eval_shape(choose, *operands)
    return names[0]


def saved_bytes(call: tuple, implementation: str | None) -> int:
    """Bytes that a layer saves for the backward pass, including operands and output."""
    with jax.sharding.use_abstract_mesh(make_mesh(devices=gpus(1)[:1]).abstract_mesh):
        forward, _, (*operands, _) = passes(call, implementation or chosen(call))

        def saved(*operands: Any) -> list[jax.Array]:
            return jax.tree.leaves(forward(*operands)[1])

        variables = jax.make_jaxpr(saved)(*operands).jaxpr.outvars
    # An array that is saved twice is one variable.
    return sum({id(x): x.aval.size * x.aval.dtype.itemsize for x in variables}.values())


def temporary_bytes(call: tuple, implementation: str | None) -> int:
    """Bytes of both passes, in one program, besides operands, output and gradients."""
    _, both, operands = passes(call, implementation)
    return compile_ahead(both, operands, gpus(1)[0]).memory_analysis().temp_size_in_bytes


def attention_rows(label: str, batch: int = 128) -> list[dict[str, Any]]:
    """Memory of a model's distinct calls of attention, with the kernels and with XLA."""
    rows = []
    for call, layers in attention_calls(MODELS[label], batch).items():
        pattern, qkv, *_ = call
        *places, _, heads, head_dim = qkv.shape[1:]
        row = {"model": label, "batch": batch, "layers": layers, "pattern": str(pattern)}
        row |= {"places": places, "heads": heads, "head_dim": head_dim}
        for name, implementation in (("kernels", None), ("xla", "xla")):
            saved = saved_bytes(call, implementation)
            row[name] = {"saved": saved, "temporary": temporary_bytes(call, implementation)}
        rows.append(row)
    return rows


_ALL_MODELS, _ALL_PARTS = list(MODELS), list(PARTS)


def run(
    keep: Keep,
    *,
    models: list[Literal[*MODELS]] = _ALL_MODELS,
    parts: list[Literal[*PARTS]] = _ALL_PARTS,
    out: pathlib.Path | None = None,
) -> None:
    """Compiles the programs, and saves the result after each row.

    Args:
        keep: saves the result.
        models: models to compile
        parts: training steps, attention alone, launches and bytes of whole programs
        out: the JSON file; its other rows are kept.
    """
    rows: dict[str, list] = {name: [] for names in PARTS.values() for name in names}
    if out is not None and out.exists():
        rows = other_rows(json.loads(out.read_text()), models, parts, out)
    machine = record("memory", {})["machine"] | {"device": "NVIDIA H200 (compiled for)"}

    def add(name: str, new: list[dict[str, Any]]) -> None:
        rows[name] = sorted(rows[name] + new, key=lambda row: list(MODELS).index(row["model"]))
        print(*new, sep="\n", flush=True)
        keep(settings={}, machine=machine, **rows)

    for label in models:
        if "attention" in parts and label not in LARGE:
            add("attention", attention_rows(label))
        if "launches" in parts and label in BATCHES:
            add("launches", launch_rows(label))
        if "steps" in parts:
            for hosts, fsdp in [(1, 1), (1, 8), (32, 8)] if label in LARGE else [(1, 1)]:
                add("rows", [step_row(label, hosts, fsdp)])
            if label not in LARGE:
                add("against_xla", [against_xla(label)])


def other_rows(
    earlier: dict[str, Any], models: list[str], parts: list[str], out: pathlib.Path
) -> dict[str, list]:
    """Returns the rows of an earlier result that this run does not replace.

    Raises:
        SystemExit: if they were computed with other versions of the software.
    """
    rows = {}
    for part, names in PARTS.items():
        for name in names:
            anew = models if part in parts else []
            rows[name] = [x for x in earlier.get(name, []) if x["model"] not in anew]
    versions = record("memory", {})["versions"]
    if any(rows.values()) and earlier["versions"] != versions:
        raise SystemExit(
            f"{out} is of {earlier['versions']}, and this is {versions}: "
            "compute all of it, or write to another file"
        )
    return rows
