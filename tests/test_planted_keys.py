"""One dominating key, planted: seen by exactly the queries that the definition names.

A random batch with a tolerance cannot see an off-by-one. Here a key with all the weight is put at
one position at a time: a query that sees it must give its value, a query that does not must not
move by a bit.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.attention_cases import (
    LARGE_TILES,
    bits,
    cells,
    dtypes_of,
    make_case,
    run,
    runs_here,
    sees,
    takes,
    usable_rows,
    with_images,
)

WINDOW = 11  # a multiple of none of the page sizes
PAGE_SIZES = (4, 16, 40)
SMALL_AND_LARGE = {"pallas_tpu": (8, 40), "pallas_gpu": (16, 64)}  # of those in an interpreter
TOKENS, WIDTH_TOKENS = 64, 80
# With queries of ones and scale 0.4: a score of 128 among scores below 20.
LOUD = 320.0
VALUE = 77.0

rows = pytest.mark.parametrize("row", usable_rows())


def page_sizes_of(row):
    """The page sizes that a row is tested with, and how many values of each list."""
    for name, take, slow in takes(row):
        for page_size in PAGE_SIZES if runs_here(row) else SMALL_AND_LARGE[row.backend]:
            yield f"{name}{page_size}", page_size, take, slow or page_size == 64


page_sizes = pytest.mark.parametrize(("row", "page_size", "take"), cells(page_sizes_of))


def each_with(row, choices, slow_choices=()):
    """Parameters of `choices`, of which an interpreter leaves `slow_choices` out by default."""
    for name, take, slow in takes(row):
        for choice in choices:
            yield f"{name}{choice}", choice, take, slow or choice in slow_choices


def with_page_sizes(row, choices, slow_choices=()):
    """Those of each page size; an interpreter leaves large pages out by default."""
    for name, page_size, take, slow in page_sizes_of(row):
        for choice in choices:
            is_slow = slow or page_size > 16 or choice in slow_choices
            yield f"{name} {choice}", page_size, choice, take, is_slow


def make(row, lengths, page_size, decode=0, tokens=TOKENS, width_tokens=WIDTH_TOKENS):
    """A case in one common shape whose queries are all ones."""
    case = make_case(
        lengths,
        page_size=page_size,
        decode=decode,
        tokens=tokens,
        seqs=16,
        width=width_tokens // page_size + 1,
        num_pages=400,
        ratio=1,
        head_dim=min(row.head_dims or (8,)),
        **dtypes_of(row),
    )
    return replace(case, queries=np.ones_like(case.queries))


def plant(case, positions):
    """The same case with a loud key at one position of each sequence (where it has it)."""
    pool, keys, values = case.pool.copy(), case.keys.copy(), case.values.copy()
    loud = LOUD / pool.shape[-1]
    for sequence, position in enumerate(positions):
        q_len, kv_len = case.lengths[sequence]
        if not 0 <= position < kv_len:
            continue
        if position < kv_len - q_len:
            page = case.table[sequence, position // case.page_size]
            pool[page, position % case.page_size, 0] = loud
            pool[page, position % case.page_size, 1] = VALUE
        else:
            row = case.rows(sequence).start + position - (kv_len - q_len)
            keys[row], values[row] = loud, VALUE
    return replace(case, pool=pool, keys=keys, values=values)


def check(row, case, clean, positions, **options):
    """Every row of every sequence either is the planted value or did not move at all."""
    out, _ = run(plant(case, positions), row.backend, **options)
    mask = {"window": options["sliding_window"], "causal": options.get("causal", True)}
    for flat, sequence, query in case.places():
        if not 0 <= positions[sequence] < case.lengths[sequence][1]:
            continue  # nothing was planted here
        if case.image_spans is not None:
            mask |= {"span": case.image_spans[flat], "rule": options["image_rule"]}
        where = f"{query=} planted={positions[sequence]} {case.page_size=}"
        if sees(query, positions[sequence], **mask):
            np.testing.assert_allclose(out[flat], VALUE, rtol=1e-6, err_msg=where)
        else:
            assert np.array_equal(bits(out[flat]), bits(clean[flat])), where


def edges(page_size, kv_len):
    """Positions on both sides of every page edge, and the ends."""
    around = {edge + side for edge in range(0, kv_len, page_size) for side in (-1, 0, 1)}
    return sorted(p for p in around | {kv_len - 1} if 0 <= p < kv_len)


@page_sizes
def test_prefill(row, page_size, take):
    case = make(row, [(60, 60)], page_size)
    clean, _ = run(case, row.backend, sliding_window=WINDOW)
    for edge in take(edges(page_size, 60), 4):
        # The key at an edge, and the keys which the query at an edge just sees and just misses.
        for position in {edge, edge - WINDOW, edge - WINDOW + 1}:
            check(row, case, clean, [position], sliding_window=WINDOW)


@page_sizes
def test_chunk(row, page_size, take):
    """Chunks that start and end on, before and after a page edge, in one batch."""
    ends = [page_size + side for side in (-1, 0, 1)] + [WINDOW + 2, 37, 48, 59, 60]
    lengths = [(min(7, end), end) for end in ends]
    case = make(row, lengths, page_size)
    clean, _ = run(case, row.backend, sliding_window=WINDOW)
    for side in (0, 1):  # q - W must not be seen, q - W + 1 must be
        for of_first in (True, False):
            queries = [end - q_len if of_first else end - 1 for q_len, end in lengths]
            positions = [query - WINDOW + side for query in queries]
            check(row, case, clean, positions, sliding_window=WINDOW)
    for back in take(range(1, 20), 4):
        check(row, case, clean, [end - back for end in ends], sliding_window=WINDOW)


@page_sizes
@pytest.mark.parametrize("decode", [0, 16], ids=["as prefill", "as decode"])
def test_decode(row, page_size, take, decode):
    """Sixteen queries at once: around the page edges, and around the window's own length."""
    queries = [
        *(page_size + side for side in (-1, 0, 1)),
        *(page_size + WINDOW + side for side in (-2, -1, 0)),  # the window starts at a page edge
        *(WINDOW + side for side in (-2, -1, 0, 1)),
        *(2 * page_size - 1, 2 * page_size - 2, 0, 1, 33, 64),
    ]
    queries = [min(query, WIDTH_TOKENS - 1) for query in queries]
    case = make(row, [(1, query + 1) for query in queries], page_size, decode=decode)
    clean, _ = run(case, row.backend, sliding_window=WINDOW)
    for distance in take((WINDOW, 1, WINDOW - 1, WINDOW + 1, 0), 3):
        positions = [query - distance for query in queries]
        check(row, case, clean, positions, sliding_window=WINDOW)


