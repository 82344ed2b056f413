"""Cases of `speed`: forward passes and training steps of whole models, by positional scheme."""

import functools
import importlib.util
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rope_jax
from benchmarks._timing import Case, Maker, Start, Timer, sample, torch_on_gpu
from rope_jax.config import OptimConfig
from rope_jax.training import optim

# timm's name of each model with a scheme.
TIMM = {
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
BATCHES = 5  # in a turn
# Models, programs and images.
MEASURED = (
    *((name, "forward", 256) for name in ("deit3_s16", "deit3_b16", "swin_t", "nat_mini")),
    ("deit3_s16", "training", 256),
    ("swin_t", "training", 128),
    ("nat_mini", "training", 128),
)
POSITIONS = ("none", "rpb", "axial_rope", "rope_mixed")


def _cast_weights(params: Any, dtype: Any) -> Any:
    """Casts weights for inference to the compute dtype, except those of position schemes."""

    def cast(path: tuple, x: jax.Array) -> jax.Array:
        is_position = any(getattr(key, "key", None) == "position" for key in path)
        return x if is_position else x.astype(dtype)

    return jax.tree.map_with_path(cast, params)


def compile_program(
    name: str, position: str, program: str, images: jax.ShapeDtypeStruct, **options: Any
) -> Start:
    """Compiles a forward pass, or a training step with class 0 as every label.

    Args:
        name: name of the model.
        position: its scheme.
        program: "forward" or "training".
        images: [B, H, W, 3], in the dtype of the computation.
        **options: options of the model.
    """
    model_options = {"position": position, "image_size": images.shape[1], "dtype": images.dtype}
    new_model = functools.partial(rope_jax.create_model, name, **model_options, **options)
    graph, params, _ = nnx.split(nnx.eval_shape(new_model), nnx.Param, ...)
    settings = OptimConfig(clip_norm=None)
    optimizer = optim.make_optimizer(settings, optax.constant_schedule(1e-4), params)

    def new_state() -> tuple[Any, Any]:
        _, params, rest = nnx.split(new_model(), nnx.Param, ...)
        params = nnx.to_pure_dict(params)
        if program == "forward":
            return _cast_weights(params, images.dtype), rest
        return (params, optimizer.init(params)), rest

    def forward(params: Any, rest: Any, images: jax.Array) -> tuple[Any, jax.Array]:
        return params, nnx.merge(graph, params, rest)(images)

    def training(state: Any, rest: Any, images: jax.Array) -> tuple[Any, jax.Array]:
        def compute_loss(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params, rest)(images, train=True, key=jax.random.key(1))
            return -jax.nn.log_softmax(logits.astype(jnp.float32))[:, 0].mean()

        params, opt = state
        loss, grads = jax.value_and_grad(compute_loss)(params)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    step = jax.jit(forward if program == "forward" else training, donate_argnums=0)
    compiled = step.lower(*jax.eval_shape(new_state), images).compile()

    def start() -> tuple[list[np.ndarray], Timer]:
        state, rest = new_state()
        batch = jax.random.normal(jax.random.key(0), images.shape, images.dtype)
        state, out = compiled(state, rest, batch)

        def measure() -> float:
            nonlocal state
            begun = time.perf_counter()
            for _ in range(BATCHES):
                state, out = compiled(state, rest, batch)
            jax.block_until_ready((state, out))
            return 1e6 * (time.perf_counter() - begun) / BATCHES

        measure()
        return sample(out), measure

    return start


def program_case(
    name: str, program: str, positions: Sequence[str], images: jax.ShapeDtypeStruct, **options: Any
) -> Case:
    """A model by scheme, ours and timm's; arguments as above."""
    makers: dict[str, Maker] = {
        f"ours+{position}": functools.partial(
            compile_program, name, position, program, images, **options
        )
        for position in positions
    }
    if importlib.util.find_spec("timm") and torch_on_gpu():
        from benchmarks import _torch

        drop_path = nnx.eval_shape(lambda: rope_jax.create_model(name)).options.drop_path
        for position in positions:
            if peer := TIMM.get((name, position)):
                make = _torch.model(peer, program, images.shape, images.dtype.name, drop_path)
                makers[f"timm+{position}"] = make
    batch, size = images.shape[:2]
    return Case(f"models, {program}", f"{name}, {batch} images of {size} px", makers)


def models(*, small: bool) -> Iterator[Case]:
    """Models forward and in training, each with several schemes."""
    if small:
        images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
        for program in ("forward", "training"):
            yield program_case("deit3_ti16", program, ("none", "rope_mixed"), images, depth=1)
    else:
        for name, program, batch in MEASURED:
            images = jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.bfloat16)
            yield program_case(name, program, POSITIONS, images)
