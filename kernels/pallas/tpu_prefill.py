"""Prefill on TPU: any number of new tokens per sequence, attended tile by tile.

A sequence's new tokens are cut into blocks of 128 queries, and a few blocks in a row walk the key
tiles together, from the exact first token that any of them sees to the last. A tile is fetched
once (the next one, also of the next sequence, is on its way meanwhile), pulled apart once into
plain keys and transposed values, and then visited by the blocks that see something of it:

    keys        tile 0     tile 1     tile 2          W = 2 tiles, four blocks:
    block 0     edge       all        diagonal        `all`: without a mask
    block 1     edge       all        diagonal        `edge`: the window's edge
    block 2                edge       diagonal
    block 3                edge       diagonal

See `tpu_prefill_softmax.py` for what a visit does. All new keys and values go to their pages
from HBM to HBM, whatever attention visits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from jaxattn.kernels.layout import LANES, KVLayout
from jaxattn.kernels.pallas.products import LOG2_E
from jaxattn.kernels.pallas.scalars import remainder
from jaxattn.kernels.pallas.tiles import PrefillTiles, odd, round_up
from jaxattn.kernels.pallas.tpu_prefill_copies import Copies
from jaxattn.kernels.pallas.tpu_prefill_heads import load_heads_first, store_tokens_first
from jaxattn.kernels.pallas.tpu_prefill_shape import ONES, PrefillShape
from jaxattn.kernels.pallas.tpu_prefill_softmax import Sight, Softmax, Unit
from jaxattn.kernels.pallas.tpu_prefill_tile import unpack_tile
from jaxattn.kernels.pallas.tpu_prefill_work import Job, Work
from jaxattn.kernels.pallas.words import Ref

Scalar = Int32[Array, ""]


@dataclass(frozen=True, kw_only=True)
class _Refs:
    """The kernel's references, by name; None where the kernel has no use for it."""

    # scalars
    kv_lens: Ref  # [seqs]
    table: Ref  # [seqs * table_width] page ids, 0 where there is none
    cu_q_lens: Ref  # [seqs + 1]
    distribution: Ref  # [3]
    first_page: Ref  # [seqs]
    sinks: Ref = None  # [q_heads] float32, times log2(e)
    reach: Ref = None  # [blocks of all sequences * 2] first and end position of their images
    reach_index: Ref = None  # [seqs] a sequence's first entry, counted in blocks
    # inputs, in HBM
    queries: Ref  # [tokens, q_heads, key_dim]
    new_kv: Ref  # [tokens, rows, pack, 128]
    pages_in: Ref  # the same memory as `pages`
    out_in: Ref  # the same memory as `out`
    scales: Ref = None  # [num_pages, scale_rows, page_size * pack]
    spans: Ref = None  # [8, tokens and more] start and end of images
    # outputs, in HBM
    out: Ref  # [tokens, q_heads, key_dim]
    pages: Ref  # [num_pages, page_size, rows, pack, 128]
    # scratch: what is copied
    query_tile: Ref  # [2, lane_tiles, queries, q_heads, 128]
    out_tile: Ref  # [lane_tiles, queries, q_heads, 128]
    tile: Ref  # [2, block_kv, odd rows, pack, 128]
    scale_tile: Ref = None  # [2, pages, scale_rows, page_size * pack]
    span_tile: Ref = None  # [2, 8, queries + 128]
    queries_arrived: Ref  # [2] semaphores
    spans_arrived: Ref = None  # [2]
    arrived: Ref  # [2]
    scales_arrived: Ref = None  # [2]
    sent: Ref
    written: Ref
    progress: Ref  # [2] tokens being written, rows of output being sent
    # scratch: what is computed with
    query: Ref  # [blocks, q_heads, block_q, key_dim], later the output
    keys: Ref  # [kv_heads, block_kv, key_dim]
    values: Ref  # [value_slots, kv_heads, value_dim + ONES, block_kv]
    span: Ref = None  # [blocks, 8, block_q]
    scale_page: Ref = None  # [scale_rows, page_size * pack], both rounded up to a register
    scale_columns: Ref = None  # [pages * page_size * pack, 128] a scale row in each lane
    hidden: Ref  # [block_kv, block_q] 0, or a very negative number where a key is not seen
    scores: Ref  # [unit_streams, block_kv, lanes]
    weights: Ref  # [unit_streams, block_kv, lanes]
    tile_top: Ref  # [unit_streams, 8, lanes] largest score of a tile
    shrink: Ref  # [unit_streams, 8, lanes] what the larger maximum makes of the past
    top: Ref  # [blocks * streams and nobody's, 8, lanes]
    acc: Ref  # [blocks * streams and nobody's, value_dim + ONES, lanes]


