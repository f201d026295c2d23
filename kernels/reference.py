"""The float32 oracle: short, obvious, dense, supports everything. Every backend is held to it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxattn.kernels.layout import KVPages, page_array, read_pages, write_tokens
from jaxattn.kernels.mask import visible
from jaxattn.kernels.ragged import token_places


def attention(
    queries: Float[Array, "queries q_heads head_dim"],
    keys: Float[Array, "keys kv_heads head_dim"],
    values: Float[Array, "keys kv_heads head_dim"],
    seen: Bool[Array, "queries keys"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, "q_heads"] | None = None,
) -> Float[Array, "queries q_heads head_dim"]:
    """Softmax attention in float32 under an explicit mask (see `kernels.mask.visible`).

    `out = softmax([soft_cap(sm_scale * q k), sink]) @ [v, 0]`. A query that sees nothing gives
    zeros. NaN in a key or value that nobody sees does not matter.
    """
    groups = queries.shape[1] // keys.shape[1]
    key = jnp.repeat(keys.astype(jnp.float32), groups, axis=1)
    value = jnp.repeat(values.astype(jnp.float32), groups, axis=1)
    value = jnp.where(seen.any(axis=0)[:, None, None], value, 0)
    with jax.default_matmul_precision("float32"):
        scores = jnp.einsum("qhd,khd->hqk", queries.astype(jnp.float32), key) * sm_scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen[None], scores, -jnp.inf)
        top = jnp.max(scores, axis=-1, initial=jnp.finfo(jnp.float32).min, keepdims=True)
        if sinks is not None:
            top = jnp.maximum(top, sinks.astype(jnp.float32)[:, None, None])
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total += jnp.exp(sinks.astype(jnp.float32)[:, None, None] - top)
        weights = weights / jnp.where(total == 0, 1, total)
        return jnp.einsum("hqk,khd->qhd", weights, value)


def ragged_paged_attention(
    queries: Float[Array, "tokens q_heads head_dim"],
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    kv_pages: KVPages,
    kv_lens: Int32[Array, "seqs"],
    page_indices: Int32[Array, "seqs pages_per_seq"],
    cu_q_lens: Int32[Array, "seqs_plus_1"],
    distribution: Int32[Array, "3"],
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, "q_heads"] | None,
    image_spans: Int32[Array, "tokens 2"] | None,
    image_rule: str,
    causal: bool,
    first_page: Int32[Array, "seqs"] | None,
    update_kv_cache: bool,
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """The oracle on pages: every token against every key of every sequence, its own kept."""
    if update_kv_cache:
        kv_pages = write_tokens(
            kv_pages, keys, values, kv_lens, page_indices, cu_q_lens, distribution, first_page
        )
    first = jnp.zeros_like(kv_lens) if first_page is None else first_page
    page_size = page_array(kv_pages).shape[1]
    place = token_places(len(queries), kv_lens, cu_q_lens, distribution)

    def one_sequence(sequence: Int32[Array, ""]) -> Float[Array, "tokens q_heads head_dim"]:
        key, value = read_pages(
            kv_pages, page_indices[sequence], num_kv_heads=keys.shape[1], head_dim=keys.shape[2]
        )
        position = first[sequence] * page_size + jnp.arange(len(key), dtype=jnp.int32)
        seen = visible(
            place.positions,
            position,
            sliding_window=sliding_window,
            causal=causal,
            image_spans=image_spans,
            image_rule=image_rule,
        )
        seen &= (position < kv_lens[sequence])[None, :]
        seen &= (place.real & (place.sequences == sequence))[:, None]
        return attention(
            queries, key, value, seen, sm_scale=sm_scale, soft_cap=soft_cap, sinks=sinks
        )

    every = jax.lax.map(one_sequence, jnp.arange(len(kv_lens), dtype=jnp.int32))
    return every.sum(axis=0).astype(queries.dtype), kv_pages
