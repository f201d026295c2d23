"""The TPU prefill kernel on CPU: tiny tiles, so that every buffer is used again and again."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxattn.kernels import layout
from jaxattn.kernels.pallas.tpu_prefill import prefill
from jaxattn.kernels.pallas.tpu_prefill_shape import PrefillTiles
from tests import attention_cases as cases

TILES = PrefillTiles(block_q=8, blocks=2, block_kv=16)
# The default detector is nearly blind: two entries a clock, and copies made when awaited.
MODES = {
    mode: pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode=mode,
        vector_clock_size=1024,
        uninitialized_memory="nan",
    )
    for mode in ("eager", "on_wait")
}
STATIC = ("made", "tiles", "interpret", "sm_scale", "sliding_window", "soft_cap")
STATIC += ("image_rule", "causal", "update_kv_cache")


@partial(jax.jit, static_argnames=STATIC)
def call(arrays, out, sinks, *, made, tiles, interpret, **options):
    queries, keys, values, pages, kv_lens, table, cu_q_lens, distribution, first, spans = arrays
    padding = made.lane_tiles * layout.LANES - queries.shape[2]
    scales = None
    if made.is_quantized:  # the caller scatters the scales of new tokens
        where = kv_lens, table, cu_q_lens, distribution, first
        scales = layout.write_tokens(pages, keys, values, *where).scales
        pages = pages.values
        (keys, _), (values, _) = (layout.quantize(each, pages.dtype) for each in (keys, values))
    new_kv = made.pack_tokens(keys.astype(pages.dtype), values.astype(pages.dtype))
    got, pages = prefill(
        jnp.pad(queries, ((0, 0), (0, 0), (0, padding))),
        new_kv,
        pages,
        scales,
        jnp.pad(out, ((0, 0), (0, 0), (0, padding))),
        *(kv_lens, table, cu_q_lens, distribution, first, sinks, spans),
        layout=made,
        tiles=tiles,
        interpret=interpret,
        vmem_limit_bytes=2**26,
        **options,
    )
    return got[..., : queries.shape[2]], pages


def check(case, mode="eager", *, tiles=TILES, sinks=None, soft_cap=None, **mask):
    """Compare outputs and the whole pool; rows of decode sequences must stay what they are."""
    mask = {"sliding_window": None, "causal": True, "image_rule": "clamp"} | mask
    update = mask.pop("update_kv_cache", True)
    kv_heads, head_dim = case.keys.shape[1:]
    made = layout.KVLayout(
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=case.page_size,
        dtype=case.pool.dtype.name,
    )
    decode = int(case.distribution[0])
    kept = int(case.cu_q_lens[decode])
    out = np.full(case.queries.shape, 7, case.queries.dtype)
    arrays = (
        *(case.queries, case.keys, case.values, case.pages(), case.kv_lens, case.table),
        *(case.cu_q_lens, case.distribution, case.first_page, case.image_spans),
    )
    got, pages = call(
        jax.tree.map(jnp.asarray, arrays),
        jnp.asarray(out),
        None if sinks is None else jnp.asarray(sinks),
        made=made,
        tiles=tiles,
        interpret=MODES[mode],
        sm_scale=cases.SCALE,
        soft_cap=soft_cap,
        update_kv_cache=update,
        **mask,
    )
    got, pages = np.asarray(got), np.asarray(pages)
    want = cases.expected(case, soft_cap=soft_cap, sinks=sinks, **mask)
    limit = cases.tolerance(case.queries.dtype.name, case.pool.dtype.name)
    np.testing.assert_array_equal(got[:kept], out[:kept])
    np.testing.assert_allclose(got[kept:].astype(np.float32), want[kept:], atol=limit, rtol=limit)
    pool = case.pool if not update else cases.expected_pool(case)[0]
    for _, sequence, position in case.places() if update else ():
        if sequence < decode:  # written by another kernel
            place = case.table[sequence, position // case.page_size], position % case.page_size
            pool[place] = case.pool[place]
    np.testing.assert_array_equal(cases.bits(pages), cases.bits(cases.laid_out(pool)))
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


LENGTHS = [(1, 20), (1, 5), (40, 40), (0, 9), (3, 50), (17, 33), (1, 1)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [None, 5, 16, 37])
def test_ragged(mode, window):
    case = cases.make_case(
        LENGTHS, page_size=8, head_dim=128, kv_heads=2, ratio=2, decode=2, tokens=70, seqs=9
    )
    check(cases.poisoned(case, window), mode, sliding_window=window)


def test_a_short_sequence_alone():
    """What the tile holds beyond it is what memory held before: NaN."""
    case = cases.make_case([(3, 3)], page_size=8, head_dim=128, kv_heads=2, ratio=2)
    check(case, sliding_window=None)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "ratio", "window"),
    [(256, 1, 4, 16), (128, 3, 1, None), (64, 2, 3, 16), (80, 1, 1, 5), (192, 2, 2, None)],
)
def test_shapes(head_dim, kv_heads, ratio, window, dtype):
    case = cases.make_case(
        [(13, 13), (9, 30), (2, 2)],
        **dict(page_size=4, head_dim=head_dim, kv_heads=kv_heads, ratio=ratio, tokens=26),
        query_dtype=dtype,
        kv_dtype=dtype,
    )
    check(cases.poisoned(case, window), sliding_window=window)


@pytest.mark.slow
@pytest.mark.parametrize("query_dtype", ["float32", "bfloat16"])
def test_mixed_dtypes(query_dtype):
    kv_dtype = {"float32": "bfloat16", "bfloat16": "float32"}[query_dtype]
    case = cases.make_case(
        [(20, 33)], page_size=8, head_dim=128, query_dtype=query_dtype, kv_dtype=kv_dtype
    )
    check(case, sliding_window=16)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ["clamp", "extend"])
@pytest.mark.parametrize("window", [None, 5, 16])
def test_images(mode, rule, window):
    case = cases.make_case([(1, 9), (30, 41), (25, 25)], page_size=8, head_dim=128, decode=1)
    case = cases.with_images(case, {1: [(2, 20), (24, 40)], 2: [(0, 3), (5, 23)]})
    check(case, mode, sliding_window=window, image_rule=rule)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 9])
def test_not_causal(window):
    case = cases.make_case([(30, 41), (5, 20)], page_size=8, head_dim=128)
    check(case, sliding_window=window, causal=False)


@pytest.mark.slow
def test_sinks_and_soft_cap():
    case = cases.make_case([(30, 41), (5, 20)], page_size=8, head_dim=64, kv_heads=2)
    sinks = np.array([0.5, -1.0, 3.0, 40.0], np.float32)
    check(case, sliding_window=9, sinks=sinks, soft_cap=2.0)
    check(case, sinks=sinks)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 9])
def test_pages_written_before(window):
    case = cases.make_case([(30, 41), (5, 20)], page_size=8, head_dim=128)
    case = cases.poisoned(cases.written(case), window)
    check(case, sliding_window=window, update_kv_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [3, 8, 16])
def test_live_pages_only(page_size):
    case = cases.make_case([(7, 60), (20, 21)], page_size=page_size, head_dim=128)
    check(cases.live_only(case, 9), sliding_window=9)


def test_pages_without_a_place_are_not_written():
    case = cases.make_case([(20, 40)], page_size=8, head_dim=128)
    case.table[0, 3] = 0
    case.table[0, 4] = len(case.pool) + 3
    check(case, sliding_window=9)


def test_no_sequence():
    case = cases.make_case([(1, 4), (0, 9)], page_size=8, head_dim=128, decode=1, tokens=30)
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(128, 4), (256, 1), (64, 2)])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_quantised(kv_dtype, head_dim, kv_heads, window, mode):
    case = cases.make_case(
        [(13, 13), (9, 30)], page_size=8, head_dim=head_dim, kv_heads=kv_heads, kv_dtype=kv_dtype
    )
    check(cases.poisoned(case, window), mode, sliding_window=window)
