"""The kernel for Hopper: paged attention of any tiles of queries, in equal shares of key tiles.

One warpgroup copies, page by page, and runs ahead as far as the ring of key tiles lets it, also
into the next piece; the others compute (`GpuShape` says what their rows are). A piece is what a
block does of one head of one tile, see `gpu_work.py`:

    copies     K V  K V  K V | K V  K V ...
    computes   S softmax PV  S softmax PV ...  result or partial result

Every row sees a range of keys, so a window costs nothing but its own tiles: those outside are
never loaded, and only tiles on an edge are masked. Two computing warpgroups take turns at the
matrix unit (Shah et al., FlashAttention-3, 2024).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from jaxattn.kernels.layout import LANES, KVLayout
from jaxattn.kernels.pallas.gpu_products import add_product, load_column
from jaxattn.kernels.pallas.gpu_shape import WARPGROUP_ROWS, GpuShape
from jaxattn.kernels.pallas.gpu_store import store_rows
from jaxattn.kernels.pallas.gpu_work import (
    COUNT,
    FULL_FROM,
    FULL_TO,
    LIVE_FROM,
    LIVE_TO,
    SEQUENCE,
    START,
    TOKEN,
    TOTAL,
    Work,
)
from jaxattn.kernels.pallas.products import LOG2_E
from jaxattn.kernels.pallas.words import Ref

Scalar = Int32[Array, ""]
# The score of a key that is not seen, and the maximum before any is. Both are finite, so that
# differences are numbers; the weight of a hidden key is exactly zero, also in a row of them alone.
HIDDEN, NONE_SEEN = -1e30, -1e29
KEY, VALUE = 0, 1
SWIZZLE_BYTES = 128
SWIZZLED_LANES = SWIZZLE_BYTES // 2


@dataclass(frozen=True, kw_only=True)
class _Refs:
    """The kernel's references, by name; None where the kernel has no use for it."""

    # inputs
    queries: Ref  # decode [tokens * q_heads, lanes]; prefill [tokens, q_heads * lanes]; and more
    keys_values: Ref  # [num_pages * page_size, rows * pack * 128]
    table: Ref  # [seqs, pages_per_seq], 0 where there is no page
    first_page: Ref  # [seqs]
    places: Ref  # [kv_heads, 2 * lane_tiles]: first lane of a key's and a value's lane tiles
    tiles: Ref  # see `Work`
    first: Ref
    end: Ref
    shares: Ref
    scales: Ref = None  # [num_pages * scale_rows, page_size, pack]
    scale_places: Ref = None  # [kv_heads, 4]: row and phase of a key's and a value's scale
    sinks: Ref = None  # [2, heads, rows]: none, and those of each row times log2(e)
    # outputs
    out: Ref  # [tokens, q_heads, lanes]
    acc: Ref  # [2 * blocks, rows, lanes]: partial results, not divided
    top: Ref  # [2 * blocks, rows]: their maximum
    total: Ref  # [2 * blocks, rows]: and sum
    # shared memory
    query: Ref  # [warpgroups, lane_tiles, 64, lanes]
    key: Ref  # [stages, lane_tiles, tile_tokens, lanes]; quantised [2, ...]: key and value
    value: Ref = None  # as `key`, not if quantised
    result: Ref  # [warpgroups, 64, lanes]
    raw_key: Ref = None  # [stages, lane_tiles, tile_tokens, lanes]
    raw_value: Ref = None
    key_scale: Ref = None  # [stages, tile_tokens, pack]
    value_scale: Ref = None
    # barriers
    key_full: Ref
    value_full: Ref
    free: Ref
    turn: Ref  # of two warpgroups at the matrix unit
    cleared: Ref  # an edge tile's values


@dataclass(frozen=True)
class _Piece:
    """What a block does of one head of one tile."""

    tile: Scalar
    head: Scalar
    key_tile: Scalar  # the first
    count: Scalar  # of key tiles
    position: Scalar  # of the first in the ring


