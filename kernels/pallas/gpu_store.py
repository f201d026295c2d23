"""Results from shared memory to the rows of the output that exist."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.pallas.gpu_shape import WARPGROUP_ROWS, GpuShape
from jaxattn.kernels.pallas.gpu_work import ROWS, TOKEN
from jaxattn.kernels.pallas.words import Ref


def store_rows(
    shape: GpuShape,
    staged: Ref,  # [64, lanes] in shared memory
    out: Ref,  # [tokens, q_heads, all lanes]
    tiles: Ref,
    tile: Any,
    head: Any,
    warpgroup: Any,
    lanes: Any,
) -> None:
    """Start the copies of the rows of one warpgroup, one head of a tile."""
    token = tiles[tile, TOKEN]
    if shape.decode:
        heads = pl.ds(head * shape.group, shape.group)
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, shape.group)], out.at[token, heads, lanes])
        return
    token += warpgroup * WARPGROUP_ROWS
    count = jnp.clip(tiles[tile, ROWS] - warpgroup * WARPGROUP_ROWS, 0, WARPGROUP_ROWS)
    size = WARPGROUP_ROWS
    while size:  # the binary digits of the count, since a copy's size is static
        done = lax.bitwise_and(count, jnp.int32(-2 * size))

        @pl.when(lax.bitwise_and(count, jnp.int32(size)) != 0)
        def _(done: Any = done, size: int = size) -> None:
            rows = pl.ds(token + done, size)
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(done, size)], out.at[rows, head, lanes])

        size //= 2
