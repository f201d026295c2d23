"""Decode on TPU: one new token per sequence, against the contiguous range of keys it sees.

A decode query is its sequence's last token, so what it sees is `starts[s] <= k < kv_lens[s]`,
whatever the mask. Keys travel in tiles of `tile_tokens` tokens, each filled by one copy per page,
from the exact first visible token to the last. A ring of `slots` tiles over tiles and sequences
keeps several copies in flight: a window is small, and one at a time would wait for latency.

    window that fits one tile     sequence:  0    1    2    3      one softmax, no running state
    global, or a larger window    tiles:     0 1 2 3 | 0 | 0 1     online softmax over the tiles

See `tpu_decode_products.py` for what happens to a tile. The new tokens' keys and values go to
their pages from HBM to HBM, and into the tiles from the same array, so that no read waits for a
write.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from jaxattn.kernels.layout import LANES
from jaxattn.kernels.pallas.products import LOG2_E
from jaxattn.kernels.pallas.scalars import ceil_quotient
from jaxattn.kernels.pallas.tiles import CLEARED, odd
from jaxattn.kernels.pallas.tpu_decode_copies import Ring, either
from jaxattn.kernels.pallas.tpu_decode_products import (
    HIDDEN,
    Tile,
    padded,
    spread_queries,
)
from jaxattn.kernels.pallas.tpu_decode_shape import DecodeShape
from jaxattn.kernels.pallas.words import Ref

Scalar = Int32[Array, ""]


@dataclass(frozen=True, kw_only=True)
class _Refs:
    """The kernel's references, by name; None where the kernel has no use for it."""

    # scalars
    count: Ref  # [1] decode sequences
    starts: Ref  # [seqs] first visible token
    offsets: Ref  # [seqs] its row in its page
    kv_lens: Ref  # [seqs]
    table: Ref  # [seqs * table_width] pages from that of `starts` on, 0 where there is none
    write_page: Ref  # [seqs] page of the new token, 0 where there is none
    write_row: Ref  # [seqs] its row in it
    # inputs
    queries: Ref  # [block_seqs, q_heads, head_dim]
    new_kv: Ref  # [tokens, rows, pack, 128] in HBM
    pages_in: Ref  # the same memory as `pages`
    scales: Ref = None  # [num_pages, scale_rows, page_size * pack] in HBM
    sinks: Ref = None  # [products, rows, 128] times log2(e)
    # outputs
    out: Ref  # [block_seqs, q_heads, head_dim]
    pages: Ref  # [num_pages, page_size, rows, pack, 128] in HBM
    # scratch
    tile: Ref  # [slots, columns and CLEARED more, odd rows, pack, 128]
    arrived: Ref  # [slots] copies of a tile
    written: Ref  # copies of new tokens to their pages
    progress: Ref  # [5]: USED_SLOT to WRITTEN
    dirty: Ref  # [slots] rows of a tile that may hold anything
    tile_scales: Ref = None  # [slots, pages, scale_rows, page_size * pack]
    scales_arrived: Ref = None  # [slots]
    top: Ref = None  # [products, rows, 128] running maximum
    total: Ref = None  # [products, rows, 128] running denominator
    acc: Ref = None  # [products, rows, lanes] running output


# Entries of `progress`.
USED_SLOT, NEXT_SLOT, NEXT_SEQ, NEXT_TILE, WRITTEN = range(5)