def _pieces(shape: GpuShape, ref: _Refs, body: Callable[[_Piece], None]) -> None:
    """All pieces of this block, in order."""
    share = [ref.shares[lax.axis_index("block"), column] for column in range(5)]
    tile, head, key_tile, total, pieces = share

    def step(_: Scalar, state: tuple) -> tuple:
        tile, head, key_tile, position = state
        left = ref.tiles[tile, COUNT] - key_tile
        count = jnp.minimum(left, total - position)
        body(_Piece(tile, head, key_tile, count, position))
        last_head = head == shape.heads - 1
        tile = jnp.where(last_head, tile + 1, tile)
        head = jnp.where(last_head, 0, head + 1)
        return tile, head, jnp.int32(0), position + count

    lax.fori_loop(0, pieces, step, (tile, head, key_tile, jnp.int32(0)))


def _kernel(names: tuple[str, ...], shape: GpuShape, interpret: bool, *refs: Ref, **more: Ref):
    ref = _Refs(**dict(zip(names, refs, strict=True)), **more)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < shape.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(shape.registers[0], action="increase")
        if shape.warpgroups > 1:
            pl.when(warpgroup == 1)(partial(_take_turn, ref))
        _pieces(shape, ref, partial(_compute, shape, ref, warpgroup, interpret))
        if shape.warpgroups > 1:
            pl.when(warpgroup == 0)(partial(_take_turn, ref))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == shape.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(shape.registers[1], action="decrease")
        _pieces(shape, ref, partial(_copy, shape, ref))
        total = ref.shares[lax.axis_index("block"), TOTAL]
        for ahead in range(shape.stages):  # all slots are free again, and known to be
            _wait_for_slot(shape, ref, total + ahead)


def _take_turn(ref: _Refs) -> None:
    plgpu.barrier_arrive(ref.turn)
    plgpu.barrier_wait(ref.turn)


def _copy(shape: GpuShape, ref: _Refs, piece: _Piece) -> None:
    """The copying warpgroup's part of a piece."""
    sequence = ref.tiles[piece.tile, SEQUENCE]
    start = ref.tiles[piece.tile, START]
    stop = ref.tiles[piece.tile, LIVE_TO]
    first_page = ref.first_page[sequence]
    kv_head = _kv_head(shape, piece)
    page_size, width = shape.layout.page_size, ref.table.shape[1]

    def page_of(token: Scalar) -> Scalar:
        column = lax.div(token, jnp.int32(page_size)) - first_page
        inside = (token < stop) & (0 <= column) & (column < width)
        return jnp.where(inside, ref.table[sequence, jnp.clip(column, 0, width - 1)], 0)

    lanes = [
        pl.ds(pl.multiple_of(ref.places[kv_head, place], shape.lanes), shape.lanes)
        for place in range(2 * shape.lane_tiles)
    ]
    quantized = shape.layout.is_quantized
    targets = (ref.raw_key, ref.raw_value) if quantized else (ref.key, ref.value)

    @pl.loop(0, piece.count)
    def _(index: Scalar) -> None:
        position = piece.position + index
        slot = lax.rem(position, jnp.int32(shape.stages))
        token = start + (piece.key_tile + index) * shape.tile_tokens

        _wait_for_slot(shape, ref, position)

        @pl.loop(0, shape.pages)  # straight code would take more registers than this one has
        def _(number: Scalar) -> None:
            first = pl.multiple_of(number * shape.page_tokens, shape.page_tokens)
            inside, page = pl.ds(first, shape.page_tokens), page_of(token + first)
            offset = lax.rem(token + first, jnp.int32(page_size))
            row = pl.multiple_of(page * page_size + offset, shape.page_tokens)
            rows = pl.ds(row, shape.page_tokens)
            for kind, full in enumerate((ref.key_full, ref.value_full)):
                for lane_tile in range(shape.lane_tiles):
                    plgpu.copy_gmem_to_smem(
                        ref.keys_values.at[rows, lanes[kind * shape.lane_tiles + lane_tile]],
                        targets[kind].at[slot, lane_tile, inside],
                        full.at[slot],
                    )
                if quantized:
                    row = page * shape.layout.scale_rows + ref.scale_places[kv_head, kind]
                    plgpu.copy_gmem_to_smem(
                        ref.scales.at[row, pl.ds(offset, shape.page_tokens)],
                        (ref.key_scale, ref.value_scale)[kind].at[slot, inside],
                        full.at[slot],
                    )


