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

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from jaxattn.kernels.layout import LANES, KVLayout
from jaxattn.kernels.pallas.gpu_compute import (
    NONE_SEEN,
    SWIZZLE_BYTES,
    SWIZZLED_LANES,
    compute,
    take_turn,
)
from jaxattn.kernels.pallas.gpu_copy import copy, wait_for_slot
from jaxattn.kernels.pallas.gpu_refs import KEY, VALUE, Refs, pieces
from jaxattn.kernels.pallas.gpu_shape import WARPGROUP_ROWS, GpuShape
from jaxattn.kernels.pallas.gpu_work import TOTAL, Work
from jaxattn.kernels.pallas.products import LOG2_E
from jaxattn.kernels.pallas.words import Ref


def _kernel(names: tuple[str, ...], shape: GpuShape, interpret: bool, *refs: Ref, **more: Ref):
    ref = Refs(**dict(zip(names, refs, strict=True)), **more)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < shape.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(shape.registers[0], action="increase")
        if shape.warpgroups > 1:
            pl.when(warpgroup == 1)(partial(take_turn, ref))
        pieces(shape, ref, partial(compute, shape, ref, warpgroup, interpret))
        if shape.warpgroups > 1:
            pl.when(warpgroup == 0)(partial(take_turn, ref))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == shape.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(shape.registers[1], action="decrease")
        pieces(shape, ref, partial(copy, shape, ref))
        total = ref.shares[lax.axis_index("block"), TOTAL]
        # All slots are free again in the end, and known to be.
        pl.loop(0, shape.stages)(lambda ahead: wait_for_slot(shape, ref, total + ahead))


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
        of_rows = jnp.maximum(sinks.astype(jnp.float32) * LOG2_E, NONE_SEEN)
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
