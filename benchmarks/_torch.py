"""Forms of other libraries for `speed`, timed as CUDA graphs; needs torch."""

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from benchmarks._timing import Maker
from rope_jax.analysis.timing import Timer, count_steps, sample
from rope_jax_kernels import Global, Neighborhood, Pattern


def rotate_in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the first 2R channels of x [B, L, 1, C] in float32, with tables [L, R]."""
    pairs = cos.shape[-1]
    a, b = x[..., :pairs].float(), x[..., pairs : 2 * pairs].float()
    x[..., :pairs] = a * cos[:, None] - b * sin[:, None]
    x[..., pairs : 2 * pairs] = b * cos[:, None] + a * sin[:, None]


def rotation(arguments: Callable[[], tuple], tables: Sequence[Any]) -> Maker:
    """A rotation in place.

    Args:
        arguments: returns arrays [B, 1, L, C] of jax, and others.
        tables: cosines and sines [1, L, R].
    """
    cos, sin = (torch.tensor(np.asarray(table)[0], device="cuda") for table in tables)
    rotate = torch.compile(rotate_in_place, dynamic=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        rotate(x.transpose(1, 2), cos, sin)
        return x

    return maker(step, functools.partial(make_tensors, arguments))


def attentions(pattern: Pattern, arguments: Callable[[], tuple]) -> dict[str, Maker]:
    """Attention without a position, by library; only those that have it and are installed.

    Args:
        pattern: the attention pattern.
        arguments: returns packed projections [B, ..., 3, N, D] of jax, and others.
    """

    def scaled_dot_product(qkv: torch.Tensor) -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2)

    def neighborhood(qkv: torch.Tensor) -> torch.Tensor:
        na2d = importlib.import_module("natten").na2d
        return na2d(*qkv.unbind(-3), kernel_size=pattern.size, dilation=pattern.dilation)

    forms: dict[str, Callable] = {}
    if pattern == Global():
        forms["torch"] = scaled_dot_product
        if importlib.util.find_spec("flash_attn"):
            forms["flash_attn"] = importlib.import_module("flash_attn").flash_attn_qkvpacked_func
    elif isinstance(pattern, Neighborhood) and importlib.util.find_spec("natten"):
        forms["natten"] = neighborhood
    return {
        name: maker(form, functools.partial(make_tensors, arguments))
        for name, form in forms.items()
    }


def make_tensors(arguments: Callable[[], tuple]) -> list[torch.Tensor]:
    """The arrays of jax that come first among these operands, in bfloat16."""
    arrays = map(np.float32, jax.jit(arguments)()[0])
    return [torch.tensor(x, device="cuda").bfloat16() for x in arrays]


def maker(form: Callable, arrays: Callable[[], Sequence[torch.Tensor]]) -> Maker:
    """A form that cycles through arrays in a CUDA graph."""

    def start() -> tuple[list[np.ndarray], Timer]:
        torch.compiler.reset()  # otherwise few shapes of one function are compiled
        xs = arrays()
        steps = count_steps(len(xs))

        def rounds() -> None:
            for i in range(steps):
                form(xs[i % len(xs)])

        with torch.no_grad():
            results = form(xs[0]).float().cpu().numpy()
            return sample(results), timer(capture(rounds), steps)

    return lambda: start


def capture(step: Callable[[], object]) -> Callable[[], None]:
    """Captures a step as a CUDA graph, after a few runs to compile and allocate.

    Returns:
        A function that replays the graph.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # jax uses threads of its own
        step()
    graph.replay()
    return graph.replay


def timer(step: Callable[[], object], count: int, passes: int = 5) -> Timer:
    """A timer of one of `count` steps that a call takes."""

    def measure() -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(passes):
            step()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - begun) / passes / count

    return measure


def model(name: str, program: str, shape: Sequence[int], dtype: str, drop_path: float) -> Maker:
    """A forward pass or training step of a timm model with its own weights and torch.compile.

    Args:
        name: timm's name of the model.
        program: "forward", with weights in `dtype`; or "training", with float32 weights, autocast
            to `dtype`, and fused AdamW.
        shape: [B, H, W, 3] of the images.
        dtype: dtype of the computation.
        drop_path: drop path rate in training.
    """
    batch, size, *_ = shape
    dtype = getattr(torch, dtype)

    def start() -> tuple[list[np.ndarray], Timer]:
        torch.compiler.reset()  # models of one class share a recompilation limit
        torch.set_float32_matmul_precision("high")  # as XLA does by itself
        timm = importlib.import_module("timm")
        net = timm.create_model(name, img_size=size, drop_path_rate=drop_path).to("cuda")
        images = torch.randn(batch, 3, size, size, device="cuda", dtype=dtype)
        if program == "forward":
            run = torch.compile(net.to(dtype).eval(), dynamic=False)
            step = torch.no_grad()(lambda: run(images))
        else:
            step = training_step(torch.compile(net.train(), dynamic=False), images)
        step()
        return [], timer(capture(step), 1)

    return lambda: start


def training_step(net: torch.nn.Module, images: torch.Tensor) -> Callable[[], None]:
    """A training step of a model, which is called with the images and computes in their dtype."""
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=1e-4, weight_decay=0.05, fused=True, capturable=True
    )
    labels = torch.zeros(len(images), dtype=torch.long, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        # Without autocast's cache: its casts would not be part of the graph.
        with torch.autocast("cuda", images.dtype, cache_enabled=False):
            loss = torch.nn.functional.cross_entropy(net(images).float(), labels)
        loss.backward()
        optimizer.step()

    return step