@pytest.mark.parametrize(
    ("row", "window", "take"), cells(lambda row: each_with(row, (1, 2, 16, 17), (2, 17)))
)
def test_windows_on_page_edges(row, window, take):
    case = make(row, [(30, 60), (20, 20)], 16)
    clean, _ = run(case, row.backend, sliding_window=window)
    for query in take(range(30, 60, 3), 3):
        for distance in (window, window - 1):
            positions = [query - distance, query - 40 - distance]
            check(row, case, clean, positions, sliding_window=window)


@rows
def test_no_window_sees_the_first_key(row):
    case = make(row, [(1, 80), (7, 41), (20, 20)], 16, decode=1)
    clean, _ = run(case, row.backend, sliding_window=None)
    for positions in ([0, 0, 0], [79, 40, 19], [1, 34, 7]):
        check(row, case, clean, positions, sliding_window=None)


@pytest.mark.parametrize(
    ("row", "page_size", "window", "take"),
    cells(lambda row: with_page_sizes(row, (WINDOW, None), (None,))),
)
def test_not_causal_sees_both_sides(row, page_size, window, take):
    if not row.non_causal:
        pytest.skip("not claimed")
    options = {"sliding_window": window, "causal": False}
    case = make(row, [(44, 44), (9, 60)], page_size)
    clean, _ = run(case, row.backend, **options)
    for position in take(edges(page_size, 44), 2):
        for distance in (0, WINDOW, WINDOW - 1, 1 - WINDOW, -WINDOW):
            check(row, case, clean, [position + distance, 50 + distance], **options)


@pytest.mark.parametrize(
    ("row", "page_size", "rule", "take"),
    cells(lambda row: with_page_sizes(row, ("clamp", "extend"))),
)
def test_image_edges(row, page_size, rule, take):
    """An image longer than the window, its edges off the page edges; and text around it."""
    if rule not in row.image_rules:
        pytest.skip("not claimed")
    options = {"sliding_window": WINDOW, "image_rule": rule}
    start, end = 14, 33
    case = make(row, [(40, 40), (23, 50)], page_size)
    case = with_images(case, {0: [(start, end)], 1: [(29, 45)]})
    clean, _ = run(case, row.backend, **options)
    keys = {start - 1, start, start + 1, end - 1, end, end - WINDOW, end - WINDOW - 1}
    keys |= {start - WINDOW, start - WINDOW + 1, end + 1, 0, 39}
    for key in take(sorted(keys), 6):
        check(row, case, clean, [key, key + 12], **options)


@pytest.mark.parametrize(
    ("row", "causal", "take"), cells(lambda row: each_with(row, (True, False), (False,)))
)
def test_block_edges(row, causal, take):
    """A chunk of more than 128 queries, over more than 256 keys: `xla` works in such blocks."""
    if not (causal or row.non_causal):
        pytest.skip("not claimed")
    options = {"sliding_window": WINDOW, "causal": causal}
    case = make(row, [(140, 300)], 16, tokens=140, width_tokens=300)
    if not runs_here(row):  # 64 queries, 128 keys
        options["tiles"] = LARGE_TILES[row.backend]
    clean, _ = run(case, row.backend, **options)
    queries = (160, 287, 288, 299, 255, 256)  # ends of the chunk, of 128 queries, of 256 keys
    for query in take(queries, 2):
        for distance in (0, WINDOW - 1, WINDOW, 1 - WINDOW, -WINDOW):
            check(row, case, clean, [query - distance], **options)
