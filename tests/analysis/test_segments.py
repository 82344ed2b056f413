"""The picture of segmented images."""

import numpy as np

from rope_jax.analysis import plots
from rope_jax.analysis.segments import Segmented, class_colours, draw


def test_classes_have_colours_of_their_own():
    for count in (2, 11, 150):
        colours = class_colours(count)
        assert len(np.unique(colours, axis=0)) == count
    apart = np.abs(class_colours(11)[:, None].astype(int) - class_colours(11)).sum(-1)
    assert apart[~np.eye(11, dtype=bool)].min() > 30


def test_the_picture_shows_images_classes_and_predictions(tmp_path, monkeypatch):
    drawn, save = [], plots.save
    monkeypatch.setattr(
        plots, "save", lambda figure, path: drawn.append(figure) or save(figure, path)
    )
    rng = np.random.default_rng(0)
    found = [
        Segmented(
            rng.integers(0, 256, (*size, 3), dtype=np.uint8),
            rng.integers(0, 3, size, dtype=np.uint8),
            rng.integers(0, 3, size, dtype=np.uint8),
        )
        for size in ((8, 8), (8, 12))
    ]
    found[0].classes[:4] = 255
    path = draw(found, ["ground", "one", "two", "not there"], tmp_path / "picture.png")
    assert path.stat().st_size > 0
    panels = [axes.get_images()[0].get_array() for axes in drawn[0].axes]
    assert len(panels) == 6
    colours = class_colours(4)
    for row, one in enumerate(found):
        image, classes, predicted = panels[3 * row : 3 * row + 3]
        np.testing.assert_array_equal(image, one.image)
        np.testing.assert_array_equal(predicted, colours[one.predicted])
        known = one.classes != 255
        np.testing.assert_array_equal(classes[known], colours[one.classes[known]])
        assert not classes[~known].any()
    right = (found[0].classes == found[0].predicted)[4:].mean()
    assert drawn[0].axes[2].get_xlabel() == f"{100 * right:.1f} % of the pixels"
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["ground", "one", "two"]
