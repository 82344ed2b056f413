"""Rotations and attention by other software, each as a CUDA graph of the same number of steps. Imported only where torch is installed."""

import functools
import importlib
import importlib.util
import math
import time
from collections.abc import Callable

import torch


def turn_in_place(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns the first 2R channels of q and k [B, L, N, C] by angles with the given cosines and sines [L, R]; float32 inside."""
    pairs = cos.shape[-1]
    for x in (q, k):
        a, b = x[..., :pairs].float(), x[..., pairs : 2 * pairs].float()
        x[..., :pairs] = a * cos[:, None] - b * sin[:, None]
        x[..., pairs : 2 * pairs] = b * cos[:, None] + a * sin[:, None]


def rotations(shape: tuple[int, ...], theta: list[list[float]], copies: int, steps: int) -> dict[str, Callable[[], float]]:
    """Form -> what times one step of `steps` rounds over `copies` pairs of arrays [B, L, N, C] by angles [L, R], in microseconds.

    Forms whose package is missing, or fails on this machine, are left out; the failure is printed.
    """
    angles = torch.tensor(theta, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    arrays = [tuple(torch.ones(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)) for _ in range(copies)]
    forms = {"torch": lambda: torch_compiled(cos, sin)}
    if importlib.util.find_spec("liger_kernel"):
        forms["liger"] = lambda: liger(cos, sin, shape[-1])
    if importlib.util.find_spec("flash_attn"):
        forms["flash_attn"] = lambda: flash_attn(cos, sin)
    return graph_timers(forms, arrays, steps)


def attentions(sees: Callable | None, shape: tuple[int, ...], copies: int, steps: int) -> dict[str, Callable[[], float]]:
    """Like `rotations`: torch's attention on `copies` packed projections of `shape`, [B, ..., 3, N, D].

    `sees(query, key)` says by the numbers of tokens whether they attend; None for all.
    """
    arrays = [(torch.randn(shape, device="cuda").bfloat16(),) for _ in range(copies)]
    return graph_timers({"torch": lambda: torch_attention(sees, shape)}, arrays, steps)


def torch_attention(sees: Callable | None, shape: tuple[int, ...]) -> Callable:
    """scaled_dot_product_attention, or FlexAttention with a mask, under torch.compile."""
    torch.compiler.reset()
    attend, tokens = torch.nn.functional.scaled_dot_product_attention, math.prod(shape[1:-3])
    if sees is not None:
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        mask = flex.create_block_mask(lambda batch, head, query, key: sees(query, key), None, None, tokens, tokens, device="cuda")
        attend = functools.partial(flex.flex_attention, block_mask=mask)
    return torch.compile(lambda qkv: attend(*qkv.view(shape[0], tokens, *shape[-3:]).permute(2, 0, 3, 1, 4)), dynamic=False)


def graph_timers(forms: dict[str, Callable], arrays: list[tuple], steps: int) -> dict[str, Callable[[], float]]:
    """Form -> `graph_timer` of what it makes; those that fail on this machine are left out, and the failure is printed."""
    timers = {}
    for name, make in forms.items():
        try:
            timers[name] = graph_timer(make(), arrays, steps)
        except Exception as error:  # a peer that does not run here must not end a benchmark of ours
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return timers


def torch_compiled(cos: torch.Tensor, sin: torch.Tensor) -> Callable:
    """`turn_in_place` as torch.compile makes it."""
    torch.compiler.reset()
    compiled = torch.compile(turn_in_place, dynamic=False)
    return lambda q, k: compiled(q, k, cos, sin)


def liger(cos: torch.Tensor, sin: torch.Tensor, channels: int) -> Callable:
    """Liger-Kernel's, in place; it turns all channels, with tables [1, L, C]."""
    apply = importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb
    cos, sin = (x.repeat(1, channels // x.shape[-1])[None].contiguous() for x in (cos, sin))
    return lambda q, k: apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def flash_attn(cos: torch.Tensor, sin: torch.Tensor) -> Callable:
    """flash-attn's Triton kernel, in place, a launch each for q and k."""
    apply = importlib.import_module("flash_attn.ops.triton.rotary").apply_rotary
    return lambda q, k: [apply(x, cos, sin, inplace=True) for x in (q, k)]


def graph_timer(form: Callable, arrays: list[tuple[torch.Tensor, ...]], steps: int) -> Callable[[], float]:
    """Captures `steps` rounds over the arrays, and returns what times one step of a replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            form(*arrays[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(steps):
            for pair in arrays:
                form(*pair)
    graph.replay()

    def elapsed() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - start) / steps / len(arrays)

    return elapsed
