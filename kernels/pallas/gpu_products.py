"""What the interpreter cannot run, behind two functions: **checked by compilation only**.

Hopper's matrix instruction takes its left side from registers, where the softmax leaves its
weights, and adds to an accumulator that holds earlier tiles; the interpreter has an ordinary
product instead. And the scales of one head lie `pack` numbers apart, which no layout of Pallas
can load.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector
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


def load_column(
    scales: Ref,  # [tokens, pack] in shared memory
    column: Int32[Array, ""],
    *,
    interpret: bool,
) -> Float[Array, "tokens"]:
    """One column, laid out as those of scores are."""
    if interpret:
        return scales[:, column]
    tokens, _ = scales.shape
    layout = plgpu.Layout.WGMMA.reduce(0)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((tokens,), jnp.dtype("float32"), layout=layout),
    )
    def load(_: Any, ref: Any) -> mgpu.FragmentedArray:
        fragment = layout.to_mgpu()
        assert isinstance(fragment, mgpu.TiledLayout)
        registers = np.empty(fragment.registers_shape((tokens,)), object)
        vector_type = ir.VectorType.get((fragment.vector_length,), ir.F32Type.get())
        zero = mgpu.c(0, ir.IndexType.get())
        places = np.ndindex(registers.shape)
        for place, (token,) in zip(places, fragment.thread_idxs((tokens,)), strict=True):
            elements = []
            for offset in range(fragment.vector_length):
                row = arith.addi(token, mgpu.c(offset, ir.IndexType.get()))
                elements.append(memref.load(ref, [row, zero]))
            registers[place] = vector.from_elements(vector_type, elements)
        return mgpu.FragmentedArray(_registers=registers, _layout=fragment, _is_signed=None)

    return load(scales.at[:, pl.ds(column, 1)])
