"""Accuracy on test splits and ImageNet variants, at any resolution."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from rope_jax import data
from rope_jax.config import Config, ConfigError, blame
from rope_jax.config.settings import EvalConfig
from rope_jax.data.images.device import normalise
from rope_jax.evaluate.results import Row
from rope_jax.names.text import image_pair
from rope_jax.positions.extension import extend_rotations
from rope_jax.system.files import warn
from rope_jax.system.sharding import put_batch, replicated, share, use_mesh
from rope_jax.tasks import classification
from rope_jax.training import seeds
from rope_jax.training.setup import Setup, State, batch_shapes, load_split
from rope_jax.training.signals import Signals
from rope_jax.weights import Preprocessing

Apply = Callable[..., Any]  # (weights, normalised images [B, H, W, 3]) -> the model's outputs


def accuracies(
    apply: Apply,
    weights: Any,
    images: data.Images | data.Streamed,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int,
    mesh: Mesh,
    task: ModuleType = classification,
    config: Config | None = None,
    poll: Callable[[int], None] = lambda images: None,
    waiting: Callable[[int], None] = lambda seconds: None,
) -> list[Row]:
    """The scores of a model, or of each seed of a run: for classification, its accuracies.

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from rope_jax.system.sharding import make_mesh
    >>> pixels, labels = np.zeros((4, 8, 8, 3), np.uint8), np.int32([0, 1, 1, 1])
    >>> (row,) = accuracies(
    ...     lambda weights, images: images.mean((1, 2)) @ weights,
    ...     jnp.zeros((3, 2)),  # equal logits, of which class 0 is the first
    ...     data.Images(pixels, labels, "mine", "test", classes=2),
    ...     mean=(0.5, 0.5, 0.5),
    ...     std=(0.5, 0.5, 0.5),
    ...     batch_size=4,
    ...     mesh=make_mesh(),
    ... )
    >>> row["top1"], row["count"]
    (0.25, 4)

    Args:
        apply: (weights, normalised images) -> the model's outputs; of sets whose images are padded,
            it is given their `extent`, int32 [B, 2], too.
        weights: a tree of arrays; stacked for a run with several seeds.
        images: a test split or evaluation set at one resolution.
        mean, std: normalisation per channel.
        batch_size: images per step on all devices together.
        mesh: the devices.
        task: whose scores these are.
        config: of the run, for its seeds, data workers and policy on bad images.
        poll: called after each step with the number of images so far; may raise to stop.
        waiting: see `rope_jax.data.batches`.

    Returns:
        A row per seed: `dataset`, `split`, `resolution` and the scores: for classification `top1`
        and `top5` (fractions) and `count`.

    Raises:
        ValueError: the model has too few classes, or an image cannot be read.
    """
    config = Config() if config is None else config
    options = {"batch_size": batch_size, "mesh": mesh, "task": task, "config": config}
    calls = {"poll": poll, "waiting": waiting}
    parts, used = counted(apply, weights, images, mean=mean, std=std, **options, **calls)
    about = description(images) | {"count": used}
    return [about | task.scores(own, images) for own in parts]


def counted(
    apply: Apply,
    weights: Any,
    images: data.Images | data.Streamed,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int,
    mesh: Mesh,
    task: ModuleType,
    config: Config,
    steps: int | None = None,
    poll: Callable[[int], None] = lambda images: None,
    waiting: Callable[[int], None] = lambda seconds: None,
) -> tuple[list[list[Any]], int]:
    """What the scores of a set need, and the number of images that were used.

    Args:
        steps: batches to stop after; None for all.
        apply, weights, images, mean, std, batch_size, mesh, task, config, poll, waiting: as of
            `accuracies`.

    Returns:
        For each seed the trees of the task's `count`, one of each batch; and the number of images.
    """

    def count(weights: Any, batch: dict[str, Array]) -> tuple[Any, Array]:
        given = {name: batch[name] for name in ("extent",) if name in batch}
        inputs = normalise(batch["image"], mean, std, **given)
        return task.count(apply(weights, inputs, **given), batch, images), batch["mask"].sum()

    count = jax.jit(
        seeds.vmap(count, config.seeds, in_axes=(0, None)), out_shardings=replicated(mesh)
    )
    parts: list[list[Any]] = [[] for _ in config.all_seeds]
    seen, used = 0, 0
    batch_size = -(-batch_size // mesh.size) * mesh.size  # the last batch is padded anyway
    batches = data.evaluation_batches(
        images,
        batch_size=batch_size,
        shard=share(),
        workers=config.data.workers or 0,  # by default threads, which start at once
        bad_images=config.data.bad_images,
        **_shapes(config, images),
        waiting=waiting,
    )
    with batches:
        for batch in itertools.islice(batches, steps):
            tree, usable = jax.device_get(count(weights, put_batch(batch, mesh)))
            used += int(usable.flat[0])  # the same for every seed
            for own, part in zip(parts, seeds.split(tree, config.seeds), strict=True):
                own.append(part)
            seen = min(seen + batch_size, len(images.labels))
            poll(seen)
    return parts, used


def _shapes(config: Config, images: data.Images | data.Streamed) -> dict[str, Any]:
    """The `batch_shapes` of an evaluation, with room for the objects of every image.

    Larger images may have more objects than those of training.
    """
    shapes = batch_shapes(config)
    if images.labels_of == "boxes":
        shapes["max_boxes"] = images.annotations.counts().max(initial=shapes["max_boxes"]).item()
    return shapes


def description(images: data.Images | data.Streamed) -> Row:
    """The entries of a row about its images, with the names of classes of pixels and boxes."""
    own = images.labels_of != "images"
    names = {"class_names": list(images.class_names or ())} if own else {}
    about = {"dataset": images.name, "split": images.split, "resolution": list(images.size)}
    return about | names


def resolutions(config: Config) -> list[tuple[int, int]]:
    """The training resolution and the config's others, without duplicates.

    >>> from rope_jax.config import resolve
    >>> raw = {"data": {"image_size": 8}, "eval": {"resolutions": [12, [8, 12]]}}
    >>> resolutions(resolve(raw))
    [(8, 8), (12, 12), (8, 12)]
    """
    sizes = map(image_pair, (config.data.image_size, *config.eval.resolutions))
    return list(dict.fromkeys(sizes))


def protocol(
    images: data.Images | data.Streamed, config: Config, windows: str | None = None
) -> str:
    """A description of the resizing of test images, of windows and of the evaluated weights.

    >>> protocol(data.load("digits", split="test"), Config())
    'whole image, ...; weights of the last step'

    Args:
        images: the test split.
        config: of the run.
        windows: `Backbone.window_rule` of the model.
    """
    weights = "averaged weights (EMA)" if config.averaged else "weights of the last step"
    return "; ".join(filter(None, (images.protocol, windows, rotation_rule(config.eval), weights)))


def rotation_rule(options: EvalConfig) -> str | None:
    """The rule of rotary schemes that an evaluation sets, in words; None if it sets none.

    >>> rotation_rule(EvalConfig(extend="ntk", log_scale=True))
    'rotations with extend=ntk and log_scale'
    """
    extend = None if options.extend is None else f"extend={options.extend}"
    found = [*filter(None, (extend, options.log_scale and "log_scale"))]
    return f"rotations with {' and '.join(found)}" if found else None


def rules(options: EvalConfig) -> dict[str, Any]:
    """The arguments of `at_resolution` in a config.

    >>> rules(EvalConfig(extend="ntk"))
    {'scale_windows': False, 'extend': 'ntk', 'log_scale': False}
    """
    return {name: getattr(options, name) for name in ("scale_windows", "extend", "log_scale")}


def protocols(setup: Setup) -> dict[str, Config]:
    """The protocols of a run's evaluation, each with the config for it.

    There is one for each crop, unless the images are in memory, where crops make no difference.
    """
    found: dict[str, Config] = {}
    options = setup.config.eval
    for frame in (options.frame, *options.frames):
        config = dataclasses.replace(setup.config, eval=dataclasses.replace(options, frame=frame))
        images = setup.held_out
        if frame != options.frame and not images.in_memory:
            images = dataclasses.replace(images, crop=frame)
        found.setdefault(protocol(images, config, setup.windows), config)
    return found


def planned_rows(setup: Setup) -> list[Row]:
    """Resolution, protocol and seed of each row that `evaluate_state` returns, in its order."""
    return [
        {"resolution": list(size), "protocol": how} | label
        for how, config in protocols(setup).items()
        for size in resolutions(config)
        for label in seeds.row_labels(config.all_seeds)
    ]


def evaluate_state(setup: Setup, state: State, *, signals: Signals) -> list[Row]:
    """Evaluates a training state at the resolutions of its config: rows of `results.json`."""
    apply, weights = applied(setup, state)
    rows = []
    for how, config in protocols(setup).items():
        for size in resolutions(config):
            images = load_split(config, "test", size)
            rows += evaluate_split(
                apply,
                weights,
                config,
                images,
                setup.mesh,
                how,
                task=setup.task,
                signals=signals,
            )
    return rows


def applied(setup: Setup, state: State) -> tuple[Apply, Any]:
    """A function (weights, images) -> outputs, for images of any size, and a state's weights."""
    config = setup.config
    params = state["ema" if config.averaged else "params"]
    rest = jax.device_put(setup.rest, replicated(setup.mesh))

    def apply(weights: Any, images: Array, **given: Array) -> Any:
        trained = nnx.merge(setup.graph, *weights)
        size, rule = images.shape[1:3], rules(config.eval)
        with use_mesh(setup.mesh):
            copy = at_resolution(trained, size, **rule, flags="--config.eval.")
            return copy(images, **given)

    return apply, (params, state.get("stats", {}), rest)


