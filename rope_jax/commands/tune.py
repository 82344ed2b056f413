"""Measures which kernels are fastest for a model on this GPU, and stores the choices.

    python -m rope_jax.tune --model=swin_t --position=axial_rope --batch=128 --train

Calls without a named implementation then use the choices, in every program of this user on this
kind of GPU with this version of jax. Training with `--config.kernels=tuned` measures by itself.
"""

import argparse
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from rope_jax.commands.arguments import Argument, CommandParser, command_parser
from rope_jax.config import ConfigError, blame, model_overrides
from rope_jax.models.registry import find_model
from rope_jax.names.options import Count, Positive
from rope_jax.names.text import format_table, image_pair
from rope_jax.system.files import write_file
from rope_jax.weights.create import create_model
from rope_jax_kernels import Call, Choices, record, tune
from rope_jax_kernels.tuning.choices import Measured
from rope_jax_kernels.tuning.measure import nothing_to_tune, on_one_device


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints the table, and saves the choices."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    with parser.one_line_errors():
        calls = trace_calls(args)
        if reason := nothing_to_tune():
            print(reason)
            return
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
        choices = tune(calls, seconds=args.seconds)
        print(table(choices))
        if args.out is None:
            try:
                path = choices.remember()
            except RuntimeError as error:  # a user without a home folder
                raise ConfigError(f"{error}: name a file with --out") from error
        else:
            path = args.out
            write_file(path, choices.to_json())
        print(f"\nchoices: {path}")


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = command_parser("rope_jax.tune", __doc__)
    add = parser.add_argument
    add("--model", required=True, help="one of rope_jax.list_models()")
    add("--position", help="positional scheme; default: the model's own")
    add("--batch", type=Argument(Count), default=128, help="images on one GPU")
    add("--resolution", help="224 or 224x320; default: the model's own")
    add("--options", default="", help="overrides of the model's options: depth=6,window_size=8")
    add(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="compute dtype",
    )
    add("--train", action="store_true", help="measure training steps, not evaluation")
    add("--seconds", type=Argument(Positive), default=60.0, help="for everything")
    add("--out", type=pathlib.Path, help="file for the choices; default: the cache folder")
    return parser


def trace_calls(args: argparse.Namespace) -> list[Call]:
    """Traces the kernel calls in one step of the model on one GPU, with shapes only."""
    with blame("--model, --position, --options or --resolution"):
        size = image_pair(args.resolution or find_model(args.model).image_size)
        options = {"dtype": jnp.dtype(args.dtype), **model_overrides(args.options)}

        def create() -> nnx.Module:
            return create_model(args.model, position=args.position, image_size=size, **options)

        graph, params, rest = nnx.split(nnx.eval_shape(create), nnx.Param, ...)

    def loss(params: nnx.State, rest: nnx.State, images: jax.Array) -> jax.Array:
        key = jax.random.key(0) if args.train else None
        logits = nnx.merge(graph, params, rest)(images, train=args.train, key=key)
        return logits.astype(jnp.float32).sum()

    step: Callable = jax.grad(loss) if args.train else loss
    images = jax.ShapeDtypeStruct((args.batch, *size, 3), jnp.float32)
    with record() as calls, on_one_device():
        jax.eval_shape(step, params, rest, images)
    return calls


def table(choices: Choices) -> str:
    """A block of lines for each measured call: candidates with microseconds, choice and gain."""
    blocks = []
    header = ("candidate", "microseconds", "gain", "")
    for key, directions in choices.calls.items():
        for direction, measured in directions.items():
            times = sorted(measured.microseconds.items(), key=lambda item: item[1])
            rows = [_row(measured, name, microseconds) for name, microseconds in times]
            rows += [(name, "-", "-", reason) for name, reason in measured.left_out.items()]
            blocks.append(f"{key}, {direction}\n{format_table(header, rows)}")
    return "\n\n".join(blocks) or "no call has more than one implementation here"


def _row(measured: Measured, name: str, microseconds: float) -> tuple[str, str, str, str]:
    """A candidate, its time, its gain against the default, and whether it is chosen."""
    default = measured.microseconds.get(measured.default)
    gain = "-" if default is None else f"{default / microseconds:.2f}x"
    marks = {"choice": measured.choice.name, "default": measured.default}
    mark = ", ".join(word for word, marked in marks.items() if marked == name)
    return name, f"{microseconds:.1f}", gain, mark
