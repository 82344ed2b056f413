import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rope_jax.checkpoint import Checkpoints, check_tree, tree_hash
from rope_jax.sharding import like, make_mesh, replicated


def state(scale=1.0):
    params = {"blocks": {0: {"kernel": jnp.full((2, 3), scale)}, 1: {"kernel": jnp.ones((2, 3))}}}
    return {"step": jnp.array(3, jnp.int32), "params": params, "opt": optax.adamw(1e-3).init(params)}


def shapes(tree):
    return like(tree, replicated(make_mesh()))


def test_what_is_saved_comes_back_whole_or_in_parts(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state(2.5), about={"seed": 1})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3]
        assert checkpoints.about(3) == {"seed": 1}
        assert tree_hash(checkpoints.load(3, shapes(state()))) == tree_hash(state(2.5))
        part = checkpoints.load(3, {"params": shapes(state())["params"]})
        assert set(part) == {"params"}
        assert list(part["params"]["blocks"]) == [0, 1]


def test_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(), about={})
        assert checkpoints.newest() == 3
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2, 3]


def test_a_step_is_never_overwritten(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1.0), about={})
        checkpoints.save(1, state(2.0), about={})
        assert tree_hash(checkpoints.load(1, shapes(state()))) == tree_hash(state(1.0))


def test_numbers_that_are_not_finite_are_never_written(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"step 1 is not saved: params.blocks.0.kernel is not finite"):
            checkpoints.save(1, state(np.nan), about={})
        assert checkpoints.steps() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["params"]["blocks"].pop(1), "params.blocks.1.kernel is not expected"),
        (lambda s: s["params"].update(extra=jnp.ones(1)), "params.extra is missing"),
        (lambda s: s["params"]["blocks"].update({0: {"kernel": jnp.ones((3, 2))}}), r"float32\[2, 3\], not float32\[3, 2\]"),
        (lambda s: s["params"]["blocks"].update({0: {"kernel": jnp.ones((2, 3), jnp.bfloat16)}}), "not bfloat16"),
    ],
)
def test_another_tree_is_refused(tmp_path, change, message):
    wanted = state()
    change(wanted)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(), about={})
        with pytest.raises(ValueError, match=message):
            checkpoints.load(1, shapes(wanted))


def test_the_hash_tells_bits_names_and_dtypes_apart():
    a = np.array([1.0, 0.0], np.float32)
    trees = [{"a": a}, {"b": a}, {"a": a.astype(np.float64)}, {"a": a[None]}, {"a": np.array([1.0, -0.0], np.float32)}]
    assert len({tree_hash(tree) for tree in trees}) == len(trees)
    assert tree_hash({"a": a}) == tree_hash({"a": jnp.asarray(a)})


def test_check_tree_names_the_first_problems():
    wanted = {str(n): jnp.ones(1) for n in range(9)}
    with pytest.raises(ValueError, match="and 4 more"):
        check_tree(wanted, {})


def test_missing_metadata_is_told(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(), about={})
        with pytest.raises(ValueError, match="1 is damaged: its metadata is missing"):
            checkpoints.about(1)
