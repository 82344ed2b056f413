import contextlib
import csv
import io
import itertools
import os
import re
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from rope_jax.data import decode_image
from rope_jax.data.images import decode
from rope_jax.data.images.decode import MAX_SCANS, EncodedImage

GIGABYTE = 10**9
ORIENTATION = 0x0112


def encode(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def exif(value, tag=ORIENTATION):
    block = Image.Exif()
    block[tag] = value
    return block


def picture(mode="RGB", height=5, width=7):
    """A deterministic picture without symmetry."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(noise, "CMYK" if mode == "CMYK" else "RGBA").convert(mode)


def chunk(kind, content):
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png(width, height, depth, colour, rows, *extra):
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            *extra,
            chunk(b"IDAT", zlib.compress(rows, 9)),
            chunk(b"IEND", b""),
        ]
    )


def black_png(width, height):
    return png(width, height, 1, 0, bytes(height * (1 + (width + 7) // 8)))


def over_white(colour, alpha):
    return np.rint((colour * alpha.astype(float) + 255.0 * (255 - alpha)) / 255).astype(np.uint8)


LOSSLESS = [
    *itertools.product(("RGB", "L", "1"), ("PNG", "WEBP", "BMP", "TIFF")),
    *(("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "TIFF")),
]


@pytest.mark.parametrize(("mode", "kind"), LOSSLESS)
def test_lossless_pixels_are_composed_over_white(mode, kind):
    rgba = np.asarray(picture(mode).convert("RGBA"))
    options = {"lossless": True, "exact": True, "compression": "tiff_lzw"}
    pixels = decode_image(encode(picture(mode), kind, **options))
    np.testing.assert_array_equal(pixels, over_white(rgba[..., :3], rgba[..., 3:]))
    assert (pixels.dtype, pixels.flags.carray) == (np.uint8, True)  # contiguous and writeable


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_modes_equal_pillow(mode, progressive):
    data = encode(picture(mode, 40, 24), "JPEG", progressive=progressive)
    image = Image.open(io.BytesIO(data))
    assert image.mode == mode
    np.testing.assert_array_equal(decode_image(data), np.asarray(image.convert("RGB")))


def palette(**options):
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    image.putdata([0, 1, 2])
    return encode(image, **options)


WHITE, DEEP_GREY = [255] * 3, np.array([[0, 257, 128, 129, 32768, 65535]], np.uint16)


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        (palette(), [[10, 20, 30], [40, 50, 60], [70, 80, 90]]),
        (palette(transparency=1), [[10, 20, 30], WHITE, [70, 80, 90]]),
        (palette(transparency=bytes([255, 100, 0])), [[10, 20, 30], [171, 175, 179], WHITE]),
        # Colour keys of each depth.
        (
            png(4, 1, 2, 0, b"\0\x1b", chunk(b"tRNS", b"\0\1")),
            [[0] * 3, WHITE, [170] * 3, WHITE],  # 0, 1, 2, 3
        ),
        (
            png(2, 1, 16, 0, struct.pack(">xHH", 257, 258), chunk(b"tRNS", b"\1\2")),
            [[1] * 3, WHITE],
        ),
        (
            png(
                *(2, 1, 16, 2, struct.pack(">x6H", 512, 768, 1024, 512, 768, 2048)),
                chunk(b"tRNS", struct.pack(">3H", 512, 768, 1024)),
            ),
            [WHITE, [2, 3, 8]],
        ),
        *(  # divided by 257
            (encode(Image.fromarray(DEEP_GREY), kind), [[k] * 3 for k in (0, 1, 0, 1, 128, 255)])
            for kind in ("PNG", "TIFF")
        ),
    ],
)
def test_palettes_colour_keys_and_16_bit_grey(data, pixels):
    assert decode_image(data)[0].tolist() == pixels


def xmp(form):
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", f"<x:xmpmeta xmlns:x='adobe:ns:meta/'>{form}</x:xmpmeta>")
    return info


# 0 and 9 do not exist.
ORIENTATIONS = [*(("PNG", number) for number in range(10)), ("JPEG", 6), ("WEBP", 7), ("TIFF", 8)]
FORMS = ('tiff:Orientation="6"', "<tiff:Orientation>8</tiff:Orientation>")


@pytest.mark.parametrize(
    "options",
    [
        *({"kind": kind, "exif": exif(number)} for kind, number in ORIENTATIONS),
        *(  # XMP, of a PNG without an orientation in Exif
            {"pnginfo": xmp(form), "exif": block}
            for form in FORMS
            for block in (exif("a camera", 0x0110), exif(1), exif(3))
        ),
    ],
)
def test_orientation_in_exif_or_xmp(options):
    data = encode(picture("RGB", 16, 24), lossless=True, **options)
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert EncodedImage(data).size == image.size
    np.testing.assert_array_equal(decode_image(data), np.asarray(image))


def exif_block(order, kind, code):
    entry = struct.pack(order + "HHI", ORIENTATION, kind, 1)
    entry += struct.pack(order + code, 6).ljust(4, b"\0")
    return {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "HIH", 42, 8, 1) + entry


@pytest.mark.parametrize(
    ("block", "turns"),
    [(exif_block(order, *kind), -1) for order in "<>" for kind in ((3, "H"), (4, "I"))]
    + [(b"", 0), (b"II*\0\xff\xff\xff\xff", 0), (b"MM\0*\0\0\0\x08\xff\xff", 0), (b"garbage", 0)],
)
def test_exif_byte_orders_and_types_and_damage(block, turns):
    """Also after the pixels, where Pillow would find it only after decoding."""
    image = picture()
    data = encode(image).replace(chunk(b"IEND", b""), chunk(b"eXIf", block) + chunk(b"IEND", b""))
    np.testing.assert_array_equal(decode_image(data), np.rot90(np.asarray(image), turns))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_animations_show_their_first_frame(kind):
    second = ImageOps.invert(picture())
    data = encode(picture(), kind, save_all=True, append_images=[second], lossless=True)
    np.testing.assert_array_equal(decode_image(data), np.asarray(picture()))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"RIFF\0\0\0\0WEBP",
        b"\xff\xd8\xff" * 1000,
        *(encode(picture("RGB", 32, 32), kind) for kind in ("GIF", "ICO", "PPM")),
    ],
)
def test_other_formats_are_refused(data):
    with pytest.raises(ValueError, match=r"not a JPEG, PNG, WebP, BMP or TIFF|cannot be"):
        decode_image(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
def test_truncated_and_corrupted_files_do_not_crash(kind):
    data = encode(picture("RGB", 40, 40), kind, exif=exif(5), progressive=kind == "JPEG")
    for length in range(0, len(data) - 20, 7):  # only the format's last bytes may be missing
        with pytest.raises(ValueError, match=r"."):
            decode_image(data[:length])
    rng = np.random.default_rng(1)
    for _ in range(200):
        broken = np.frombuffer(data, np.uint8).copy()
        broken[rng.integers(len(data), size=3)] = rng.integers(256, size=3)
        with contextlib.suppress(ValueError):
            assert decode_image(broken.tobytes()).ndim == 3


def add_bombs(data):
    """Adds hundreds of chunks of metadata to a PNG."""
    text = zlib.compress(bytes(50_000_000), 9)
    bombs = [
        chunk(b"zTXt", b"a\0\0" + text),
        chunk(b"iTXt", b"a\0\1\0\0\0" + text),
        chunk(b"iCCP", b"a\0\0" + text),
        chunk(b"tEXt", b"interlace\0001"),  # Pillow would decode with settings of these names
        chunk(b"tEXt", b"transparency\0001"),
        chunk(b"tEXt", b"a\0b")[:-1] + b"?",  # a wrong checksum
    ]
    header_end = 8 + 25
    return data[:header_end] + b"".join(bombs * 100) + data[header_end:]


def tiff(entries, order="<"):
    """A file of 8 x 8 grey pixels with other tags: type, number of values, value or position."""
    tags = {256: 8, 257: 8, 258: 8, 262: 1, 273: 8, 278: 8, 279: 64}
    tags = {tag: (4, 1, value) for tag, value in tags.items()} | entries
    rows = [struct.pack(order + "HHII", tag, *tags[tag]) for tag in sorted(tags)]
    start = struct.pack(order + "2sHI", b"MM" if order == ">" else b"II", 42, 72)
    return b"".join([start, bytes(range(64)), struct.pack(order + "H", len(rows)), *rows, bytes(4)])


def tiff_with_tags(order):
    """Each tag points at the same megabyte, which would be read for each."""
    return tiff(dict.fromkeys(range(40000, 40200), (7, 1000000, 8)), order) + bytes(1_000_000)


@pytest.mark.parametrize(
    ("make", "plain", "limit"),
    [
        # Not one of them is inflated, which would take 50 MB.
        (lambda: add_bombs(encode(picture())), encode(picture()), 1_000_000),
        (lambda: tiff_with_tags("<"), tiff({}), 5_000_000),
        (lambda: tiff_with_tags(">"), tiff({}), 5_000_000),
    ],
    ids=["png", "tiff", "big-endian tiff"],
)
def test_metadata_is_ignored(make, plain, limit):
    data, expected = make(), decode_image(plain)
    tracemalloc.start()
    try:
        np.testing.assert_array_equal(decode_image(data), expected)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tiff({322: (4, 1, 40_000), 323: (4, 1, 40_000)}), "tiles of 1,600,000,000 pixels"),
        (tiff({273: (4, 1_000_000, 8)}) + bytes(4_000_000), "unknown data organization"),
        *(
            (b"II*\0" + bytes([k, 0, 0, 0]) + tiff({})[8:], "cannot be decoded")
            for k in range(1, 8)
        ),
        (encode(picture("L").convert("F"), "TIFF"), "12 or 32 bits"),
        (encode(picture("L").convert("I"), "TIFF"), "12 or 32 bits"),
    ],
)
def test_tiff_with_unsupported_values_or_large_tables_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        decode_image(data)


def test_global_settings_of_pillow_are_ignored(monkeypatch):
    data = encode(picture("RGB", 40, 40))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(ValueError, match="too many"):
        decode_image(black_png(30_000, 30_000))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2_000)
    assert decode_image(data).shape == (40, 40, 3)


def huge_webp():
    """Its header has a canvas of 16,384 x 16,384."""
    data = encode(picture("RGBA"), "WEBP", exif=b"Exif\0\0II")
    return data[:24] + b"\xff\x3f\0\xff\x3f\0" + data[30:]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (black_png(12_000, 12_000), "12000 x 12000 .* 64,000,000"),
        (black_png(70_000, 1), "65,535 a side"),
        (huge_webp(), "WebP image cannot be decoded"),
    ],
    ids=["pixels", "side", "webp"],
)
def test_sizes_are_refused_from_the_header(data, message, monkeypatch):
    with pytest.raises(ValueError, match=message):
        decode_image(data)
    monkeypatch.setattr(decode, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match=f"{len(data):,} bytes; allowed are 10"):
        decode_image(data)


def test_scans_are_limited():
    data = encode(picture("L", 64, 64), "JPEG", progressive=True)
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(ValueError, match=f"more than {MAX_SCANS} scans"):
        decode_image(data[:-2] + last_scan * MAX_SCANS + data[-2:])
    # Data after the picture are not counted.
    np.testing.assert_array_equal(decode_image(data + last_scan * MAX_SCANS), decode_image(data))


# VmHWM rather than ru_maxrss, which a child process inherits from the one that started it.
PEAKS = """
import re, sys, warnings
from rope_jax.data import decode_image
from rope_jax.data.images.crops import centre, crop_file
from rope_jax.data.images.decode import EncodedImage
warnings.simplefilter("error")
cropped = lambda data: crop_file(EncodedImage(data), centre, (490, 490))
for path in sys.argv[1:]:
    try:
        decode = cropped if "strip" in path else decode_image
        print(decode(open(path, "rb").read()).shape)
    except ValueError as error:
        print("refused", error)
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
@pytest.mark.process
def test_peak_memory_of_a_long_strip_of_bombs_and_of_the_largest_images(tmp_path):
    """Both the file of the strip and what it is resized to, 32901 x 490, are just allowed."""
    # The costliest of each kind: libjpeg holds all coefficients of an image in scans, libwebp
    # several copies of its canvas.
    flat, clear = Image.new("RGB", (8_000, 8_000), 9), Image.new("RGBA", (5_600, 5_600), 9)
    files = {
        "strip.png": encode(Image.new("L", (65_535, 976), 100), "PNG", compress_level=1),
        "bomb.png": black_png(30_000, 30_000),
        "large.jpg": encode(flat, "JPEG", progressive=True, subsampling=0),
        "large.webp": encode(clear, "WEBP", method=0),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-c", PEAKS, *(str(tmp_path / name) for name in files)]
    lines = subprocess.check_output(command, text=True).splitlines()
    (strip, bomb, *large), peaks = lines[::2], [int(line) for line in lines[1::2]]
    assert [strip, *large] == ["(490, 490, 3)", "(8000, 8000, 3)", "(5600, 5600, 3)"]
    assert re.match(r"refused .*30000 x 30000 pixels are too many", bomb)
    assert peaks[0] < 7 * GIGABYTE // 10
    assert peaks[-1] < GIGABYTE


@pytest.mark.images("odd_images.tar")
def test_odd_images_decode_like_pillow(tmp_path):
    with tarfile.open(Path(os.environ["ROPE_JAX_TEST_IMAGES"], "odd_images.tar")) as archive:
        archive.extractall(tmp_path, filter="data")
    with open(tmp_path / "expected.csv", newline="") as file:
        rows = [(row[0], row[2]) for row in csv.reader(file, delimiter="|")][1:]
    decoded = 0
    for name, result in rows:
        data = (tmp_path / name).read_bytes()
        if result != "ok" or name.endswith((".gif", ".tga", ".j2k")):
            with pytest.raises(ValueError, match=r"."):
                decode_image(data)
            continue
        with warnings.catch_warnings():  # Pillow's own, about damaged Exif
            warnings.simplefilter("ignore")
            image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        if image.mode.startswith("I"):
            expected = np.rint(np.asarray(image) / 257)[:, :, None]
        else:
            white = Image.new("RGBA", image.size, "white")
            expected = np.asarray(Image.alpha_composite(white, image.convert("RGBA")))[:, :, :3]
        assert EncodedImage(data).size == image.size
        difference = np.abs(decode_image(data).astype(int) - expected)
        if name == "pillow/i_trns.png":  # has a colour key, which Pillow ignores in 16 bits
            difference[decode_image(data) == 255] = 0
        assert difference.max() <= 1, name
        decoded += 1
    assert decoded > 50
