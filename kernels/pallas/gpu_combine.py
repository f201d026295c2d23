"""Puts partial results together: exact, because each comes with its maximum and its sum.

    result = sum of acc[i] * 2^(top[i] - most)  /  sum of total[i] * 2^(top[i] - most)

A head that is cut begins in the last piece of one block, and goes on as the first piece of the
blocks after it. A thread block puts together 64 rows and a few lanes of one head.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxattn.kernels.pallas.gpu_shape import WARPGROUP_ROWS, GpuShape
from jaxattn.kernels.pallas.gpu_store import store_rows
from jaxattn.kernels.pallas.gpu_work import CUT, CUT_HEAD, CUT_TILE, LAST_BLOCK, Work
from jaxattn.kernels.pallas.words import Ref

LANES_AT_ONCE = 32
LOADS_IN_FLIGHT = 4


def _kernel(
    shape: GpuShape,
    cuts: Ref,  # [blocks, 4]
    tiles: Ref,  # [tiles, 9]
    acc: Ref,  # [2 * blocks, rows, lanes]
    top: Ref,  # [2 * blocks, rows]
    total: Ref,  # [2 * blocks, rows]
    out: Ref,  # [tokens, q_heads, lanes]
    staged: Ref,  # [64, LANES_AT_ONCE] in shared memory
) -> None:
    block, warpgroup = lax.axis_index("block"), lax.axis_index("rows")
    lanes = pl.ds(lax.axis_index("lanes") * LANES_AT_ONCE, LANES_AT_ONCE)
    rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @pl.when(cuts[block, CUT] != 0)
    def _() -> None:
        count = cuts[block, LAST_BLOCK] - block + 1

        def load(source: Ref, layout: Any) -> Array:
            return plgpu.load(source, layout=layout, optimized=False)

        def add(index: Any, state: tuple) -> tuple:
            most, sums, mixed = state
            parts, exists = [], []
            for offset in range(LOADS_IN_FLIGHT):
                number = jnp.minimum(index * LOADS_IN_FLIGHT + offset, count - 1)
                parts.append(2 * (block + number) + jnp.where(number == 0, 1, 0))
                exists.append(index * LOADS_IN_FLIGHT + offset < count)
            by_row = plgpu.Layout.WGMMA.reduce(1)
            tops = [load(top.at[part, rows], by_row) for part in parts]
            totals = [load(total.at[part, rows], by_row) for part in parts]
            accs = [load(acc.at[part, rows, lanes], plgpu.Layout.WGMMA) for part in parts]
            new_most = most
            for each in tops:  # one that is loaded twice changes nothing
                new_most = jnp.maximum(new_most, each)
            shrink = jnp.exp2(most - new_most)
            sums, mixed = sums * shrink, mixed * _across(shrink)
            for each, there, part_sum, part_acc in zip(tops, exists, totals, accs, strict=True):
                weight = jnp.exp2(each - new_most) * jnp.where(there, 1.0, 0.0)
                sums += part_sum * weight
                mixed += part_acc * _across(weight)
            return new_most, sums, mixed

        def splat(value: float, *lanes: int) -> Array:
            layout = plgpu.Layout.WGMMA if lanes else plgpu.Layout.WGMMA.reduce(1)
            array = jnp.full((WARPGROUP_ROWS, *lanes), value, jnp.float32)
            return plgpu.layout_cast(array, layout)

        state = splat(-1e30), splat(0.0), splat(0.0, LANES_AT_ONCE)
        steps = lax.div(count + (LOADS_IN_FLIGHT - 1), jnp.int32(LOADS_IN_FLIGHT))
        _, sums, mixed = lax.fori_loop(0, steps, add, state)
        sums = jnp.where(sums == 0, splat(1.0), sums)  # of a row that sees nothing
        staged[...] = (mixed / _across(sums)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        tile, head = cuts[block, CUT_TILE], cuts[block, CUT_HEAD]
        store_rows(shape, staged, out, tiles, tile, head, warpgroup, lanes)
        plgpu.wait_smem_to_gmem(0)


def _across(vector: Float[Array, "rows"]) -> Float[Array, "rows lanes"]:
    return lax.broadcast_in_dim(vector, (vector.shape[0], LANES_AT_ONCE), [0])


def combine(
    acc: Float[Array, "parts rows lanes"],
    top: Float[Array, "parts rows"],
    total: Float[Array, "parts rows"],
    work: Work,
    out: Ref,
    *,
    shape: GpuShape,
    interpret: Any,
) -> None:
    """Write the results of the heads that were cut to `out`."""
    plgpu.kernel(
        partial(_kernel, shape),
        scratch_types=[plgpu.SMEM((WARPGROUP_ROWS, LANES_AT_ONCE), jnp.bfloat16)],
        grid=(shape.blocks, shape.warpgroups, shape.lane_tiles * shape.lanes // LANES_AT_ONCE),
        grid_names=("block", "rows", "lanes"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="jaxattn_combine",
        interpret=interpret,
    )(work.cuts, work.tiles, acc, top, total, out)