def at_resolution(
    model: nnx.Module,
    size: tuple[int, int],
    *,
    scale_windows: bool = False,
    rpb_shrink: str | None = None,
    extend: str | None = None,
    log_scale: bool = False,
    flags: str = "--",
) -> nnx.Module:
    """A copy of a model for images of another size; position tables are resized by their rule.

    >>> import rope_jax
    >>> model = rope_jax.create_model("vit_digits", position="ape", depth=1, width=16, heads=2)
    >>> copy = at_resolution(model, (16, 8))
    >>> model.position.embedding.shape, copy.position.embedding.shape
    ((16, 16), (32, 16))

    Args:
        model: not changed.
        size: (h, w) in pixels.
        scale_windows: for Swin, windows of 1/32 of the image (Heo et al., section 3.3).
        rpb_shrink: resizing of `rpb`'s tables to a smaller map, "bicubic" or "crop"; None for the
            model's own rule.
        extend: the rule of rotary schemes, "ntk" or "yarn(beta=8)", see
            `rope_jax.positions.extension`; None for the model's own.
        log_scale: whether logits of models with rotary schemes grow with the logarithm of the
            number of tokens.
        flags: how the flags begin that errors name.

    Raises:
        ConfigError: the model takes no images of that size, or an option does not suit it.
    """
    copy = nnx.clone(model)
    if rpb_shrink is not None:
        tables = [m for _, m in nnx.iter_modules(copy) if getattr(m, "shrink", None) is not None]
        if not tables:
            raise ConfigError(
                f"--rpb_shrink={rpb_shrink} is for models with the scheme rpb: leave it out"
            )
        for table in tables:
            table.shrink = rpb_shrink
    if scale_windows:
        try:
            copy.scale_windows()
        except ValueError as error:
            raise ConfigError(f"{flags}{error}") from error
    with blame(f"{flags}{'log_scale' if extend is None else 'extend'}"):
        schemes = extend_rotations(copy, extend, log_scale)
    with blame(f"{flags}resolutions"):
        copy.resize(size)
    resized = any(scheme.stage.grid != scheme.trained.grid for scheme in schemes)
    if resized and not any(scheme.extends for scheme in schemes):
        warn(
            f"WARNING: at {size[0]}x{size[1]} pixels, queries see as many patches as in training, "
            "at the same steps: extend and log_scale change nothing there"
        )
    return copy