def _kernel(names: tuple[str, ...], shape: PrefillShape, *flat: Ref) -> None:
    refs = _Refs(**dict(zip(names, flat, strict=True)))
    copies, softmax = Copies(shape, refs), Softmax(shape, refs)
    end, queries = refs.distribution[2], shape.tiles.queries
    refs.progress[0] = refs.progress[1] = 0
    ones = (*refs.values.shape[:2], ONES, shape.tiles.block_kv)
    refs.values[:, :, shape.value_dim :] = jnp.ones(ones, refs.values.dtype)

    def fetch_queries(work: Work, slot: Scalar | int) -> None:
        copies.fetch_queries(work.token, work.rows, slot)

    def fetch_tile(work: Work, index: Scalar | int, slot: Scalar | int) -> None:
        copies.fetch_tile(work.job.seq, *work.tile(index), slot)

    first = Job(refs.distribution[0], jnp.int32(0)).skip_empty(copies)

    @pl.when(first.seq < end)
    def _() -> None:
        work = Work(shape, refs, first)
        fetch_queries(work, 0)
        fetch_tile(work, 0, 0)

    def visit(state: tuple) -> tuple:
        seq, offset, query_slot, tile_slot = state
        job = Job(seq, offset)
        work, next_job = Work(shape, refs, job), job.following(copies, queries)
        if shape.update_kv_cache:
            pl.when(offset == 0)(lambda: copies.write_new(seq))

        def with_next(start: Callable[[Work], None]) -> None:
            pl.when(next_job.seq < end)(lambda: start(Work(shape, refs, next_job)))

        with_next(lambda work: fetch_queries(work, 1 - query_slot))
        copies.wait_queries(work.rows, query_slot)

        @pl.loop(0, work.blocks)
        def _(block: Scalar) -> None:
            _unpack_queries(shape, refs, query_slot, block)
            softmax.start(block)

        if refs.spans is not None:
            _unpack_spans(shape, refs, query_slot, work.token)

        def walk(index: Scalar, state: tuple) -> tuple:
            slot, value_slot, older, newer = state
            last = index == work.tiles - 1
            pl.when(jnp.logical_not(last))(lambda: fetch_tile(work, index + 1, 1 - slot))
            pl.when(last)(lambda: with_next(lambda work: fetch_tile(work, 0, 1 - slot)))
            first, stop = work.tile(index)
            copies.wait_tile(first, stop, slot)
            unpack_tile(shape, refs, slot, value_slot, first, stop)

            def block_step(block: Scalar, pipeline: tuple) -> tuple:
                something, everything = work.visits(block, first, stop)
                span = None if refs.span is None else refs.span.at[block]
                begin = work.first_query + block * shape.tiles.block_q

                def unit_step(edge: bool, unit: Scalar, pipeline: tuple) -> tuple:
                    older, newer = Unit(*pipeline[0]), Unit(*pipeline[1])
                    state = block * shape.num_streams + unit * shape.unit_streams
                    now = Unit(state, block, unit, value_slot)
                    softmax.step(older, newer, now, edge=edge)
                    return tuple(newer), tuple(now)

                # Edges and the rest are two loops, of which one is empty.
                at_edge = something & jnp.logical_not(everything)
                pl.when(at_edge)(lambda: softmax.hide(Sight(begin, first, stop, span)))
                edges = jnp.where(at_edge, jnp.int32(shape.units), 0)
                rest = jnp.where(something & everything, jnp.int32(shape.units), 0)
                pipeline = jax.lax.fori_loop(0, edges, partial(unit_step, True), pipeline)
                return jax.lax.fori_loop(0, rest, partial(unit_step, False), pipeline)

            older, newer = jax.lax.fori_loop(0, work.blocks, block_step, (older, newer))
            following = jnp.where(value_slot == shape.value_slots - 1, 0, value_slot + 1)
            return 1 - slot, following, older, newer

        nobody = tuple(jnp.int32(entry) for entry in softmax.nobody)
        start = tile_slot, jnp.int32(0), nobody, nobody
        slot, _, older, newer = jax.lax.fori_loop(0, work.tiles, walk, start)
        softmax.step(Unit(*older), Unit(*newer), None, edge=False)
        softmax.step(Unit(*newer), None, None, edge=False)

        copies.wait_sent(refs.progress[1])

        @pl.loop(0, work.blocks)
        def _(block: Scalar) -> None:
            _pack_output(shape, refs, softmax, block)

        copies.send(work.token, work.rows)
        refs.progress[1] = work.rows
        return next_job.seq, next_job.offset, 1 - query_slot, slot

    start = first.seq, first.offset, jnp.int32(0), jnp.int32(0)
    jax.lax.while_loop(lambda state: state[0] < end, visit, start)
    copies.wait_sent(refs.progress[1])
    copies.clear_padding(refs.cu_q_lens[end])
    copies.wait_written()


