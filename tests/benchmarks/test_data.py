import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from benchmarks._runner import main


@pytest.mark.slow
def test_every_loader_is_measured(tmp_path):
    rng, archive, out = np.random.default_rng(0), tmp_path / "few.tar", tmp_path / "x.json"
    with tarfile.open(archive, "w") as tar:
        for i in range(33):
            path, pixels = tmp_path / f"{i}.jpg", rng.integers(0, 256, (40 + i, 60, 3), np.uint8)
            Image.fromarray(pixels).save(path)
            tar.add(path, path.name)
    assert main(["data", f"--images={archive}", "--rounds=2", f"--out={out}"]) == 0
    result = json.loads(out.read_text())
    rows = {name: (float(rate), float(share)) for name, rate, share in result["rows"]}
    assert rows["Pillow's decoding"][1] == 1
    sets = {"folder", "packed", "packed squares"}
    assert {f"{name}: resized_crop+flip" for name in sets} < set(rows)
    assert min(min(x) for x in rows.values()) > 0
    assert result["note"] == "33 photographs, to 224 px."
