"""The tiny multimodal models of `tiny_vision.py` as ours, loaded from a Hugging Face folder."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jax.numpy as jnp
import numpy as np

from jaxattn.models.gemma3.checkpoint import load_weights
from jaxattn.models.gemma3.model import Gemma3
from tests import tiny_vision
from tests.tiny_checkpoints import write_folder


def write(folder: Path, name: str) -> Path:
    """The model as transformers 5 saves it, in float32."""
    return write_folder(
        folder,
        tiny_vision.hf_tensors(name),
        config_json=tiny_vision.CONFIGS[name],
        dtype=np.float32,
    )


@cache
def load(name: str) -> Gemma3:
    with TemporaryDirectory() as folder:
        config, weights = load_weights(write(Path(folder), name), dtype="float32")
    return Gemma3(config, {name: jnp.asarray(array) for name, array in weights.items()})
