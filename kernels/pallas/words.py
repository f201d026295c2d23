"""Loading tiles of tokens from VMEM by 32-bit words, spelled for the chip and for the interpreter.

A strided load of words touches every token's row once, whatever the dtype, and never pulls heads
apart: the vectors that share a word come out interleaved, `pack` rows a token.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped, UInt32

from jaxattn.kernels.layout import LANES

Ref = Any  # a Pallas reference


def load_words(tile: Ref, row: int, *, interpret: bool) -> UInt32[Array, "tokens 128"]:
    """Row `row` of every token, `pack` elements in each word, the first in the lowest bits.

    `tile` is `[tokens, rows, pack, 128]` in VMEM. An odd number of rows avoids bank conflicts.
    """
    tokens, rows, pack, _ = tile.shape
    if interpret:  # which has no Ref.bitcast and no Ref.reshape: the same words from a value
        value = tile[:, row]  # [tokens, pack, 128]
        if pack == 1:
            return jax.lax.bitcast_convert_type(value[:, 0], jnp.uint32)
        return jax.lax.bitcast_convert_type(value.swapaxes(1, 2), jnp.uint32)
    words = tile if pack == 1 else tile.bitcast(jnp.uint32)  # [tokens, rows, 1, 128]
    value = words.reshape(tokens * rows, LANES)[pl.ds(row, tokens, stride=rows), :]
    return value if value.dtype == jnp.uint32 else pltpu.bitcast(value, jnp.uint32)


def as_rows(
    words: UInt32[Array, "tokens 128"], dtype: jnp.dtype, *, interpret: bool
) -> Shaped[Array, "tokens*pack 128"]:
    """The vectors in these words, one after the other: row `token * pack + phase`."""
    pack = 4 // dtype.itemsize
    if not interpret:
        return pltpu.bitcast(words, dtype)
    value = jax.lax.bitcast_convert_type(words, dtype)
    if pack == 1:
        return value
    return value.swapaxes(1, 2).reshape(-1, LANES)
