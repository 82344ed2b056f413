"""Vision transformers by their definition: NumPy, float64, image by image and head by head.

Layers are those of a model. Maps are [H, W, C], tokens [L, C].
"""

import itertools
import math

import numpy as np


def value(variable):
    return np.asarray(variable[...], np.float64)


# Layers


def norm(x, layer, epsilon):
    centred = x - x.mean(axis=-1, keepdims=True)
    out = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
    out = out * value(layer.scale)
    return out if getattr(layer, "bias", None) is None else out + value(layer.bias)


def dense(x, layer):
    out = x @ value(layer.kernel)
    return out if getattr(layer, "bias", None) is None else out + value(layer.bias)


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def mlp(x, layer):
    """Linear, GELU, linear; or SwiGLU, by the width of the layers."""
    hidden = dense(x, layer.fc1)
    if layer.fc2.kernel.shape[0] == hidden.shape[-1]:
        return dense(gelu(hidden), layer.fc2)
    gate, values = np.split(hidden, 2, axis=-1)
    return dense(silu(gate) * values, layer.fc2)


def extract_patches(image, side, stride, padding=0, border=0.0):
    """The patches of a map that a kernel of `side` covers, [h, w, side, side, C]."""
    frame = ((padding, padding), (padding, padding), (0, 0))
    padded = np.pad(image, frame, constant_values=border)
    rows, columns = (range(0, n - side + 1, stride) for n in padded.shape[:2])
    return np.array([[padded[y : y + side, x : x + side] for x in columns] for y in rows])


def convolve(image, layer, stride, padding=0):
    kernel = value(layer.kernel)
    out = np.tensordot(extract_patches(image, len(kernel), stride, padding), kernel, axes=3)
    return out if getattr(layer, "bias", None) is None else out + value(layer.bias)


def bilinear(image, x, y):
    """A map [H, W, ...] at a place in [0, 1], between the centres of four pixels; 0 outside."""
    height, width = image.shape[:2]
    x, y, total = x * width - 0.5, y * height - 0.5, 0.0
    for row in (math.floor(y), math.floor(y) + 1):
        for column in (math.floor(x), math.floor(x) + 1):
            if 0 <= row < height and 0 <= column < width:
                total += (1 - abs(x - column)) * (1 - abs(y - row)) * image[row, column]
    return total


def turn(x, theta, interleaved=False):
    """Rotates pairs of channels: x [L, D], theta [L, R]."""
    pairs, out = theta.shape[1], x.copy()
    for r in range(pairs):
        a, b = (2 * r, 2 * r + 1) if interleaved else (r, pairs + r)
        out[:, a] = x[:, a] * np.cos(theta[:, r]) - x[:, b] * np.sin(theta[:, r])
        out[:, b] = x[:, b] * np.cos(theta[:, r]) + x[:, a] * np.sin(theta[:, r])
    return out


def attend(x, layer, heads, *, theta=None, interleaved=False, bias=None, allowed=True, scale=None):
    """Attention of tokens [L, C].

    theta(head) [L, R] rotates q and k, bias(head) [L, L] is added to the logits. layer.local(v), if
    defined, is added to the output of a head. With layer.logit_scale, logits are cosines times its
    exponential, at most 100.
    """
    scales = getattr(layer, "logit_scale", None)
    scales = [scale] * heads if scales is None else np.minimum(np.exp(value(scales)), 100)
    local = getattr(layer, "local", None)
    qkv = dense(x, layer.qkv)
    if getattr(layer, "qv_bias", None) is not None:
        q, v = np.split(value(layer.qv_bias), 2)
        qkv = qkv + np.concatenate([q, 0 * q, v])
    out, parts = [], zip(*(np.split(y, heads, 1) for y in np.split(qkv, 3, 1)), strict=True)
    for head, (q, k, v) in enumerate(parts):
        scale = scales[head]
        if hasattr(layer, "logit_scale"):
            q, k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, k))
        if theta is not None:
            q, k = turn(q, theta(head), interleaved), turn(k, theta(head), interleaved)
        logits = q @ k.T * (q.shape[1] ** -0.5 if scale is None else scale)
        logits = logits + (0 if bias is None else bias(head))
        attended = softmax(np.where(allowed, logits, -np.inf)) @ v
        out.append(attended if local is None else attended + local(v))
    return dense(np.concatenate(out, axis=1), layer.proj)


