"""Decoding of untrusted image files to RGB pixels.

Attacks on decoders use the metadata (compressed text, text under names that Pillow's decoder takes
for its own settings, directories whose entries all point at the same megabytes). JPEG, PNG and TIFF
files are therefore reduced to the parts that encode pixels before Pillow reads them; the
orientation is read here. No global state is used: decoding is safe in threads and under any setting
of Pillow (for TIFF files, and from Pillow 13 on for WebP files, its own limit of pixels also
applies).
"""

import contextlib
import io
import re
from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

MAX_PIXELS = 64_000_000
# Half for decoders that hold several copies of the whole image: libwebp (canvas, previous frame,
# frame), libtiff (a strip or tile, of 16 bits) and libjpeg with CMYK in several scans.
MAX_PIXELS_COSTLY = 32_000_000
# Of a file, before it is read: two bytes per pixel, which no photograph of that size needs.
MAX_BYTES = 2 * MAX_PIXELS
# JPEG's own limit; Pillow keeps pointers per row: 64 million rows would cost a gigabyte.
MAX_SIDE = 65_535
# Progressive JPEGs have about 10. Every scan visits the whole image; an empty one has 20 bytes.
MAX_SCANS = 100

# Format -> the first bytes of its files.
_STARTS = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "WebP": rb"RIFF....WEBP",
    "BMP": rb"BM",
    "TIFF": rb"II\*\0|MM\0\*",
}
# Exif orientation -> the transposition that undoes it.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PIXEL_CHUNKS = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
# A PNG chunk of XMP, which its standard does not compress.
_XMP = b"iTXtXML:com.adobe.xmp\0\0"
# A JPEG marker with a length (or the end of the image).
_SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
# Comments, and all APPn but JFIF (0) and Adobe's colour transform (14).
_METADATA_SEGMENTS = {*range(0xE1, 0xEE), 0xEF, 0xFE}
# Of TIFF: sizes and formats, compression, strips, tiles, colours; the longest lists positions of
# tiles, which have 16 x 16 pixels at the least.
_PIXEL_TAGS = {*range(256, 260), 262, 266, 273, *range(277, 280), 284, 292, 293, 317, 320}
_PIXEL_TAGS |= {*range(322, 326), 338, 339, 347, *range(529, 533)}
_MAX_VALUES = MAX_PIXELS // 256


def decode_image(data: bytes) -> UInt8[np.ndarray, "H W 3"]:
    """Decodes a JPEG, PNG, WebP, BMP or TIFF file to RGB.

    The orientation is applied (of the first Exif block of the file; PNG: eXIf, or where it has none
    XMP; TIFF: its own). Alpha, palette transparency and colour keys are laid over white; 16-bit
    grey is divided by 257 and rounded, 16-bit colour keeps its high bytes; CMYK is converted
    without a colour profile; 1-bit, grey and palette images become RGB; animations and documents
    are reduced to their first frame or page. Colour profiles are ignored.

    >>> import io
    >>> file = io.BytesIO()
    >>> Image.new("L", (3, 2), 100).save(file, "PNG")
    >>> decode_image(file.getvalue())[0, 0].tolist()
    [100, 100, 100]

    Args:
        data: the bytes of the file.

    Returns:
        uint8 [H, W, 3], after orientation.

    Raises:
        ValueError: other formats, truncated or corrupt files, more than 128 million bytes, more
            than 64 million pixels (32 million of WebP, of TIFF, and of JPEG that is both CMYK and
            stored in several scans), a side over 65,535 pixels, more than 100 scans, TIFF with
            pixels of 12 or 32 bits; the message has the reason.
        MemoryError: there is too little memory.
    """
    return np.array(EncodedImage(data).picture())


