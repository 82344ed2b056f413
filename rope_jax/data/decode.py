"""Bytes of an image file -> RGB pixels, for files that nobody has looked at.

Metadata is where image files attack (compressed text, colour profiles, Exif directories whose every entry points at the same megabytes) and
where Pillow warns, so JPEG and PNG files are reduced to what their pixels need before Pillow sees them. The one thing wanted from the
metadata, the orientation, is read here. Nothing global is touched: decoding is safe in threads and under any setting of Pillow's.
"""

import contextlib
import io
import re
import struct
from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

MAX_PIXELS = 64_000_000
# Half for decoders that hold several copies of the whole image: libwebp (canvas, previous frame, frame), libjpeg with CMYK in scans.
MAX_PIXELS_COSTLY = 32_000_000
MAX_SIDE = 65_535  # JPEG's own limit; Pillow keeps pointers per row, so 64 million rows would cost a gigabyte
MAX_SCANS = 100  # progressive JPEGs have about 10; every scan visits the whole image, and an empty one costs the file 20 bytes
_STRIP_PIXELS = 1 << 20  # converted at a time, so that temporaries stay small beside the image

# Orientation -> what undoes it, see `_turn`.
_TURNS = dict(
    enumerate(
        (
            Image.Transpose.FLIP_LEFT_RIGHT,
            Image.Transpose.ROTATE_180,
            Image.Transpose.FLIP_TOP_BOTTOM,
            Image.Transpose.TRANSPOSE,
            Image.Transpose.ROTATE_270,
            Image.Transpose.TRANSVERSE,
            Image.Transpose.ROTATE_90,
        ),
        start=2,
    )
)
_PIXEL_CHUNKS = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
_SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # a JPEG marker with a length (or the end of the image)
_METADATA_SEGMENTS = {*range(0xE1, 0xEE), 0xEF, 0xFE}  # all APPn but JFIF (0) and Adobe's colour transform (14), and comments


def decode_image(data: bytes) -> UInt8[np.ndarray, "H W 3"]:
    """Decodes a JPEG, PNG or WebP file to RGB, one rule for each kind of image.

    The Exif orientation is applied (the first Exif block of the file; PNG: eXIf); alpha, palette transparency and colour keys are laid over
    white; 16-bit grey is divided by 257 and rounded, 16-bit colour keeps its high bytes; CMYK is converted without a colour profile; 1-bit,
    grey and palette images become RGB; of an animation the first frame counts. Colour profiles are ignored.

    Args:
        data: the bytes of the file.

    Returns:
        uint8 [H, W, 3], after orientation.

    Raises:
        ValueError: with the reason, for anything else: other formats, truncated or corrupt files, more than 64 million pixels (WebP, and
            JPEG that is both CMYK and stored in several scans: 32 million), a side over 65,535 pixels, more than 100 scans.
    """
    return open_image(data).pixels()


