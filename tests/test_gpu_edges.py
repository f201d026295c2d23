"""Rows of GPU kernels that see no key at all: zeros, as everywhere, and nothing out of bounds."""

import numpy as np
import pytest

from tests.attention_cases import make_case, run


@pytest.mark.parametrize(
    ("lengths", "decode", "kv_lens"),
    [
        (((1, 5), (1, 1), (1, 7)), 3, [5, 0, 7]),
        (((5, 5),), 0, [2]),
        (((200, 200),), 0, [2]),
    ],
)
def test_a_row_without_keys_is_zero(lengths, decode, kv_lens):
    """Lengths that lie, as `RaggedBatch` refuses them: sequences shorter than their new tokens."""
    case = make_case(
        lengths,
        decode=decode,
        page_size=128,
        head_dim=64,
        query_dtype="bfloat16",
        kv_dtype="bfloat16",
    )
    case.kv_lens[:] = kv_lens
    out, _ = run(case, "pallas_gpu", sliding_window=None)
    out = out.astype(np.float32)
    assert np.isfinite(out).all()
    position = np.concatenate(
        [np.arange(kv - q, kv) for (q, _), kv in zip(lengths, kv_lens, strict=True)]
    )
    assert not out[position < 0].any()
    assert np.abs(out[position >= 0]).max(axis=(1, 2)).min() > 0
