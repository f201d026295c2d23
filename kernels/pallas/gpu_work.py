"""Who does what on a GPU: tiles of queries, the keys each of them sees, and equal shares.

A tile is a few query rows of one sequence; with each of its heads it visits the same key tiles.
All visits of a launch, tile by tile and head by head, lie on one line, and every thread block
takes an equal part of it, wherever that cuts:

    tile              0               1       2
    head          0   |   1       0 | 1     0   |   1
    key tiles    0 1 2|0 1 2     0 1|0 1   0 1 2|0 1 2
    thread block [0      ][1      ][2      ][3       ]

A head whose key tiles are cut leaves partial results, which `gpu_combine.py` puts together. All
of this is computed on the device, from lengths that the host need not know.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxattn.kernels.mask import visible_range
from jaxattn.kernels.pallas.gpu_shape import GpuShape
from jaxattn.kernels.ragged import TokenPlaces

# Columns of `Work.tiles`.
SEQUENCE, TOKEN, ROWS, START, COUNT, FULL_FROM, FULL_TO, LIVE_FROM, LIVE_TO = range(9)
# Columns of `Work.shares`.
TILE, HEAD, KEY_TILE, TOTAL, PIECES = range(5)
# Columns of `Work.cuts`.
CUT, LAST_BLOCK, CUT_TILE, CUT_HEAD = range(4)
LEAST_SHARE = 2  # key tiles of a block: fewer are not worth another


class Ranges(NamedTuple):
    """Per token the keys it sees, `first <= k < end` of its sequence; none for padding."""

    first: Int32[Array, "tokens"]
    end: Int32[Array, "tokens"]


class Work(NamedTuple):
    """What a launch does."""

    tiles: Int32[Array, "tiles 9"]  # SEQUENCE to LIVE_TO, see above
    first: Int32[Array, "tiles rows"]  # first key that a row sees
    end: Int32[Array, "tiles rows"]  # end of what it sees
    shares: Int32[Array, "blocks 5"]  # TILE to PIECES: where a block starts and how far it goes
    cuts: Int32[Array, "blocks 4"]  # CUT to CUT_HEAD: results that begin in this block's last piece


def ranges_of(
    places: TokenPlaces,
    kv_lens: Int32[Array, "seqs"],
    image_spans: Int32[Array, "tokens 2"] | None,
    *,
    sliding_window: int | None,
    causal: bool,
    image_rule: str,
) -> Ranges:
    """What every token of the batch sees."""
    first, end = visible_range(
        places.positions,
        None if image_spans is None else (image_spans[:, 0], image_spans[:, 1]),
        sliding_window=sliding_window,
        causal=causal,
        image_rule=image_rule,
        kv_len=kv_lens[places.sequences],
    )
    return Ranges(jnp.where(places.real, first, 0), jnp.where(places.real, jnp.maximum(end, 0), 0))


def decode_work(ranges: Ranges, count: Int32[Array, ""], seqs: int, shape: GpuShape) -> Work:
    """Tiles of one token each: those of the first `count` sequences, of at most `seqs`."""
    token = jnp.arange(seqs, dtype=jnp.int32)
    first, end = (
        jnp.broadcast_to(jnp.where(token < count, each[:seqs], 0)[:, None], (seqs, shape.rows))
        for each in ranges
    )
    rows = jnp.where(token < count, shape.group, 0)
    return _work(token, token, rows, first, end, shape)


def prefill_work(
    ranges: Ranges,
    cu_q_lens: Int32[Array, "seqs_plus_1"],
    distribution: Int32[Array, "3"],
    shape: GpuShape,
) -> Work:
    """Tiles of `shape.rows` tokens: those of the sequences after the decoding ones."""
    tokens, seqs = len(ranges.first), len(cu_q_lens) - 1
    number = jnp.arange(seqs, dtype=jnp.int32)
    chunked = (distribution[0] <= number) & (number < distribution[2])
    lens = jnp.where(chunked, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    ends = jnp.cumsum(-(-lens // shape.rows), dtype=jnp.int32)
    tile = jnp.arange(tokens // shape.rows + min(seqs, tokens), dtype=jnp.int32)
    sequence = jnp.sum(ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, seqs - 1)
    before = jnp.where(sequence > 0, ends[sequence - 1], 0)
    token = cu_q_lens[sequence] + (tile - before) * shape.rows
    rows = jnp.clip(cu_q_lens[sequence + 1] - token, 0, shape.rows)
    rows = jnp.where(tile < ends[-1], rows, 0)
    row = jnp.arange(shape.rows, dtype=jnp.int32)
    of_rows = jnp.clip(token[:, None] + row[None], 0, tokens - 1)
    first, end = (jnp.where(row[None] < rows[:, None], each[of_rows], 0) for each in ranges)
    return _work(sequence, token, rows, first, end, shape)


def _work(
    sequence: Int32[Array, "tiles"],
    token: Int32[Array, "tiles"],
    rows: Int32[Array, "tiles"],
    first: Int32[Array, "tiles rows"],
    end: Int32[Array, "tiles rows"],
    shape: GpuShape,
) -> Work:
    sees = first < end
    last = jnp.iinfo(jnp.int32).max
    live_from = jnp.min(jnp.where(sees, first, last), axis=1)
    live_to = jnp.max(end, axis=1)
    live_from = jnp.minimum(live_from, live_to)
    start = live_from - live_from % shape.page_tokens
    count = -(-(live_to - start) // shape.tile_tokens)
    columns = [
        sequence,
        token,
        rows,
        start,
        count,
        jnp.max(jnp.where(sees, first, 0), axis=1),
        jnp.min(jnp.where(sees, end, last), axis=1),
        live_from,
        live_to,
    ]
    ends = shape.heads * jnp.cumsum(count, dtype=jnp.int32)  # on the line of all visits
    share = jnp.maximum(-(-ends[-1] // shape.blocks), LEAST_SHARE)
    begin = jnp.minimum(jnp.arange(shape.blocks, dtype=jnp.int32) * share, ends[-1])
    stop = jnp.minimum(begin + share, ends[-1])

    def locate(place: Int32[Array, "blocks"]) -> tuple[Array, Array, Array]:
        tile = jnp.sum(ends[None] <= place[:, None], axis=1, dtype=jnp.int32)
        tile = jnp.minimum(tile, len(ends) - 1)
        each = jnp.maximum(count[tile], 1)
        offset = place - (ends[tile] - shape.heads * count[tile])
        return tile, offset // each, offset % each

    tile, head, key_tile = locate(begin)
    last_tile, last_head, last_key_tile = locate(jnp.maximum(stop - 1, 0))
    pieces = (last_tile - tile) * shape.heads + last_head - head + 1
    pieces = jnp.where(begin < stop, pieces, 0)
    shares = jnp.stack([tile, head, key_tile, stop - begin, pieces], axis=1)
    # The last piece of a block, if it has the first key tile of its head and not the last one.
    ends_here = last_key_tile == count[last_tile] - 1
    starts_here = (pieces > 1) | (key_tile == 0)
    cut = (begin < stop) & starts_here & ~ends_here
    head_end = ends[last_tile] - shape.heads * count[last_tile] + (last_head + 1) * count[last_tile]
    last_block = (head_end - 1) // share
    cuts = jnp.stack([cut.astype(jnp.int32), last_block, last_tile, last_head], axis=1)
    return Work(jnp.stack(columns, axis=1), first, end, shares, cuts)