def _kernel(names: tuple[str, ...], shape: DecodeShape, *refs: Ref) -> None:
    ref = _Refs(**dict(zip(names, refs, strict=True)))
    ring = Ring(shape, ref)
    block, count, slots = pl.program_id(0), ref.count[0], shape.tiles.slots

    def following(slot: Scalar) -> Scalar:
        return jnp.where(slot == slots - 1, 0, slot + 1)

    def fetch_next() -> None:
        seq = ref.progress[NEXT_SEQ]

        @pl.when(seq < count)
        def _() -> None:
            index = 0 if shape.single else ref.progress[NEXT_TILE]
            slot = ref.progress[NEXT_SLOT]
            ring.fetch(seq, index, slot)
            ref.progress[NEXT_SLOT] = following(slot)
            if shape.single:
                ref.progress[NEXT_SEQ] = seq + 1
            else:
                last = ring.span(seq, index + 1)[0] >= ref.kv_lens[seq]
                ref.progress[NEXT_SEQ] = seq + last.astype(jnp.int32)
                ref.progress[NEXT_TILE] = jnp.where(last, 0, index + 1)

    @pl.when(block == 0)
    def _() -> None:
        for entry in range(len(ref.progress)):
            ref.progress[entry] = 0
        for slot in range(slots):
            ref.dirty[slot] = shape.tiles.columns(shape.layout)
        pl.loop(0, slots - 1)(lambda _: fetch_next())

    def visit(seq: Scalar, row: Scalar, index: Scalar | int) -> None:
        """Wait for a tile and attend to it."""
        slot = ref.progress[USED_SLOT]
        ref.progress[USED_SLOT] = following(slot)
        fetch_next()
        first, stop = ring.span(seq, index)
        base = ring.base(seq)
        rows = base, base + stop - first
        ring.wait(slot, stop - first, rows[1] if shape.layout.is_quantized else None)
        ring.clear(slot, *rows)

        def attend(columns: int) -> None:
            scales = None
            if ref.tile_scales is not None:
                pages = columns // shape.layout.page_size
                scales = ref.tile_scales.at[slot, pl.ds(0, pages)]
            tile = Tile(shape, ref.tile.at[slot, pl.ds(0, columns)], scales, rows)
            if shape.single:
                _attend_single(row, shape, ref, tile)
            else:
                _attend_more(row, index, shape, ref, tile)

        columns = shape.tiles.columns(shape.layout)
        if shape.single:
            attend(columns)
        else:  # a short sequence does not pay for a whole tile
            small = shape.small_tokens
            either(rows[1] > small, lambda: attend(columns), lambda: attend(small))

    @pl.loop(0, jnp.clip(count - block * shape.tiles.block_seqs, 0, shape.tiles.block_seqs))
    def _(row: Scalar) -> None:
        seq = block * shape.tiles.block_seqs + row
        if shape.update_kv_cache:

            @pl.when(ref.write_page[seq] > 0)
            def _() -> None:
                target = ref.pages.at[ref.write_page[seq], pl.ds(ref.write_row[seq], 1)]
                pltpu.make_async_copy(ref.new_kv.at[pl.ds(seq, 1)], target, ref.written).start()
                ref.progress[WRITTEN] += 1

        if shape.single:
            visit(seq, row, 0)
        else:
            tiles = ceil_quotient(ref.kv_lens[seq] - ref.starts[seq], shape.full_tokens)
            pl.loop(0, tiles)(lambda index: visit(seq, row, index))
            _finish(shape, ref, row)

    if shape.update_kv_cache:

        @pl.when((block == pl.num_programs(0) - 1) & (ref.progress[WRITTEN] > 0))
        def _() -> None:
            rows = ref.new_kv.at[pl.ds(0, ref.progress[WRITTEN])]
            pltpu.make_async_copy(rows, rows, ref.written).wait()


def _sinks(ref: _Refs, product: int) -> Array | None:
    return None if ref.sinks is None else ref.sinks[product][:, :1]


def _attend_single(row: Scalar, shape: DecodeShape, ref: _Refs, tile: Tile) -> None:
    """All keys at once: an ordinary softmax."""
    queries, seen = spread_queries(shape, ref.queries[row]), tile.seen()
    scores = [tile.scores(product, query, seen) for product, query in enumerate(queries)]
    out = []
    for product, score in enumerate(scores):
        top, sink = jnp.max(score, axis=1, keepdims=True), _sinks(ref, product)
        if sink is not None:
            top = jnp.maximum(top, sink)
        weights = jnp.exp2(score - top)
        total = jnp.sum(weights, axis=1, keepdims=True)
        if sink is not None:
            total += jnp.exp2(sink - top)
        out.append(tile.weighted(product, weights, seen) / total)
    _store(shape, ref, row, out)


def _attend_more(
    row: Scalar, index: Scalar | int, shape: DecodeShape, ref: _Refs, tile: Tile
) -> None:
    """One tile more: the online softmax (Milakov and Gimelshein, 2018)."""
    queries, seen = spread_queries(shape, ref.queries[row]), tile.seen()
    scores = [tile.scores(product, query, seen) for product, query in enumerate(queries)]
    began = index == 0
    for product, score in enumerate(scores):
        sink = _sinks(ref, product)
        # The state before the first tile: nothing seen but the sink.
        before = jnp.full((score.shape[0], 1), HIDDEN) if sink is None else sink
        old_top = jnp.where(began, before, ref.top[product][:, :1])
        old_total = jnp.where(began, float(sink is not None), ref.total[product][:, :1])
        top = jnp.maximum(old_top, jnp.max(score, axis=1, keepdims=True))
        shrink = jnp.exp2(old_top - top)
        weights = jnp.exp2(score - top)
        total = old_total * shrink + jnp.sum(weights, axis=1, keepdims=True)
        acc = jnp.where(began, 0.0, ref.acc[product]) * shrink
        ref.acc[product] = acc + tile.weighted(product, weights, seen)
        ref.top[product] = jnp.broadcast_to(top, ref.top.shape[1:])
        ref.total[product] = jnp.broadcast_to(total, ref.total.shape[1:])


