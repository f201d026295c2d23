"""The KV page layout, owned by this file alone: shapes, writing tokens, reading pages.

One array a layer, `[num_pages, page_size, 2, num_kv_heads, head_dim]`: a token's keys ([0]) and
values ([1]) lie side by side, a page is one contiguous block. int8 and float8 pages carry one
float32 scale per token, kv head and key/value. Page 0 is the null page: never written, all zeros.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxattn.kernels.ragged import token_places


class QuantizedPages(NamedTuple):
    """Pages of a quantised cache: `values * scales` are the keys and values."""

    values: Array  # [num_pages, page_size, 2, num_kv_heads, head_dim], int8 or float8
    scales: Float[Array, "num_pages page_size 2 num_kv_heads"]


KVPages = Array | QuantizedPages


def is_quantized(dtype: str) -> bool:
    """Whether pages of this dtype carry scales."""
    return jnp.dtype(dtype).itemsize == 1


def kv_pages_shape(
    *, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: str
) -> jax.ShapeDtypeStruct | QuantizedPages:
    """Shape and dtype of one layer's pages (a pytree of `jax.ShapeDtypeStruct`)."""
    shape = (num_pages, page_size, 2, num_kv_heads, head_dim)
    values = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if is_quantized(dtype):
        return QuantizedPages(values, jax.ShapeDtypeStruct(shape[:-1], jnp.float32))  # type: ignore[arg-type]
    return values


def page_array(kv_pages: KVPages) -> Array:
    """The array that holds the elements (without scales)."""
    return kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages


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
    num_pages, page_size = page_array(kv_pages).shape[:2]
    place = token_places(len(keys), kv_lens, cu_q_lens, distribution)
    column = place.positions // page_size
    if first_page is not None:
        column -= first_page[place.sequences]
    page = page_indices.at[place.sequences, column].get(mode="fill", fill_value=0)
    in_pool = place.real & (column >= 0) & (0 < page) & (page < num_pages)
    page = jnp.where(in_pool, page, num_pages)  # out of bounds: the scatter drops it
    row = place.positions % page_size
    tokens = jnp.stack([keys, values], axis=1)

    def put(pool: Array, new: Array) -> Array:
        return pool.at[page, row].set(new.astype(pool.dtype), mode="drop")

    if isinstance(kv_pages, QuantizedPages):
        quantized, scales = quantize(tokens, kv_pages.values.dtype)
        return QuantizedPages(put(kv_pages.values, quantized), put(kv_pages.scales, scales))
    return put(kv_pages, tokens)


def read_pages(
    kv_pages: KVPages, page_ids: Int32[Array, "pages"]
) -> tuple[Float[Array, "tokens kv_heads head_dim"], Float[Array, "tokens kv_heads head_dim"]]:
    """Keys and values of whole pages, in order. Ids that are no page read the null page."""

    def take(pool: Array) -> Array:
        ids = jnp.where((page_ids >= 0) & (page_ids < pool.shape[0]), page_ids, 0)
        taken = pool.at[ids].get(mode="promise_in_bounds")
        return taken.reshape(-1, *pool.shape[2:])

    if isinstance(kv_pages, QuantizedPages):
        tokens = take(kv_pages.values).astype(jnp.float32) * take(kv_pages.scales)[..., None]
    else:
        tokens = take(kv_pages)
    return tokens[:, 0], tokens[:, 1]
