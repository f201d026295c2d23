"""Ragged paged attention on TPU: one call for a mixed batch, two kernels behind it.

    sequences   0 .. distribution[0]                 decode, `tpu_decode.py`
                distribution[0] .. distribution[2]   chunks of any length, `tpu_prefill.py`

Both run in every call, one after the other on the same pages and the same output; the one without
work returns at once. What differs between layers of a group is static: window, soft cap, rule.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from jaxattn.kernels.layout import (
    LANES,
    KVPages,
    QuantizedPages,
    as_stored,
    layout_of,
    page_array,
    token_slots,
)
from jaxattn.kernels.pallas.tiles import (
    Chip,
    Tiles,
    choose_tiles,
    decode_vmem_bytes,
    prefill_vmem_bytes,
)
from jaxattn.kernels.pallas.tpu_decode import DecodeShape, decode
from jaxattn.kernels.pallas.tpu_prefill import prefill


@partial(
    jax.jit,
    static_argnames=(
        "sm_scale",
        "sliding_window",
        "soft_cap",
        "image_rule",
        "causal",
        "update_kv_cache",
        "chip",
        "tiles",
        "interpret",
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
    chip: Chip,
    tiles: Tiles,
    interpret: pltpu.InterpretParams | None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """See `jaxattn.ragged_paged_attention`, which validates and calls this.

    `chip` decides the tiles that `tiles` leaves open. `interpret` runs the kernels on a CPU.
    """
    layout = layout_of(kv_pages, *keys.shape[1:])
    tokens, q_heads, head_dim = queries.shape
    if first_page is None:
        first_page = jnp.zeros_like(kv_lens)
    slots = token_slots(
        kv_pages, tokens, kv_lens, page_indices, cu_q_lens, distribution, first_page
    )
    # Lengths that lie would let copies run off their buffers: bounds are not checked on a chip.
    kv_lens = jnp.maximum(kv_lens, cu_q_lens[1:] - cu_q_lens[:-1])
    num_pages, page_size = page_array(kv_pages).shape[:2]
    scales = kv_pages.scales if isinstance(kv_pages, QuantizedPages) else None
    if update_kv_cache:
        # Scales are scattered here: a token's few are less than a copy can move.
        new_kv, scales = as_stored(kv_pages, keys, values, slots)
        taken = (slots.page < num_pages)[:, None, None, None]
        new_kv = jnp.where(taken, new_kv, jnp.zeros_like(new_kv))  # zeros where no page takes it
    else:
        new_kv = jnp.zeros((1, layout.rows, layout.pack, LANES), page_array(kv_pages).dtype)
    # Beyond what a query sees through its image, a window bounds what decode sees.
    bounded = sliding_window is not None and (image_spans is None or image_rule != "extend")
    decode_tiles, prefill_tiles = choose_tiles(
        layout,
        most_tokens=sliding_window if bounded else None,
        num_seqs=min(len(kv_lens), tokens),
        num_q_heads=q_heads,
        query_dtype=queries.dtype.name,
        chip=chip,
        override=tiles,
    )
    sizes = q_heads, queries.dtype.name
    padded = jnp.pad(queries, ((0, 0), (0, 0), (0, layout.lane_tiles * LANES - head_dim)))
    decode_lens = jnp.maximum(kv_lens, 1)
    starts = _first_visible(decode_lens, sliding_window, None if bounded else image_spans)
    shape = DecodeShape(
        layout=layout,
        num_q_heads=q_heads,
        query_dtype=queries.dtype.name,
        sm_scale=sm_scale,
        soft_cap=soft_cap,
        sinks=sinks is not None,
        most_tokens=sliding_window if bounded else None,
        from_zero=sliding_window is None,
        update_kv_cache=update_kv_cache,
        tiles=decode_tiles,
        interpret=interpret is not None,
    )
    table = _live_table(page_indices, first_page, starts // page_size, num_pages, shape)
    table_end = starts // page_size + table.shape[1]
    decode_lens = jnp.minimum(decode_lens, table_end * page_size)
    out, pages = decode(
        padded,
        new_kv,
        page_array(kv_pages),
        scales,
        sinks,
        distribution[0],
        starts,
        decode_lens,
        table,
        _one_per_sequence(slots.page, len(kv_lens), num_pages),
        _one_per_sequence(slots.slot, len(kv_lens), page_size),
        shape=shape,
        interpret=interpret or False,
        vmem_limit_bytes=_limit(decode_vmem_bytes(layout, *sizes, decode_tiles), chip),
    )
    out, pages = prefill(
        padded,
        new_kv,
        pages,
        scales,
        out,
        kv_lens,
        page_indices,
        cu_q_lens,
        distribution,
        first_page,
        sinks,
        image_spans,
        layout=layout,
        tiles=prefill_tiles,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        image_rule=image_rule,
        causal=causal,
        update_kv_cache=update_kv_cache,
        interpret=interpret or False,
        vmem_limit_bytes=_limit(prefill_vmem_bytes(layout, *sizes, prefill_tiles), chip),
    )
    return out[..., :head_dim], pages if scales is None else QuantizedPages(pages, scales)


def _limit(needed: int, chip: Chip) -> int:
    """Half as much again as counted, for what the compiler adds; at least its own default."""
    return min(max(needed * 3 // 2, 32 * 2**20), chip.usable_vmem_bytes)


def _first_visible(
    kv_lens: Int32[Array, "seqs"],
    sliding_window: int | None,
    image_spans: Int32[Array, "tokens 2"] | None,
) -> Int32[Array, "seqs"]:
    """First token that the last query of each sequence sees, if it is its only new one."""
    if sliding_window is None:
        return jnp.zeros_like(kv_lens)
    starts = jnp.maximum(kv_lens - sliding_window, 0)
    if image_spans is None:
        return starts
    spare = max(len(kv_lens) - len(image_spans), 0)
    spans = jnp.pad(image_spans, ((0, spare), (0, 0)))[: len(kv_lens)]  # decode: a row each
    begin = jnp.where(spans[:, 0] < spans[:, 1], jnp.maximum(spans[:, 0], 0), starts)
    return jnp.minimum(starts, begin)


def _live_table(
    page_indices: Int32[Array, "seqs pages_per_seq"],
    first_page: Int32[Array, "seqs"],
    start_page: Int32[Array, "seqs"],
    num_pages: int,
    shape: DecodeShape,
) -> Int32[Array, "seqs width"]:
    """The pages that decode looks at, from `start_page` on; the null page where there is none.

    A few columns for a window, so that the table of a long context need not fit a chip's SMEM.
    """
    table_width = page_indices.shape[1]
    width = table_width
    if shape.most_tokens is not None:
        page_size = shape.layout.page_size
        width = min(width, (shape.most_tokens + page_size - 2) // page_size + 1)
    column = (start_page - first_page)[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    ids = jnp.take_along_axis(page_indices, jnp.clip(column, 0, table_width - 1), axis=1)
    is_page = (0 <= column) & (column < table_width) & (0 < ids) & (ids < num_pages)
    return jnp.where(is_page, ids, 0)


def _one_per_sequence(of_tokens: Int32[Array, "tokens"], seqs: int, end: int) -> Array:
    """Page, or row in it, of the token of each decode sequence, its row; 0 where it has none."""
    inside = jnp.where(of_tokens < end, of_tokens, 0)
    return jnp.pad(inside, (0, max(seqs - len(inside), 0)))[:seqs]
