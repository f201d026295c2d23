"""Pictures in any form to pixels; what is none is refused."""

import base64
import logging
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from jaxattn.models.gemma3 import images
from jaxattn.models.gemma3.config import VisionConfig
from jaxattn.models.gemma3.images import load_image, preprocess

SMALL = VisionConfig(image_size=56, patch_size=7, tokens_per_image=16, embed_dim=8, num_heads=2)


def picture(width: int, height: int) -> np.ndarray:
    """Smooth noise `[height, width, 3]`."""
    draw = np.random.default_rng(width * height)
    coarse = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encoded(array: np.ndarray, kind: str = "PNG", **options) -> bytes:
    file = BytesIO()
    Image.fromarray(array).save(file, kind, **options)
    return file.getvalue()


ARRAY = picture(40, 30)
PNG = encoded(ARRAY)
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


# Pixels.

# width, height, and the crops that pan and scan adds
ASPECTS = [
    (56, 56, 0), (500, 500, 0), (600, 501, 0), (601, 501, 0), (620, 512, 2), (1000, 300, 3),
    (1300, 260, 4), (300, 1100, 4), (512, 700, 2), (400, 300, 0), (2000, 200, 0), (1, 90, 0),
]  # fmt: skip


def squeezed(array: np.ndarray, size: int) -> np.ndarray:
    image = Image.fromarray(np.ascontiguousarray(array))
    image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image)


def crops_of(array: np.ndarray, count: int) -> list[np.ndarray]:
    """The whole, then its pieces along the longer side; the last may be shorter."""
    height, width = array.shape[:2]
    step = -(-max(width, height) // max(count, 1))
    pieces = [slice(index * step, (index + 1) * step) for index in range(count)]
    return [array, *(array[:, each] if width >= height else array[each] for each in pieces)]


@pytest.mark.parametrize(("width", "height", "crops"), ASPECTS)
def test_pixels(width, height, crops):
    array = picture(width, height)
    for pan_and_scan in (False, True):
        pixels = preprocess(load_image(array), SMALL, pan_and_scan=pan_and_scan)
        expected = [squeezed(each, 56) for each in crops_of(array, crops * pan_and_scan)]
        assert pixels.shape == (len(expected), 56, 56, 3)
        assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous
        assert np.array_equal(pixels, np.stack(expected))


def test_pixels_of_the_published_processor():
    published = {  # preprocessor_config.json of the 4B, 12B and 27B
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_pan_and_scan": None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "pan_and_scan_max_num_crops": None,
        "pan_and_scan_min_crop_size": None,
        "pan_and_scan_min_ratio_to_activate": None,
        "resample": 2,
        "rescale_factor": 0.00392156862745098,
        "size": {"height": 896, "width": 896},
    }
    image = load_image(picture(700, 300))
    theirs = Gemma3ImageProcessorPil.from_dict(published)(image)["pixel_values"]
    ours = preprocess(image, VisionConfig())
    assert ours.shape == (1, 896, 896, 3)
    numbers = ours.astype(np.float32) / 127.5 - 1  # as the tower begins
    assert np.array_equal(numbers.transpose(0, 3, 1, 2), np.stack(theirs))


# Every form of a picture.


def test_every_form(tmp_path):
    file = tmp_path / "picture.png"
    file.write_bytes(PNG)
    quoted = "data:image/png;base64," + base64.b64encode(PNG).decode().replace("+", "%2B")
    percent = "DATA:image/png," + "".join(f"%{byte:02x}" for byte in PNG)
    forms = [Image.fromarray(ARRAY), str(file), file, PNG, DATA_URL, quoted, percent, ARRAY]
    for form in forms:
        image = load_image(form)
        assert image.mode == "RGB" and np.array_equal(image, ARRAY)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats(kind):
    image = load_image(encoded(ARRAY, kind))
    assert image.mode == "RGB" and image.size == (40, 30)
    assert np.abs(np.asarray(image, np.int32) - ARRAY).mean() < 20


def test_an_image_lies_as_its_exif_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    file = BytesIO()
    Image.fromarray(ARRAY).save(file, "PNG", exif=exif)
    for form in (file.getvalue(), Image.open(file)):
        assert np.array_equal(load_image(form), np.rot90(ARRAY, 3))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGBa"])
def test_what_is_transparent_becomes_white(mode):
    rgba = Image.new("RGBA", (2, 1), (10, 10, 10, 255))
    rgba.putpixel((1, 0), (10, 10, 10, 0))
    assert np.asarray(load_image(rgba.convert(mode))).tolist() == [[[10] * 3, [255] * 3]]


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr"])
def test_other_modes(mode):
    image = load_image(Image.new("RGB", (2, 2), "white").convert(mode))
    assert np.asarray(image).min() == 255


# What is refused.


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", r"the file of 0 bytes cannot be read as a picture: it is none of PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is none of PNG, JPEG"),
        (PNG[:300], "the file of 300 bytes cannot be read as a picture: image file is trunc"),
        (PNG[:60] + b"\0" * 40 + PNG[100:], "cannot be read as a picture: broken data stream"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png;base64,!!!", "'data:image/png;base64,!!!' is not base64"),
        ("data:text/plain,hello", "'data:text/plain,hello' cannot be read as a picture"),
        (DATA_URL[:300], r"'data:image/png;base64,iVBOR[^ ]*\.\.\.' (is not|cannot)"),
        ("http://localhost/a.png", "'http://localhost/a.png' is remote: give the picture itself"),
        ("HTTPS://localhost/a.png", "is remote"),
        ("file:///etc/hostname", "'file:///etc/hostname': a URL is read from data:, http: or"),
        ("FILE:/etc/hostname", "a URL is read from"),
        ("ftp://localhost/a.png", "a URL is read from"),
        ("no/such.png", "'no/such.png' is neither a file that can be read nor a data: URL"),
        (DATA_URL[22:] * 50, r"'iVBOR[^ ]*\.\.\.' is neither a file"),
        ("nul\0", "is neither a file"),
        (".", "'.' is neither a file"),
        (ARRAY[:, :, 0], r"an array \(30, 40\) of uint8: a picture is uint8 \[height, width, 3\]"),
        (ARRAY.astype(np.float32), r"an array \(30, 40, 3\) of float32"),
        (ARRAY[:0], r"an array \(0, 40, 3\) of uint8"),
        (
            Image.new("RGB", (0, 3)),
            "the image of 0 x 3 pixels cannot be read as a picture: it has no pixels",
        ),
        (Image.new("I;16", (3, 3)), "mode 'I;16': convert them to 8 bits"),
        (Image.new("F", (3, 3)), "mode 'F'"),
    ],
)
def test_no_picture(source, message):
    with pytest.raises(ValueError, match=message):
        load_image(source, allow_remote=False)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]), st.data())
