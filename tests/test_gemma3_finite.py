"""Every two-byte float there is, and a few others."""

import ml_dtypes
import numpy as np
import pytest

from jaxattn.models.gemma3.finite import all_finite


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_two_byte_float(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    finite = np.isfinite(every.astype(np.float32))
    assert [all_finite(each) for each in every[:, None]] == finite.tolist()
    assert all_finite(every[finite])
    assert not all_finite(every)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_float32(value):
    values = np.full((3, 5), np.finfo(np.float32).max)
    assert all_finite(values)
    values[2, 3] = value
    assert not all_finite(values)


def test_integers():
    assert all_finite(np.full((2, 2), -128, np.int8))