def places(grid):
    """(row, column) of each token of a map."""
    return np.array(list(itertools.product(range(grid[0]), range(grid[1]))))


def sinusoids(tokens, width):
    """1-D sinusoids [tokens, width], sines and cosines in turn."""
    channel = np.arange(width)
    angles = np.arange(tokens)[:, None] / 10000 ** (2 * (channel // 2) / width)
    return np.where(channel % 2, np.cos(angles), np.sin(angles))


# The isotropic ViT


def vit(
    model, options, image, *, tokens=0, joins=None, bias=None, theta=None, allowed=None, **attention
):
    """Logits of one image.

    Args:
        model: or its layers.
        options: `ViTOptions`.
        tokens: what joins class and distillation token and patches, or patches alone.
        joins: joins(layer), what joins the normalised tokens.
        bias: bias(layer) as `attend` takes it.
        theta: theta(layer) as `attend` takes it.
        allowed: allowed(layer) as `attend` takes it.
        attention: further arguments of `attend`.
    """
    epsilon = options.norm_epsilon
    x = convolve(image, model.patch_embed.proj, options.patch_size)
    x = x.reshape(-1, x.shape[-1])
    if options.patch_norm:
        x = norm(x, model.patch_embed.norm, epsilon)
    prefix = []
    if options.class_token:
        prefix.append(value(model.class_token)[0])
    if options.distilled:
        prefix.append(value(model.distillation_token)[0])
    embedded = len(prefix) if options.embed_class_token else 0
    if options.registers:
        prefix.append(value(model.registers)[0])
    x = np.concatenate([*prefix[:embedded], x]) + tokens
    x = np.concatenate([x[:embedded], *prefix[embedded:], x[embedded:]])
    for index, block in enumerate(model.blocks):
        by_layer = {"bias": bias, "theta": theta, "allowed": allowed}
        settings = {key: of(index) for key, of in by_layer.items() if of is not None} | attention
        added = 0 if joins is None else joins(index)
        attend_tokens = lambda x, block=block, added=added, settings=settings: attend(
            x + added, block.attn, options.heads, **settings
        )
        x = run_block(x, block, attend_tokens, options)
    if not options.pool_norm:
        x = norm(x, model.norm, epsilon)
    pooling = options.pooling or ("class" if options.class_token else "mean")
    mean = x[sum(map(len, prefix)) :].mean(axis=0)
    pooled = {"class": x[0], "mean": mean, "class_mean": np.concatenate([x[0], mean])}[pooling]
    pooled = norm(pooled, model.norm, epsilon) if options.pool_norm else pooled
    logits = dense(pooled, model.head)
    return (logits + dense(x[1], model.distillation_head)) / 2 if options.distilled else logits


def run_block(x, block, attend_tokens, options):
    """The tokens [L, C] after a block, whose attention is a function of (normalised) tokens."""
    branches = ((block.norm1, attend_tokens), (block.norm2, lambda x: mlp(x, block.mlp)))
    for number, (layer, branch) in enumerate(branches, 1):
        normalise = lambda x, layer=layer: norm(x, layer, options.norm_epsilon)
        out = normalise(branch(x)) if options.post_norm else branch(normalise(x))
        x = x + scale(block, number) * out
    return x


def scale(block, number):
    """LayerScale of a branch, or 1."""
    layer = getattr(block, f"scale{number}", None)
    return 1 if layer is None else value(layer.gamma)