def test_damaged_files_are_read_or_refused(kind, data):
    """Any error but ValueError fails the test."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "described"
    damaged = bytearray(encoded(ARRAY, kind, **({} if kind in ("GIF", "BMP") else {"exif": exif})))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert load_image(bytes(damaged[: data.draw(st.integers(9, len(damaged)))])).mode == "RGB"
    except ValueError as error:
        assert "cannot be read as a picture" in str(error)


@pytest.mark.parametrize("source", [None, 3, [PNG], {"url": DATA_URL}])
def test_no_form_of_a_picture(source):
    with pytest.raises(TypeError, match=f"{type(source).__name__}: a picture is a PIL image, a"):
        load_image(source)


@pytest.mark.parametrize("most", [1199, 500])  # Pillow warns of the one, and raises for the other
def test_too_many_pixels(monkeypatch, most):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
    with pytest.raises(ValueError, match="1200 pixels"):
        load_image(PNG)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_too_many_pixels_where_warnings_are_ignored(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1199)
    with pytest.raises(ValueError, match="40 x 30 pixels, at most 1199 are read"):
        load_image(PNG)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1200)
    assert load_image(PNG).size == (40, 30)


# Remote pictures.


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/picture":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PNG)
        else:
            self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture
def remote(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_remote_pictures(remote, monkeypatch):
    for path in ("/picture", "/to//picture"):
        assert np.array_equal(load_image(remote + path, allow_remote=True), ARRAY)
    for path in ("/none", "/to/file:///etc/hostname", "/to/ftp://localhost/a"):
        with pytest.raises(ValueError, match=rf"'{remote}{path}' cannot be fetched"):
            load_image(remote + path, allow_remote=True)
    monkeypatch.setattr(images, "MAX_REMOTE_BYTES", len(PNG) - 1)
    with pytest.raises(ValueError, match=f"has more than {len(PNG) - 1} bytes"):
        load_image(f"{remote}/picture", allow_remote=True)
    monkeypatch.setattr(images, "MAX_REMOTE_BYTES", len(PNG))
    load_image(f"{remote}/picture", allow_remote=True)


def test_a_server_that_says_nothing(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(images, "_REMOTE_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(ValueError, match=r"cannot be fetched: .*timed out"):
            load_image(url, allow_remote=True)


# The optional packages.


@pytest.mark.parametrize("missing", ["PIL.Image", "transformers"])
def test_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    for name in [name for name in sys.modules if name.startswith("transformers.")]:
        monkeypatch.delitem(sys.modules, name)
    images._processor.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'jaxattn\[images\]'"):
        if missing == "PIL.Image":
            load_image(PNG)
        preprocess(Image.fromarray(ARRAY), SMALL)


def test_nothing_is_said_of_torch():
    script = (
        "import numpy as np, sys\n"
        "from jaxattn.models.gemma3.images import load_image, preprocess\n"
        "from jaxattn.models.gemma3.config import VisionConfig\n"
        "assert 'PIL' not in sys.modules and 'transformers' not in sys.modules\n"
        "preprocess(load_image(np.zeros((9, 9, 3), np.uint8)), VisionConfig())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not logging.getLogger("transformers").filters
