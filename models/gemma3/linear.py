"""`x W^T`, quick on every platform. Weights are `[out, in]`, as checkpoints have them."""

from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int8, Num

from jaxattn.models.gemma3.weights import SCALE

_TERMS = 16  # products that one lane adds up: fewer is slower to run, more is slower to compile
_MAX_TERMS = 40  # with over 64 XLA on CPU is three times slower
_BLOCK = 2**20  # int8 weights that are converted at a time: what a core keeps in its cache
_MAX_SUMS = 2**22  # partial sums of all outputs: beyond 16 MB they cost more than they save


class Linear(nnx.Module):
    """`y = x W^T` without bias; W has a scale for each row if it is int8."""

    def __init__(self, weight: Num[Array, "out in"], scale: Float[Array, "out"] | None = None):
        self.weight = nnx.Param(weight)
        self.scale = None if scale is None else nnx.Param(scale)

    @classmethod
    def named(cls, name: str, weights: dict[str, Array]) -> Self:
        """The matrix of this name, and its scales if there are any."""
        return cls(weights[name], weights.get(name + SCALE))

    def __call__(self, x: Float[Array, "tokens in"]) -> Float[Array, "tokens out"]:
        scale = None if self.scale is None else self.scale[...]
        return project(x, self.weight[...], x.dtype, scale)


def project(
    x: Float[Array, "tokens in"],
    weight: Num[Array, "out in"],
    out_dtype: jnp.dtype,
    scale: Float[Array, "out"] | None = None,
) -> Float[Array, "tokens out"]:
    """`x W^T`, times `scale` for each output, accumulated in float32.

    Contracted in place: as `dot(x, W.T)`, XLA on CPU copies the weight. For a single row of
    bfloat16 it would convert the whole weight to float32; there the product is written out, or
    is made one of two rows where that would need too many partial sums. An int8 weight, which it
    would convert whole for any number of rows, is multiplied in blocks.
    """
    if scale is not None:
        return (_int8_product(x, weight) * scale[None]).astype(out_dtype)
    product = partial(_dot, out_dtype=out_dtype)
    if x.shape[0] > 1 or weight.dtype == jnp.float32:
        return product(x, weight)
    lanes = _lanes(*weight.shape)
    if lanes is None:
        on_cpu = partial(_dot_of_two, out_dtype=out_dtype)
    else:
        on_cpu = partial(_multiply_and_add, lanes=lanes, out_dtype=out_dtype)
    return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=product)


def _int8_product(
    x: Float[Array, "tokens in"], weight: Int8[Array, "out in"]
) -> Float[Array, "tokens out"]:
    """`x W^T` of whole numbers in float32. Only the CPU needs to be told not to store a copy."""
    lanes = _lanes(*weight.shape) if x.shape[0] == 1 else None
    if lanes is None:
        on_cpu = _dot_in_blocks
    else:
        on_cpu = partial(_multiply_and_add, lanes=lanes, out_dtype=jnp.dtype(jnp.float32))
    return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=_converted_dot)


def _converted_dot(
    x: Float[Array, "tokens in"], weight: Int8[Array, "out in"]
) -> Float[Array, "tokens out"]:
    """int8 is exact in bfloat16."""
    return _dot(x, weight.astype(x.dtype), out_dtype=jnp.dtype(jnp.float32))


def _dot_in_blocks(
    x: Float[Array, "tokens in"], weight: Int8[Array, "out in"]
) -> Float[Array, "tokens out"]:
    """Block after block of rows, each converted into the same small buffer.

    Two blocks at least: outside of a loop XLA converts the weights of all layers at once, before
    anything else, which made decoding half as fast.
    """
    outputs, size = weight.shape
    fitting = [n for n in range(1, min(_BLOCK // size, outputs // 2) + 1) if outputs % n == 0]
    step = max(fitting, default=0)
    if step * size < _BLOCK // 16:  # small steps cost more than a copy
        return _converted_dot(x, weight)
    blocks = jax.lax.map(partial(_converted_dot, x), weight.reshape(-1, step, size))
    return jnp.swapaxes(blocks, 0, 1).reshape(x.shape[0], outputs)


def _dot(
    x: Float[Array, "tokens in"], weight: Float[Array, "out in"], *, out_dtype: jnp.dtype
) -> Float[Array, "tokens out"]:
    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype
    )


def _dot_of_two(
    x: Float[Array, "1 in"], weight: Float[Array, "out in"], *, out_dtype: jnp.dtype
) -> Float[Array, "1 out"]:
    """The product of the row and a row of zeros, which leaves the weight as it is."""
    return _dot(jnp.pad(x, ((0, 1), (0, 0))), weight, out_dtype=out_dtype)[:1]


def _lanes(outputs: int, size: int) -> int | None:
    """How many partial sums an output has: a divisor of `size`, None if none is good."""
    divisors = [lanes for lanes in range(8, size + 1) if size % lanes == 0]
    good = [lanes for lanes in divisors if size // lanes <= _MAX_TERMS]
    small = [lanes for lanes in good if lanes * outputs <= _MAX_SUMS]
    few = [lanes for lanes in small if size // lanes <= _TERMS]
    return min(few, default=max(small, default=None))


def _multiply_and_add(
    x: Float[Array, "1 in"], weight: Num[Array, "out in"], *, lanes: int, out_dtype: jnp.dtype
) -> Float[Array, "1 out"]:
    """Sum `in / lanes` products into `[out, lanes]`, then over the lanes, in vector code."""
    total = jnp.zeros((weight.shape[0], lanes), jnp.float32)
    for start in range(0, weight.shape[1], lanes):
        block = weight[:, start : start + lanes].astype(jnp.float32)
        total += block * x[:, start : start + lanes].astype(jnp.float32)
    # The barrier keeps the two sums apart; merged, they become scalar code.
    return jnp.sum(jax.lax.optimization_barrier(total), axis=1)[None].astype(out_dtype)
