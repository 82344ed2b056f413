"""Prints the published weights: the model's name and position, accuracy, licence, where they are.

    rope_jax weights 'deit3*' --position=rope_mixed
    rope_jax weights --paper=heo

`create_model(MODEL, position=POSITION, pretrained=True)` takes the first of a model and position,
`pretrained="TAG"` the one with that tag.
"""

from rope_jax.commands.arguments import command_parser
from rope_jax.models.registry import name_here
from rope_jax.names.text import format_table
from rope_jax.weights import ReleasedWeights, list_weights

HEADER = ("model", "position", "tag", "pixels", "published, %", "licence", "where")


def scores(weights: ReleasedWeights) -> str:
    """The published results: resolution, score if it is not top-1, and by whom.

    >>> scores(list_weights("deit3_s16", position="rope_mixed")[0])
    "224: 80.9, 384: 81.8 (authors' README), 224: 81.252 (timm results-imagenet.csv, crop 0.900)"
    """
    by: dict[str, list[str]] = {}
    for result in weights.published:
        ((name, value),) = [
            (name, value) for name, value in result.items() if name not in ("resolution", "by")
        ]
        size = f"{result['resolution']}: " if "resolution" in result else ""
        text = f"{size}{value}{'' if name == 'top1' else f' {name}'}"
        by.setdefault(result["by"], []).append(text)
    return ", ".join(f"{', '.join(texts)} ({who})" for who, texts in by.items())


def rows(listed: list[ReleasedWeights]) -> list[tuple[str, ...]]:
    """A row of `HEADER` for each."""
    return [
        (
            weights.model,
            weights.position,
            weights.tag,
            "x".join(map(str, weights.description.image_size)),
            scores(weights),
            weights.licence or "",
            weights.where,
        )
        for weights in listed
    ]


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = command_parser("rope_jax.commands.weights", __doc__)
    add = parser.add_argument
    add("pattern", nargs="?", default="*", help="of names of models, with *, ? and [...]")
    add("--position", help="of the models")
    add("--paper", choices=("heo", "thesis"), help="those that serve rows of its tables")
    asked = parser.parse_args(arguments)
    with parser.one_line_errors():
        listed = list_weights(asked.pattern, position=asked.position, paper=asked.paper)
    if not listed:
        positions = ", ".join(dict.fromkeys(w.position for w in list_weights(asked.pattern)))
        hint = name_here(asked.pattern) or "without arguments, all are listed"
        hint = f"{asked.pattern} has some with {positions}" if positions else hint
        parser.error(f"no published weights match; {hint}")
    print(format_table(HEADER, rows(listed)))