def evaluate_split(
    apply: Apply,
    weights: Any,
    config: Config,
    images: data.Images | data.Streamed,
    mesh: Mesh,
    how: str,
    *,
    task: ModuleType = classification,
    signals: Signals | None = None,
) -> list[Row]:
    """Evaluates on the test split of a run's data, loaded at one resolution: one row per seed.

    >>> import jax.numpy as jnp
    >>> from rope_jax.system.sharding import make_mesh
    >>> apply = lambda weights, images: images.mean((1, 2)) @ weights
    >>> images = load_split(Config(), "test", (8, 8))
    >>> weights, mesh = jnp.zeros((3, 10)), make_mesh()
    >>> (row,) = evaluate_split(apply, weights, Config(), images, mesh, "whole image")
    >>> row["dataset"], row["resolution"], row["count"], row["protocol"]
    ('digits', [8, 8], 360, 'whole image')

    `how` is the rows' protocol and `task` that of the model; `signals` may stop the evaluation.
    """
    signals = signals or Signals()
    rows = accuracies(
        apply,
        weights,
        images,
        mean=config.data.mean,
        std=config.data.std,
        batch_size=config.eval.batch_size,
        mesh=mesh,
        task=task,
        config=config,
        poll=lambda images: signals(),
        waiting=signals.waiting,
    )
    labels = seeds.row_labels(config.all_seeds)
    return [row | {"protocol": how} | label for row, label in zip(rows, labels, strict=True)]


