"""Queries and outputs, between `[tokens, heads, 128]` in HBM's order and heads first."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxattn.kernels.layout import LANES
from jaxattn.kernels.pallas.words import Ref


def is_dense(heads: int, pack: int) -> bool:
    """Whether a token's heads fill whole words and whole tiles of VMEM, so that they have a stride.

    Others are exchanged with tokens in registers, at three times the cost.
    """
    return heads % pack == 0 and (heads % (8 * pack) == 0 or heads & (heads - 1) == 0)


def load_heads_first(tile: Ref, *, interpret: bool) -> list[Float[Array, "tokens 128"]]:
    """Per head the vectors of all tokens, in float32. `tile` is `[tokens, heads, 128]`."""
    tokens, heads, _ = tile.shape
    pack = 4 // tile.dtype.itemsize
    if interpret or not is_dense(heads, pack):
        value = jnp.swapaxes(tile[...], 0, 1).astype(jnp.float32)
        return [value[head] for head in range(heads)]
    words = (tile.bitcast(jnp.uint32) if pack > 1 else tile).reshape(tokens * heads // pack, LANES)
    out = []
    for row in range(heads // pack):
        word = words[pl.ds(row, tokens, stride=heads // pack), :]
        out += [word] if pack == 1 else [_from_bits(word << 16), _from_bits(word)]
    return out


def store_tokens_first(
    tile: Ref, values: list[Float[Array, "tokens 128"]], *, interpret: bool
) -> None:
    """The way back, rounded to the dtype of `tile`."""
    tokens, heads, _ = tile.shape
    pack = 4 // tile.dtype.itemsize
    if interpret or not is_dense(heads, pack):
        value = jnp.stack([value.astype(tile.dtype) for value in values])
        tile[...] = jnp.swapaxes(value, 0, 1)
        return
    words = (tile.bitcast(jnp.uint32) if pack > 1 else tile).reshape(tokens * heads // pack, LANES)
    for row in range(heads // pack):
        word = values[row * pack]
        if pack == 2:
            low, high = (_to_bits(value) for value in values[row * pack : row * pack + 2])
            word = low >> 16 | high
        words[pl.ds(row, tokens, stride=heads // pack), :] = word


def _from_bits(word: Array) -> Float[Array, "tokens 128"]:
    """The bfloat16 in the high half of a word."""
    return jax.lax.bitcast_convert_type(word & jnp.uint32(0xFFFF0000), jnp.float32)


def _to_bits(value: Float[Array, "tokens 128"]) -> Array:
    """Rounded to bfloat16, in the high half of a word."""
    rounded = value.astype(jnp.bfloat16).astype(jnp.float32)
    return jax.lax.bitcast_convert_type(rounded, jnp.uint32)
