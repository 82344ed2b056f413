"""Rotations, attention and models of other libraries, timed as CUDA graphs; needs torch."""

import functools
import importlib
import importlib.util
import math
import time
from collections.abc import Callable

import torch

Makers = dict[str, Callable[[], Callable[[], float]]]  # of timers, in microseconds, by form


def rotate_in_place(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the first 2R channels of q and k [B, L, N, C] in float32, with tables [L, R]."""
    pairs = cos.shape[-1]
    for x in (q, k):
        a, b = x[..., :pairs].float(), x[..., pairs : 2 * pairs].float()
        x[..., :pairs] = a * cos[:, None] - b * sin[:, None]
        x[..., pairs : 2 * pairs] = b * cos[:, None] + a * sin[:, None]


def rotations(shape: tuple[int, ...], theta: list[list[float]], copies: int, steps: int) -> Makers:
    """Functions that make timers of one rotation, by library; only those that are installed.

    Args:
        shape: [B, L, N, C] of q and of k.
        theta: angles [L, R].
        copies: number of pairs of q and k to cycle through.
        steps: rounds over all pairs in one graph.
    """
    forms = {"torch": torch_compiled}
    if importlib.util.find_spec("liger_kernel"):
        forms["liger"] = functools.partial(liger, channels=shape[-1])
    if importlib.util.find_spec("flash_attn"):
        forms["flash_attn"] = flash_attn

    @functools.cache  # shared by the libraries
    def arrays() -> list[tuple[torch.Tensor, ...]]:
        ones = functools.partial(torch.ones, shape, dtype=torch.bfloat16, device="cuda")
        return [(ones(), ones()) for _ in range(copies)]

    def make(form: Callable) -> Callable[[], float]:
        angles = torch.tensor(theta, device="cuda")
        return graph_timer(form(angles.cos(), angles.sin()), arrays(), steps)

    return {name: functools.partial(make, form) for name, form in forms.items()}


def attentions(sees: Callable | None, shape: tuple[int, ...], copies: int, steps: int) -> Makers:
    """Functions that make timers of torch's attention, by form.

    Args:
        sees: function of query and key indices that returns whether the query attends to the key;
            None for global attention.
        shape: [B, ..., 3, N, D] of the packed projection.
        copies: number of projections to cycle through.
        steps: rounds over all projections in one graph.
    """

    def make() -> Callable[[], float]:
        arrays = [(torch.randn(shape, device="cuda").bfloat16(),) for _ in range(copies)]
        return graph_timer(torch_attention(sees, shape), arrays, steps)

    return {"torch": make}


def torch_attention(sees: Callable | None, shape: tuple[int, ...]) -> Callable:
    """scaled_dot_product_attention, or FlexAttention for a mask, with torch.compile."""
    torch.compiler.reset()
    attend, tokens = torch.nn.functional.scaled_dot_product_attention, math.prod(shape[1:-3])
    if sees is not None:
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        mask = flex.create_block_mask(
            lambda batch, head, query, key: sees(query, key),
            None,
            None,
            tokens,
            tokens,
            device="cuda",
        )
        attend = functools.partial(flex.flex_attention, block_mask=mask)
    return torch.compile(
        lambda qkv: attend(*qkv.view(shape[0], tokens, *shape[-3:]).permute(2, 0, 3, 1, 4)),
        dynamic=False,
    )


def torch_compiled(cos: torch.Tensor, sin: torch.Tensor) -> Callable:
    """`rotate_in_place` with torch.compile."""
    torch.compiler.reset()
    compiled = torch.compile(rotate_in_place, dynamic=False)
    return lambda q, k: compiled(q, k, cos, sin)


def liger(cos: torch.Tensor, sin: torch.Tensor, channels: int) -> Callable:
    """Liger-Kernel's rotation of all channels in place, with tables [1, L, C]."""
    apply = importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb
    cos, sin = (x.repeat(1, channels // x.shape[-1])[None].contiguous() for x in (cos, sin))
    return lambda q, k: apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def flash_attn(cos: torch.Tensor, sin: torch.Tensor) -> Callable:
    """flash-attn's Triton kernel in place, with one launch each for q and k."""
    apply = importlib.import_module("flash_attn.ops.triton.rotary").apply_rotary
    return lambda q, k: [apply(x, cos, sin, inplace=True) for x in (q, k)]


def graph_timer(
    form: Callable, arrays: list[tuple[torch.Tensor, ...]], steps: int
) -> Callable[[], float]:
    """Captures `steps` rounds over the arrays; the timer returns microseconds per step."""

    def rounds() -> None:
        with torch.no_grad():
            for _ in range(steps):
                for pair in arrays:
                    form(*pair)

    run = timer(captured(rounds))
    return lambda: 1e3 * run(1) / steps / len(arrays)


def captured(step: Callable[[], object]) -> Callable[[], None]:
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


def timer(step: Callable[[], object]) -> Callable[[int], float]:
    """Returns a function that runs a step several times and returns milliseconds per run."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def elapsed(passes: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(passes):
            step()
        wait()
        return 1e3 * (time.perf_counter() - start) / passes

    return elapsed


def model(
    name: str, *, program: str, batch: int, image_size: int, dtype: str, drop_path: float, mode: str
) -> Callable[[int], float]:
    """Returns a `timer` of a forward pass or training step of a timm model with torch.compile.

    Args:
        name: timm's name of the model.
        program: "forward", with weights in `dtype`; or "train", with float32 weights, autocast to
            `dtype`, and fused AdamW.
        batch: images per batch.
        image_size: pixels.
        dtype: dtype of the computation.
        drop_path: drop path rate in training.
        mode: mode of torch.compile.
    """
    timm, torch_dtype = importlib.import_module("timm"), getattr(torch, dtype)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.compiler.reset()  # models of one class share a recompilation limit
    torch.set_float32_matmul_precision("high")  # as XLA does by itself
    net = timm.create_model(name, img_size=image_size, drop_path_rate=drop_path).to(device)
    images = torch.randn(batch, 3, image_size, image_size, device=device, dtype=torch_dtype)
    if program == "forward":
        net = net.to(torch_dtype).eval()
        run = torch.compile(net, mode=mode, dynamic=False)

        def step() -> None:
            with torch.no_grad():
                run(images)

    else:
        run = torch.compile(net.train(), mode=mode, dynamic=False)
        optimizer = torch.optim.AdamW(
            net.parameters(), lr=1e-4, weight_decay=0.05, fused=True, capturable=on_gpu
        )
        labels = torch.zeros(batch, dtype=torch.long, device=device)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            # Without autocast's cache: its casts would not be part of the graph.
            with torch.autocast(
                device, torch_dtype, enabled=torch_dtype is not torch.float32, cache_enabled=False
            ):
                loss = torch.nn.functional.cross_entropy(run(images).float(), labels)
            loss.backward()
            optimizer.step()

    step()
    return timer(captured(step) if on_gpu else step)
