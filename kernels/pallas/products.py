"""What both kernels' products share: their dtype, their precision, and the base of the softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxattn.kernels.layout import KVLayout

LOG2_E = 1.4426950408889634


def compute_dtype(layout: KVLayout, query_dtype: str) -> jnp.dtype:
    """bfloat16 if queries are, and pages are not wider."""
    narrow = query_dtype == "bfloat16" and layout.dtype != "float32"
    return jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)


def dot(left: Array, right: Array, contract: tuple) -> Float[Array, "rows columns"]:
    """A product in float32; of float32 operands without bfloat16 passes, which are the default."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        left, right, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
