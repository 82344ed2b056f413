"""Sizes of the terms that attention and its gradients sum up, as a measure of rounding.

Each term of a sum is rounded by itself, so that the error of the sum is about one rounding of the
root of the sum of the squares of its terms, however small the sum is. Where terms cancel, as in the
gradient of a query that attends to one key, which is zero, the result is no measure of its error.

This module computes those squares in float64, from the definition over the pairs that attend. The
operands of a term have errors too, whose squares are added: those of angles, of turned rows, of
products of rows, of the output, and of weights, whose relative error is that of their logit and of
the logarithm of their sum, which kernels keep for the backward pass.
"""

import numpy as np

from rope_jax_kernels import Global
from tests.kernels.attention_pairs import pairs, token_coords


def term_sizes(pattern, places, qkv, coords, freqs, bias, cotangent, *, pairing, scale=None):
    """The largest root for the output and for the gradients of qkv, freqs and bias.

    Arguments are those of `operands` in `test_attention_triton`, in float64.
    """
    grid = (1, *places) if isinstance(pattern, Global) else places
    found_pairs = np.array(pairs(pattern, grid)).T
    batch, heads, head_dim = qkv.shape[0], *qkv.shape[-2:]
    by_head = lambda x: np.moveaxis(x.reshape(batch, -1, heads, head_dim), 2, 1)
    rows = [by_head(qkv[..., i, :, :]) for i in range(3)] + [by_head(cotangent)]
    if bias is not None:
        bias = bias.reshape(heads, -1)
    squares = []  # of each head: name -> array
    for head in range(heads):
        turn = None
        if freqs is not None:
            turn = Turn(coords[token_coords(pattern, grid)], freqs[head % len(freqs)], pairing)
        table = None if bias is None else bias[head]
        examples = [
            term_squares(*(x[example, head] for x in rows), found_pairs, turn, table, scale)
            for example in range(batch)
        ]
        data_squares = {
            name: max(squares_of_head[name].max() for squares_of_head in examples)
            for name in ("out", "qkv")
        }
        squares.append(
            data_squares
            | {
                name: sum(squares_of_head[name] for squares_of_head in examples)
                for name in ("freqs", "bias")
            }
        )
    join = np.sum if freqs is not None and len(freqs) == 1 else np.max
    largest = {
        name: np.max([squares_of_head[name] for squares_of_head in squares])
        for name in ("out", "qkv", "bias")
    }
    largest["freqs"] = np.max(
        join([squares_of_head["freqs"] for squares_of_head in squares], axis=0)
    )
    return {name: float(np.sqrt(square)) for name, square in largest.items()}


def term_squares(q, k, v, dout, found_pairs, turn, table, scale):
    """Sums of squared terms of one head of an example: rows [L, D], a table [entries] or None."""
    q_at, k_at, entry = found_pairs
    over_keys, over_queries = (
        lambda values, at=at: totals(at, values, len(q)) for at in (q_at, k_at)
    )
    dot = lambda a, b: (a[q_at] * b[k_at]).sum(axis=1)
    scale = q.shape[1] ** -0.5 if scale is None else scale
    q_square, k_square = q**2, k**2
    if turn is not None:
        (q, q_square), (k, k_square) = turn.rows(q), turn.rows(k)
    logits = scale * dot(q, k) + (0 if table is None else table[entry])
    logarithm = np.log(over_keys(np.exp(logits)))[q_at]
    weights = np.exp(logits - logarithm)
    products = scale**2 * dot(q_square, k_square)
    # Relative, of the weights.
    errors = 1 + products + over_keys(weights**2 * products)[q_at] + logits**2 + logarithm**2

    out = over_keys(weights[:, None] * v[k_at])
    of_out = over_keys((weights**2 * errors)[:, None] * v[k_at] ** 2)
    # The gradient of a logit is its weight times dout v - dout out.
    dlogits = weights * (dot(dout, v) - (dout * out).sum(axis=1)[q_at])
    terms = dot(dout**2, v**2) + (dout**2 * (out**2 + of_out)).sum(axis=1)[q_at]
    of_logits = weights**2 * terms + dlogits**2 * errors
    dq = scale**2 * over_keys(of_logits[:, None] * k[k_at] ** 2)
    dk = scale**2 * over_queries(of_logits[:, None] * q[q_at] ** 2)
    dv = over_queries((weights**2 * errors)[:, None] * dout[q_at] ** 2)
    freqs = bias = np.zeros(1)
    if turn is not None:
        freqs = turn.freqs_squares(q, dq) + turn.freqs_squares(k, dk)
        dq, dk = turn.squares(dq), turn.squares(dk)
    if table is not None:
        bias = totals(entry, of_logits, len(table))
    return {"out": of_out, "qkv": np.stack([dq, dk, dv]), "freqs": freqs, "bias": bias}


def totals(at, values, count):
    """Sums of the values with each of `count` indices."""
    sums = np.zeros((count, *values.shape[1:]))
    np.add.at(sums, at, values)
    return sums


class Turn:
    """The rotation of the rows [L, D] of one head, by coords [L, A] and freqs [A, R]."""

    def __init__(self, coords, freqs, pairing):
        self.coords, angles, pairs = coords, coords @ freqs, freqs.shape[1]
        self.cos, self.sin = np.cos(angles), np.sin(angles)
        error = coords**2 @ freqs**2  # of the angle
        self.cos_square = self.cos**2 + error * self.sin**2
        self.sin_square = self.sin**2 + error * self.cos**2
        self.first = np.arange(pairs) * (1 if pairing == "half" else 2)
        self.second = self.first + (pairs if pairing == "half" else 1)

    def rows(self, x):
        """Turned rows, and the squares of their terms."""
        a, b = x[:, self.first], x[:, self.second]
        turned = x.copy()
        turned[:, self.first] = a * self.cos - b * self.sin
        turned[:, self.second] = b * self.cos + a * self.sin
        return turned, self.squares(x**2)

    def squares(self, x):
        """Squares of the terms of turned rows, or of rows turned back, from those of the rows."""
        a, b = x[:, self.first], x[:, self.second]
        turned = x.copy()
        turned[:, self.first] = a * self.cos_square + b * self.sin_square
        turned[:, self.second] = b * self.cos_square + a * self.sin_square
        return turned

    def freqs_squares(self, turned, gradient):
        """Squares for the gradient of the frequencies, [A, R], from turned rows and their gradient.

        The gradient of an angle is a db - b da.
        """
        a, b = turned[:, self.first], turned[:, self.second]
        da, db = gradient[:, self.first], gradient[:, self.second]
        return self.coords.T**2 @ (a**2 * db + b**2 * da)
