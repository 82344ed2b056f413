"""The command that lists the schemes."""

import pytest

from rope_jax.commands.positions import count_parameters, main, rows
from rope_jax.positions import list_positions
from rope_jax.positions.scheme import SCHEMES


def test_the_command_prints_a_row_without_gaps_of_every_scheme(capsys):
    row = (
        "rpb",
        "logits + B[q - k]",
        "added to the attention logits",
        "interpolated: its table is resampled",
        "Liu et al., arXiv 2103.14030, eq. 4",
    )
    assert row in rows()
    assert all(cell and "|" not in cell for row in rows() for cell in row)
    main([])
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert max(map(len, lines)) <= 100
    names = [line.split("(")[0].split(":")[0] for line in lines if not line.startswith(" ")]
    assert names == list_positions()
    words = " ".join(output.split())
    assert all(" ".join(cell.split()) in words for row in rows() for cell in row)


@pytest.mark.parametrize(
    ("model", "position", "count"),
    [
        ("deit3_s16", "ape", "75,264"),  # 196 * 384
        ("deit3_s16", "rope_mixed", "4,608"),  # methods of Heo et al.: 384 per layer
        ("swin_t", "rpb", "23,322"),
        ("swin_t", "irpe", "refused"),
    ],
)
def test_parameters_of_a_scheme_in_a_model(model, position, count):
    assert count_parameters(model, position) == count


def test_unknown_models_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--model=deit9"])
    assert "unknown model 'deit9'; the nearest are 'deit" in capsys.readouterr().err


def test_a_custom_scheme_has_no_inherited_source(monkeypatch):
    class CustomRope(SCHEMES["rope2d"]):
        equation = "theta = x f"

    monkeypatch.setitem(SCHEMES, "mine", CustomRope)
    (row,) = [row for row in rows() if row[0] == "mine"]
    assert row[1:3] == ("theta = x f", "rotates queries and keys")
    assert row[-1] == ""