def on_all_devices(model: nnx.Module, mesh: Mesh) -> tuple[Apply, Any]:
    """A model as a function (weights, images) -> outputs, and its weights on every device."""
    graph, state = nnx.split(model)

    def apply(state: Any, images: Array, **given: Array) -> Any:
        with use_mesh(mesh):
            return nnx.merge(graph, state)(images, **given)

    return apply, jax.device_put(state, replicated(mesh))


def evaluate_files(
    model: nnx.Module,
    found: data.EvaluationSet,
    size: tuple[int, int],
    preprocessing: Preprocessing,
    mesh: Mesh,
    *,
    batch_size: int,
    windows: str | None = None,
    poll: Callable[[int], None] = lambda images: None,
) -> Row:
    """Evaluates a model on image files at one resolution: a row with its preprocessing.

    >>> import pathlib, tempfile
    >>> import rope_jax
    >>> from PIL import Image
    >>> from rope_jax.system.sharding import make_mesh
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> (folder / "cat").mkdir()
    >>> Image.new("RGB", (10, 10)).save(folder / "cat" / "1.png")
    >>> model = rope_jax.create_model("vit_digits", depth=1, width=16, heads=2, num_classes=1)
    >>> found = data.EvaluationSet("folder", folder)
    >>> row = evaluate_files(model, found, (8, 8), Preprocessing(), make_mesh(), batch_size=1)
    >>> row["top1"], row["count"]
    (1.0, 1)

    Args:
        model: from `create_model`.
        found: the image files and their labels.
        size: (h, w) in pixels.
        preprocessing: resizing, crop and normalisation.
        mesh: the devices.
        batch_size: images per step on all devices together.
        windows: `Backbone.window_rule` of the model, for the protocol.
        poll: called after each step with the number of images so far.
    """
    crop, interpolation = preprocessing.crop, preprocessing.interpolation
    apply, weights = on_all_devices(model, mesh)
    (row,) = accuracies(
        apply,
        weights,
        data.Streamed(found, size, preprocessing.crop_notation),
        mean=preprocessing.mean,
        std=preprocessing.std,
        batch_size=batch_size,
        mesh=mesh,
        poll=poll,
    )
    height, width = (preprocessing.resized(side) for side in size)
    square = size[0] == size[1]
    resized = (
        f"a short side of {height} pixels" if square else f"at least {height} x {width} pixels"
    )
    resizing = (
        f"whole image resized to {resized} ({interpolation}, antialiased), centre cropped (ratio "
        f"{crop:g})"
    )
    row["protocol"] = "; ".join(filter(None, (resizing, windows, found.note)))
    return row | dataclasses.asdict(preprocessing)
