from benchmarks import peers

SECONDS = {
    ("rope_jax", "float32"): 0.4,
    ("rope_jax", "bfloat16"): 0.3,
    ("Equimo", "float32"): 0.5,
    ("Equimo", "bfloat16"): 0.6,
}


def test_times_are_relative_to_ours_in_the_same_dtype_and_to_float32(monkeypatch):
    models = lambda position, size, dtype: {name: (name, dtype) for name, _ in SECONDS}
    monkeypatch.setattr(peers._peers, "models", models)
    start = lambda model, form, batch, size: (lambda steps: SECONDS[model], 7_000_000, 10)
    monkeypatch.setattr(peers, "start", start)
    cases = peers.compare("ape", "forward", batch=2, size=16, turns=3)
    assert [peers.row(case)[2:] for case in cases] == [
        ["float32", "rope_jax", "400", "", "", "7"],
        ["float32", "Equimo", "500", "1.25 (1.25 to 1.25)", "", "7"],
        ["bfloat16", "rope_jax", "300", "", "0.75 (0.75 to 0.75)", "7"],
        ["bfloat16", "Equimo", "600", "2.00 (2.00 to 2.00)", "1.20 (1.20 to 1.20)", "7"],
    ]
