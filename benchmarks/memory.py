"""What a training step holds on each of many GPUs, and what they tell each other; which batch fits; what attention alone holds.

    python -m benchmarks memory --out benchmarks/results/memory_h200.json

Compiles the step of `rope_jax.run` (bfloat16, AdamW, averaged weights, 224 pixels) for H200s that need not be there: this needs
jax[cuda13], JAX_PLATFORMS=cpu and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1. Bytes are those that XLA plans; a running process needs some more.
With --models or --parts, all else that is in the file stays there.
"""

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from benchmarks._program import TARGET, absent_gpus, compile_ahead, sizes
from benchmarks._record import record, write
from rope_jax import config, data, optim
from rope_jax.models import attention as model_attention
from rope_jax.models.registry import create_model
from rope_jax.run import Run, initial_state, make_step
from rope_jax.sharding import in_force, like, make_mesh, split_batch, state_shardings
from rope_jax_kernels import attention_qkv
from rope_jax_kernels.attention import api

FITS = 0.9 * 139.8 * 2**30  # bytes of an H200, without a tenth for what XLA does not plan
SIZE = 224  # pixels
MODELS = {"ViT-L": "deit3_l16", "Swin-B": "swin_b", "ViT-S": "vit_s16", "Swin-T": "swin_t", "NAT-Mini": "nat_mini"}
LARGE = ("ViT-L", "Swin-B")  # also on 256 GPUs, and with divided parameters
PARTS = {"steps": ("rows", "against_xla"), "attention": ("attention",)}  # names in the result
COLLECTIVE = re.compile(
    r"%\S+ = (\(.*?\)|\S+) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(-start)?\("
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled training step.

    Attributes:
        state: bytes on a device of parameters, optimiser and average.
        rest: bytes on a device of everything else: activations, gradients, gathered parameters, the batch.
        collectives: (operation, bytes on a device of its largest array) of each.
        text: the optimised HLO.
    """

    state: int
    rest: int
    collectives: list[tuple[str, int]]
    text: str


def gpus(hosts: int) -> list:
    """H200s of so many hosts with eight each."""
    absent_gpus()  # for its error
    target = TARGET.read_text()
    return topologies.get_topology_desc(platform="cuda", topology_name="h200", topology=f"1x{hosts}x8", target_config=target).devices


def compile_step(name: str, devices: list, batch: int, *, fsdp: int = 1, implementation: str | None = None, **options: Any) -> Step:
    """Compiles the step of a model.

    Args:
        name: of the model.
        devices: on which it is to run.
        batch: examples on each.
        fsdp: as in `MeshConfig`.
        implementation: of attention; None for what models take by themselves.
        **options: of the model.
    """
    run, state = _run(name, make_mesh(fsdp, devices=devices), options)
    batch *= run.mesh.size
    image = jax.ShapeDtypeStruct((batch, SIZE, SIZE, 3), jnp.uint8)
    number = jax.ShapeDtypeStruct((batch,), jnp.int32)
    batch = like({"image": image, "label": number, "epoch": number, "index": number}, split_batch(run.mesh))
    default = api.default if implementation is None else lambda *arguments: implementation
    with in_force(run.mesh), mock.patch.object(api, "default", default):
        lowered = make_step(run).trace(like(state, state_shardings(state, run.mesh)), batch).lower()
    compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False})
    memory, text = compiled.memory_analysis(), re.sub(r"backend_config=.*", "", compiled.as_text())
    collectives = [(found[2], max(sizes(found[1]))) for found in map(COLLECTIVE.search, text.splitlines()) if found]
    batch_bytes = memory.argument_size_in_bytes - memory.alias_size_in_bytes
    total = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + batch_bytes
    return Step(memory.alias_size_in_bytes, total, collectives, text)


def _run(name: str, mesh: Any, options: dict[str, Any]) -> tuple[Run, Any]:
    """A run of this model without its data, and the shapes of its state."""
    raw = config.default()
    raw.update({"dtype": "bfloat16", "ema_decay": 0.9999})
    settings = config.resolve(raw)
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, num_classes=1000))
    make: Callable = lambda: create_model(name, dtype=jnp.bfloat16, **options)
    graph, params, _, rest = nnx.split(nnx.eval_shape(make), nnx.Param, nnx.BatchStat, ...)
    schedule = optim.learning_rate_schedule(settings.optim, epochs=300.0, steps_per_epoch=1251.0)
    optimizer = optim.make_optimizer(settings.optim, schedule, params)
    images = data.load("digits", None, "train", (8, 8))  # of which the step takes nothing
    run = Run(settings, mesh, images, {}, graph, rest, settings.seed, optimizer, schedule, total_steps=300 * 1251)
    return run, jax.eval_shape(lambda: initial_state(run, make()))


def largest_batch(first: tuple[int, int], second: tuple[int, int], state: int) -> int:
    """The largest multiple of 8 that fits, from (examples, bytes) of two batches: all but the state grows with the batch."""
    (small, few), (large, many) = first, second
    slope = (many - few) / (large - small)
    return max(0, math.floor((FITS - state - few + slope * small) / slope / 8) * 8)


def row(label: str, hosts: int, fsdp: int, batches: tuple[int, int] = (32, 64)) -> dict[str, Any]:
    """One line of the table."""
    steps = [compile_step(MODELS[label], gpus(hosts), batch, fsdp=fsdp, scan_layers=True) for batch in batches]
    counts = collections.Counter(kind for kind, _ in steps[1].collectives)
    fitting = largest_batch((batches[0], steps[0].rest), (batches[1], steps[1].rest), steps[1].state)
    figures = {"state_bytes": steps[1].state, "rest_bytes": dict(zip(map(str, batches), (s.rest for s in steps), strict=True))}
    return {"model": label, "gpus": 8 * hosts, "fsdp": fsdp, "largest_batch": fitting, "collectives": counts} | figures


def against_xla(label: str, batch: int = 128) -> dict[str, Any]:
    """Bytes beside the state with the attention kernels and without."""
    kernels, xla = (compile_step(MODELS[label], gpus(1), batch, implementation=x, scan_layers=True).rest for x in (None, "xla"))
    return {"model": label, "batch": batch, "kernels_bytes": kernels, "xla_bytes": xla}


def attention_calls(name: str, batch: int) -> collections.Counter:
    """(pattern, shapes of qkv, rotation and bias, scale) -> how many layers of a model ask attention for it."""
    calls: collections.Counter = collections.Counter()

    def attend(qkv: jax.Array, *, pattern: Any, scale: float | None, **terms: Any) -> jax.Array:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (qkv, terms["rotation"], terms["bias"]))
        calls[pattern, *shapes, scale] += 1
        return qkv[..., 0, :, :]

    images = jax.ShapeDtypeStruct((batch, SIZE, SIZE, 3), jnp.bfloat16)
    with mock.patch.object(model_attention, "attention_qkv", attend):
        jax.eval_shape(lambda images: create_model(name, dtype=jnp.bfloat16)(images), images)
    return calls


def passes(call: tuple, implementation: str | None) -> tuple[Callable, Callable, tuple]:
    """Of one layer's attention, trained with fixed frequencies: the forward pass, both passes, and shapes of operands of both.

    The forward pass takes all of these but the last, and returns the output and what the backward pass is made of.
    """
    pattern, qkv, rotation, bias, scale = call
    learned = {"qkv": qkv} | ({} if bias is None else {"bias": bias})

    def forward(rotation: Any, learned: dict) -> tuple[jax.Array, Callable]:
        options = {"pattern": pattern, "rotation": rotation, "scale": scale, "implementation": implementation}
        return jax.vjp(lambda learned: attention_qkv(learned["qkv"], bias=learned.get("bias"), **options), learned)

    def both(rotation: Any, learned: dict, cotangent: jax.Array) -> tuple:
        out, pull_back = forward(rotation, learned)
        return out, pull_back(cotangent)

    cotangent = jax.ShapeDtypeStruct((*qkv.shape[:-3], *qkv.shape[-2:]), qkv.dtype)
    return forward, both, (rotation, learned, cotangent)


def saved_bytes(call: tuple, implementation: str | None) -> int:
    """Bytes that a layer's forward pass leaves for the backward pass; operands and the output, too, where they are kept for it."""
    forward, _, (*operands, _) = passes(call, implementation)
    (gpu, *_) = gpus(1)
    with jax.sharding.use_abstract_mesh(make_mesh(devices=[gpu]).abstract_mesh):
        saved = jax.make_jaxpr(lambda *operands: jax.tree.leaves(forward(*operands)[1]))(*operands).jaxpr.outvars
    # An array that is saved for two purposes is one variable.
    return sum({id(x): x.aval.size * x.aval.dtype.itemsize for x in saved}.values())


def temporary_bytes(call: tuple, implementation: str | None) -> int:
    """Bytes that both passes, as one program, take beside operands, output and gradients."""
    _, both, operands = passes(call, implementation)
    return compile_ahead(both, operands, gpus(1)[0]).memory_analysis().temp_size_in_bytes


def of_attention(label: str, batch: int = 128) -> list[dict[str, Any]]:
    """The layers of a model by what they ask of attention: their bytes with the kernels and without."""
    rows = []
    for call, layers in attention_calls(MODELS[label], batch).items():
        pattern, qkv, *_ = call
        *places, _, heads, head_dim = qkv.shape[1:]
        about = {"model": label, "batch": batch, "layers": layers, "pattern": str(pattern)}
        about |= {"places": places, "heads": heads, "head_dim": head_dim}
        kinds = {"kernels": None, "xla": "xla"}
        rows.append(about | {x: {"saved": saved_bytes(call, y), "temporary": temporary_bytes(call, y)} for x, y in kinds.items()})
    return rows


def main(argv: list[str]) -> None:
    """Compiles, prints and writes after every line, because it takes a while."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="whole steps, and attention alone")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file")
    settings = parser.parse_args(argv)
    result = record("memory", {}, **{name: [] for names in PARTS.values() for name in names})
    result["machine"]["device"] = "NVIDIA H200 (compiled for)"
    if settings.out is not None and settings.out.exists():
        keep(result, json.loads(settings.out.read_text()), settings)

    def add(name: str, rows: list[dict[str, Any]]) -> None:
        result[name] = sorted(result[name] + rows, key=lambda row: list(MODELS).index(row["model"]))
        print(*rows, sep="\n", flush=True)
        write(result, settings.out)

    for label in settings.models:
        if "attention" in settings.parts and label not in LARGE:
            add("attention", of_attention(label))
        if "steps" in settings.parts:
            for hosts, fsdp in [(1, 1), (1, 8), (32, 8)] if label in LARGE else [(1, 1)]:
                add("rows", [row(label, hosts, fsdp)])
            if label not in LARGE:
                add("against_xla", [against_xla(label)])


def keep(result: dict[str, Any], earlier: dict[str, Any], settings: argparse.Namespace) -> None:
    """Takes from an earlier result what is not computed anew.

    Raises:
        ValueError: it comes of other versions, and two of them would be in one table.
    """
    made_anew = {name for part in settings.parts for name in PARTS[part]}
    for name in (name for names in PARTS.values() for name in names):
        result[name] = [row for row in earlier.get(name, []) if name not in made_anew or row["model"] not in settings.models]
        if result[name] and earlier["versions"] != result["versions"]:
            versions = f"{earlier['versions']}, and this is {result['versions']}"
            raise ValueError(f"{settings.out} is of {versions}: compute all of it, or write to another file")
