from rope_jax.evaluate import results_table, rows_by_line

ROWS = [
    {
        "resolution": [size, size],
        "top1": top1,
        "top5": 1.0,
        "count": 360,
        "protocol": f"centre(crop={crop}) of each image; weights of the last step",
    }
    for crop, top1s in ((1.0, (0.5, 0.25)), (0.875, (0.75, 0.625)))
    for size, top1 in zip((8, 12), top1s, strict=True)
]


def test_rows_of_two_crops_are_told_apart():
    table = [line.split() for line in results_table(ROWS).splitlines()]
    assert [(line[0], line[-1]) for line in table] == [
        ("resolution", "protocol"),
        ("----------", "-" * len("centre(crop=0.875)")),
        ("8x8", "centre(crop=1.0)"),
        ("12x12", "centre(crop=1.0)"),
        ("8x8", "centre(crop=0.875)"),
        ("12x12", "centre(crop=0.875)"),
    ]
    assert rows_by_line("ape", ROWS) == {
        "ape, centre(crop=1.0)": ROWS[:2],
        "ape, centre(crop=0.875)": ROWS[2:],
    }


def test_rows_of_one_protocol_do_not_repeat_it():
    assert "protocol" not in results_table(ROWS[:2])
    assert rows_by_line("ape", ROWS[:2]) == {"ape": ROWS[:2]}


def test_seeds_and_crops_have_lines_of_their_own():
    rows = [row | {"seed": seed} for row in ROWS for seed in (0, 1)]
    lines = rows_by_line("ape", rows)
    assert len(lines) == 4
    assert [row["seed"] for row in lines["ape, seed 1, centre(crop=1.0)"]] == [1, 1]
    header, _, first, *_ = map(str.split, results_table(rows).splitlines())
    assert dict(zip(header, first, strict=True))["protocol"] == "centre(crop=1.0)"
