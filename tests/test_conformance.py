"""One suite for every backend, generated from its row: what is claimed equals the oracle."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.registry import CAPABILITIES
from jaxattn.testing.conformance import (
    IMAGES,
    MIXED,
    WINDOW,
    base,
    check,
    check_pool,
    claimed_features,
    claimed_geometries,
    claimed_page_sizes,
    mixed,
    within,
)
from tests.attention_cases import (
    LARGE_TILES,
    bits,
    cells,
    choices,
    expected,
    expected_pool,
    laid_out,
    live_only,
    make_case,
    page_size_of,
    poisoned,
    run,
    runs_here,
    takes,
    tolerance,
    tolerance_of,
    usable_rows,
    with_images,
    written,
)

SLOW = True  # in an interpreter, see `cells`


def geometries(row):
    """Those of `claimed_geometries`, and what an interpreter has time for."""
    for name, geometry in claimed_geometries(row):
        yield name, geometry, WINDOW, SLOW
    pairs = list(product(row.query_dtypes, row.kv_dtypes))
    if runs_here(row):
        return
    # Compiled slowly, and windowed decode is a kernel of its own: all that at once.
    ratios = within(row.q_heads_per_kv_head, 1, 3, 8)
    sizes = claimed_page_sizes(row, 8, 40)
    for index, (query_dtype, kv_dtype) in enumerate(pairs):
        geometry = {
            "head_dim": row.head_dims[(index + 2 * (index // 6)) % len(row.head_dims)],
            "page_size": sizes[index % len(sizes)],
            "ratio": ratios[index % len(ratios)],
            "kv_heads": 4 - index % 4,
            "query_dtype": query_dtype,
            "kv_dtype": kv_dtype,
        }
        name = " ".join(map(str, geometry.values()))
        for window in (WINDOW, None):
            yield f"{name} {window}", geometry, window, (window is None) == (index % 2 == 0)


def features_and_windows(row):
    """Those without a window too, where it matters."""
    for name, features, images in claimed_features(row):
        windows = [WINDOW] if row.sliding_window else []
        if not windows or not {"causal", "soft_cap"}.isdisjoint(features):  # and "everything"
            windows.append(None)
        for window in windows:
            slow = not window and name != "everything"
            if row.backend == "pallas_gpu":  # whose interpreter is the slowest
                slow |= name not in ("everything", "non-causal", "image clamp") or not window
            yield f"{name} {window}", features, images, window, slow


def page_sizes(*cases):
    """A generator for `cells`: those of the cases (page_size, ...) that the row claims."""

    def claimed(row):
        for case in cases:
            values = [value for value in case if value is not SLOW]
            dtypes = row.kv_dtypes[:1] if len(values) == 1 else values[1:]
            if values[0] in claimed_page_sizes(row, values[0]) and dtypes[0] in row.kv_dtypes:
                yield "-".join(map(str, values)), *values, SLOW in case

    return claimed


@pytest.mark.parametrize(("row", "geometry", "window"), cells(geometries))
def test_claimed_geometry(row, geometry, window):
    window = window if row.sliding_window else None
    case = mixed(row, **geometry)
    out, pages = run(case, row.backend, sliding_window=window)
    chosen = base(row) | geometry
    check(case, out, tolerance(chosen["query_dtype"], chosen["kv_dtype"]), sliding_window=window)
    check_pool(case, pages)


@pytest.mark.slow
@pytest.mark.parametrize("window", [WINDOW, None])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("head_dim", CAPABILITIES["pallas_tpu"].head_dims)
def test_every_layout(head_dim, kv_heads, kv_dtype, window):
    """How heads, keys and values share words differs with all three."""
    row = CAPABILITIES["pallas_tpu"]
    query_dtype = "float32" if kv_dtype == "float32" else "bfloat16"
    geometry = {"head_dim": head_dim, "kv_heads": kv_heads}
    case = mixed(row, query_dtype=query_dtype, kv_dtype=kv_dtype, **geometry)
    out, pages = run(case, row.backend, sliding_window=window)
    check(case, out, tolerance(query_dtype, kv_dtype), sliding_window=window)
    check_pool(case, pages)


@pytest.mark.parametrize(
    ("row", "window"), cells(choices((None, 1, WINDOW, 64), on_gpu=(1, WINDOW)))
)
def test_claimed_window(row, window):
    if window and not row.sliding_window:
        pytest.skip("no window claimed")
    case = mixed(row)
    out, _ = run(case, row.backend, sliding_window=window)
    check(case, out, tolerance_of(row), sliding_window=window)


@pytest.mark.parametrize(("row", "features", "images", "window"), cells(features_and_windows))
def test_claimed_feature(row, features, images, window):
    case = mixed(row, kv_heads=2, **({"ratio": 2} if "sinks" in features else {}))
    case = with_images(case, IMAGES) if images else case
    out, _ = run(case, row.backend, sliding_window=window, **features)
    check(case, out, tolerance_of(row), sliding_window=window, **features)


@pytest.mark.parametrize(("row", "window"), cells(choices((WINDOW,), on_gpu=())))
def test_features_change_the_output(row, window):
    """A feature that is accepted is not dropped: without it the oracle says something else."""
    plain = expected(mixed(row, kv_heads=2), sliding_window=window)
    for name, features, images in claimed_features(row):
        case = mixed(row, kv_heads=2)
        case = with_images(case, IMAGES) if images else case
        out, _ = run(case, row.backend, sliding_window=window, **features)
        assert np.abs(out - plain).max() > 1e-2, name


@pytest.mark.parametrize(("row", "window"), cells(choices((WINDOW, 200, None), on_gpu=(WINDOW,))))
def test_long_sequences(row, window):
    """Several query blocks and several key blocks a sequence, with every edge off a multiple."""
    lengths = ((1, 700), (1, 257), (140, 140), (131, 530), (7, 300))
    case = make_case(lengths, decode=2, tokens=300, **base(row))
    options = {} if runs_here(row) else {"tiles": LARGE_TILES[row.backend]}
    out, pages = run(case, row.backend, sliding_window=window, **options)
    check(case, out, tolerance_of(row), sliding_window=window)
    check_pool(case, pages)


@pytest.mark.parametrize(("row", "kv_len"), cells(choices((1, 2, 40), on_gpu=(2,))))
def test_one_token(row, kv_len):
    for decode in (0, 1):
        case = make_case([(1, kv_len)], width=5, decode=decode, **base(row))
        out, pages = run(case, row.backend, sliding_window=WINDOW)
        check(case, out, tolerance_of(row), sliding_window=WINDOW)
        check_pool(case, pages)


@pytest.mark.parametrize(("row", "window"), cells(choices((WINDOW,), on_gpu=())))
def test_distribution_only_hints(row, window):
    """All decode, all prefill and mixed: decode sequences may be declared as prefill."""
    everyone = mixed(row, [(1, 37), (1, 1), (1, 16), (1, 50)])
    some = mixed(row, [(1, 37), (1, 1), (2, 16), (3, 50)])
    for case, most in ((everyone, 4), (some, 2)):
        for decode in range(most + 1):
            for prefill in range(decode, 5) if runs_here(row) else (decode, 4):
                hint = np.array([decode, prefill, 4], np.int32)
                out, _ = run(replace(case, distribution=hint), row.backend, sliding_window=window)
                check(case, out, tolerance_of(row), sliding_window=window)


@pytest.mark.parametrize("row", usable_rows())
def test_padding_sequences_may_own_rows(row):
    """Sequences from `total` on change nothing, even with lengths and offsets of their own."""
    case = mixed(row)
    stale = case.cu_q_lens.copy()
    stale[-2:] += (3, 9)
    finite = {name: np.nan_to_num(getattr(case, name)) for name in ("queries", "keys", "values")}
    case = replace(case, cu_q_lens=stale, **finite)
    out, pages = run(case, row.backend, sliding_window=WINDOW)
    check(case, out, tolerance_of(row), sliding_window=WINDOW)
    check_pool(case, pages)


@pytest.mark.parametrize("row", usable_rows())
def test_an_empty_step(row):
    case = mixed(row, [(0, 0), (0, 9)], decode=0)
    out, pages = run(case, row.backend, sliding_window=WINDOW)
    assert not out.any()
    check_pool(case, pages)


def takes_and_windows(row):
    """One window by default on a GPU, whose interpreter is the slowest."""
    for name, take, slow in takes(row):
        for window in (5, None):
            late = row.backend == "pallas_gpu" and window is None
            yield f"{name}{window}", take, window, slow or late


@pytest.mark.parametrize(("row", "take", "window"), cells(takes_and_windows))
def test_chunks_equal_one_shot(row, take, window):
    """Chunk sizes 1 to 3 W; the pages travel from chunk to chunk."""
    length = 31
    whole = make_case([(length, length)], tokens=32, **base(row))
    expect = expected(whole, sliding_window=window)[:length]
    filled = laid_out(*expected_pool(whole))
    empty = replace(whole, pool=np.zeros_like(whole.pool)).pages()
    for chunk in take(range(1, 16), 3):
        pages, rows = empty, []
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            q_k_v = [
                np.concatenate([each[start:end], np.zeros_like(each[: 16 - end + start])])
                for each in (whole.queries, whole.keys, whole.values)
            ]
            step = replace(
                whole,
                **dict(zip(("queries", "keys", "values"), q_k_v, strict=True)),
                kv_lens=np.array([end], np.int32),
                cu_q_lens=np.array([0, end - start], np.int32),
                lengths=((end - start, end),),
            )
            out, pages = run(step, row.backend, pages=pages, sliding_window=window)
            rows.append(out[: end - start])
        atol = tolerance_of(row)
        np.testing.assert_allclose(np.concatenate(rows), expect, atol=atol, rtol=atol)
        assert np.array_equal(bits(pages), bits(filled)), chunk


@pytest.mark.parametrize(
    ("row", "page_size", "kv_dtype"),
    cells(
        page_sizes(
            (1, "float32"),
            (8, "float32"),
            (40, "float32", SLOW),
            (8, "bfloat16"),
            (8, "int8"),
            (40, "float8_e4m3fn", SLOW),
        )
    ),
)
def test_dead_pages_and_stale_ids_do_not_matter(row, page_size, kv_dtype):
    """NaN in all that is dead and garbage in every dead column: equal to the bit."""
    case = mixed(row, page_size=page_size, kv_dtype=kv_dtype)
    for window in (WINDOW, None) if kv_dtype == row.kv_dtypes[0] else (WINDOW,):
        clean, _ = run(case, row.backend, sliding_window=window)
        for seed in range(3):
            bad = poisoned(case, window, seed)
            out, pages = run(bad, row.backend, sliding_window=window)
            assert np.isfinite(out).all()
            assert np.array_equal(bits(out), bits(clean))
            check_pool(bad, pages)


@pytest.mark.parametrize(
    ("row", "features"),
    cells(
        choices(
            ({"causal": False}, {"image_rule": "clamp"}, {"image_rule": "extend"}, {"sinks": True}),
            on_gpu=({"image_rule": "extend"},),
        )
    ),
)
def test_dead_pages_do_not_matter_to_features(row, features):
    case = mixed(row, kv_heads=2)
    if "image_rule" in features:  # of images inside the readable part of their sequence
        case = with_images(case, IMAGES)
    if "sinks" in features:
        features = {"sinks": jnp.array([0.5, -1.0, 2.0, 0.0])}
    clean, _ = run(case, row.backend, sliding_window=WINDOW, **features)
    out, _ = run(poisoned(case, WINDOW), row.backend, sliding_window=WINDOW, **features)
    assert np.isfinite(out).all()
    assert np.array_equal(bits(out), bits(clean))


@pytest.mark.parametrize(("row", "kv_dtype"), cells(choices((None, "int8"), on_gpu=("int8",))))
def test_new_tokens_without_a_page_are_dropped(row, kv_dtype):
    """Ids 0, negative, too large, and columns outside the table: no row of any pool moves."""
    case = mixed(row, page_size=page_size_of(row, 8), kv_dtype=kv_dtype or row.kv_dtypes[0])
    table = case.table.copy()
    num_pages = len(case.pool)
    table[0, 36 // case.page_size] = num_pages
    table[1, 0] = -1
    table[3, 0], table[3, 1] = 0, 2**31 - 1
    table[5, 49 // case.page_size] = -num_pages  # would wrap around to page 0
    # Columns 1 to 5 only: page 0 of a sequence is before the table, column 6 is behind it.
    columns = replace(case, table=case.table[:, 1:6], first_page=np.ones(len(table), np.int32))
    for changed in (replace(case, table=table), columns):
        _, pages = run(changed, row.backend, sliding_window=WINDOW)
        check_pool(changed, pages)


@pytest.mark.parametrize(("row", "kv_dtype"), cells(choices((None, "int8"), on_gpu=("int8",))))
def test_reading_only_writes_nothing(row, kv_dtype):
    """`update_kv_cache=False`: the keys and values given are not looked at (they are NaN)."""
    if not row.shared_kv:
        pytest.skip("not claimed")
    case = written(mixed(row, kv_dtype=kv_dtype or row.kv_dtypes[0]))
    out, pages = run(case, row.backend, sliding_window=WINDOW, update_kv_cache=False)
    check(case, out, tolerance_of(row), sliding_window=WINDOW)
    same = jax.tree.map(
        lambda after, was: np.array_equal(bits(after), bits(was)), pages, case.pages()
    )
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(("row", "page_size"), cells(page_sizes((1,), (8,), (16, SLOW))))
def test_tables_of_live_pages_only(row, page_size):
    if not row.first_page:
        pytest.skip("not claimed")
    full = mixed(row, page_size=page_size)
    live = live_only(full, WINDOW)
    assert live.first_page[: len(MIXED)].max() > 0
    out, pages = run(full, row.backend, sliding_window=WINDOW)
    out_live, pages_live = run(live, row.backend, sliding_window=WINDOW)
    check(live, out_live, tolerance_of(row), sliding_window=WINDOW)
    check_pool(live, pages_live)
    assert np.array_equal(bits(pages), bits(pages_live))
    if row.backend == "xla":  # walks blocks of absolute positions, whatever the table holds
        assert np.array_equal(bits(out), bits(out_live))


@pytest.mark.parametrize("row", usable_rows())
def test_image_of_the_next_sequence_keeps_dead_pages_dead(row):
    """A block's tail may be the next sequence's rows, whose image starts further back."""
    case = with_images(mixed(row, [(5, 50), (9, 9)], decode=0), {1: [(0, 7)]})
    options = {"sliding_window": WINDOW, "image_rule": "extend"}
    out, _ = run(poisoned(case, WINDOW), row.backend, **options)
    check(case, out, tolerance_of(row), **options)


def test_every_usable_row_is_run():
    assert not any(mark.args[0] for param in usable_rows() for mark in param.marks)
    assert {"pallas_tpu", "pallas_gpu", "xla", "reference"} <= {param.id for param in usable_rows()}
