"""Rotary embedding far out, where float32 angles are coarse, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.models.gemma3.config import CONFIGS
from jaxattn.models.gemma3.layers import rope

THETA, FACTOR = 1_000_000.0, 8.0
HEADS = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)


def wide_rope(position: int, *, factor: float) -> np.ndarray:
    """In float64: the first half of a head real, the second imaginary."""
    half = HEADS.shape[1] // 2
    angles = position / factor * THETA ** (-np.arange(half, dtype=np.float64) / half)
    turned = (HEADS[:, :half] + 1j * HEADS[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)


def narrow_rope(position: int, *, factor: float) -> np.ndarray:
    positions = jnp.array([position], jnp.int32)
    return np.asarray(rope(jnp.asarray(HEADS)[None], positions, theta=THETA, factor=factor)[0])


def test_it_is_the_rotation_of_the_global_layers_of_the_large_sizes():
    for size in ("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"):
        layer = CONFIGS[size].layers[5]
        assert (layer.rope_theta, layer.rope_factor) == (THETA, FACTOR)


# An angle of a radians is off by up to a few a * 2**-24: here 1,024 and 16,384 radians.
@pytest.mark.parametrize(("position", "tolerance"), [(8_191, 2e-4), (8_192, 2e-4), (131_071, 3e-3)])
def test_far_positions(position, tolerance):
    rotated = narrow_rope(position, factor=FACTOR)
    np.testing.assert_allclose(rotated, wide_rope(position, factor=FACTOR), rtol=0, atol=tolerance)
    for factor in (1.0, FACTOR / 2):
        for other in (narrow_rope, wide_rope):
            assert np.abs(rotated - other(position, factor=factor)).max() > 1
