"""What the GPU kernels are told to do: what each row sees, and who visits which key tile."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.kernels.layout import KVLayout
from jaxattn.kernels.mask import visible, visible_range
from jaxattn.kernels.pallas.gpu_shape import GpuTiles, multiprocessors, shape_for
from jaxattn.kernels.pallas.gpu_work import (
    COUNT,
    LIVE_FROM,
    LIVE_TO,
    ROWS,
    SEQUENCE,
    START,
    TOKEN,
    Ranges,
    decode_work,
    prefill_work,
)

LENGTH = 24


@pytest.mark.parametrize("rule", ["clamp", "extend"])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_a_range_is_what_is_visible(window, causal, rule):
    """For text and images of any place and length."""
    position = jnp.arange(LENGTH, dtype=jnp.int32)
    for start in range(LENGTH):
        for end in (start, start + 1, start + 7, LENGTH):
            inside = (start <= position) & (position < end)
            spans = jnp.where(inside[:, None], jnp.array([[start, end]], jnp.int32), 0)
            mask = {"sliding_window": window, "causal": causal, "image_rule": rule}
            first, stop = visible_range(
                position, (spans[:, 0], spans[:, 1]), **mask, kv_len=jnp.full(LENGTH, LENGTH)
            )
            ranges = (first[:, None] <= position[None]) & (position[None] < stop[:, None])
            np.testing.assert_array_equal(
                ranges, visible(position, position, image_spans=spans, **mask)
            )


def shape_of(decode, blocks, *, q_heads=4, page_size=16):
    layout = KVLayout(num_kv_heads=2, head_dim=64, page_size=page_size, dtype="bfloat16")
    tiles = GpuTiles(blocks=blocks, tile_tokens=64, stages=2)
    options = {"soft_cap": None, "sm_scale": 1.0, "tiles": tiles}
    return shape_for(layout, num_q_heads=q_heads, decode=decode, **options)


def walk(work, shape):
    """Every visit as (tile, head, key tile), block by block, as the kernel walks."""
    tiles = np.asarray(work.tiles)
    for block, (tile, head, key_tile, total, pieces) in enumerate(np.asarray(work.shares)):
        done = 0
        for _ in range(pieces):
            count = min(tiles[tile, COUNT] - key_tile, total - done)
            whole = key_tile == 0 and count == tiles[tile, COUNT]
            yield block, tile, head, range(key_tile, key_tile + count), whole
            done += count
            tile, head = (tile + 1, 0) if head == shape.heads - 1 else (tile, head + 1)
            key_tile = 0
        assert done == total


def check(work, shape):
    """Every key tile of every head is visited once, and every cut head is put together."""
    tiles, cuts = np.asarray(work.tiles), np.asarray(work.cuts)
    visits, parts = set(), {}
    for block, tile, head, key_tiles, whole in walk(work, shape):
        assert len(key_tiles) > 0
        for key_tile in key_tiles:
            assert (tile, head, key_tile) not in visits
            visits.add((tile, head, key_tile))
        if not whole:
            parts.setdefault((tile, head), []).append(block)
    assert visits == {
        (tile, head, key_tile)
        for tile in range(len(tiles))
        for head in range(shape.heads)
        for key_tile in range(tiles[tile, COUNT])
    }
    combined = {
        (tile, head): list(range(block, last + 1))
        for block, (cut, last, tile, head) in enumerate(cuts)
        if cut
    }
    assert combined == parts


lengths = st.lists(st.integers(1, 900), min_size=1, max_size=7)


@settings(max_examples=15, deadline=None)
@given(lengths, st.integers(1, 9), st.sampled_from([None, 1, 100, 513]))
def test_decode_shares(lens, blocks, window):
    shape = shape_of(True, blocks)
    end = np.array([*lens, 0], np.int32)
    first = np.maximum(end - (window or 10**6), 0)
    ranges = Ranges(jnp.asarray(first), jnp.asarray(end))
    work = decode_work(ranges, jnp.int32(len(lens)), len(end), shape)
    check(work, shape)
    tiles = np.asarray(work.tiles)
    assert (tiles[:, START] % 16 == 0).all()
    assert (tiles[:, START] + 64 * tiles[:, COUNT] >= end).all()
    assert (first - tiles[:, START] < 16).all()  # nothing below the window's own page is visited


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 500)), min_size=1, max_size=5),
    st.integers(0, 2),
    st.integers(1, 9),
    st.sampled_from([None, 100]),
)
def test_prefill_tiles_and_shares(chunks, decode, blocks, window):
    shape = shape_of(False, blocks)
    lens = [(q_len, q_len + past) for q_len, past in [(1, 40)] * decode + chunks]
    cu_q_lens = np.cumsum([0, *(q_len for q_len, _ in lens)])
    tokens = int(cu_q_lens[-1]) + 3
    first, end, owner = (np.zeros(tokens, np.int32) for _ in range(3))
    for sequence, (q_len, kv_len) in enumerate(lens):
        rows = slice(cu_q_lens[sequence], cu_q_lens[sequence + 1])
        end[rows] = np.arange(kv_len - q_len, kv_len) + 1
        first[rows] = np.maximum(end[rows] - (window or 10**6), 0)
        owner[rows] = sequence
    distribution = jnp.array([decode, len(lens), len(lens)], jnp.int32)
    ranges = Ranges(jnp.asarray(first), jnp.asarray(end))
    work = prefill_work(ranges, jnp.asarray(cu_q_lens, jnp.int32), distribution, shape)
    check(work, shape)
    covered = []
    for index, tile in enumerate(np.asarray(work.tiles)):
        rows = np.arange(tile[TOKEN], tile[TOKEN] + tile[ROWS])
        covered += list(rows)
        if not len(rows):
            assert tile[COUNT] == 0
            continue
        assert (owner[rows] == tile[SEQUENCE]).all()
        assert (tile[LIVE_FROM], tile[LIVE_TO]) == (first[rows].min(), end[rows].max())
        np.testing.assert_array_equal(np.asarray(work.first)[index, : len(rows)], first[rows])
        np.testing.assert_array_equal(np.asarray(work.end)[index, : len(rows)], end[rows])
        assert not np.asarray(work.end)[index, len(rows) :].any()
    assert covered == list(range(decode, int(cu_q_lens[-1])))


def test_one_block_on_each_multiprocessor():
    assert multiprocessors("NVIDIA H100 80GB HBM3") == multiprocessors("NVIDIA H200") == 132
    assert multiprocessors("NVIDIA H100 PCIe") == 114
    assert multiprocessors("NVIDIA H20") == 78
