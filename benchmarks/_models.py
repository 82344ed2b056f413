"""Cases of `speed`: forward passes and training steps of whole models, by positional scheme."""

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import rope_jax
from benchmarks._timing import Case, Maker, torch_on_gpu
from rope_jax.analysis.speed import compile_forward
from rope_jax.analysis.timing import Start, compile_program
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
# Models, programs and images.
MEASURED = (
    *((name, "forward", 256) for name in ("deit3_s16", "deit3_b16", "swin_t", "nat_mini")),
    ("deit3_s16", "training", 256),
    ("swin_t", "training", 128),
    ("nat_mini", "training", 128),
)
POSITIONS = ("none", "rpb", "axial_rope", "rope_mixed")


def compile_training(
    name: str, position: str, images: jax.ShapeDtypeStruct, **options: Any
) -> Start:
    """Compiles a training step with class 0 as every label; arguments of `compile_forward`."""
    new_model = functools.partial(
        rope_jax.create_model,
        name,
        position=position,
        image_size=images.shape[1:3],
        dtype=images.dtype,
        **options,
    )
    graph, params, _ = nnx.split(nnx.eval_shape(new_model), nnx.Param, ...)
    rate = optax.constant_schedule(1e-4)
    optimizer = optim.make_optimizer(OptimConfig(clip_norm=None), rate, params)

    def new_state() -> tuple[Any, Any]:
        _, params, rest = nnx.split(new_model(), nnx.Param, ...)
        params = nnx.to_pure_dict(params)
        return (params, optimizer.init(params)), rest

    def step(state: Any, rest: Any, images: jax.Array) -> tuple[Any, jax.Array]:
        def compute_loss(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params, rest)(images, train=True, key=jax.random.key(1))
            return -jax.nn.log_softmax(logits.astype(jnp.float32))[:, 0].mean()

        params, opt = state
        loss, grads = jax.value_and_grad(compute_loss)(params)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    return compile_program(step, new_state, images)


COMPILE = {"forward": compile_forward, "training": compile_training}


def program_case(
    name: str, program: str, positions: Sequence[str], images: jax.ShapeDtypeStruct, **options: Any
) -> Case:
    """A model by scheme, ours and timm's; arguments of `compile_forward`, and a program."""
    makers: dict[str, Maker] = {
        f"ours+{position}": functools.partial(COMPILE[program], name, position, images, **options)
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
