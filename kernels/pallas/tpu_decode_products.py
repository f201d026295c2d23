"""Products of a decode step's queries with a tile of tokens, which stay packed as they lie.

The product of queries with a tile's rows scores every vector in the shared words. Scores of the
wrong phase (the other head's, or the value's) are hidden together with those of tokens out of
range, and weights are moved to the phase of the values:

    columns of a score    token 0        token 1        token 2
    bf16, 2 heads         K0   K1        K0   K1        K0   K1       a row of head 0 keeps K0
    bf16, 1 head          K    V         K    V         K    V        keeps K, moves p to V

This doubles the work of a matrix unit that decode leaves idle, and saves the vector unit from
pulling heads apart, which would be most of the time.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from jaxattn.kernels.layout import LANES
from jaxattn.kernels.pallas.products import LOG2_E, dot
from jaxattn.kernels.pallas.scalars import quotient, remainder
from jaxattn.kernels.pallas.tpu_decode_shape import DecodeShape
from jaxattn.kernels.pallas.words import Ref, as_rows, load_words

HIDDEN = -1e30  # finite: hidden - hidden is 0, not NaN


class Tile:
    """One tile in VMEM and the products with it; rows `span[0] .. span[1]` are keys to see."""

    def __init__(self, shape: DecodeShape, tile: Ref, scales: Ref, span: tuple):
        self.shape, self.tile, self.scales, self.span = shape, tile, scales, span
        self._rows: dict[int, Array] = {}

    def rows(self, row: int) -> Float[Array, "columns 128"]:
        """The vectors in one row of words."""
        if row not in self._rows:
            layout, interpret = self.shape.layout, self.shape.interpret
            words = load_words(self.tile, row, interpret=interpret)
            rows = as_rows(words, jnp.dtype(layout.dtype), interpret=interpret)
            self._rows[row] = rows.astype(self.shape.compute_dtype)
        return self._rows[row]

    def operand(self, product: int, kind: int) -> Float[Array, "columns words*lanes"]:
        """Keys (0) or values (1) of all groups of heads in a product, side by side."""
        layout, count = self.shape.layout, self.shape.words_per_product
        heads, _, tiles = layout.shared
        rows = [
            layout.place(kind, (product * count + word) * heads, tile * tiles).row
            for word in range(count)
            for tile in range(layout.lane_tiles // tiles)
        ]
        return jnp.concatenate([self.rows(row) for row in rows], axis=1)

    def column_scales(self, product: int, kind: int) -> Float[Array, "rows columns"]:
        """Per query head the scale of every column."""
        layout, count = self.shape.layout, self.shape.words_per_product
        per_word = self.shape.product_rows // count
        parts = []
        for word in range(count):
            row = layout.scale_row(kind, (product * count + word) * layout.shared[0])
            pages = [self.scales[page, row : row + 1, :] for page in range(self.scales.shape[0])]
            line = jnp.concatenate(pages, axis=1)
            parts.append(jnp.broadcast_to(line, (per_word, line.shape[1])))
        return jnp.concatenate(parts, axis=0)

    def seen(self) -> Bool[Array, "rows columns"]:
        """Of the scores of a product, those of the row's own keys in range."""
        shape, layout = self.shape, self.shape.layout
        dims = shape.product_rows, self.tile.shape[0] * layout.pack
        column = jax.lax.broadcasted_iota(jnp.int32, dims, 1)
        first, end = (each * layout.pack for each in self.span)
        seen = column < end
        if layout.is_quantized:  # else a tile starts with its first token
            seen &= column >= first
        if layout.pack > 1:
            heads, kinds, tiles = layout.shared
            row = jax.lax.broadcasted_iota(jnp.int32, dims, 0)
            head = remainder(quotient(row, shape.groups), heads)
            seen &= remainder(column, layout.pack) == head * (kinds * tiles)
        return seen

    def scores(
        self, product: int, query: Float[Array, "rows lanes"], seen: Bool[Array, "rows columns"]
    ) -> Float[Array, "rows columns"]:
        """Scores times log2(e) (for exp2), hidden where not seen."""
        shape, layout = self.shape, self.shape.layout
        rows = shape.product_rows
        scores = dot(query, self.operand(product, 0), ((1,), (1,)))
        if layout.shared[2] == 2:  # both halves of the head are in the word: q in two row halves
            scores = scores[:rows] + _roll(scores[rows:], -1, interpret=shape.interpret)
        if layout.is_quantized:
            scores *= self.column_scales(product, 0)
        if shape.soft_cap is None:
            scores *= shape.sm_scale * LOG2_E
        else:
            scores = jnp.tanh(scores * (shape.sm_scale / shape.soft_cap))
            scores *= shape.soft_cap * LOG2_E
        return jnp.where(seen, scores, HIDDEN)

    def weighted(
        self, product: int, weights: Float[Array, "rows columns"], seen: Bool[Array, "rows columns"]
    ) -> Float[Array, "rows lanes"]:
        """Weights times values, `[rows, lane_tiles * 128]`."""
        shape, layout = self.shape, self.shape.layout
        rows, count = shape.product_rows, shape.words_per_product
        _, kinds, tiles = layout.shared
        if layout.is_quantized:
            scales = self.column_scales(product, 1)
            if kinds == 2:  # the value's scale lies in the value's column
                scales = _roll(scales, -tiles, interpret=shape.interpret)
            weights *= jnp.where(seen, scales, 0.0)
        shifts = [tile + (tiles if kinds == 2 else 0) for tile in range(tiles)]
        shifted = [_roll(weights, shift, interpret=shape.interpret) for shift in shifts]
        weights = jnp.concatenate(shifted, axis=0).astype(shape.compute_dtype)
        out = dot(weights, self.operand(product, 1), ((1,), (0,)))
        lanes = layout.lane_tiles * LANES // tiles
        row = quotient(jax.lax.broadcasted_iota(jnp.int32, (rows, lanes), 0), rows // count)
        parts = []
        for tile in range(tiles):
            every = out[rows * tile : rows * (tile + 1)]  # [rows, words * lanes]
            picked = every[:, :lanes]
            for word in range(1, count):
                picked = jnp.where(row == word, every[:, lanes * word : lanes * (word + 1)], picked)
            parts.append(picked)
        return jnp.concatenate(parts, axis=1)


def _roll(value: Array, shift: int, *, interpret: bool) -> Array:
    """Move columns within their group of `pack`, which never straddles 128 lanes."""
    if shift == 0:
        return value
    parts = [value[:, lane : lane + LANES] for lane in range(0, value.shape[1], LANES)]
    return jnp.concatenate([pltpu.roll(part, shift % LANES, 1) for part in parts], axis=1)


def spread_queries(shape: DecodeShape, query: Float[Array, "q_heads head_dim"]) -> list[Array]:
    """Per product the queries `[rows, words * lanes]`, each beside zeros for other words' heads."""
    layout, count = shape.layout, shape.words_per_product
    lanes, tiles = layout.lane_tiles * LANES, layout.shared[2]
    query = query.astype(jnp.float32)
    rows = layout.padded_heads * shape.groups
    query = padded(padded(query, lanes, axis=1), rows, axis=0)
    out = []
    for product in range(shape.words // count):
        part = query[product * shape.product_rows : (product + 1) * shape.product_rows]
        part = jnp.concatenate(  # halves of a head that share a word: one below the other
            [part[:, lanes // tiles * tile : lanes // tiles * (tile + 1)] for tile in range(tiles)]
        )
        word = jax.lax.broadcasted_iota(jnp.int32, part.shape, 0)
        word = quotient(remainder(word, shape.product_rows), shape.product_rows // count)
        beside = [jnp.where(word == index, part, 0.0) for index in range(count)]
        out.append(jnp.concatenate(beside, axis=1).astype(shape.compute_dtype))
    return out


def padded(value: Array, size: int, *, axis: int) -> Array:
    missing = size - value.shape[axis]
    if missing == 0:
        return value
    blank = list(value.shape)
    blank[axis] = missing
    return jnp.concatenate([value, jnp.zeros(blank, value.dtype)], axis=axis)
