"""The vision tower against transformers' outputs (see tests/data/gemma3_vision)."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_vision, vision_models
from tests.tiny_vision import CASES, DATA


@pytest.mark.parametrize(("name", "images"), CASES)
def test_image_embeddings(name, images):
    pixels = jnp.asarray(tiny_vision.pixels(name, images))
    embeddings = vision_models.load(name).encode_images(pixels)
    expected = np.load(DATA / f"{name}_{images}.npz")["image_embeddings"]
    assert embeddings.dtype == jnp.float32
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=1e-5)