def _pieces(
    shape: PrefillShape, block: Scalar, body: Callable[[Scalar, Scalar, int], None]
) -> None:
    """`body(token of the job, of the block, lane tile)` for all of a block, some tokens at once."""
    piece, block_q = shape.piece, shape.tiles.block_q

    @pl.loop(0, block_q // piece)
    def _(index: Scalar) -> None:
        token = pl.multiple_of(index * piece, piece)
        for tile in range(shape.layout.lane_tiles):
            body(pl.multiple_of(block * block_q + token, piece), token, tile)


def _unpack_queries(shape: PrefillShape, refs: _Refs, slot: Scalar, block: Scalar) -> None:
    """A block's queries, heads first and scaled."""

    def unpack(source: Scalar, token: Scalar, tile: int) -> None:
        ref = refs.query_tile.at[slot, tile, pl.ds(source, shape.piece)]
        for head, query in enumerate(load_heads_first(ref, interpret=shape.interpret)):
            query = (query * shape.query_scale).astype(refs.query.dtype)
            refs.query[block, head, pl.ds(token, shape.piece), pl.ds(tile * LANES, LANES)] = query

    _pieces(shape, block, unpack)


def _unpack_spans(shape: PrefillShape, refs: _Refs, slot: Scalar, token: Scalar) -> None:
    """The image spans of a job's queries, from the register that its first one is in."""
    lanes = refs.span_tile.shape[2]
    spans = pltpu.roll(refs.span_tile[slot], remainder(lanes - remainder(token, LANES), lanes), 1)
    for block in range(shape.tiles.blocks):
        first = block * shape.tiles.block_q
        refs.span[block] = spans[:, first : first + shape.tiles.block_q]


def _pack_output(shape: PrefillShape, refs: _Refs, softmax: Softmax, block: Scalar) -> None:
    """A block's outputs, tokens first."""
    for head, out in softmax.finish(block):
        if shape.value_dim < shape.key_dim:
            out = jnp.concatenate([out, jnp.zeros_like(out)], axis=1)
        refs.query[block, head] = out.astype(refs.query.dtype)

    def pack(target: Scalar, token: Scalar, tile: int) -> None:
        part = pl.ds(token, shape.piece), pl.ds(tile * LANES, LANES)
        out = [refs.query[block, head, *part] for head in range(shape.num_q_heads)]
        out = [each.astype(jnp.float32) for each in out]
        ref = refs.out_tile.at[tile, pl.ds(target, shape.piece)]
        store_tokens_first(ref, out, interpret=shape.interpret)

    _pieces(shape, block, pack)


def prefill(
    queries: Float[Array, "tokens q_heads key_dim"],
    new_kv: Float[Array, "tokens rows pack 128"],
    pages: Array,
    scales: Array | None,
    out: Float[Array, "tokens q_heads key_dim"],
    kv_lens: Int32[Array, "seqs"],
    page_indices: Int32[Array, "seqs pages_per_seq"],
    cu_q_lens: Int32[Array, "seqs_plus_1"],
    distribution: Int32[Array, "3"],
    first_page: Int32[Array, "seqs"] | None,
    sinks: Float[Array, "q_heads"] | None,
    image_spans: Int32[Array, "tokens 2"] | None,
    *,
    layout: KVLayout,
    tiles: PrefillTiles,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    image_rule: str,
    causal: bool,
    update_kv_cache: bool,
    interpret: Any,
    vmem_limit_bytes: int,
) -> tuple[Float[Array, "tokens q_heads key_dim"], Array]:
    """Attend for sequences `distribution[0] .. distribution[2]` and write their new tokens.

    `queries` and `out` are padded to `layout.lane_tiles * 128` elements a head, `new_kv` is packed
    as pages are. Rows of `out` before these sequences stay what they are, those after them become
    zeros. Donate `pages` and `out`.
    """
    tokens, q_heads, key_dim = queries.shape
    shape = PrefillShape(
        layout=layout,
        num_q_heads=q_heads,
        query_dtype=queries.dtype.name,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        image_rule=image_rule,
        causal=causal,
        update_kv_cache=update_kv_cache,
        table_width=page_indices.shape[1],
        tiles=tiles,
        interpret=bool(interpret),
    )
    is_page = (0 < page_indices) & (page_indices < pages.shape[0])
    scalars = {
        "kv_lens": kv_lens,
        "table": jnp.where(is_page, page_indices, 0).reshape(-1),
        "cu_q_lens": cu_q_lens,
        "distribution": distribution,
        "first_page": jnp.zeros_like(kv_lens) if first_page is None else first_page,
    }
    inputs = {"queries": queries, "new_kv": new_kv, "pages_in": pages, "out_in": out}
    outputs = {"out": out, "pages": pages}
    compute, full, semaphore = shape.compute_dtype, jnp.float32, pltpu.SemaphoreType.DMA
    states = tiles.blocks * shape.num_streams + shape.unit_streams
    streams, lanes, block_kv = shape.unit_streams, shape.lanes, tiles.block_kv
    heads, rows = layout.num_kv_heads, shape.value_dim + ONES
    out_tile = layout.lane_tiles, tiles.queries, q_heads, LANES
    scratch: dict[str, Any] = {
        "query_tile": pltpu.VMEM((2, *out_tile), queries.dtype),
        "out_tile": pltpu.VMEM(out_tile, queries.dtype),
        "tile": pltpu.VMEM((2, block_kv, odd(layout.rows), layout.pack, LANES), pages.dtype),
        "queries_arrived": semaphore((2,)),
        "arrived": semaphore((2,)),
        "sent": semaphore,
        "written": semaphore,
        "progress": pltpu.SMEM((2,), jnp.int32),
        "query": pltpu.VMEM((tiles.blocks, q_heads, tiles.block_q, key_dim), compute),
        "keys": pltpu.VMEM((heads, block_kv, key_dim), compute),
        "values": pltpu.VMEM((shape.value_slots, heads, rows, block_kv), compute),
        "hidden": pltpu.VMEM((block_kv, tiles.block_q), full),
        "scores": pltpu.VMEM((streams, block_kv, lanes), full),
        "weights": pltpu.VMEM((streams, block_kv, lanes), compute),
        "tile_top": pltpu.VMEM((streams, 8, lanes), full),
        "shrink": pltpu.VMEM((streams, 8, lanes), full),
        "top": pltpu.VMEM((states, 8, lanes), full),
        "acc": pltpu.VMEM((states, rows, lanes), full),
    }
    if scales is not None:
        count = (block_kv + layout.page_size - 2) // layout.page_size + 1
        columns = layout.page_size * layout.pack
        block = round_up(layout.scale_rows, 8), round_up(columns, LANES)
        inputs["scales"] = scales
        scratch["scale_tile"] = pltpu.VMEM((2, count, *scales.shape[1:]), full)
        scratch["scale_page"] = pltpu.VMEM(block, full)
        scratch["scales_arrived"] = semaphore((2,))
        scratch["scale_columns"] = pltpu.VMEM((count * columns, LANES), full)
    if sinks is not None:
        scalars["sinks"] = sinks.astype(jnp.float32) * LOG2_E
    if image_spans is not None:
        scalars["reach"], scalars["reach_index"] = _reach(image_spans, cu_q_lens, tiles.block_q)
        width = tiles.queries + LANES
        padding = -(-tokens // LANES) * LANES + width - tokens
        inputs["spans"] = jnp.pad(image_spans.T, ((0, 6), (0, padding)))
        scratch["span_tile"] = pltpu.VMEM((2, 8, width), jnp.int32)
        scratch["spans_arrived"] = semaphore((2,))
        scratch["span"] = pltpu.VMEM((tiles.blocks, 8, tiles.block_q), jnp.int32)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    first_input = len(scalars)
    out, pages = pl.pallas_call(
        partial(_kernel, (*scalars, *inputs, *outputs, *scratch), shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[in_hbm] * len(inputs),
            out_specs=[in_hbm] * len(outputs),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[jax.typeof(each) for each in outputs.values()],
        input_output_aliases={
            first_input + list(inputs).index("out_in"): 0,
            first_input + list(inputs).index("pages_in"): 1,
        },
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        cost_estimate=_cost(shape, tokens, page_indices.shape[1] * layout.page_size),
        interpret=interpret,
        metadata={"tiles": str(tiles)},
        name="jaxattn_prefill",
    )(*scalars.values(), *inputs.values())
    return out, pages


def _reach(
    image_spans: Int32[Array, "tokens 2"], cu_q_lens: Int32[Array, "seqs_plus_1"], block_q: int
) -> tuple[Int32[Array, "blocks*2"], Int32[Array, "seqs"]]:
    """Per block of queries where its images start and end, and each sequence's first block."""
    tokens, seqs = len(image_spans), len(cu_q_lens) - 1
    blocks = (cu_q_lens[1:] - cu_q_lens[:-1] + block_q - 1) // block_q
    first = jnp.cumsum(blocks, dtype=jnp.int32) - blocks
    token = jnp.arange(tokens, dtype=jnp.int32)
    seq = jnp.sum(cu_q_lens[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
    real = seq < seqs
    seq = jnp.minimum(seq, seqs - 1)
    index = first[seq] + (token - cu_q_lens[seq]) // block_q
    some = real & (image_spans[:, 0] < image_spans[:, 1])
    count = -(-tokens // block_q) + seqs
    index = jnp.where(some, index, count)  # out of bounds: dropped
    begin = jnp.full(count, jnp.iinfo(jnp.int32).max, jnp.int32)
    begin = begin.at[index].min(image_spans[:, 0], mode="drop")
    stop = jnp.zeros(count, jnp.int32).at[index].max(image_spans[:, 1], mode="drop")
    return jnp.stack([begin, stop], axis=1).reshape(-1), first


def _cost(shape: PrefillShape, tokens: int, most_keys: int) -> pl.CostEstimate:
    """As if every query saw its whole window, or half of the longest sequence."""
    window = shape.sliding_window
    seen = most_keys // 2 if window is None else min(window, most_keys)
    keys = seen * -(-tokens // shape.tiles.queries) + tokens
    bytes_per_key = shape.layout.rows * LANES * 4
    return pl.CostEstimate(
        flops=4 * tokens * seen * shape.num_q_heads * shape.key_dim,
        transcendentals=tokens * seen * shape.num_q_heads,
        bytes_accessed=keys * bytes_per_key,
    )
