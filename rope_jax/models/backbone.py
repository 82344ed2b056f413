"""The interface that all backbones share.

A backbone consists of parts: stages of equal blocks on one map, each with its own positional
scheme. An isotropic model has one part, itself. Costs, analysis and weight conversion iterate over
the parts and do not distinguish families.

Parameters declare their treatment in training as metadata: `nnx.Param(value, decay=False)`, or
`blocks.declare(module, depth=0)` for all of a module.

    decay      whether weight decay applies; by default to matrices, and not to vectors
    depth      for layer-wise learning rates: n of the n-th block through all stages, which
               `make_blocks` declares, and 0 below the first; without it, that of the head
    last_norm  of the norm after the last block, whose rate may be that of the head or of the block
    layers     the first axis is that of layers, the first of which has the depth
"""

import abc
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from rope_jax.models.description import Preprocessing
from rope_jax.models.layers import BatchNorm
from rope_jax.models.registry import check_blocks
from rope_jax.names.text import image_pair
from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax.system.sharding import explicit_mesh
from rope_jax_kernels import Pattern


def allow_any_mesh(method: Callable) -> Callable:
    """Lets a method of models run on meshes with Explicit axes, the default of `jax.make_mesh`.

    There, the type of an array includes its sharding, and with sharded parameters every layer would
    have to state the sharding of its output. Inside the method the axes are Auto: XLA decides.

    Args:
        method: from images [B, h, w, 3] and other arguments to arrays [B, ...]. These are sharded
            like the batch of images.
    """

    @functools.wraps(method)
    def call(model: nnx.Module, images: Array, *args: Any, **kwargs: Any) -> Any:
        mesh = explicit_mesh(images)
        if mesh is None:
            return method(model, images, *args, **kwargs)

        def training_norms(model: nnx.Module) -> list[BatchNorm]:
            modules = nnx.iter_modules(model) if kwargs.get("train") else ()
            return [module for _, module in modules if isinstance(module, BatchNorm)]

        def run(state: nnx.State) -> tuple[Any, list[tuple[Array, Array]]]:
            model, images, args, kwargs = nnx.merge(graph, state)
            out = method(model, images, *args, **kwargs)
            return out, [(norm.mean[...], norm.variance[...]) for norm in training_norms(model)]

        graph, state = nnx.split((model, images, args, kwargs))
        batch = NamedSharding(mesh, P(*jax.typeof(images).sharding.spec[:1]))
        out, statistics = jax.sharding.auto_axes(
            run, axes=mesh.explicit_axes, out_sharding=(batch, NamedSharding(mesh, P()))
        )(state)
        for norm, (mean, variance) in zip(training_norms(model), statistics, strict=True):
            # New variables, as in `BatchNorm`.
            norm.mean, norm.variance = norm.mean.replace(mean), norm.variance.replace(variance)
        return out

    return call


