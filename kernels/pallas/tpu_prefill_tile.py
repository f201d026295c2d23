"""A tile of tokens, pulled apart into keys and transposed values of each head."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32, UInt32

from jaxattn.kernels.layout import LANES
from jaxattn.kernels.pallas.scalars import ceil_quotient, remainder
from jaxattn.kernels.pallas.tpu_prefill_shape import PrefillShape
from jaxattn.kernels.pallas.words import load_words

Scalar = Int32[Array, ""]


def unpack_tile(
    shape: PrefillShape, refs: Any, slot: Scalar, value_slot: Scalar, first: Scalar, end: Scalar
) -> None:
    """From the words of tokens `first .. end` to plain arrays; zeros where there is no token.

    Not what was there before: it may be NaN, and 0 * NaN would reach the output.
    """
    layout, count = shape.layout, end - first
    dtype = jnp.dtype(layout.dtype)
    piece = min(LANES, shape.tiles.block_kv)
    places = [
        (kind, head, tile, layout.place(kind, head, tile))
        for kind in range(2)
        for head in range(layout.num_kv_heads)
        for tile in range(layout.lane_tiles)
    ]
    offset = remainder(first, layout.page_size)
    if refs.scales is not None:
        _turn_scales(shape, refs, slot, ceil_quotient(offset + count, layout.page_size))
    for begin in range(0, shape.tiles.block_kv, piece):
        token = jax.lax.broadcasted_iota(jnp.int32, (piece, LANES), 0) + begin
        tokens = slice(begin, begin + piece)
        for row in range(layout.rows):
            ref = refs.tile.at[slot, pl.ds(begin, piece)]
            words = load_words(ref, row, interpret=shape.interpret)
            words = jnp.where(token < count, words, jnp.zeros_like(words))
            for kind, head, tile, place in places:
                if place.row != row:
                    continue
                vector = _vector(words, place.phase, dtype)
                if refs.scales is not None:
                    phase = layout.place(kind, head, 0).phase
                    start = (offset + begin) * layout.pack + phase
                    scales = refs.scale_columns[pl.ds(start, piece, stride=layout.pack), :]
                    scale_row = layout.scale_row(kind, head)
                    scale = jnp.broadcast_to(scales[:, scale_row : scale_row + 1], vector.shape)
                    vector *= jnp.where(token < count, scale, 0.0)
                lanes = slice(tile * LANES, (tile + 1) * LANES)
                if kind == 0:
                    refs.keys[head, tokens, lanes] = vector.astype(refs.keys.dtype)
                else:
                    value = vector.T[place.lane :].astype(refs.values.dtype)
                    lanes = slice(tile * LANES, tile * LANES + value.shape[0])
                    refs.values[value_slot, head, lanes, tokens] = value


def _turn_scales(shape: PrefillShape, refs: Any, slot: Scalar, pages: Scalar) -> None:
    """From pages, where scales lie along lanes, to a column for each scale row."""
    columns = shape.layout.page_size * shape.layout.pack

    @pl.loop(0, pages)
    def _(page: Scalar) -> None:
        refs.scale_page[: shape.layout.scale_rows, :columns] = refs.scale_tile[slot, page]
        turned = refs.scale_page[...].T[:columns]
        refs.scale_columns[pl.ds(page * columns, columns), : turned.shape[1]] = turned


def _vector(
    words: UInt32[Array, "tokens 128"], phase: int, dtype: jnp.dtype
) -> Float[Array, "tokens 128"]:
    """One of the vectors that share words, in float32."""
    if dtype == jnp.float32:
        return jax.lax.bitcast_convert_type(words, jnp.float32)
    if dtype == jnp.bfloat16:
        high = words << 16 if phase == 0 else words & jnp.uint32(0xFFFF0000)
        return jax.lax.bitcast_convert_type(high, jnp.float32)
    signed = jax.lax.bitcast_convert_type(words, jnp.int32)
    signed = (signed << (24 - 8 * phase)) >> 24
    if dtype == jnp.int8:
        return signed.astype(jnp.float32)
    return _float8(signed, dtype)


def _float8(signed: Int32[Array, "tokens 128"], dtype: jnp.dtype) -> Float[Array, "tokens 128"]:
    """Finite float8 by its bits, on chips that know no float8 too."""
    facts = jnp.finfo(dtype)
    mantissa, bias = facts.nmant, 1 - facts.minexp
    magnitude = signed & 0x7F
    value = jax.lax.bitcast_convert_type(magnitude << (23 - mantissa), jnp.float32)
    value *= 2.0 ** (127 - bias)
    # The smallest would be subnormal in float32, which chips take for 0.
    small = magnitude.astype(jnp.float32) * 2.0 ** (1 - bias - mantissa)
    value = jnp.where(magnitude < 1 << mantissa, small, value)
    return jnp.where(signed < 0, -value, value)
