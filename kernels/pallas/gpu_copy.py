"""The copying warpgroup: keys and values, page by page, to the ring of key tiles."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.pallas.gpu_refs import Piece, Refs, Scalar, kv_head_of
from jaxattn.kernels.pallas.gpu_shape import GpuShape
from jaxattn.kernels.pallas.gpu_work import LIVE_TO, SEQUENCE, START


def copy(shape: GpuShape, ref: Refs, piece: Piece) -> None:
    """The copying warpgroup's part of a piece."""
    kv_head = kv_head_of(shape, piece)
    page_size, width = shape.layout.page_size, ref.table.shape[1]

    def page_of(token: Scalar) -> Scalar:
        # Loaded again for each page: the first load brings them near.
        sequence, stop = ref.tiles[piece.tile, SEQUENCE], ref.tiles[piece.tile, LIVE_TO]
        column = lax.div(token, jnp.int32(page_size)) - ref.first_page[sequence]
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
        token = ref.tiles[piece.tile, START] + (piece.key_tile + index) * shape.tile_tokens

        wait_for_slot(shape, ref, position)

        @pl.loop(0, shape.pages)  # straight code would take more registers than this one has
        def _(number: Scalar) -> None:
            first = pl.multiple_of(number * shape.page_tokens, shape.page_tokens)
            inside, page = pl.ds(first, shape.page_tokens), page_of(token + first)
            offset: Any = 0
            if page_size > shape.page_tokens:
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


def wait_for_slot(shape: GpuShape, ref: Refs, position: Scalar) -> None:
    """Until what this place in the ring held before has been used."""

    @pl.when(position >= shape.stages)
    def _() -> None:
        plgpu.barrier_wait(ref.free.at[lax.rem(position, jnp.int32(shape.stages))])
