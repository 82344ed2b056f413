"""A ViT in eager PyTorch, the peer of `benchmarks.cpu`; needs torch and no other package.

    python benchmarks/_torch_vit.py '{"width": 96, ...}'

It runs with any Python that has torch, prints a line of JSON when it is ready, reads numbers of
steps from its standard input, takes as many training steps, and prints the seconds of each. The
model is `vit_digits` of this package, with the scheme `rope_mixed` or `none`; a step normalises
images of bytes, and clips gradients before a fused AdamW.
"""

import json
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


def rotated(x, cos, sin):
    """x [B, N, L, D] with the pairs (i, i + D/2) turned by angles [N, L, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Self-attention, with RoPE-Mixed or without a position."""

    def __init__(self, width, heads, grid, position):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.freqs = None
        if position == "rope_mixed":
            pairs = width // heads // 2
            self.freqs = nn.Parameter(torch.rand(heads, 2, pairs))
            rows, columns = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
            coords = torch.stack([rows.flatten(), columns.flatten()], dim=-1).float()
            self.register_buffer("coords", coords)

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.freqs is not None:
            theta = self.coords @ self.freqs
            cos, sin = theta.cos(), theta.sin()
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width, heads, hidden, epsilon, grid, position):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)
        self.attn = Attention(width, heads, grid, position)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, blocks, a norm, the mean of the tokens, a linear classifier."""

    def __init__(self, asked):
        super().__init__()
        width, side, epsilon = asked["width"], asked["patch_size"], asked["norm_epsilon"]
        self.patches = nn.Conv2d(3, width, side, side)
        self.patch_norm = nn.LayerNorm(width, epsilon) if asked["patch_norm"] else nn.Identity()
        hidden, grid = int(width * asked["mlp_ratio"]), asked["image_size"] // side
        block = (width, asked["heads"], hidden, epsilon, grid, asked["position"])
        self.blocks = nn.Sequential(*(Block(*block) for _ in range(asked["depth"])))
        self.norm, self.head = nn.LayerNorm(width, epsilon), nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(self.patch_norm(x))).mean(dim=1))


class Training:
    """A model, its optimizer, and one batch."""

    def __init__(self, asked):
        self.asked, size = asked, asked["image_size"]
        self.model = ViT(asked)
        decayed = [x for x in self.model.parameters() if x.ndim in (2, 4)]
        others = [x for x in self.model.parameters() if x.ndim not in (2, 4)]
        groups = [
            {"params": decayed, "weight_decay": asked["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=asked["learning_rate"], fused=True)
        shape = (asked["batch"], size, size, 3)
        self.images = torch.randint(0, 256, shape, dtype=torch.uint8)
        self.labels = torch.randint(0, 10, shape[:1])

    def step(self):
        """Takes one step; returns loss, accuracy and the norm of the gradient as tensors."""
        images = ((self.images.float() / 255 - 0.5) / 0.5).permute(0, 3, 1, 2)
        logits = self.model(images)
        loss = F.cross_entropy(logits, self.labels, label_smoothing=self.asked["label_smoothing"])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        limit = self.asked["clip_norm"] or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit, foreach=True)
        self.optimizer.step()
        return loss.detach(), (logits.argmax(-1) == self.labels).float().mean(), norm

    def seconds(self, steps):
        """Takes so many steps and returns their time."""
        start = time.perf_counter()
        for _ in range(steps):
            numbers = [value.item() for value in self.step()]
        assert all(map(math.isfinite, numbers)), numbers
        return time.perf_counter() - start


def main(asked):
    training = Training(asked)
    training.seconds(2)
    parameters = sum(x.numel() for x in training.model.parameters())
    about = {"threads": torch.get_num_threads(), "parameters": parameters}
    print(json.dumps(about | {"version": torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(training.seconds(int(line))), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
