"""Trees of arrays: names, hashes, and comparisons of the leaves."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def not_finite(tree: Any) -> list[str]:
    """Names of the leaves with a number that is not finite, computed on the device."""
    leaves = {
        name: leaf for name, leaf in named_leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    # A program of hundreds of leaves would take seconds to compile; several that run at once may
    # wait for each other's collectives, on a CPU with several processes.
    return [name for name, leaf in leaves.items() if not jax.device_get(_is_finite(leaf))]


@jax.jit
def _is_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Checks that two arrays have the same shape, dtype and bits; 0.0 and -0.0 differ."""
    bits = lambda x: np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return (a.shape, a.dtype) == (b.shape, b.dtype) and np.array_equal(bits(a), bits(b))


def check_tree(expected: Any, stored: Any) -> None:
    """Rejects a stored tree with other names, shapes or dtypes (orbax would cast silently)."""
    types = lambda tree: {name: f"{x.dtype}{list(x.shape)}" for name, x in named_leaves(tree)}
    expected, stored = types(expected), types(stored)
    problems = [
        f"{name} is {stored.get(name, 'missing')}, not {expected.get(name, 'expected')}"
        for name in expected | stored
        if expected.get(name) != stored.get(name)
    ]
    if problems:
        raise ValueError(
            "the checkpoint's arrays are not those of this run: " + first_problems(problems)
        )


def first_problems(problems: list[str]) -> str:
    """Lists the first five problems, and the number of others."""
    return "; ".join(problems[:5]) + (
        f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    )


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with their names, "params.blocks.0.attn.qkv.kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def tree_hash(tree: Any) -> str:
    """sha256 of names, dtypes, shapes and bytes: equal only for bit-for-bit equal trees."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(tree):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
