"""Integer arithmetic inside kernels, of values that are never negative.

`//` and `%` also round negative numbers, which costs a chip a dozen instructions each, and which
the TPU compiler refuses to lower without a device to ask.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


def quotient(value: Int32[Array, "*shape"], divisor: int) -> Int32[Array, "*shape"]:
    """`value // divisor`, for `value >= 0`."""
    if divisor & (divisor - 1) == 0:
        return value >> (divisor.bit_length() - 1)
    return jax.lax.div(value, jnp.full_like(value, divisor))


def remainder(value: Int32[Array, "*shape"], divisor: int) -> Int32[Array, "*shape"]:
    """`value % divisor`, for `value >= 0`."""
    if divisor & (divisor - 1) == 0:
        return value & (divisor - 1)
    return jax.lax.rem(value, jnp.full_like(value, divisor))


def ceil_quotient(value: Int32[Array, "*shape"], divisor: int) -> Int32[Array, "*shape"]:
    """`ceil(value / divisor)`, for `value >= 0`."""
    return quotient(value + (divisor - 1), divisor)