class Backbone(nnx.Module):
    """Base of all models.

    Attributes:
        options: the family's `Options`.
        hierarchical: whether the parts are `stages` with successively halved maps, or the model
            itself.
        task: the model's task, a key of `rope_jax.tasks.TASKS`.
        padded: whether calls take the `extent` of images that are padded.
        own_maps: whether `features` makes four maps, of strides 4 to 32, with norms of their own,
            instead of those after blocks.
        beyond_classifier: starts of the names of parameters that weights of a classifier may lack;
            {i} stands for any number.
        softmax: whether the weights of attention come from a softmax and sum to 1.
        name: in `create_model`, which sets this and the next five.
        notation: the text of the positional scheme.
        head_notation: the text of the head of dense prediction; None without one.
        image_size: (height, width) in pixels, of creation or the last `resize`.
        trained_size: (height, width) in pixels from which schemes extend, those of creation.
        trained_options: `Options` from which schemes extend, those of creation or of the weights.
        preprocessing: what the weights expect of images, where known.
        class_names: of the logits, in their order, where known.
    """

    hierarchical: ClassVar[bool] = False
    own_maps: ClassVar[bool] = False
    beyond_classifier: ClassVar[tuple[str, ...]] = ()
    softmax: ClassVar[bool] = True
    task: str = "classification"
    padded: bool = False
    name: str | None = None
    notation: str = ""
    head_notation: str | None = None
    image_size: Grid | None = None
    trained_size: Grid | None = None
    trained_options: Any = None
    preprocessing: Preprocessing | None = None
    class_names: tuple[str, ...] | None = None

    @property
    def num_classes(self) -> int:
        """Outputs of the head; 0 for a model without one."""
        return getattr(self.head, "out_features", 0)

    @abc.abstractmethod
    def __call__(
        self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None
    ) -> Float[Array, "B classes"]:
        """Logits of images.

        Args:
            images: normalised, of any size that `grids` accepts.
            train: whether to use dropout, augmented positions and batch statistics.
            key: for randomness in training; not needed in evaluation.
        """

    @allow_any_mesh
    def features(
        self,
        images: Float[Array, "B h w 3"],
        *,
        blocks: Sequence[int] | None = None,
        norm: bool | None = None,
        train: bool = False,
        key: Array | None = None,
    ) -> list[Float[Array, "B _H _W _C"]]:
        """Feature maps after some blocks, for dense prediction; without class and register tokens.

        >>> import jax.numpy as jnp
        >>> import rope_jax
        >>> model = rope_jax.create_model("vit_digits")
        >>> maps = model.features(jnp.zeros((1, 8, 12, 3)), blocks=(1, 3), norm=False)
        >>> [features.shape for features in maps]
        [(1, 4, 6, 96), (1, 4, 6, 96)]

        Args:
            images: as in `__call__`.
            blocks: numbers of the blocks, from 0 through all stages, in ascending order; the map of
                the last block of a stage is that before downsampling. None for the last block of
                every stage, strides 4 to 32.
            norm: whether the maps are normalised by the model's last layer norm: all of them, none,
                or, with None, the last block's only, if the classifier's input is that.
            train, key: as in `__call__`, for drop path, augmented positions and batch statistics.

        Returns:
            A map per block, in order.

        Raises:
            ValueError: blocks that the model does not have, or norm=True where the last norm is not
                one of these maps.
        """
        depths = [part.position.stage.depth for part in self.parts().values()]
        final = sum(depths) - 1
        blocks = [n - 1 for n in itertools.accumulate(depths)] if blocks is None else [*blocks]
        check_blocks("blocks", blocks, final + 1, max(1, len(blocks)))
        if norm and blocks[0] <= final - depths[-1]:
            raise ValueError(
                f"norm=True is the norm after the last stage, but blocks={tuple(blocks)} has block "
                f"{blocks[0]} of an earlier one, of other channels: pass norm=None or norm=False"
            )
        if norm and not self.options.last_norm:
            raise ValueError(
                "norm=True needs a last layer norm, and this model was created with "
                "last_norm=False: pass norm=None or norm=False"
            )
        normed = {*blocks} if norm else {final} if norm is None and self.norms_tokens else set()
        maps = zip(blocks, self.maps(images, blocks, train, key), strict=True)
        return [self.norm(x) if block in normed else x for block, x in maps]

    def _refuse_table(self, _: int) -> None:
        raise NotImplementedError(
            "nnx.tabulate compiles every method of a module, and those of models also return what "
            "jax cannot, such as patterns: use `python -m rope_jax.models.cost NAME`, or "
            "rope_jax.models.cost.cost(model, image_size), for the parameters and multiply-adds of "
            "each module"
        )

    # Flax sets this first. Failing later, it would leave its wrappers around all methods.
    _nnx_tabulate_id = property(fset=_refuse_table)

    def add_modules(self, *, rngs: nnx.Rngs, dtypes: dict) -> None:
        """Creates the modules of a family beyond its base, as the last step of the constructor.

        Args:
            rngs: for the initial weights.
            dtypes: of activations and parameters, see `layers.layer_dtypes`.
        """

    @property
    def norms_tokens(self) -> bool:
        """True if the classifier applies the last layer norm to the tokens of the last block."""
        return True

    def maps(
        self, images: Float[Array, "B h w 3"], blocks: Sequence[int], train: bool, key: Array | None
    ) -> Iterator[Float[Array, "B H W C"]]:
        """Yields the map after each of some blocks, whose numbers ascend, as it is."""
        raise NotImplementedError

    @abc.abstractmethod
    def parts(self) -> dict[str, nnx.Module]:
        """The modules that hold `blocks` and `position`, by the prefix of their parameters' names.

        {"": model} for isotropic models, {"stages.0.": ..., "stages.1.": ...} for others.
        """

    @abc.abstractmethod
    def grids(self, image_size: Grid) -> list[Grid]:
        """(rows, columns) of each part's map for an image of (height, width) pixels."""

    @abc.abstractmethod
    def patterns(self, part: int, grid: Grid) -> list[Pattern]:
        """Attention pattern of each block of a part on a map of `grid` tokens."""

    def positions(self, image_size: int | Grid) -> list[tuple[Position, Grid]]:
        """Each part's positional scheme and its map.

        Args:
            image_size: pixels, a side or (height, width).
        """
        schemes = [part.position for part in self.parts().values()]
        return list(zip(schemes, self.grids(image_pair(image_size)), strict=True))

    def resize(self, image_size: int | Grid) -> None:
        """Sets the image size of creation; schemes resize their tables by their own rules.

        Args:
            image_size: pixels, a side or (height, width).
        """
        for position, grid in self.positions(image_size):
            position.resize(grid)
        self.image_size = image_pair(image_size)

    def prepare(self, image_size: Grid) -> None:
        """Sets attributes that depend on the image size and are no parameters; part of `resize`.

        Raises:
            ValueError: the model does not allow that size.
        """

    def check_size(self, image_size: Grid) -> None:
        """Rejects images of a size that the model does not support, before any computation.

        Raises:
            ValueError: with what to change.
        """
        self.grids(image_size)

    def scale_windows(self) -> None:
        """Sets windows to a thirty-second of the image, from the next `resize` on.

        Raises:
            ValueError: the model has no windows, or they keep their size.
        """
        raise ValueError(
            "scale_windows needs a model whose windows can follow the image, as those of Swin do, "
            f"unlike {type(self).__name__}: leave it out"
        )

    def window_rule(self, *, scaled: bool = False) -> str | None:
        """The size of windows on maps of any size, in words; None for models without windows.

        Args:
            scaled: after `scale_windows`.
        """
        return None

    def random_parts(self) -> list[str]:
        """The random parts of a forward pass in training: options, and "position"."""
        options = self.options
        augments = any(part.position.augments for part in self.parts().values())
        named = [name for name in options.draws if getattr(options, name) > 0]
        return [*named, *(["position"] if augments else [])]

    def training_keys(self, train: bool, key: Array | None, count: int) -> list[Array | None]:
        """`count` keys for a forward pass in training, or `count` Nones otherwise.

        Raises:
            ValueError: there is no key, and training needs one.
        """
        if train and key is None and (parts := self.random_parts()):
            raise ValueError(
                f"train=True needs a key for {', '.join(parts)}: pass key=jax.random.key(...), or "
                "create the model without"
            )
        return [None] * count if not train or key is None else list(jax.random.split(key, count))


def patch_grid(image_size: Grid, patch: int) -> Grid:
    """Rows and columns of patches.

    Raises:
        ValueError: the patches do not divide the image.
    """
    height, width = image_size
    if height % patch or width % patch:
        raise ValueError(
            f"image size {height}x{width} is not divisible by the patch size {patch}: "
            "crop or resize the images, or change the patch size"
        )
    return height // patch, width // patch
