"""From a picture in any form to the pixels that the vision tower reads.

Pillow and transformers do the work; both come with the extra `images`.
"""

import base64
import binascii
import logging
from functools import cache
from importlib import import_module
from io import BytesIO
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    UnknownHandler,
)

import numpy as np
from jaxtyping import UInt8

from jaxattn.models.gemma3.vision_config import VisionConfig

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageSource = Image | str | PathLike[str] | bytes | np.ndarray

MAX_REMOTE_BYTES = 20 * 2**20
_REMOTE_TIMEOUT = 10  # seconds without a byte
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # others run programs, or are rare
_PAN_AND_SCAN = {  # transformers' and the published numbers
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def load_image(source: "ImageSource", *, allow_remote: bool = False) -> "Image":
    """The picture, upright and in RGB, of a PIL image, a file's path or bytes, or a uint8 array
    `[height, width, 3]`; or of a URL: `data:`, and with `allow_remote` also `http:` and `https:`.

    What is transparent becomes white. An animation gives its first frame. A string may name any
    local file: do not hand on one from a stranger, unless it begins with `data:` or `http`.

    Raises ValueError, saying what was given, for a file that is damaged, of another format, or of
    more pixels than Pillow takes for an attack (`PIL.Image.MAX_IMAGE_PIXELS`); ImportError
    without Pillow.
    """
    pillow = _import("PIL.Image")
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise ValueError(
                f"an array {source.shape} of {source.dtype}: a picture is uint8 [height, width, 3]"
            )
        return pillow.fromarray(source)
    image: Any = source if isinstance(source, pillow.Image) else None
    if image is not None:
        data, given = b"", f"the image of {image.width} x {image.height} pixels"
    else:
        data, given = _bytes_of(source, allow_remote)
    try:
        return _upright_rgb(image or _decode(data))
    except Exception as error:  # Pillow's decoders raise anything
        raise ValueError(f"{given} cannot be read as a picture: {error}") from error


def preprocess(
    image: "Image", vision_config: VisionConfig, *, pan_and_scan: bool = False
) -> UInt8[np.ndarray, "crops height width 3"]:
    """Pixels for the vision tower: the whole picture, squeezed into a square.

    `pan_and_scan`: of a picture longer than 1.2 times its width, or the other way round, two to
    four crops follow the whole, side by side along the longer side.

    Raises ImportError without transformers.
    """
    processor = _processor(vision_config.image_size)
    # Bytes while they wait: the tower makes numbers of them.
    bytes_only = {"do_rescale": False, "do_normalize": False}
    pixels = processor(image, do_pan_and_scan=pan_and_scan, **bytes_only)["pixel_values"]
    return np.ascontiguousarray(np.stack(pixels).transpose(0, 2, 3, 1))


def check_readable(vision_config: VisionConfig) -> None:
    """Raise ImportError unless pictures can be read here. What reads them is then imported."""
    _import("PIL.Image")
    _processor(vision_config.image_size)


def _decode(data: bytes) -> "Image":
    pillow = _import("PIL.Image")
    try:
        image = pillow.open(BytesIO(data), formats=_FORMATS)
    except _import("PIL").UnidentifiedImageError:
        raise ValueError(f"it is none of {', '.join(_FORMATS)}") from None
    most = pillow.MAX_IMAGE_PIXELS
    if most is not None and image.width * image.height > most:  # Pillow may merely warn
        raise ValueError(f"{image.width} x {image.height} pixels, at most {most} are read")
    image.load()
    return image


def _upright_rgb(image: "Image") -> "Image":
    if image.mode.startswith(("I", "F")):  # Pillow would clip them
        raise ValueError(f"its pixels have mode {image.mode!r}: convert them to 8 bits")
    if 0 in image.size:
        raise ValueError("it has no pixels")
    upright = _import("PIL.ImageOps").exif_transpose(image)
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    white = _import("PIL.Image").new("RGBA", upright.size, "white")
    return _import("PIL.Image").alpha_composite(white, upright.convert("RGBA")).convert("RGB")


def _bytes_of(source: object, allow_remote: bool) -> tuple[bytes, str]:
    """The bytes of a file, and how to call it in an error."""
    if isinstance(source, bytes):
        return source, f"the file of {len(source)} bytes"
    if not isinstance(source, str | PathLike):
        raise TypeError(
            f"{type(source).__name__}: a picture is a PIL image, a path, bytes, a URL or an array"
        )
    text = fspath(source)
    given = repr(text if len(text) <= 80 else text[:77] + "...")
    scheme = text.partition(":")[0].lower() if isinstance(source, str) else ""
    if scheme == "data":
        return _data_url(text, given), given
    if scheme in ("http", "https"):
        if not allow_remote:
            raise ValueError(f"{given} is remote: give the picture itself, as a data: URL")
        return _fetch(text, given), given
    if scheme == "file" or "://" in text:
        raise ValueError(f"{given}: a URL is read from data:, http: or https: only")
    try:
        return Path(text).read_bytes(), given
    except (OSError, ValueError) as error:
        raise ValueError(f"{given} is neither a file that can be read nor a data: URL") from error


def _data_url(url: str, given: str) -> bytes:
    """What a URL `data:[type][;base64],...` holds."""
    header, comma, body = url.partition(",")
    if not comma:
        raise ValueError(f"{given} has no comma: data:image/png;base64,... is expected")
    if not header.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(unquote_to_bytes(body), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{given} is not base64: {error}") from error


def _fetch(url: str, given: str) -> bytes:
    """A remote file, through redirects to http and https only."""
    opener = OpenerDirector()
    for handler in (
        ProxyHandler, HTTPHandler, HTTPSHandler, HTTPRedirectHandler, HTTPErrorProcessor,
        HTTPDefaultErrorHandler, UnknownHandler,
    ):  # fmt: skip
        opener.add_handler(handler())
    try:
        with opener.open(url, timeout=_REMOTE_TIMEOUT) as response:
            data = response.read(MAX_REMOTE_BYTES + 1)
    except Exception as error:  # URLError, HTTPException, ValueError, TimeoutError
        raise ValueError(f"{given} cannot be fetched: {error}") from error
    if len(data) > MAX_REMOTE_BYTES:
        raise ValueError(f"{given} has more than {MAX_REMOTE_BYTES} bytes")
    return data


@cache
def _processor(image_size: int) -> Any:
    """transformers' processor of one size of square."""
    logger = logging.getLogger("transformers")
    logger.addFilter(_is_not_about_torch)  # which is not needed
    try:
        module = _import("transformers.models.gemma3.image_processing_pil_gemma3")
    finally:
        logger.removeFilter(_is_not_about_torch)
    size = {"height": image_size, "width": image_size}
    return module.Gemma3ImageProcessorPil(size=size, do_convert_rgb=True, **_PAN_AND_SCAN)


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            "pictures need Pillow and transformers 5.5 or later: pip install 'jaxattn[images]' "
            f"({error})"
        ) from error
