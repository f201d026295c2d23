"""The TPU kernels where copies happen as late as they may, and with tiles of their own choice."""

import numpy as np
import pytest

from jaxattn.kernels.layout import page_array
from jaxattn.kernels.pallas.tiles import Tiles
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

BATCHES = {
    "decode": (((1, 37), (1, 1), (1, 16), (1, 50), (1, 11)), 5),
    "prefill": (((9, 9), (0, 7), (6, 50), (12, 12)), 0),
    "mixed": (((1, 37), (1, 1), (1, 16), (9, 9), (0, 0), (6, 50), (1, 8), (12, 12)), 3),
}


def check(case, window, **options):
    case = poisoned(case, window)
    out, pages = run(case, "pallas_tpu", sliding_window=window, **options)
    limit = tolerance(case.queries.dtype.name, case.pool.dtype.name)
    wanted = expected(case, sliding_window=window)
    np.testing.assert_allclose(out.astype(np.float32), wanted, atol=limit, rtol=limit)
    pool = laid_out(*expected_pool(case))
    assert np.array_equal(bits(page_array(pages)), bits(page_array(pool)))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("kv_dtype", "page_size", "window"), [("bfloat16", 8, 11), ("int8", 32, None)]
)
def test_copies_as_late_as_they_may(kv_dtype, page_size, window, batch):
    """A copy that is never awaited is never made, and one that is awaited late comes late."""
    lengths, decode = BATCHES[batch]
    case = make_case(
        lengths,
        decode=decode,
        page_size=page_size,
        head_dim=128,
        tokens=40,
        seqs=9,
        width=9,
        num_pages=64,
        query_dtype="bfloat16",
        kv_dtype=kv_dtype,
    )
    check(case, window, mode="on_wait")


@pytest.mark.parametrize(("window", "kv_dtype"), [(64, "bfloat16"), (None, "float32")])
def test_tiles_by_rule(window, kv_dtype):
    """The sizes that a chip would run with, against sequences of about their length."""
    lengths = ((1, 700), (1, 64), (1, 513), (1, 63), (130, 600), (9, 9))
    case = make_case(
        lengths, decode=4, page_size=16, head_dim=128, query_dtype=kv_dtype, kv_dtype=kv_dtype
    )
    check(case, window, tiles=Tiles())
