"""What both roles of the GPU kernel share: its references, and the pieces that a block does."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jaxattn.kernels.pallas.gpu_shape import GpuShape
from jaxattn.kernels.pallas.gpu_work import COUNT
from jaxattn.kernels.pallas.words import Ref

Scalar = Int32[Array, ""]
KEY, VALUE = 0, 1


@dataclass(frozen=True, kw_only=True)
class Refs:
    """The kernel's references, by name; None where the kernel has no use for it."""

    # inputs
    queries: Ref  # decode [tokens * q_heads, lanes]; prefill [tokens, q_heads * lanes]; and more
    keys_values: Ref  # [num_pages * page_size, rows * pack * 128]
    table: Ref  # [seqs, pages_per_seq], 0 where there is no page
    first_page: Ref  # [seqs]
    places: Ref  # [kv_heads, 2 * lane_tiles]: first lane of a key's and a value's lane tiles
    tiles: Ref  # see `Work`
    first: Ref
    end: Ref
    shares: Ref
    scales: Ref = None  # [num_pages * scale_rows, page_size, pack]
    scale_places: Ref = None  # [kv_heads, 4]: row and phase of a key's and a value's scale
    sinks: Ref = None  # [2, heads, rows]: none, and those of each row times log2(e)
    # outputs
    out: Ref  # [tokens, q_heads, lanes]
    acc: Ref  # [2 * blocks, rows, lanes]: partial results, not divided
    top: Ref  # [2 * blocks, rows]: their maximum
    total: Ref  # [2 * blocks, rows]: and sum
    # shared memory
    query: Ref  # [warpgroups, lane_tiles, 64, lanes]
    key: Ref  # [stages, lane_tiles, tile_tokens, lanes]; quantised [2, ...]: key and value
    value: Ref = None  # as `key`, not if quantised
    result: Ref  # [warpgroups, 64, lanes]
    raw_key: Ref = None  # [stages, lane_tiles, tile_tokens, lanes]
    raw_value: Ref = None
    key_scale: Ref = None  # [stages, tile_tokens, pack]
    value_scale: Ref = None
    # barriers
    key_full: Ref
    value_full: Ref
    free: Ref
    turn: Ref  # of two warpgroups at the matrix unit
    cleared: Ref  # an edge tile's values


@dataclass(frozen=True)
class Piece:
    """What a block does of one head of one tile."""

    tile: Scalar
    head: Scalar
    key_tile: Scalar  # the first
    count: Scalar  # of key tiles
    position: Scalar  # of the first in the ring


def pieces(shape: GpuShape, ref: Refs, body: Callable[[Piece], None]) -> None:
    """All pieces of this block, in order."""
    share = [ref.shares[lax.axis_index("block"), column] for column in range(5)]
    tile, head, key_tile, total, count = share

    def step(_: Scalar, state: tuple) -> tuple:
        tile, head, key_tile, position = state
        left = ref.tiles[tile, COUNT] - key_tile
        visits = jnp.minimum(left, total - position)
        body(Piece(tile, head, key_tile, visits, position))
        last_head = head == shape.heads - 1
        tile = jnp.where(last_head, tile + 1, tile)
        head = jnp.where(last_head, 0, head + 1)
        return tile, head, jnp.int32(0), position + visits

    lax.fori_loop(0, count, step, (tile, head, key_tile, jnp.int32(0)))


def kv_head_of(shape: GpuShape, piece: Piece) -> Scalar:
    return piece.head if shape.decode else lax.div(piece.head, jnp.int32(shape.group))
