"""Ragged paged attention in plain XLA: portable, exact, and quick on CPU.

Work is cut into items: `block_q` consecutive queries of one sequence. An item walks the KV blocks
that its queries can see, and no others, with an online softmax; both loops have dynamic trip
counts, so time follows the lengths of the batch and not the shapes of its arrays. A windowed
layer starts at the block of its first visible key: its cost is O(window), whatever the context.
Peak scores: `block_q * q_heads * BLOCK_KV` floats.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxattn.kernels.layout import KVPages, page_array, read_pages, write_tokens
from jaxattn.kernels.mask import visible

BLOCK_Q = 128  # queries of one prefill item
BLOCK_KV = 256  # keys of one step, rounded up to whole pages


class _Softmax(NamedTuple):
    """Running softmax of an item: `top` is the largest score so far, `total` its denominator."""

    top: Float[Array, "kv_heads rows 1"]
    total: Float[Array, "kv_heads rows 1"]
    out: Float[Array, "kv_heads rows head_dim"]


@partial(
    jax.jit,
    static_argnames=(
        "sm_scale",
        "sliding_window",
        "soft_cap",
        "image_rule",
        "causal",
        "update_kv_cache",
    ),
)
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
    """See `jaxattn.ragged_paged_attention`, which validates and calls this."""
    if update_kv_cache:
        kv_pages = write_tokens(
            kv_pages, keys, values, kv_lens, page_indices, cu_q_lens, distribution, first_page
        )
    if first_page is None:
        first_page = jnp.zeros_like(kv_lens)
    num_tokens = len(queries)
    num_kv_heads = keys.shape[1]
    head_dim = queries.shape[2]
    groups = queries.shape[1] // num_kv_heads
    page_size = page_array(kv_pages).shape[1]
    block_pages = -(-BLOCK_KV // page_size)
    block_kv = block_pages * page_size
    same_dtype = page_array(kv_pages).dtype == queries.dtype
    compute_dtype = queries.dtype if same_dtype else jnp.dtype(jnp.float32)
    # A float32 product in bfloat16 passes (the default on TPU) would not be float32 attention.
    precision = jax.lax.Precision.HIGHEST if compute_dtype == jnp.float32 else None
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    table_width = page_indices.shape[1]

    def attend_item(
        block_q: int, sequence: Int32[Array, ""], offset: Int32[Array, ""], start: Int32[Array, ""]
    ) -> Float[Array, "block_q q_heads head_dim"]:
        """Queries `offset .. offset + block_q` of a sequence, at flat rows `start ..`."""
        kv_len = kv_lens[sequence]
        positions = kv_len - q_lens[sequence] + offset + jnp.arange(block_q, dtype=jnp.int32)
        last = jnp.minimum(positions[-1], kv_len - 1)
        query = jax.lax.dynamic_slice_in_dim(padded_queries, start, block_q)
        query = query.reshape(block_q, num_kv_heads, groups, head_dim)
        query = query.transpose(1, 0, 2, 3).reshape(num_kv_heads, block_q * groups, head_dim)
        spans = None
        first_key, end_key = jnp.int32(0), kv_len
        if sliding_window is not None:
            first_key = jnp.maximum(positions[0] - sliding_window + 1, 0)
        if image_spans is not None:
            spans = jax.lax.dynamic_slice_in_dim(padded_spans, start, block_q)
            if image_rule == "extend":
                # The block's tail may be the next sequence's rows: their images say nothing here.
                mine = offset + jnp.arange(block_q, dtype=jnp.int32) < q_lens[sequence]
                begin = jnp.where(mine & (spans[:, 0] < spans[:, 1]), spans[:, 0], kv_len)
                first_key = jnp.minimum(first_key, jnp.maximum(begin.min(), 0))
        elif causal:
            end_key = last + 1
        elif sliding_window is not None:
            end_key = jnp.minimum(kv_len, last + sliding_window)

        def step(block: Int32[Array, ""], state: _Softmax) -> _Softmax:
            page = block * block_pages + jnp.arange(block_pages, dtype=jnp.int32)
            column = page - first_page[sequence]
            live = (column >= 0) & (column < table_width)
            live &= (page * page_size < end_key) & ((page + 1) * page_size > first_key)
            ids = page_indices[sequence, jnp.clip(column, 0, table_width - 1)]
            # Whatever a dead table entry says, the null page is read; whatever a live page holds
            # outside [first_key, end_key), it is not multiplied by a zero weight (0 * NaN = NaN).
            key, value = read_pages(
                kv_pages, jnp.where(live, ids, 0), num_kv_heads=num_kv_heads, head_dim=head_dim
            )
            position = block * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
            readable = (first_key <= position) & (position < end_key)
            value = jnp.where(readable[:, None, None], value, jnp.zeros_like(value))
            # One copy in order; fused into the products, the gather halves their speed on CPU.
            key, value = jax.lax.optimization_barrier((key, value))
            seen = visible(
                positions,
                position,
                sliding_window=sliding_window,
                causal=causal,
                image_spans=spans,
                image_rule=image_rule,
            )
            seen = jnp.repeat(
                seen & readable[None], groups, axis=0, total_repeat_length=block_q * groups
            )
            return _accumulate(
                state, query, key, value, seen, compute_dtype, precision, sm_scale, soft_cap
            )

        state = _Softmax(  # shaped like the queries, so that it varies with them in a shard_map
            top=jnp.full_like(query[..., :1], jnp.finfo(jnp.float32).min, jnp.float32),
            total=jnp.zeros_like(query[..., :1], jnp.float32),
            out=jnp.zeros_like(query, jnp.float32),
        )
        first_block, end_block = first_key // block_kv, -(-end_key // block_kv)
        state = jax.lax.fori_loop(first_block, end_block, step, state)
        out = _normalise(state, sinks, block_q, groups)
        out = out.reshape(num_kv_heads, block_q, groups, head_dim).transpose(1, 0, 2, 3)
        return out.reshape(block_q, num_kv_heads * groups, head_dim).astype(queries.dtype)

    def run_items(
        block_q: int,
        member: Bool[Array, "seqs"],
        out: Float[Array, "padded_tokens q_heads head_dim"],
    ) -> Float[Array, "padded_tokens q_heads head_dim"]:
        """Attend for every token of the member sequences, `block_q` queries at a time."""
        items_end = jnp.cumsum(jnp.where(member, -(-q_lens // block_q), 0), dtype=jnp.int32)

        def item(index: Int32[Array, ""], out: Array) -> Array:
            sequence = jnp.sum(items_end <= index, dtype=jnp.int32)
            before = jnp.where(sequence > 0, items_end[sequence - 1], 0)
            offset = (index - before) * block_q
            start = cu_q_lens[sequence] + offset
            new = attend_item(block_q, sequence, offset, start)
            if block_q > 1:  # the block's tail may be the next sequence's rows
                mine = offset + jnp.arange(block_q, dtype=jnp.int32) < q_lens[sequence]
                old = jax.lax.dynamic_slice_in_dim(out, start, block_q)
                new = jnp.where(mine[:, None, None], new, old)
            return jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)

        return jax.lax.fori_loop(0, items_end[-1], item, out)

    block_q = min(BLOCK_Q, num_tokens)
    padded_queries = jnp.pad(queries, ((0, block_q), (0, 0), (0, 0)))
    if image_spans is not None:
        padded_spans = jnp.pad(image_spans, ((0, block_q), (0, 0)))
    sequence = jnp.arange(len(kv_lens), dtype=jnp.int32)
    decode = sequence < distribution[0]
    prefill = (distribution[0] <= sequence) & (sequence < distribution[2])
    out = jnp.zeros_like(padded_queries)
    if block_q > 1:
        out = run_items(1, decode, out)
        out = run_items(block_q, prefill, out)
    else:
        out = run_items(1, decode | prefill, out)
    return out[:num_tokens], kv_pages


def _accumulate(
    state: _Softmax,
    query: Float[Array, "kv_heads rows head_dim"],
    key: Float[Array, "keys kv_heads head_dim"],
    value: Float[Array, "keys kv_heads head_dim"],
    seen: Bool[Array, "rows keys"],
    compute_dtype: jnp.dtype,
    precision: jax.lax.Precision | None,
    sm_scale: float,
    soft_cap: float | None,
) -> _Softmax:
    """One step of the online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022)."""
    scores = jnp.einsum(
        "hrd,khd->hrk",
        query.astype(compute_dtype),
        key.astype(compute_dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    scores *= sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[None], scores, -jnp.inf)
    top = jnp.maximum(state.top, scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    shrink = jnp.exp(state.top - top)
    out = jnp.einsum(
        "hrk,khd->hrd",
        weights.astype(compute_dtype),
        value.astype(compute_dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return _Softmax(
        top=top,
        total=state.total * shrink + weights.sum(axis=-1, keepdims=True),
        out=state.out * shrink + out,
    )


def _normalise(
    state: _Softmax, sinks: Float[Array, "q_heads"] | None, block_q: int, groups: int
) -> Float[Array, "kv_heads rows head_dim"]:
    """Divide by the denominator, which a sink enters as one more logit per query head."""
    if sinks is None:
        return state.out / jnp.where(state.total == 0, 1, state.total)
    sink = sinks.astype(jnp.float32).reshape(-1, 1, groups)
    sink = jnp.broadcast_to(sink, (sink.shape[0], block_q, groups)).reshape(*state.top.shape)
    top = jnp.maximum(state.top, sink)
    shrink = jnp.exp(state.top - top)
    return state.out * shrink / (state.total * shrink + jnp.exp(sink - top))
