"""Names of yitu-opensource/T2T-ViT."""

from flax import nnx

from rope_jax.models.pretrained.cct import sinusoids
from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Table, dense, isotropic, norm
from rope_jax.models.pretrained.tensors import SAME, TOKENS

_STEM = "tokens_to_token"
_PERFORMER = ("patch_embed.attention{n}", f"{_STEM}.attention{{n}}")


def table(model: nnx.Module) -> Table:
    """Sinusoids are in its files. Those published first need `logit_scale="width"`, which they do not say."""
    ours, theirs = _PERFORMER
    rows = [
        (f"{ours}.w", f"{theirs}.w", SAME),
        *(row for name in ("norm1", "norm2") for row in norm(f"{ours}.{name}", f"{theirs}.{name}")),
        *(row for name in ("kqv", "proj") for row in dense(f"{ours}.{name}", f"{theirs}.{name}")),
        *dense(f"{ours}.mlp.fc1", f"{theirs}.mlp.0"),
        *dense(f"{ours}.mlp.fc2", f"{theirs}.mlp.2"),
        *dense("patch_embed.project", f"{_STEM}.project"),
        ("position.ape.embedding", "pos_embed", TOKENS),
        *isotropic(),
    ]
    return Table(rows, None, Preprocessing(crop=0.9), frozen=(("pos_embed", sinusoids),))