class EncodedImage:
    """A file with an acceptable header; `picture` decodes it, once.

    Args:
        data: the bytes of the file.

    Raises:
        ValueError, MemoryError: as `decode_image`; damaged pixels are found when they are decoded.

    Attributes:
        size: (width, height) in pixels, after orientation.
        orientation: Exif's number, 1 to 8; 1 for images without a rotation.
    """

    def __init__(self, data: bytes):
        if len(data) > MAX_BYTES:
            raise ValueError(f"the image file has {len(data):,} bytes; allowed are {MAX_BYTES:,}")
        self._name = _format(data)
        with self._blame():
            self._image, self.orientation, limit = _open(data, self._name)
            width, height = self._image.size
            if width * height > limit or max(width, height) > MAX_SIDE:
                raise ValueError(
                    f"{width} x {height} pixels are too many; "
                    f"allowed are {limit:,} in all and {MAX_SIDE:,} a side"
                )
            if self._name == "PNG":
                _scale_colour_key(self._image, depth=data[24])
        self.size = (height, width) if self.orientation >= 5 else (width, height)

    def picture(self, *, reduce: int = 1) -> Image.Image:
        """The pixels of `decode_image` as a Pillow image of mode RGB.

        Args:
            reduce: 1, 2, 4 or 8. JPEG files are decoded to that fraction of their sides, rounded
                up, in the transform that the file is stored in; other files, and pictures with a
                rotation, keep their size.
        """
        with self._blame():
            image = self._image
            del self._image  # only the newest copy is kept
            if reduce > 1 and self.orientation == 1:
                image.draft(None, (image.width // reduce, image.height // reduce))
            image.load()
            if image.mode.startswith("I"):
                image = image.convert("I").point(_grey_levels(image), "L")
            elif image.has_transparency_data:
                image = image if image.mode in ("LA", "RGBA") else image.convert("RGBA")
                white = Image.new("RGB", image.size, "white")
                white.paste(image, mask=image)
                image = white
            if image.mode != "RGB":
                image = image.convert("RGB")
            return image.transpose(_TURNS[self.orientation]) if self.orientation > 1 else image

    @contextlib.contextmanager
    def _blame(self) -> Iterator[None]:
        try:
            yield
        except MemoryError:  # no fault of the file
            raise
        # Pillow raises OSError, SyntaxError, EOFError, struct.error, zlib.error and others.
        except Exception as error:
            raise ValueError(f"the {self._name} image cannot be decoded: {error}") from error


def _format(data: bytes) -> str:
    for name, start in _STARTS.items():
        if re.match(start, data, re.DOTALL):
            return name
    raise ValueError(f"not a JPEG, PNG, WebP, BMP or TIFF image: it starts with {data[:12]!r}")


def _open(data: bytes, name: str) -> tuple[ImageFile.ImageFile, int, int]:
    """Reads the header: the image, its orientation, and the largest number of pixels."""
    # The plugins are called directly: Image.open adds warnings and limits of global settings.
    if name == "PNG":
        data, exif, xmp = _reduce_png(data)
        return PngImageFile(io.BytesIO(data)), _orientation(exif, xmp), MAX_PIXELS
    if name == "JPEG":
        data, exif, scans = _reduce_jpeg(data)
        image = JpegImageFile(io.BytesIO(data))
        costly = image.mode == "CMYK" and scans > 1
        return image, _orientation(exif), MAX_PIXELS_COSTLY if costly else MAX_PIXELS
    if name == "BMP":
        return BmpImageFile(io.BytesIO(data)), 1, MAX_PIXELS
    if name == "TIFF":
        return _open_tiff(data), _orientation(data), MAX_PIXELS_COSTLY
    image = WebPImageFile(io.BytesIO(data))
    return image, _orientation(image.info.get("exif", b"")), MAX_PIXELS_COSTLY


def _reduce_png(data: bytes) -> tuple[bytes, bytes, bytes]:
    """The chunks that encode pixels, the Exif block, and XMP; the decoder detects damage."""
    kept, exif, xmp, at = [data[:8]], b"", b"", 8
    while at < len(data):
        kind, end = data[at + 4 : at + 8], at + 12 + int.from_bytes(data[at : at + 4])
        if kind in _PIXEL_CHUNKS or end > len(data):
            kept.append(data[at:end])
        elif kind == b"eXIf":
            exif = exif or data[at + 8 : end - 4]
        elif data.startswith(_XMP, at + 4):
            xmp = data[at + 8 : end - 4]
        if kind == b"IEND":
            break
        at = end
    return b"".join(kept), exif, xmp


def _reduce_jpeg(data: bytes) -> tuple[bytes, bytes, int]:
    """The file without metadata, its Exif block, and its number of scans.

    The decoder detects damage.
    """
    kept, exif, scans, at = [data[:2]], b"", 0, 2
    while (segment := _SEGMENT.search(data, at)) is not None:
        kind, body = data[segment.end() - 1], segment.end() + 2
        at = max(body, segment.end() + int.from_bytes(data[segment.end() : body]))
        if kind == 0xD9:  # end of image; a second picture or a film may follow
            break
        if kind == 0xDA:  # start of scan
            scans += 1
            if scans == 1:
                kept.append(data[segment.start() :])
            if scans > MAX_SCANS:
                raise ValueError(f"it has more than {MAX_SCANS} scans")
        elif kind == 0xE1 and not exif and data[body : body + 6] == b"Exif\0\0":
            exif = data[body:at]
        elif scans == 0 and kind not in _METADATA_SEGMENTS:
            kept.append(data[segment.start() : at])
    return b"".join(kept), exif, scans


def _open_tiff(data: bytes) -> TiffImageFile:
    """Opens the first page of a file, reduced to the tags of pixels."""
    order, entries = _directory(data)
    kept = [
        entry
        for tag, entry in sorted(entries.items())
        if tag in _PIXEL_TAGS and int.from_bytes(entry[4:8], order) <= _MAX_VALUES
    ]
    directory = b"".join([len(kept).to_bytes(2, order), *kept, bytes(4)])
    # Replaces a longer directory, but not the header, which must point to this one.
    start = max(8, int.from_bytes(data[4:8], order))
    header, tail = data[:4] + start.to_bytes(4, order), data[start + len(directory) :]
    image = TiffImageFile(io.BytesIO(b"".join([header, data[8:start], directory, tail])))
    tags = image.tag_v2
    if image.mode in ("I", "F") or 12 in tags.get(258, ()):
        raise ValueError("its values are of 12 or 32 bits, or signed: store 8 or 16 bits")
    if (pixels := tags.get(322, 0) * tags.get(323, 0)) > MAX_PIXELS_COSTLY:
        raise ValueError(f"its tiles of {pixels:,} pixels are too large")
    return image


def _directory(tiff: bytes) -> tuple[str, dict[int, bytes]]:
    """Byte order, and the entries by tag, of the first directory of a TIFF file or Exif block.

    An entry has 12 bytes: tag, type, number of values, and the values or their position. A damaged
    file has none, or shorter ones.
    """
    order = "little" if tiff[:2] == b"II" else "big"
    if tiff[:2] not in (b"II", b"MM"):
        return order, {}
    first = int.from_bytes(tiff[4:8], order) + 2
    end = first + 12 * int.from_bytes(tiff[first - 2 : first], order)
    blocks = [tiff[at : at + 12] for at in range(first, end, 12)]
    return order, {int.from_bytes(entry[:2], order): entry for entry in reversed(blocks)}


def _orientation(exif: bytes, xmp: bytes = b"") -> int:
    """Orientation 1 to 8 of an Exif block, otherwise of XMP; 1 if it is missing or damaged."""
    order, entries = _directory(exif.removeprefix(b"Exif\0\0"))
    if entry := entries.get(0x0112):
        end = 12 if int.from_bytes(entry[2:4], order) == 4 else 10
        value = int.from_bytes(entry[8:end], order)
    else:
        match = re.search(rb'tiff:Orientation(?:="|>)(\d)', xmp)
        value = int(match[1]) if match else 1
    return value if 1 <= value <= 8 else 1


def _scale_colour_key(image: ImageFile.ImageFile, *, depth: int) -> None:
    """Scales the transparent colour of a PNG from the file's bit depth to Pillow's 8 bits."""
    key = image.info.get("transparency")
    if image.mode == "L" and depth in (2, 4) and isinstance(key, int):
        image.info["transparency"] = key * 255 // (2**depth - 1)
    elif image.mode == "RGB" and depth == 16 and isinstance(key, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in key)


def _grey_levels(image: Image.Image) -> list[int]:
    """The 8-bit grey of each 16-bit value; white for the transparent one."""
    key = image.info.get("transparency")
    return [255 if value == key else (value + 128) // 257 for value in range(65_536)]