def _finish(shape: DecodeShape, ref: _Refs, row: Scalar) -> None:
    products = range(shape.words // shape.words_per_product)
    _store(shape, ref, row, [ref.acc[p] / ref.total[p][:, :1] for p in products])


def _store(shape: DecodeShape, ref: _Refs, row: Scalar, out: list[Array]) -> None:
    layout = shape.layout
    lane = layout.place(1, 0, 0).lane
    value = jnp.concatenate(out, axis=0)[: shape.num_q_heads, lane : lane + layout.head_dim]
    ref.out[row] = padded(value, ref.out.shape[2], axis=1).astype(ref.out.dtype)


def decode(
    queries: Float[Array, "tokens q_heads head_dim"],
    new_kv: Float[Array, "tokens rows pack 128"],
    pages: Array,
    scales: Array | None,
    sinks: Float[Array, "q_heads"] | None,
    count: Int32[Array, ""],
    starts: Int32[Array, "seqs"],
    kv_lens: Int32[Array, "seqs"],
    table: Int32[Array, "seqs table_width"],
    write_page: Int32[Array, "seqs"],
    write_row: Int32[Array, "seqs"],
    *,
    shape: DecodeShape,
    interpret: Any,
    vmem_limit_bytes: int,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Array]:
    """Attend for the first `count` rows, sequence i's query in row i, and write their keys.

    `table[s]` holds the pages from that of token `starts[s]` on, 0 where there is none;
    `write_page[s]` that of the new token, `write_row[s]` its row in it. Rows of the output from
    `count` on are left undefined.
    """
    layout, tiles = shape.layout, shape.tiles
    tokens, q_heads, head_dim = queries.shape
    products, rows = shape.words // shape.words_per_product, shape.product_rows
    lanes = layout.lane_tiles * LANES
    page_size = layout.page_size
    scalars = {
        "count": count.reshape(1),
        "starts": starts,
        "offsets": starts % page_size,
        "kv_lens": kv_lens,
        "table": table.reshape(-1),
        "write_page": write_page,
        "write_row": write_row,
    }

    def of_block(block: Scalar, count: Ref, *_: Ref) -> tuple:
        last = jnp.maximum(ceil_quotient(count[0], tiles.block_seqs) - 1, 0)
        return jnp.minimum(block, last), 0, 0

    by_block = pl.BlockSpec((tiles.block_seqs, q_heads, head_dim), of_block)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    inputs = {
        "queries": (queries, by_block),
        "new_kv": (new_kv, in_hbm),
        "pages_in": (pages, in_hbm),
    }
    columns = tiles.columns(layout)
    scratch: dict[str, Any] = {
        "tile": pltpu.VMEM(
            (tiles.slots, columns + CLEARED, odd(layout.rows), layout.pack, LANES), pages.dtype
        ),
        "dirty": pltpu.SMEM((tiles.slots,), jnp.int32),
        "arrived": pltpu.SemaphoreType.DMA((tiles.slots,)),
        "written": pltpu.SemaphoreType.DMA,
        "progress": pltpu.SMEM((5,), jnp.int32),
    }
    if scales is not None:
        inputs["scales"] = scales, in_hbm
        block = (tiles.slots, columns // page_size, *scales.shape[1:])
        scratch["tile_scales"] = pltpu.VMEM(block, jnp.float32)
        scratch["scales_arrived"] = pltpu.SemaphoreType.DMA((tiles.slots,))
    if sinks is not None:
        spread = jnp.pad(sinks.astype(jnp.float32) * LOG2_E, (0, products * rows - q_heads))
        spread = jnp.broadcast_to(spread.reshape(products, rows, 1), (products, rows, LANES))
        inputs["sinks"] = spread, pl.BlockSpec(memory_space=pltpu.VMEM)
    if not shape.single:
        scratch["top"] = scratch["total"] = pltpu.VMEM((products, rows, LANES), jnp.float32)
        scratch["acc"] = pltpu.VMEM((products, rows, lanes), jnp.float32)
    outputs = {  # as their inputs, so that they vary with them over a mesh
        "out": (jax.typeof(queries), by_block),
        "pages": (jax.typeof(pages), in_hbm),
    }
    names = (*scalars, *inputs, *outputs, *scratch)
    seqs = len(kv_lens)
    seen = min(shape.most_tokens or table.shape[1] * page_size, table.shape[1] * page_size)
    out, pages = pl.pallas_call(
        partial(_kernel, names, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(pl.cdiv(min(seqs, tokens), tiles.block_seqs),),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[each for each, _ in outputs.values()],
        input_output_aliases={len(scalars) + list(inputs).index("pages_in"): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_limit_bytes,
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * seqs * seen * q_heads * head_dim,
            transcendentals=seqs * seen * q_heads,
            bytes_accessed=seqs * seen * layout.rows * LANES * 4,
        ),
        interpret=interpret,
        metadata={"tiles": str(tiles)},
        name="jaxattn_decode_window" if shape.single else "jaxattn_decode",
    )(*scalars.values(), *(array for array, _ in inputs.values()))
    return out, pages
