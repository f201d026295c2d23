"""`x W^T`, quick on every platform. Weights are `[out, in]`, as checkpoints have them."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

_MAX_TERMS = 40  # products that one output lane adds up; with over 64 XLA on CPU slows threefold


class Linear(nnx.Module):
    """`y = x W^T` without bias."""

    def __init__(self, weight: Float[Array, "out in"]):
        self.weight = nnx.Param(weight)

    def __call__(self, x: Float[Array, "tokens in"]) -> Float[Array, "tokens out"]:
        return project(x, self.weight[...], x.dtype)


def project(
    x: Float[Array, "tokens in"], weight: Float[Array, "out in"], out_dtype: jnp.dtype
) -> Float[Array, "tokens out"]:
    """`x W^T`, accumulated in float32.

    Contracted in place: as `dot(x, W.T)`, XLA on CPU copies the weight. For a single row of
    bfloat16 it would convert the whole weight to float32; there the product is written out.
    """
    product = partial(_dot, out_dtype=out_dtype)
    lanes = _lanes(weight.shape[1])
    if x.shape[0] > 1 or weight.dtype == jnp.float32 or lanes is None:
        return product(x, weight)
    written_out = partial(_multiply_and_add, lanes=lanes, out_dtype=out_dtype)
    return jax.lax.platform_dependent(x, weight, cpu=written_out, default=product)


def _dot(
    x: Float[Array, "tokens in"], weight: Float[Array, "out in"], *, out_dtype: jnp.dtype
) -> Float[Array, "tokens out"]:
    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype
    )


def _lanes(size: int) -> int | None:
    """The narrowest divisor, 16 or more, that leaves at most `_MAX_TERMS` terms, if any does."""
    return next(
        (
            lanes
            for lanes in range(16, size + 1)
            if size % lanes == 0 and size // lanes <= _MAX_TERMS
        ),
        None,
    )


def _multiply_and_add(
    x: Float[Array, "1 in"], weight: Float[Array, "out in"], *, lanes: int, out_dtype: jnp.dtype
) -> Float[Array, "1 out"]:
    """Sum `in / lanes` products into `[out, lanes]`, then over the lanes, in vector code."""
    total = jnp.zeros((weight.shape[0], lanes), jnp.float32)
    for start in range(0, weight.shape[1], lanes):
        block = weight[:, start : start + lanes].astype(jnp.float32)
        total += block * x[:, start : start + lanes].astype(jnp.float32)
    # The barrier keeps the two sums apart; merged, they become scalar code.
    return jnp.sum(jax.lax.optimization_barrier(total), axis=1)[None].astype(out_dtype)
