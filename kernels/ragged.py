"""Where each token of a ragged batch stands: its sequence and its absolute position."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class TokenPlaces(NamedTuple):
    """Per token: the sequence it belongs to, its absolute position, and whether it is real."""

    sequences: Int32[Array, "tokens"]
    positions: Int32[Array, "tokens"]
    real: Bool[Array, "tokens"]


def token_places(
    num_tokens: int,
    kv_lens: Int32[Array, "seqs"],
    cu_q_lens: Int32[Array, "seqs_plus_1"],
    distribution: Int32[Array, "3"],
) -> TokenPlaces:
    """Locate `num_tokens` (static) flat tokens; padding tokens get `real=False`, position 0."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    real = token < cu_q_lens[distribution[2]]
    # Zero-length sequences end where they start, so the last one that starts here is the owner.
    sequence = jnp.sum(cu_q_lens[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.where(real, sequence, 0)
    from_end = cu_q_lens[sequence + 1] - token
    return TokenPlaces(sequence, jnp.where(real, kv_lens[sequence] - from_end, 0), real)
