"""The KV page layout, owned by this file alone: shapes, writing tokens, reading pages.

One array a layer, `[num_pages, page_size, rows, pack, 128]`. A token is cut into vectors of 128
elements, a chip's lanes; `pack` of them share a row of 32-bit words (1 in float32, 2 in bfloat16,
4 in int8). Tokens and rows are not tiled on any chip, so a copy may start and end at any token,
and a kernel loads whole words without pulling heads apart. bfloat16, one token:

    4 kv heads of 128              2 kv heads of 256              1 kv head of 256
    row 0  K head 0 | K head 1     row 0  K0[:128] | K1[:128]     row 0  K[:128] | V[:128]
    row 1  V head 0 | V head 1     row 1  K0[128:] | K1[128:]     row 1  K[128:] | V[128:]
    row 2  K head 2 | K head 3     row 2  V0[:128] | V1[:128]
    row 3  V head 2 | V head 3     row 3  V0[128:] | V1[128:]

Heads are padded to a multiple of 128 elements (80 and 96 to 128, 192 to 256), except that up to
64 a key (from element 0) and its value (from element 64) share one vector. Rows go by heads
first, so that shards of whole rows are shards of heads.

int8 and float8 pages carry one float32 scale per token, kv head and key/value. Page 0 is the null
page: never written, all zeros.
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxattn.kernels.ragged import token_places

LANES = 128


class QuantizedPages(NamedTuple):
    """Pages of a quantised cache: `values * scales` are the keys and values."""

    values: Array  # [num_pages, page_size, rows, pack, 128], int8 or float8
    scales: Float[Array, "num_pages scale_rows page_size*pack"]


KVPages = Array | QuantizedPages


class Place(NamedTuple):
    """Where a vector of 128 elements is inside a token: `[row, phase, lane:]`."""

    row: int
    phase: int
    lane: int


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """How the tokens of one layer lie in its pages. Static."""

    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def pack(self) -> int:
        """Vectors that share a row of 32-bit words."""
        return 4 // jnp.dtype(self.dtype).itemsize

    @property
    def is_quantized(self) -> bool:
        """Whether pages of this dtype carry scales."""
        return jnp.dtype(self.dtype).itemsize == 1

    @property
    def lane_tiles(self) -> int:
        """Vectors of a key, or of a key with its value up to head dim 64."""
        return -(-self.head_dim // LANES)

    @property
    def kinds(self) -> int:
        """2 where keys and values have vectors of their own, 1 where they share them."""
        return 1 if self.head_dim <= LANES // 2 else 2

    @property
    def shared(self) -> tuple[int, int, int]:
        """How many heads, kinds (key, value) and lane tiles share a word; the product is `pack`."""
        heads = gcd(self.num_kv_heads, self.pack)
        kinds = gcd(self.kinds, self.pack // heads)
        tiles = gcd(self.lane_tiles, self.pack // (heads * kinds))
        return self.pack // (kinds * tiles), kinds, tiles  # what is left over: padded heads

    @property
    def padded_heads(self) -> int:
        """kv heads, with the zero heads that fill the last word."""
        return -(-self.num_kv_heads // self.shared[0]) * self.shared[0]

    @property
    def rows(self) -> int:
        """Rows of words of one token."""
        return self.padded_heads * self.kinds * self.lane_tiles // self.pack

    @property
    def scale_rows(self) -> int:
        """Rows of scales of one page: per word of heads one, or one for K and one for V."""
        heads, kinds, _ = self.shared
        return self.padded_heads // heads * (2 // kinds)

    def place(self, kind: int, head: int, lane_tile: int) -> Place:
        """Where lane tile `lane_tile` of the key (kind 0) or value (kind 1) of a kv head is."""
        heads, kinds, tiles = self.shared
        lane = kind * LANES // 2 if self.kinds == 1 else 0
        kind = 0 if self.kinds == 1 else kind
        row = (head // heads * (self.kinds // kinds) + kind // kinds) * (self.lane_tiles // tiles)
        phase = (head % heads * kinds + kind % kinds) * tiles + lane_tile % tiles
        return Place(row + lane_tile // tiles, phase, lane)

    def scale_row(self, kind: int, head: int) -> int:
        """The row of a page's scales that holds those of this head; `[slot * pack + phase]`."""
        heads, kinds, _ = self.shared
        return head // heads * (2 // kinds) + (kind if kinds == 1 else 0)

    def pages(self, num_pages: int) -> jax.ShapeDtypeStruct | QuantizedPages:
        """Shape and dtype of a pool (a pytree of `jax.ShapeDtypeStruct`)."""
        shape = (num_pages, self.page_size, self.rows, self.pack, LANES)
        values = jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
        if not self.is_quantized:
            return values
        scales = (num_pages, self.scale_rows, self.page_size * self.pack)
        return QuantizedPages(values, jax.ShapeDtypeStruct(scales, jnp.float32))  # type: ignore[arg-type]

    def pack_tokens(
        self,
        keys: Float[Array, "tokens kv_heads head_dim"],
        values: Float[Array, "tokens kv_heads head_dim"],
    ) -> Float[Array, "tokens rows pack 128"]:
        """Tokens as they lie in a page, in the dtype that they come in."""
        if self.kinds == 1:
            half = [(0, 0), (0, 0), (0, LANES // 2 - self.head_dim)]
            tokens = jnp.concatenate([jnp.pad(keys, half), jnp.pad(values, half)], axis=-1)
        else:
            tokens = jnp.stack([keys, values], axis=2)
            padding = self.lane_tiles * LANES - self.head_dim
            tokens = jnp.pad(tokens, [(0, 0), (0, 0), (0, 0), (0, padding)])
        heads, kinds, tiles = self.shared
        blank = self.padded_heads - self.num_kv_heads
        tokens = jnp.pad(tokens, [(0, 0), (0, blank), *[(0, 0)] * (tokens.ndim - 2)])
        shape = (len(keys), -1, heads, self.kinds // kinds, kinds, self.lane_tiles // tiles, tiles)
        tokens = tokens.reshape(*shape, LANES).transpose(0, 1, 3, 5, 2, 4, 6, 7)
        return tokens.reshape(len(keys), self.rows, self.pack, LANES)

    def unpack_tokens(
        self, tokens: Float[Array, "tokens rows pack 128"]
    ) -> tuple[Float[Array, "tokens kv_heads head_dim"], Float[Array, "tokens kv_heads head_dim"]]:
        """Keys and values of tokens as they lie in a page."""
        heads, kinds, tiles = self.shared
        count = len(tokens)
        shape = (count, -1, self.kinds // kinds, self.lane_tiles // tiles, heads, kinds, tiles)
        tokens = tokens.reshape(*shape, LANES).transpose(0, 1, 4, 2, 5, 3, 6, 7)
        tokens = tokens.reshape(count, self.padded_heads, self.kinds, -1, LANES)
        # In one piece with the next reshape, XLA computes an index for each element: eight times
        # as long on CPU.
        keys, values = jax.lax.optimization_barrier(
            (tokens[:, : self.num_kv_heads, 0], tokens[:, : self.num_kv_heads, -1])
        )
        keys, values = (each.reshape(*each.shape[:2], -1) for each in (keys, values))
        if self.kinds == 1:
            values = values[..., LANES // 2 :]
        return keys[..., : self.head_dim], values[..., : self.head_dim]

    def pack_scales(
        self, scales: Float[Array, "tokens kv_heads 2"]
    ) -> Float[Array, "tokens scale_rows pack"]:
        """Scales of tokens as they lie in a page."""
        heads, kinds, tiles = self.shared
        blank = self.padded_heads - self.num_kv_heads
        scales = jnp.pad(scales, [(0, 0), (0, blank), (0, 0)])
        scales = scales.reshape(len(scales), -1, heads, 2 // kinds, kinds).transpose(0, 1, 3, 2, 4)
        scales = jnp.repeat(scales, tiles, axis=-1, total_repeat_length=kinds * tiles)
        return scales.reshape(len(scales), self.scale_rows, self.pack)

    def unpack_scales(
        self, scales: Float[Array, "tokens scale_rows pack"]
    ) -> Float[Array, "tokens kv_heads 2"]:
        """Scales per token, kv head and key/value."""
        heads, kinds, tiles = self.shared
        shape = (len(scales), -1, 2 // kinds, heads, kinds, tiles)
        scales = scales.reshape(*shape)[..., 0].transpose(0, 1, 3, 2, 4)
        return scales.reshape(len(scales), self.padded_heads, 2)[:, : self.num_kv_heads]


def page_array(kv_pages: KVPages) -> Array:
    """The array that holds the elements (without scales)."""
    return kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages


def layout_of(kv_pages: KVPages, num_kv_heads: int, head_dim: int) -> KVLayout:
    """The layout of these pages."""
    pages = page_array(kv_pages)
    return KVLayout(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=pages.shape[1],
        dtype=pages.dtype.name,
    )


def quantize(
    tokens: Float[Array, "*shape head_dim"], dtype: jnp.dtype
) -> tuple[Array, Float[Array, "*shape"]]:
    """Symmetric quantisation over the head dimension; `values * scales[..., None]` restores it."""
    integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    tokens = tokens.astype(jnp.float32)
    scales = jnp.max(jnp.abs(tokens), axis=-1) / largest
    values = tokens / jnp.where(scales == 0, 1, scales)[..., None]
    return (jnp.round(values) if integer else values).astype(dtype), scales


class TokenSlots(NamedTuple):
    """Per token the page and the row in it; the page is out of bounds where nothing is written."""

    page: Int32[Array, "tokens"]
    slot: Int32[Array, "tokens"]


def token_slots(
    kv_pages: KVPages,
    num_tokens: int,
    kv_lens: Int32[Array, "seqs"],
    page_indices: Int32[Array, "seqs pages_per_seq"],
    cu_q_lens: Int32[Array, "seqs_plus_1"],
    distribution: Int32[Array, "3"],
    first_page: Int32[Array, "seqs"] | None,
) -> TokenSlots:
    """Where the new tokens of a batch are written: those of padding and without a page nowhere."""
    num_pages, page_size = page_array(kv_pages).shape[:2]
    place = token_places(num_tokens, kv_lens, cu_q_lens, distribution)
    column = place.positions // page_size
    if first_page is not None:
        column -= first_page[place.sequences]
    page = page_indices.at[place.sequences, column].get(mode="fill", fill_value=0)
    in_pool = place.real & (column >= 0) & (0 < page) & (page < num_pages)
    return TokenSlots(jnp.where(in_pool, page, num_pages), place.positions % page_size)


def write_tokens(
    kv_pages: KVPages,
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    kv_lens: Int32[Array, "seqs"],
    page_indices: Int32[Array, "seqs pages_per_seq"],
    cu_q_lens: Int32[Array, "seqs_plus_1"],
    distribution: Int32[Array, "3"],
    first_page: Int32[Array, "seqs"] | None = None,
) -> KVPages:
    """Write every new token to its page, whatever attention will visit.

    Padding tokens and tokens whose table entry is no page (0, negative, `>= num_pages`, or
    outside the table) are dropped.
    """
    where = kv_lens, page_indices, cu_q_lens, distribution, first_page
    slots = token_slots(kv_pages, len(keys), *where)
    tokens, scales = as_stored(kv_pages, keys, values, slots)
    pages = page_array(kv_pages).at[slots.page, slots.slot].set(tokens, mode="drop")
    return pages if scales is None else QuantizedPages(pages, scales)


def as_stored(
    kv_pages: KVPages,
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    slots: TokenSlots,
) -> tuple[Array, Array | None]:
    """New tokens `[tokens, rows, pack, 128]` as pages hold them, and the pool's updated scales."""
    layout, dtype = layout_of(kv_pages, *keys.shape[1:]), page_array(kv_pages).dtype
    if not isinstance(kv_pages, QuantizedPages):
        return layout.pack_tokens(keys.astype(dtype), values.astype(dtype)), None
    keys, key_scales = quantize(keys, dtype)
    values, value_scales = quantize(values, dtype)
    new = layout.pack_scales(jnp.stack([key_scales, value_scales], axis=-1))
    return layout.pack_tokens(keys, values), put_scales(kv_pages.scales, new, *slots)


def put_scales(
    scales: Float[Array, "num_pages scale_rows page_size*pack"],
    new: Float[Array, "tokens scale_rows pack"],
    page: Int32[Array, "tokens"],
    slot: Int32[Array, "tokens"],
) -> Float[Array, "num_pages scale_rows page_size*pack"]:
    """Scatter the scales of tokens; those out of bounds are dropped."""
    rows, pack = new.shape[1:]
    lane = slot[:, None] * pack + jnp.arange(pack, dtype=jnp.int32)[None, :]
    row = jnp.arange(rows, dtype=jnp.int32)
    return scales.at[page[:, None, None], row[None, :, None], lane[:, None, :]].set(
        new, mode="drop"
    )


def read_pages(
    kv_pages: KVPages, page_ids: Int32[Array, "pages"], *, num_kv_heads: int, head_dim: int
) -> tuple[Float[Array, "tokens kv_heads head_dim"], Float[Array, "tokens kv_heads head_dim"]]:
    """Keys and values of whole pages, in order. Ids that are no page read the null page."""
    layout = layout_of(kv_pages, num_kv_heads, head_dim)

    def take(pool: Array) -> Array:
        ids = jnp.where((page_ids >= 0) & (page_ids < pool.shape[0]), page_ids, 0)
        return pool.at[ids].get(mode="promise_in_bounds")

    tokens = take(page_array(kv_pages)).reshape(-1, layout.rows, layout.pack, LANES)
    keys, values = layout.unpack_tokens(tokens)
    if isinstance(kv_pages, QuantizedPages):
        scales = take(kv_pages.scales)  # [pages, scale_rows, page_size * pack]
        scales = scales.reshape(*scales.shape[:2], layout.page_size, layout.pack)
        scales = layout.unpack_scales(
            scales.transpose(0, 2, 1, 3).reshape(-1, layout.scale_rows, layout.pack)
        )
        keys = keys.astype(jnp.float32) * scales[:, :, 0, None]
        values = values.astype(jnp.float32) * scales[:, :, 1, None]
    return keys, values