def _wait_for_slot(shape: GpuShape, ref: _Refs, position: Scalar) -> None:
    """Until what this place in the ring held before has been used."""

    @pl.when(position >= shape.stages)
    def _() -> None:
        plgpu.barrier_wait(ref.free.at[lax.rem(position, jnp.int32(shape.stages))])


def _load_queries(shape: GpuShape, ref: _Refs, warpgroup: Scalar, piece: _Piece) -> None:
    """Queries to shared memory; not by the copying warpgroup, since they may start at any row."""
    token = ref.tiles[piece.tile, TOKEN]
    if shape.decode:
        row, lane = token * shape.num_q_heads + piece.head * shape.group, jnp.int32(0)
    else:
        row = token + warpgroup * WARPGROUP_ROWS
        lane = piece.head * (shape.lane_tiles * shape.lanes)
    layout = _copy_layout(shape)
    for lane_tile in range(shape.lane_tiles):
        lanes = pl.ds(lane + lane_tile * shape.lanes, shape.lanes)
        source = ref.queries.at[pl.ds(row, WARPGROUP_ROWS), lanes]
        ref.query[warpgroup, lane_tile] = plgpu.load(source, layout=layout, optimized=False)
    plgpu.commit_smem()


def _kv_head(shape: GpuShape, piece: _Piece) -> Scalar:
    return piece.head if shape.decode else lax.div(piece.head, jnp.int32(shape.group))


def _copy_layout(shape: GpuShape) -> Any:
    """Of 64 rows of bfloat16 on their way to shared memory: eight elements at a time."""
    size = WARPGROUP_ROWS, shape.lanes
    return plgpu.Layout.SMEM_GMEM_COPY(size, jnp.bfloat16, SWIZZLE_BYTES)


def _convert(
    shape: GpuShape,
    raw: Ref,
    target: Ref,
    live: tuple[Scalar, Scalar] | None = None,
) -> None:
    """Quantised elements, without their scales, as bfloat16: all of them are exact.

    Rows outside `live[0] .. live[1]` become zeros.
    """
    layout, parts = _copy_layout(shape), shape.tile_tokens // WARPGROUP_ROWS

    @pl.loop(0, shape.lane_tiles * parts)  # straight code would keep many addresses in registers
    def _(index: Scalar) -> None:
        row = pl.multiple_of(lax.rem(index, jnp.int32(parts)) * WARPGROUP_ROWS, WARPGROUP_ROWS)
        part = lax.div(index, jnp.int32(parts)), pl.ds(row, WARPGROUP_ROWS)
        loaded = plgpu.load(raw.at[part], layout=layout, optimized=False)
        # The assembler has no direct way from float8 to bfloat16 on Hopper.
        wide = loaded if loaded.dtype == jnp.int8 else loaded.astype(jnp.float16)
        wide = wide.astype(jnp.bfloat16)
        if live is not None:
            token = row + plgpu.broadcasted_iota(jnp.int32, wide.shape, 0, layout=layout)
            inside = (live[0] <= token) & (token < live[1])
            wide = jnp.where(inside, wide, jnp.zeros_like(wide))
        target[part] = wide

    plgpu.commit_smem()


def _by_row(vector: Array, columns: int) -> Array:
    return lax.broadcast_in_dim(vector, (vector.shape[0], columns), [0])


def _compute(
    shape: GpuShape, ref: _Refs, warpgroup: Scalar, interpret: bool, piece: _Piece
) -> None:
    """A computing warpgroup's part of a piece."""
    rows, row_layout = WARPGROUP_ROWS, plgpu.Layout.WGMMA.reduce(1)
    quantized = shape.layout.is_quantized
    kv_head = _kv_head(shape, piece)
    my_rows = pl.ds(warpgroup * rows, rows)

    def load_rows(source: Ref) -> Array:
        return plgpu.load(source, layout=row_layout, optimized=False)

    def load_scales(scales: Ref, kind: int) -> Array:
        return load_column(scales, ref.scale_places[kv_head, 2 + kind], interpret=interpret)

    _load_queries(shape, ref, warpgroup, piece)

    def splat(value: float, *lanes: int) -> Array:
        layout = plgpu.Layout.WGMMA if lanes else row_layout
        return plgpu.layout_cast(jnp.full((rows, *lanes), value, jnp.float32), layout)

    top, total = splat(NONE_SEEN), splat(0.0)
    if ref.sinks is not None:  # once in a head: where it begins
        begins = jnp.where(piece.key_tile == 0, 1, 0)
        top = load_rows(ref.sinks.at[begins, piece.head, my_rows])
        total = jnp.where(top > NONE_SEEN, splat(1.0), total)
    acc = tuple(splat(0.0, shape.lanes) for _ in range(shape.lane_tiles))

    def visit(index: Scalar, state: tuple) -> tuple:
        top, total, acc = state[0], state[1], state[2:]
        slot = lax.rem(piece.position + index, jnp.int32(shape.stages))
        query_slot, key_slot, value_slot, values = warpgroup, slot, slot, ref.value
        if quantized:
            # Places that change with the tile, or might as far as the compiler can tell: it would
            # keep the matrix unit's addresses in registers from before the loop.
            key_slot = lax.rem(piece.position + index, jnp.int32(2))
            query_slot = jnp.minimum(warpgroup, key_slot)  # 0: it is the only one
            value_slot, values = 1 - key_slot, ref.key
        # Loaded for each tile, as the rows' ranges: registers are short.
        start, full_from, full_to, live_from, live_to = (
            ref.tiles[piece.tile, column]
            for column in (START, FULL_FROM, FULL_TO, LIVE_FROM, LIVE_TO)
        )
        begin = start + (piece.key_tile + index) * shape.tile_tokens
        stop = begin + shape.tile_tokens
        plgpu.barrier_wait(ref.key_full.at[slot])
        if quantized:
            _convert(shape, ref.raw_key.at[slot], ref.key.at[key_slot])
        scores = _products(shape, ref, query_slot, key_slot)
        if quantized:
            key_scale = load_scales(ref.key_scale.at[slot], KEY)
            scores *= lax.broadcast_in_dim(key_scale, scores.shape, [1])
        scores = _scaled(shape, scores)

        def hide(scores: Array) -> Array:
            key = begin + plgpu.broadcasted_iota(
                jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA
            )
            first = load_rows(ref.first.at[piece.tile, my_rows])
            end = load_rows(ref.end.at[piece.tile, my_rows])
            seen = _by_row(first, shape.tile_tokens) <= key
            seen &= key < _by_row(end, shape.tile_tokens)
            return jnp.where(seen, scores, HIDDEN)

        on_edge = (begin < full_from) | (stop > full_to)
        scores = lax.cond(on_edge, hide, lambda scores: scores, scores)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - _by_row(new_top, shape.tile_tokens))
        total = total * shrink + jnp.sum(weights, axis=1)
        acc = tuple(each * _by_row(shrink, shape.lanes) for each in acc)
        if quantized:
            plgpu.barrier_wait(ref.value_full.at[slot])
            value_scale = load_scales(ref.value_scale.at[slot], VALUE)
            scaled = weights * lax.broadcast_in_dim(value_scale, weights.shape, [1])
            weights = jnp.where(weights > 0, scaled, 0.0)  # scales of no token may be anything
        narrow = weights.astype(jnp.bfloat16)
        if quantized:
            live = live_from - begin, live_to - begin
            _convert(shape, ref.raw_value.at[slot], values.at[value_slot], live)
            plgpu.barrier_arrive(ref.free.at[slot])
        if shape.warpgroups > 1:
            plgpu.barrier_arrive(ref.turn)
        if not quantized:
            plgpu.barrier_wait(ref.value_full.at[slot])
            _clear(shape, ref, warpgroup, slot, begin, live_from, live_to)
        if shape.warpgroups > 1:
            plgpu.barrier_wait(ref.turn)
        acc = add_product(acc, narrow, values, value_slot, interpret=interpret)
        if not quantized:
            plgpu.barrier_arrive(ref.free.at[slot])
        return new_top, total, *acc

    top, total, *acc = lax.fori_loop(0, piece.count, visit, (top, total, *acc))
    whole = (piece.key_tile == 0) & (piece.count == ref.tiles[piece.tile, COUNT])

    @pl.when(whole)
    def _() -> None:
        shrink = 1.0 / total
        for lane_tile, each in enumerate(acc):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged = ref.result.at[warpgroup]
            staged[...] = (each * _by_row(shrink, shape.lanes)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            lanes = pl.ds(lane_tile * shape.lanes, shape.lanes)
            store_rows(shape, staged, ref.out, ref.tiles, piece.tile, piece.head, warpgroup, lanes)

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        part = 2 * lax.axis_index("block") + jnp.where(piece.key_tile == 0, 1, 0)
        for lane_tile, each in enumerate(acc):
            lanes = pl.ds(lane_tile * shape.lanes, shape.lanes)
            ref.acc[part, my_rows, lanes] = each
        ref.top[part, my_rows] = top
        ref.total[part, my_rows] = total


def _products(shape: GpuShape, ref: _Refs, query_slot: Scalar, slot: Scalar) -> Array:
    """Queries times keys, `[64, tile_tokens]`."""

    def multiply(acc: Ref) -> Array:
        for lane_tile in range(shape.lane_tiles):
            keys = ref.key.at[slot, lane_tile].transpose((1, 0))
            plgpu.wgmma(acc, ref.query.at[query_slot, lane_tile], keys)
        if shape.warpgroups > 1:
            _take_turn(ref)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, shape.tile_tokens), jnp.float32))


def _scaled(shape: GpuShape, products: Array) -> Array:
    """Scores times log2(e)."""
    if shape.soft_cap is None:
        return products * (shape.sm_scale * LOG2_E)
    # tanh by exp2, whose approximation is good to 2 ulp; that of tanh is not
    power = jnp.exp2(products * (2 * LOG2_E * shape.sm_scale / shape.soft_cap))
    return (1.0 - 2.0 / (power + 1.0)) * (shape.soft_cap * LOG2_E)


def _clear(
    shape: GpuShape,
    ref: _Refs,
    warpgroup: Scalar,
    slot: Scalar,
    begin: Scalar,
    live_from: Scalar,
    live_to: Scalar,
) -> None:
    """Zeros to a tile's values that no row sees: 0 * NaN would reach the output."""
    edge = (begin < live_from) | (begin + shape.tile_tokens > live_to)

    @pl.when(edge)
    def _() -> None:
        @pl.when(warpgroup == 0)
        def _() -> None:
            for lane_tile, row, lane in product(
                range(shape.lane_tiles),
                range(0, shape.tile_tokens, WARPGROUP_ROWS),
                range(0, shape.lanes, SWIZZLED_LANES),
            ):
                values = ref.value.at[
                    slot, lane_tile, pl.ds(row, WARPGROUP_ROWS), pl.ds(lane, SWIZZLED_LANES)
                ]
                loaded = plgpu.load(values, layout=plgpu.Layout.WGMMA)
                token = (
                    begin
                    + row
                    + plgpu.broadcasted_iota(jnp.int32, loaded.shape, 0, layout=plgpu.Layout.WGMMA)
                )
                live = (live_from <= token) & (token < live_to)
                values[...] = jnp.where(live, loaded, jnp.zeros_like(loaded))
            plgpu.commit_smem()

        if shape.warpgroups > 1:
            plgpu.barrier_arrive(ref.cleared)
            plgpu.barrier_wait(ref.cleared)


def _places(layout: KVLayout) -> np.ndarray:
    """Per kv head the first lane, in a token, of each lane tile of its key and of its value."""

    def lane(kind: int, head: int, lane_tile: int) -> int:
        place = layout.place(kind, head, lane_tile)
        return (place.row * layout.pack + place.phase) * LANES + place.lane

    return np.array(
        [
            [lane(kind, head, tile) for kind in (KEY, VALUE) for tile in range(layout.lane_tiles)]
            for head in range(layout.num_kv_heads)
        ],
        np.int32,
    )


def _scale_places(layout: KVLayout) -> np.ndarray:
    """Per kv head the rows, in a page, of the scales of its key and value, and their phases."""
    return np.array(
        [
            [
                *(layout.scale_row(kind, head) for kind in (KEY, VALUE)),
                *(layout.place(kind, head, 0).phase for kind in (KEY, VALUE)),
            ]
            for head in range(layout.num_kv_heads)
        ],
        np.int32,
    )


def attend(
    queries: Float[Array, "tokens q_heads lanes"],
    pages: Array,
    scales: Array | None,
    sinks: Float[Array, "q_heads"] | None,
    table: Int32[Array, "seqs pages_per_seq"],
    first_page: Int32[Array, "seqs"],
    work: Work,
    out: Ref,
    *,
    shape: GpuShape,
    interpret: Any,
) -> tuple[Array, Array, Array]:
    """Write the results of whole heads to `out`; return the partial results of those cut."""
    tokens, q_heads, lanes = queries.shape
    layout = shape.layout
    flat = queries.reshape(tokens * q_heads, lanes) if shape.decode else queries.reshape(tokens, -1)
    inputs: dict[str, Any] = {
        "queries": jnp.pad(flat, ((0, shape.rows), (0, 0))),  # a tile may look past the end
        "keys_values": pages.reshape(pages.shape[0] * pages.shape[1], -1),
        "table": table,
        "first_page": first_page,
        "places": jnp.asarray(_places(layout)),
        "tiles": work.tiles,
        "first": work.first,
        "end": work.end,
        "shares": work.shares,
    }
    if sinks is not None:
        of_rows = sinks.astype(jnp.float32) * LOG2_E
        if shape.decode:
            of_rows = of_rows.reshape(layout.num_kv_heads, shape.group)
            of_rows = jnp.pad(of_rows, ((0, 0), (0, shape.rows - shape.group)))
        else:
            of_rows = jnp.broadcast_to(of_rows[:, None], (q_heads, shape.rows))
        inputs["sinks"] = jnp.stack([jnp.full_like(of_rows, NONE_SEEN), of_rows])
    if scales is not None:
        inputs["scales"] = scales.reshape(-1, layout.page_size, layout.pack)
        inputs["scale_places"] = jnp.asarray(_scale_places(layout))
    swizzled = plgpu.TilingTransform((8, SWIZZLED_LANES)), plgpu.SwizzleTransform(SWIZZLE_BYTES)  # type: ignore[abstract]
    tile = shape.lane_tiles, shape.tile_tokens, shape.lanes

    def buffer(*sizes: int) -> Any:
        return plgpu.SMEM(sizes, jnp.bfloat16, transforms=swizzled)

    copies = shape.pages * (shape.lane_tiles + layout.is_quantized)
    full = plgpu.Barrier(num_arrivals=copies, num_barriers=shape.stages)
    scratch = {
        "query": buffer(shape.warpgroups, shape.lane_tiles, WARPGROUP_ROWS, shape.lanes),
        "key": buffer(2 if layout.is_quantized else shape.stages, *tile),
        "result": plgpu.SMEM((shape.warpgroups, WARPGROUP_ROWS, shape.lanes), jnp.bfloat16),
        "key_full": full,
        "value_full": full,
        "free": plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=shape.stages),
        "turn": plgpu.Barrier(num_arrivals=shape.warpgroups),
        "cleared": plgpu.Barrier(num_arrivals=shape.warpgroups),
    }
    if layout.is_quantized:
        raw = plgpu.SMEM((shape.stages, *tile), pages.dtype)
        scale = plgpu.SMEM((shape.stages, shape.tile_tokens, layout.pack), jnp.float32)
        scratch |= {"raw_key": raw, "raw_value": raw, "key_scale": scale, "value_scale": scale}
    else:
        scratch["value"] = scratch["key"]
    outputs = {
        "acc": jax.ShapeDtypeStruct((2 * shape.blocks, shape.rows, lanes), jnp.float32),
        "top": jax.ShapeDtypeStruct((2 * shape.blocks, shape.rows), jnp.float32),
        "total": jax.ShapeDtypeStruct((2 * shape.blocks, shape.rows), jnp.float32),
    }
    names = (*inputs, "out", *outputs)
    kernel = plgpu.kernel(
        partial(_kernel, names, shape, interpret is not None),
        out_type=list(outputs.values()),
        scratch_types=scratch,
        grid=(shape.blocks,),
        grid_names=("block",),
        num_threads=shape.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="jaxattn_decode" if shape.decode else "jaxattn_prefill",
        interpret=interpret,
    )
    return kernel(*inputs.values(), out)
