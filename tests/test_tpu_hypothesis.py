"""The TPU kernels on ragged batches that nobody would think of."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxattn.kernels.layout import page_array
from tests.attention_cases import (
    bits,
    expected,
    expected_pool,
    laid_out,
    make_case,
    poisoned,
    run,
    tolerance,
)

# Few kernels, many batches: (window, page size, dtype of pages, head dim, kv heads, ratio).
KERNELS = (
    (None, 8, "float32", 64, 1, 2),
    (5, 24, "float32", 128, 2, 1),
    (40, 16, "bfloat16", 128, 1, 3),
)
MORE_KERNELS = (
    (1, 8, "float32", 128, 3, 1),
    (40, 8, "float32", 256, 1, 2),
    (None, 24, "bfloat16", 80, 4, 2),
    (17, 32, "int8", 128, 2, 2),
    (None, 64, "int8", 64, 1, 8),
    (3, 16, "bfloat16", 192, 2, 4),
)
SEQS, TOKENS, MOST = 7, 56, 90  # arrays; most tokens of a sequence


@st.composite
def batches(draw):
    """(lengths, decode, prefill): decode sequences first, then chunks, empty ones among them."""
    num_decode = draw(st.integers(0, SEQS))
    decode = draw(st.lists(st.integers(1, MOST), min_size=num_decode, max_size=num_decode))
    lengths = [(1, kv_len) for kv_len in decode]
    left = TOKENS - len(lengths)
    for _ in range(draw(st.integers(0, SEQS - len(lengths)))):
        q_len = draw(st.integers(0, min(left, 40)))
        lengths.append((q_len, q_len + draw(st.integers(0, MOST - q_len))))
        left -= q_len
    declared = draw(st.integers(0, num_decode))  # decode sequences may pass for chunks
    return lengths, declared


def check(kernel, lengths, decode, seed):
    window, page_size, kv_dtype, head_dim, kv_heads, ratio = kernel
    query_dtype = "float32" if kv_dtype == "float32" else "bfloat16"
    case = make_case(
        lengths or [(0, 0)],
        decode=decode,
        page_size=page_size,
        head_dim=head_dim,
        kv_heads=kv_heads,
        ratio=ratio,
        query_dtype=query_dtype,
        kv_dtype=kv_dtype,
        tokens=TOKENS,
        seqs=SEQS + 1,
        width=-(-MOST // page_size) + 1,
        num_pages=SEQS * -(-MOST // page_size) + 5,
        seed=seed,
    )
    case = poisoned(case, window, seed)
    out, pages = run(case, "pallas_tpu", sliding_window=window)
    limit = tolerance(query_dtype, kv_dtype)
    if case.num_tokens:
        wanted = expected(case, sliding_window=window)
        np.testing.assert_allclose(out.astype(np.float32), wanted, atol=limit, rtol=limit)
    assert not out[case.num_tokens :].any()
    pool = laid_out(*expected_pool(case))
    assert np.array_equal(bits(page_array(pages)), bits(page_array(pool)))


def examples(count):
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@examples(6)
@given(batch=batches(), seed=st.integers(0, 99))
def test_any_batch(kernel, batch, seed):
    check(kernel, *batch, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS + MORE_KERNELS, ids=str)
@examples(80)
@given(batch=batches(), seed=st.integers(0, 99))
def test_any_of_many_batches(kernel, batch, seed):
    check(kernel, *batch, seed)
