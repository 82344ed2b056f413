"""Trees of arrays on disk: one folder per step, written so that a step is there whole or not at all."""

import hashlib
import pathlib
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp


class Checkpoints:
    """The checkpoints of one run, in `folder/<step>/`; a context manager.

    A state is a dict of trees; each of its entries is a folder of its own and can be read alone.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int | None = None):
        """Opens a folder of checkpoints (made when it is not there); the newest `keep` stay, or all."""
        policies = ocp.training.preservation_policies
        policy = policies.PreserveAll() if keep is None else policies.LatestN(keep)
        self._checkpointer = ocp.training.Checkpointer(folder.absolute(), preservation_policy=policy)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._checkpointer.close()

    def steps(self) -> list[int]:
        """The steps that are there, ascending."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def newest(self) -> int | None:
        """The newest step that is there, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: dict[str, Any], *, about: dict) -> None:
        """Writes a state and, as JSON, what is to be known about it; returns when both are on disk. A step that is there already stays.

        Raises:
            ValueError: a number is not finite; nothing is written.
        """
        if step in self.steps():
            return
        bad = [name for name, leaf in named_leaves(state) if not np.isfinite(np.asarray(leaf)).all()]
        if bad:
            raise ValueError(f"step {step} is not saved: {', '.join(bad[:3])} {'is' if len(bad) == 1 else 'are'} not finite")
        self._checkpointer.save_checkpointables(step, state, force=True, custom_metadata=about)

    def load(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """Reads a state, or the entries of it that `like` has.

        Args:
            step: one of `steps()`.
            like: trees of `jax.ShapeDtypeStruct`s with the shardings to restore to.

        Raises:
            ValueError: what is on disk has other names, shapes or dtypes.
        """
        found = self._checkpointer.checkpointables_metadata(step).metadata
        check_tree(like, {name: found[name] for name in like if name in found})
        return self._checkpointer.load_checkpointables(step, like)

    def about(self, step: int) -> dict:
        """What was stored beside a state.

        Raises:
            ValueError: it is not there: the checkpoint is damaged.
        """
        about = self._checkpointer.checkpointables_metadata(step).custom_metadata
        if not about:
            raise ValueError(
                f"checkpoint {self._checkpointer.directory / str(step)} is damaged: its metadata is missing; remove that folder"
            )
        return about


def check_tree(wanted: Any, found: Any) -> None:
    """Refuses a stored tree whose names, shapes or dtypes are not the wanted ones (orbax would cast a dtype without a word)."""
    wanted, found = dict(named_leaves(wanted)), dict(named_leaves(found))
    describe = lambda leaf: f"{leaf.dtype}{list(leaf.shape)}"
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not expected" for name in found if name not in wanted]
    both = [(name, describe(found[name]), describe(wanted[name])) for name in wanted if name in found]
    problems += [f"{name} is {there}, not {here}" for name, there, here in both if there != here]
    if problems:
        raise ValueError("the checkpoint does not fit this run: " + some_of(problems))


def some_of(problems: list[str]) -> str:
    """The first five of a list of problems, and how many more there are."""
    return "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with their names, "params.blocks.0.attn.qkv.kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def tree_hash(tree: Any) -> str:
    """sha256 over names, dtypes, shapes and bytes of all leaves: equal exactly when the trees are equal bit for bit."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(tree):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
