"""Accuracy on test splits and ImageNet variants, at any resolution."""

import dataclasses
import math
import pathlib
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from rope_jax.config import Config, ConfigError, blame
from rope_jax.config.settings import EvalConfig
from rope_jax.evaluate.results import Row
from rope_jax.positions.extension import extend_rotations
from rope_jax.system.files import warn
from rope_jax.system.sharding import make_mesh, replicate, use_mesh
from rope_jax.tasks import find_task, seeds
from rope_jax.tasks.evaluator import Apply, Evaluator, weights_rule
from rope_jax.training.setup import Setup, State, load_split
from rope_jax.training.signals import Signals


def rotation_rule(options: EvalConfig) -> str | None:
    """The rule of rotary schemes that an evaluation sets, in words; None if it sets none.

    >>> rotation_rule(EvalConfig(extend="ntk", log_scale=True))
    'rotations with extend=ntk and log_scale'
    """
    extend = None if options.extend is None else f"extend={options.extend}"
    changes = [*filter(None, (extend, options.log_scale and "log_scale"))]
    return f"rotations with {' and '.join(changes)}" if changes else None


def rules(options: EvalConfig) -> dict[str, Any]:
    """The arguments of `at_resolution` in a config.

    >>> rules(EvalConfig(extend="ntk"))
    {'scale_windows': False, 'extend': 'ntk', 'log_scale': False}
    """
    return {name: getattr(options, name) for name in ("scale_windows", "extend", "log_scale")}


def protocols(setup: Setup) -> dict[str, Config]:
    """The protocols of a run's evaluation, each with the config for it.

    A protocol describes the resizing of test images, windows, rotations and the evaluated weights.
    There is one for each crop, unless the images are in memory, where crops make no difference.
    """
    configs: dict[str, Config] = {}
    options = setup.config.eval
    shared = (setup.windows, rotation_rule(options), weights_rule(setup.config.averaged))
    for frame in (options.frame, *options.frames):
        config = dataclasses.replace(setup.config, eval=dataclasses.replace(options, frame=frame))
        images = setup.held_out
        if frame != options.frame and not images.in_memory:
            images = dataclasses.replace(images, crop=frame)
        configs.setdefault("; ".join(filter(None, (images.protocol, *shared))), config)
    return configs


def planned_rows(setup: Setup) -> list[Row]:
    """Resolution, protocol, data and seed of each row of `evaluate_state`, in its order."""
    images = {"data": setup.fingerprint[setup.held_out.split]}
    return [
        {"resolution": list(size), "protocol": protocol} | images | label
        for protocol, config in protocols(setup).items()
        for size in config.test_sizes
        for label in seeds.row_labels(config.all_seeds)
    ]


def evaluate_state(setup: Setup, state: State, *, signals: Signals) -> list[Row]:
    """Evaluates a training state at the resolutions of its config: rows of `results.json`."""
    poll = lambda images: signals()
    evaluator = dataclasses.replace(
        state_evaluator(setup, state), poll=poll, waiting=signals.waiting
    )
    scores = [
        score
        for config in protocols(setup).values()
        for size in config.test_sizes
        for score in evaluator.score(load_split(config, "test", size))
    ]
    return [score | row for score, row in zip(scores, planned_rows(setup), strict=True)]


def state_evaluator(setup: Setup, state: State) -> Evaluator:
    """The evaluation of a training state on images of any size."""
    config = setup.config
    params = state["ema" if config.averaged else "params"]
    rest = jax.device_put(setup.rest, replicate(setup.mesh))
    return Evaluator(
        at_any_resolution(setup.graph, setup.mesh, flags="--config.eval.", **rules(config.eval)),
        (params, state.get("stats", {}), rest),
        setup.task,
        mean=config.data.mean,
        std=config.data.std,
        batch_size=config.eval.batch_size,
        mesh=setup.mesh,
        config=config,
    )


def model_evaluator(model: nnx.Module, config: Config) -> Evaluator:
    """The evaluation of a run's model on images of any size."""
    graph, *weights = nnx.split(model)
    mesh = make_mesh()
    return Evaluator(
        at_any_resolution(graph, mesh),
        jax.device_put(weights, replicate(mesh)),
        find_task(model),
        mean=config.data.mean,
        std=config.data.std,
        batch_size=config.eval.batch_size,
        mesh=mesh,
        config=config,
    )


def at_any_resolution(graph: nnx.GraphDef, mesh: Mesh, **options: Any) -> Apply:
    """A model as a function (weights, images) -> outputs, for images of any size.

    Args:
        graph: of the model; the weights are the other parts from `nnx.split`.
        mesh: the devices.
        **options: of `at_resolution`.
    """

    def apply(weights: Any, images: Array, **inputs: Array) -> Any:
        model = nnx.merge(graph, *weights)
        with use_mesh(mesh):
            return at_resolution(model, images.shape[1:3], **options)(images, **inputs)

    return apply


def draw_predictions(setup: Setup, state: State, path: pathlib.Path, *, count: int = 2) -> None:
    """Writes a picture of predictions for the first test images of a run.

    They are shown at the training resolution and at the largest. Of several seeds, the first one
    predicts.

    Args:
        setup: of a run whose task has a `picture`.
        state: its state.
        path: of the PNG.
        count: of images at each resolution.
    """
    config, images, evaluator = setup.config, setup.held_out, state_evaluator(setup, state)
    weights = seeds.take(evaluator.weights, config.seeds)
    evaluator = dataclasses.replace(evaluator, weights=weights, config=config.single())
    sizes = config.test_sizes
    predictions = []
    for size in dict.fromkeys((sizes[0], max(sizes[1:] or sizes, key=math.prod))):
        predictions += setup.task.predict(evaluator, load_split(config, "test", size), count)
    setup.task.draw(predictions, images.class_names, images.classes, path)


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
        log_scale: True if logits of models with rotary schemes grow with the logarithm of the
            number of tokens.
        flags: prefix of the flags that errors name.

    Raises:
        ConfigError: the model takes no images of that size, or does not support an option.
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
