"""A ViT in eager PyTorch, the peer of `benchmarks.cpu`; needs torch and no other package.

    python benchmarks/_torch_vit.py '{"width": 96, ...}'

It runs with any Python that has torch, prints the number of parameters when it is ready, reads
numbers of steps from its standard input, takes as many training steps, and prints their seconds.
The model is `vit_digits` of this package with RoPE-Mixed; a step normalises images of bytes, and
clips gradients before a fused AdamW.
"""

import json
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


def rotate(x, cos, sin):
    """Turns the pairs (i, i + D/2) of x [B, N, L, D] by angles [N, L, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """x + attention(norm(x)) with RoPE-Mixed, then x + mlp(norm(x))."""

    def __init__(self, width, heads, hidden, epsilon, grid):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.freqs = nn.Parameter(torch.rand(heads, 2, width // heads // 2))
        rows, columns = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
        self.register_buffer("coords", torch.stack([rows.flatten(), columns.flatten()], 1).float())

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        theta = self.coords @ self.freqs
        cos, sin = theta.cos(), theta.sin()
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, blocks, a norm, the mean of the tokens, a linear classifier."""

    def __init__(self, spec):
        super().__init__()
        width, side, epsilon = spec["width"], spec["patch_size"], spec["norm_epsilon"]
        self.patches = nn.Conv2d(3, width, side, side)
        self.patch_norm = nn.LayerNorm(width, epsilon) if spec["patch_norm"] else nn.Identity()
        hidden, grid = int(width * spec["mlp_ratio"]), spec["image_size"] // side
        block = (width, spec["heads"], hidden, epsilon, grid)
        self.blocks = nn.Sequential(*(Block(*block) for _ in range(spec["depth"])))
        self.norm, self.head = nn.LayerNorm(width, epsilon), nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(self.patch_norm(x))).mean(dim=1))


def main(spec):
    model, size = ViT(spec), spec["image_size"]
    parameters = list(model.parameters())
    groups = [
        {
            "params": [x for x in parameters if (x.ndim in (2, 4)) == decayed],
            "weight_decay": spec["weight_decay"] if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=spec["learning_rate"], fused=True)
    images = torch.randint(0, 256, (spec["batch"], size, size, 3), dtype=torch.uint8)
    labels = torch.randint(0, 10, images.shape[:1])

    def step():
        logits = model(((images.float() / 255 - 0.5) / 0.5).permute(0, 3, 1, 2))
        loss = F.cross_entropy(logits, labels, label_smoothing=spec["label_smoothing"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        limit = spec["clip_norm"] or math.inf
        norm = nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
        optimizer.step()
        return loss.item(), (logits.argmax(-1) == labels).float().mean().item(), norm.item()

    for _ in range(2):
        assert all(map(math.isfinite, step()))
    print(sum(x.numel() for x in parameters), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            step()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