class EncodedImage:
    """A file whose header has been read and found acceptable; see `open_image`. It is decoded once, by one of its two methods.

    Attributes:
        size: (width, height) in pixels, after orientation.
    """

    def __init__(self, data: bytes):
        self._name = _format(data)
        with self._blame():
            self._image, self._orientation, limit = _open(data, self._name)
            width, height = self._image.size
            if width * height > limit or max(width, height) > MAX_SIDE:
                raise ValueError(f"{width} x {height} pixels are too many; allowed are {limit:,} in all and {MAX_SIDE:,} a side")
            if self._name == "PNG":
                _scale_colour_key(self._image, depth=data[24])
        self.size = (height, width) if self._orientation >= 5 else (width, height)

    def pixels(self) -> UInt8[np.ndarray, "H W 3"]:
        """What `decode_image` returns."""
        with self._blame():
            pixels = _to_rgb(self._image)
        del self._image  # its memory serves the copy that turning makes
        return np.ascontiguousarray(_turn(pixels, self._orientation))

    def picture(self, *, reduce: int = 1) -> Image.Image:
        """The same pixels as a Pillow image of mode RGB.

        Args:
            reduce: 1, 2, 4 or 8. JPEG files are decoded straight to that fraction of their sides, rounded up, where they can be (each
                square of so many pixels becomes one, in the transform that the file is stored in); other files, and pictures that are
                to be turned, keep their size.
        """
        with self._blame():
            image = self._image
            if image.mode.startswith("I") or image.has_transparency_data:
                return Image.fromarray(self.pixels())
            if reduce > 1 and self._orientation == 1:
                image.draft(None, (image.width // reduce, image.height // reduce))
            image.load()
            image = image if image.mode == "RGB" else image.convert("RGB")
            return image.transpose(_TURNS[self._orientation]) if self._orientation > 1 else image

    @contextlib.contextmanager
    def _blame(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Pillow raises OSError, SyntaxError, EOFError, struct.error, zlib.error and more for broken files
            raise ValueError(f"the {self._name} image cannot be decoded: {error}") from error


def open_image(data: bytes) -> EncodedImage:
    """Reads the header of a file, for those who want to know its size before they decode it, or not all of its pixels.

    Raises:
        ValueError: as `decode_image`; what is wrong with the pixels shows when they are decoded.
    """
    return EncodedImage(data)


def _format(data: bytes) -> str:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    raise ValueError(f"not a JPEG, PNG or WebP image: it starts with {data[:12]!r}" if data else "the image file is empty")


def _open(data: bytes, name: str) -> tuple[ImageFile.ImageFile, int, int]:
    """Reads the header only: the image, its orientation, and how many pixels it may have."""
    # The plugins are called directly: Image.open would add warnings and limits that depend on global settings.
    if name == "PNG":
        data, exif = _reduce_png(data)
        return PngImageFile(io.BytesIO(data)), _orientation(exif), MAX_PIXELS
    if name == "JPEG":
        data, exif, scans = _reduce_jpeg(data)
        image = JpegImageFile(io.BytesIO(data))
        return image, _orientation(exif), MAX_PIXELS_COSTLY if image.mode == "CMYK" and scans > 1 else MAX_PIXELS
    image = WebPImageFile(io.BytesIO(data))
    return image, _orientation(image.info.get("exif", b"")), MAX_PIXELS_COSTLY


def _reduce_png(data: bytes) -> tuple[bytes, bytes]:
    """The file with the chunks that make pixels, and its Exif block. What is damaged stays in, for the decoder to refuse."""
    kept, exif, at = [data[:8]], b"", 8
    while at < len(data):
        header = data[at : at + 8]
        end = at + 12 + int.from_bytes(header[:4])
        kind = header[4:]
        if kind in _PIXEL_CHUNKS or end > len(data):
            kept.append(data[at:end])
        elif kind == b"eXIf":
            exif = exif or data[at + 8 : end - 4]
        if kind == b"IEND":
            break
        at = end
    return b"".join(kept), exif


def _reduce_jpeg(data: bytes) -> tuple[bytes, bytes, int]:
    """The file without metadata, its Exif block, and its number of scans. What is damaged stays in, for the decoder to refuse."""
    kept, exif, scans, at, pixels_at = [data[:2]], b"", 0, 2, len(data)
    while (found := _SEGMENT.search(data, at)) is not None:
        kind, body = data[found.end() - 1], found.end() + 2
        at = max(body, found.end() + int.from_bytes(data[found.end() : body]))
        if kind == 0xD9:  # end of image: whatever follows (a second picture, a film) is not read
            break
        if kind == 0xDA:  # start of scan
            scans += 1
            pixels_at = min(pixels_at, found.start())
            if scans > MAX_SCANS:
                raise ValueError(f"it has more than {MAX_SCANS} scans")
        elif kind == 0xE1 and not exif and data[body : body + 6] == b"Exif\0\0":
            exif = data[body:at]
        if scans == 0 and kind not in _METADATA_SEGMENTS:
            kept.append(data[found.start() : at])
    return b"".join([*kept, data[pixels_at:]]), exif, scans


def _orientation(exif: bytes) -> int:
    """Orientation 1 to 8 of an Exif block; 1 where it has none or is damaged."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(order + "HH", tiff, entry)
            if tag == 0x0112:
                (value,) = struct.unpack_from(order + ("I" if kind == 4 else "H"), tiff, entry + 8)
                return value if 1 <= value <= 8 else 1
    except struct.error:  # an offset or an entry beyond the block's end
        pass
    return 1


def _scale_colour_key(image: ImageFile.ImageFile, *, depth: int) -> None:
    """Brings the transparent colour of a PNG, which the file gives at its own bit depth, to the 8 bits of Pillow's pixels."""
    key = image.info.get("transparency")
    if image.mode == "L" and depth in (2, 4) and isinstance(key, int):
        image.info["transparency"] = key * 255 // (2**depth - 1)
    elif image.mode == "RGB" and depth == 16 and isinstance(key, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in key)


def _to_rgb(image: ImageFile.ImageFile) -> np.ndarray:
    image.load()
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        pixels[top:bottom] = _strip_to_rgb(image.crop((0, top, width, bottom)))
    return pixels


def _strip_to_rgb(strip: Image.Image) -> np.ndarray:
    if strip.mode.startswith("I"):  # 16-bit grey
        grey = np.asarray(strip)
        scaled = (grey.astype(np.uint32) + 128) // 257
        if "transparency" in strip.info:
            scaled[grey == strip.info["transparency"]] = 255
        return scaled[:, :, None]
    if not strip.has_transparency_data:
        return np.asarray(strip if strip.mode == "RGB" else strip.convert("RGB"))
    rgba = np.asarray(strip.convert("RGBA")).astype(np.uint16)
    colour, alpha = rgba[:, :, :3], rgba[:, :, 3:]
    return (colour * alpha + 255 * (255 - alpha) + 127) // 255  # at most 255 * 255 + 127: fits 16 bits


def _turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undoes it: 2 mirror, 3 half a turn, 4 upside down, 5 transpose, 6 clockwise, 7 transpose and half a turn, 8 anticlockwise."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels
