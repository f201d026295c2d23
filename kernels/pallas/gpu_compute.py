"""A computing warpgroup: 64 rows of queries against the key tiles of a piece, by online softmax."""

from itertools import product
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jaxattn.kernels.pallas.gpu_products import add_product, load_column
from jaxattn.kernels.pallas.gpu_refs import KEY, VALUE, Piece, Refs, Scalar, kv_head_of
from jaxattn.kernels.pallas.gpu_shape import WARPGROUP_ROWS, GpuShape
from jaxattn.kernels.pallas.gpu_store import store_rows
from jaxattn.kernels.pallas.gpu_work import (
    COUNT,
    FULL_FROM,
    FULL_TO,
    LIVE_FROM,
    LIVE_TO,
    START,
    TOKEN,
)
from jaxattn.kernels.pallas.products import LOG2_E
from jaxattn.kernels.pallas.words import Ref

# The score of a key that is not seen, and the maximum before any is. Both are finite, so that
# differences are numbers; the weight of a hidden key is exactly zero, also in a row of them alone.
HIDDEN, NONE_SEEN = -1e30, -1e29
SWIZZLE_BYTES = 128
SWIZZLED_LANES = SWIZZLE_BYTES // 2


def take_turn(ref: Refs) -> None:
    plgpu.barrier_arrive(ref.turn)
    plgpu.barrier_wait(ref.turn)


def _load_queries(shape: GpuShape, ref: Refs, warpgroup: Scalar, piece: Piece) -> None:
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


def compute(shape: GpuShape, ref: Refs, warpgroup: Scalar, interpret: bool, piece: Piece) -> None:
    """A computing warpgroup's part of a piece."""
    rows, row_layout = WARPGROUP_ROWS, plgpu.Layout.WGMMA.reduce(1)
    quantized = shape.layout.is_quantized
    kv_head = kv_head_of(shape, piece)
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
        shrink = 1.0 / jnp.where(total == 0, splat(1.0), total)  # zeros for a row that sees nothing
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


def _products(shape: GpuShape, ref: Refs, query_slot: Scalar, slot: Scalar) -> Array:
    """Queries times keys, `[64, tile_tokens]`."""

    def multiply(acc: Ref) -> Array:
        for lane_tile in range(shape.lane_tiles):
            keys = ref.key.at[slot, lane_tile].transpose((1, 0))
            plgpu.wgmma(acc, ref.query.at[query_slot, lane_tile], keys)
        if shape.warpgroups > 1:
            take_turn(ref)
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
    ref: Refs,
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
