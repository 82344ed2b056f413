"""The programs that `benchmarks models` compares: our models by implementation, and timm's."""

import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import os
import time
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import rope_jax
from benchmarks._timing import reason_of
from benchmarks._training import training_step
from rope_jax.config import OptimConfig
from rope_jax.training import optim
from rope_jax_kernels import Global, Pattern, Rotation, dispatch, rotate

# timm's name of each model with a scheme.
TIMM = {
    ("deit_s16", "ape"): "deit_small_patch16_224",
    ("deit3_s16", "ape"): "deit3_small_patch16_224",
    ("deit3_b16", "ape"): "deit3_base_patch16_224",
    ("deit3_s16", "rope2d"): "vit_small_patch16_rope_224",
    ("deit3_b16", "rope2d"): "vit_base_patch16_rope_224",
    ("deit3_s16", "rope_mixed"): "vit_small_patch16_rope_mixed_224",
    ("deit3_b16", "rope_mixed"): "vit_base_patch16_rope_mixed_224",
    ("swin_t", "rpb"): "swin_tiny_patch4_window7_224",
    ("swin_s", "rpb"): "swin_small_patch4_window7_224",
    ("swin_b", "rpb"): "swin_base_patch4_window7_224",
}
OURS, PEER = "rope_jax", "timm"


@dataclasses.dataclass(frozen=True)
class Form:
    """One program of a comparison: a scheme in our model or in timm's.

    Attributes:
        software: "rope_jax" or "timm".
        position: the scheme.
        implementation: of attention; None for the model's own choice.
    """

    software: str
    position: str
    implementation: str | None = None

    def __str__(self) -> str:
        by = f" by {self.implementation}" if self.implementation else ""
        return f"{self.position}{by}"


def attention_of_jnp(
    *operands: jax.Array,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: jax.Array | None,
    scale: float | None,
) -> jax.Array:
    """Rotation in jax.numpy, then `jax.nn` attention, of q, k, v or a packed array."""
    if not isinstance(pattern, Global):
        kind = type(pattern).__name__
        raise ValueError(f"implementation='jnp' needs global attention, but the pattern is {kind}")
    q, k, v = operands if len(operands) == 3 else jnp.moveaxis(operands[0], -3, 0)
    if rotation is not None:
        q, k = rotate(q, k, rotation, implementation="xla")
    bias = None if bias is None else bias[None].astype(q.dtype)
    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, bias, scale=scale, implementation=kernel)


@contextlib.contextmanager
def attention_by(implementation: str | None) -> Iterator[None]:
    """Context in which attention is traced with this implementation, or raises a ValueError."""
    original = dispatch.call

    def call(op: str, arguments: dict[str, Any], **options: Any) -> Any:
        if implementation is None or op not in ("attention", "attention_qkv"):
            return original(op, arguments, **options)
        if implementation == "jnp":
            terms = ("pattern", "rotation", "bias", "scale")
            operands = [x for name, x in arguments.items() if name not in terms]
            return attention_of_jnp(*operands, **{name: arguments[name] for name in terms})
        return original(op, arguments, **options | {"implementation": implementation})

    with mock.patch.object(dispatch, "call", call):
        yield


def _cast_weights(params: Any, dtype: Any) -> Any:
    """Casts weights for inference to the compute dtype, except those of position schemes."""

    def cast(path: tuple, x: jax.Array) -> jax.Array:
        is_position = any(getattr(key, "key", None) == "position" for key in path)
        return x if is_position else x.astype(dtype)

    return jax.tree.map_with_path(cast, params)


class Program:
    """A forward pass or training step with its state; call `compile` first."""

    def __init__(
        self, model: nnx.Module, implementation: str | None, program: str, images: jax.Array
    ):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        settings = OptimConfig(clip_norm=None)
        optimizer = optim.make_optimizer(settings, optax.constant_schedule(1e-4), params)
        # Copied, because it is donated and other programs use the model.
        params = jax.tree.map(jnp.copy, nnx.to_pure_dict(params))

        def forward(state: Any, images: jax.Array) -> tuple[Any, jax.Array]:
            return state, nnx.merge(graph, state, rest)(images)

        if program == "forward":
            self.state, step = _cast_weights(params, images.dtype), forward
        else:
            self.state = {"params": params, "opt": optimizer.init(params)}
            step = training_step(graph, rest, optimizer)
        self.images = images
        with attention_by(implementation):
            self._lowered = jax.jit(step, donate_argnums=0).lower(self.state, images)

    def compile(self) -> None:
        """Compiles the program; several can be compiled in parallel (but not traced)."""
        self.step = self._lowered.compile()
        self.temp_bytes = self.step.memory_analysis().temp_size_in_bytes

    def __call__(self, passes: int) -> float:
        """Runs `passes` batches one after the other; returns milliseconds per batch."""
        start = time.perf_counter()
        for _ in range(passes):
            self.state, out = self.step(self.state, self.images)
        jax.block_until_ready((self.state, out))
        return 1e3 * (time.perf_counter() - start) / passes


def left_out(name: str, program: str, form: Form, error: BaseException) -> None:
    """Prints why a form is skipped, in one line."""
    print(f"{form.software}'s {name} with {form}, {program}, is skipped: {reason_of(error)}",
          flush=True)  # fmt: skip


def programs(
    name: str, program: str, images: jax.Array, args: types.SimpleNamespace
) -> dict[Form, Any]:
    """Compiles the programs of all forms; those that fail are skipped and reported.

    Args:
        name: name of the model.
        program: "forward" or "train".
        images: [B, H, W, 3].
        args: arguments of `run` (positions, implementations, depth, torch, torch_mode).
    """
    traced, ready, drop_path, size = {}, {}, {}, images.shape[1]
    options = {} if args.depth is None else {"depth": args.depth}
    for position in args.positions:
        try:
            model = rope_jax.create_model(
                name, position=position, image_size=size, dtype=images.dtype, **options
            )
        except ValueError as error:
            left_out(name, program, Form(OURS, position), error)
            continue
        drop_path[position] = getattr(model.options, "drop_path", 0.0)
        for implementation in args.implementations:
            form = Form(OURS, position, implementation)
            try:
                traced[form] = Program(model, implementation, program, images)
            except Exception as error:  # the other forms are measured nevertheless
                left_out(name, program, form, error)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiling = {form: pool.submit(one.compile) for form, one in traced.items()}
    for form, future in compiling.items():
        if (error := future.exception()) is None:
            ready[form] = traced[form]
        else:
            left_out(name, program, form, error)
    # After all compilation: nothing else may allocate on the GPU while torch captures a graph.
    if args.torch and args.depth is None and all(map(importlib.util.find_spec, ("timm", "torch"))):
        settings = {"program": program, "batch": len(images), "image_size": size}
        settings |= {"dtype": images.dtype.name, "mode": args.torch_mode}
        for position, rate in drop_path.items():
            if (name, position) in TIMM:
                form = Form(PEER, position)
                try:
                    from benchmarks import _torch

                    ready[form] = _torch.model(TIMM[name, position], drop_path=rate, **settings)
                except Exception as error:
                    left_out(name, program, form, error)
    for form in list(ready):
        try:
            ready[form](1)
        except Exception as error:  # for example out of memory
            left_out(name, program, form, error)
            del ready[form]
    return ready
