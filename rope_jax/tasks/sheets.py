"""Sheets of pictures: rows of panels with captions, and a legend."""

import colorsys
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from rope_jax.system.files import write_file

_GAP, _LINE = 12, 22  # pixels: between panels, of a line of text
_ENTRY = 150  # pixels: of a class in the legend
Colour = tuple[int, int, int]


class Panel(NamedTuple):
    """A picture and the line below it."""

    picture: Image.Image
    caption: str = ""


def draw_sheet(
    titles: Sequence[str],
    rows: Sequence[Sequence[Panel]],
    path: Path,
    legend: Sequence[tuple[str, Colour]] = (),
) -> None:
    """Writes a picture with rows of panels below titles, and a legend at its end.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "sheet.png")
    >>> draw_sheet(["sky"], [[Panel(Image.new("RGB", (64, 32), "blue"), "noon")]], path)
    >>> with Image.open(path) as sheet:
    ...     sheet.size
    (88, 88)

    Args:
        titles: of the columns.
        rows: a panel for each title.
        path: of the PNG.
        legend: names and their colours.
    """
    widths = [max(panel.picture.width for panel in column) for column in zip(*rows, strict=True)]
    lefts = [_GAP + sum(widths[:k]) + k * _GAP for k in range(len(widths))]
    width = lefts[-1] + widths[-1] + _GAP
    across = max(1, width // _ENTRY)
    heights = [max(panel.picture.height for panel in row) for row in rows]
    height = _LINE + sum(heights) + len(rows) * _LINE + _GAP + -(-len(legend) // across) * _LINE
    sheet = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(sheet), text_font()

    def write(x: int, y: int, text: str) -> None:
        pen.text((x, y), text, fill="black", font=font)

    for left, title in zip(lefts, titles, strict=True):
        write(left, 2, title)
    top = _LINE
    for row, high in zip(rows, heights, strict=True):
        for left, panel in zip(lefts, row, strict=True):
            sheet.paste(panel.picture, (left, top))
            write(left, top + high + 1, panel.caption)
        top += high + _LINE
    for place, (name, colour) in enumerate(legend):
        x, y = _GAP + place % across * _ENTRY, top + _GAP // 2 + place // across * _LINE
        pen.rectangle((x, y + 3, x + 14, y + 17), fill=colour)
        write(x + 20, y + 1, name[:18])
    encoded = io.BytesIO()
    sheet.save(encoded, "PNG")
    write_file(path, encoded.getvalue())


def text_font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """The font of all text, 14 pixels high."""
    return ImageFont.load_default(14)


def enlarge(pixels: UInt8[np.ndarray, "H W 3"], width: int) -> Image.Image:
    """Enlarges pixels to a width, so that each is visible where they are few."""
    height = max(1, round(pixels.shape[0] * width / pixels.shape[1]))
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)


def class_colours(count: int) -> UInt8[np.ndarray, "K 3"]:
    """A colour of each class: light grey for the first, then hues far apart, light and dark.

    >>> class_colours(3).tolist()
    [[225, 225, 225], [224, 54, 54], [38, 73, 158]]
    """
    colours = [(0.0, 0.0, 225 / 255)]
    for k in range(count - 1):
        hue = k * 0.6180339887 % 1  # the golden section keeps neighbours apart
        colours.append((hue, 0.76, (0.88, 0.62)[k % 2]))
    return np.rint(255 * np.array([colorsys.hsv_to_rgb(*x) for x in colours])).astype(np.uint8)
