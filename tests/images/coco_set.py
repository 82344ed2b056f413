"""A small set in COCO's format, drawn by tests: coloured rectangles on black grounds."""

import json

import numpy as np
from PIL import Image

CATEGORIES = {3: "cat", 17: "dog", 90: "bird"}
COLOURS = {3: (255, 0, 0), 17: (0, 255, 0), 90: (0, 0, 255)}
# Rows and columns of the images of a split, by id, and the objects in each: category, x, y, width,
# height. Image 5 is empty, image 7 has a crowd only.
SIZES = {2: (48, 64), 5: (40, 40), 7: (60, 36), 11: (36, 72), 20: (64, 48), 30: (50, 50)}
OBJECTS = {
    2: [(3, 4, 6, 20, 14), (90, 40, 20, 16, 24)],
    7: [(17, 2, 2, 30, 50)],
    11: [(17, 10, 8, 25, 20)],
    20: [(3, 8, 30, 24, 20), (3, 30, 4, 12, 12), (17, 0, 0, 8, 60)],
    30: [(90, 12, 12, 26, 26)],
}
CROWDS = {7: {0}, 20: {2}}  # of the objects of an image


def write_coco(folder, sizes=SIZES, objects=OBJECTS):
    """Writes both splits with the same images; returns the folder."""
    (folder / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        (folder / f"{split}2017").mkdir()
        for number, size in sizes.items():
            pixels = np.zeros((*size, 3), np.uint8)
            for category, x, y, w, h in objects.get(number, ()):
                pixels[y : y + h, x : x + w] = COLOURS[category]
            Image.fromarray(pixels).save(folder / f"{split}2017" / file_name(number), "PNG")
        write_annotations(folder, split, annotations(sizes, objects))
    return folder


def write_annotations(folder, split, content):
    (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))


def file_name(number):
    return f"{number:012}.jpg"


def annotations(sizes=SIZES, objects=OBJECTS):
    """The content of an annotation file, with images and categories in no particular order."""
    entries = []
    for number, boxes in objects.items():
        for place, (category, x, y, w, h) in enumerate(boxes):
            crowd = place in CROWDS.get(number, ())
            polygons = [[x, y, x + w, y, x + w, y + h, x, y + h]]
            entries.append(
                {
                    "id": 100 + len(entries),
                    "image_id": number,
                    "category_id": category,
                    "bbox": [x, y, w, h],
                    "area": w * h * 0.75,
                    "iscrowd": int(crowd),
                    "segmentation": run_lengths(sizes[number], x, y, w, h) if crowd else polygons,
                }
            )
    images = [
        {"id": number, "file_name": file_name(number), "height": height, "width": width}
        for number, (height, width) in reversed(sizes.items())
    ]
    categories = [{"id": k, "name": name} for k, name in reversed(CATEGORIES.items())]
    return {"info": {}, "images": images, "annotations": entries, "categories": categories}


def run_lengths(size, x, y, w, h):
    """A rectangle as COCO's crowds have it: runs down the columns, of zeros first."""
    height, width = size
    between = [h, height - h] * (w - 1) + [h]
    return {
        "size": [height, width],
        "counts": [x * height + y, *between, height * (width - x - w + 1) - y - h],
    }
