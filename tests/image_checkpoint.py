"""A tiny multimodal checkpoint with a tokenizer, and pictures in every form."""

import base64
from copy import deepcopy
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import AddedToken

from tests import tiny_vision
from tests.test_gemma3_tokenizer import json_library
from tests.tiny_checkpoints import write_folder

NAME = "wide_window"
TOKENS = tiny_vision.CONFIGS[NAME]["mm_tokens_per_image"]
EMBED = "model.language_model.embed_tokens.weight"


def write(folder: Path) -> Path:
    """A folder as transformers saves it; its words are letters, and two more control tokens."""
    library = json_library()
    library.add_special_tokens([AddedToken(f"<{end}_of_image>") for end in ("start", "end")])
    config = deepcopy(tiny_vision.CONFIGS[NAME])
    config["text_config"]["vocab_size"] = vocab = library.get_vocab_size()
    tensors = tiny_vision.hf_tensors(NAME)
    draw = np.random.default_rng(0)
    embed = 0.2 * draw.standard_normal((vocab, tensors[EMBED].shape[1]))
    tensors[EMBED] = embed.astype(np.float32)
    write_folder(folder, tensors, config_json=config, dtype=np.float32)
    library.save(str(folder / "tokenizer.json"))
    return folder


def picture(seed: int = 0, width: int = 40, height: int = 40) -> Image.Image:
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "png")
    return file.getvalue()


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def part(url: str) -> dict:
    """As OpenAI's clients send it."""
    return {"type": "image_url", "image_url": {"url": url}}
