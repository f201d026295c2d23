"""What the interpreter cannot run, behind one function.

Hopper's matrix instruction takes its left side from registers, where the softmax leaves its
weights, and adds to an accumulator that holds earlier tiles. The interpreter knows neither, so
there this product is an ordinary one: the instruction itself is **checked by compilation only**.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int32

from jaxattn.kernels.pallas.words import Ref


def add_product(
    acc: tuple[Float[Array, "rows lanes"], ...],
    weights: BFloat16[Array, "rows tokens"],
    values: Ref,  # [stages, lane tiles, tokens, lanes] in shared memory
    slot: Int32[Array, ""],
    *,
    interpret: bool,
) -> tuple[Float[Array, "rows lanes"], ...]:
    """`acc + weights @ values[slot]` for each tile of lanes."""
    if interpret:
        out = tuple(
            each + jnp.dot(weights, values[slot, lane_tile], preferred_element_type=jnp.float32)
            for lane_tile, each in enumerate(acc)
        )
        plgpu.commit_smem()  # this read is of another kind than the instruction's
        return out

    def multiply(refs: tuple[Ref, ...]) -> None:
        for lane_tile, ref in enumerate(refs):
            plgpu.wgmma(ref, weights, values.at[slot, lane_tile])

    return tuple(pl.run_state(multiply)(tuple(plgpu.ACC.init(each) for each in acc)))
