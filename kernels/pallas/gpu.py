"""Ragged paged attention on Hopper GPUs: one call for a mixed batch.

    sequences   0 .. distribution[0]                 decode
                distribution[0] .. distribution[2]   chunks of any length

Both are the kernel of `gpu_attend.py` with other rows, followed by `gpu_combine.py`. New keys and
values are written before, in place. What a layer's mask shows is worked out here, for all rows
and in one place, as ranges of keys; the kernels see no window and no image.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxattn.kernels.layout import KVPages, QuantizedPages, layout_of, page_array, write_tokens
from jaxattn.kernels.pallas.gpu_attend import attend
from jaxattn.kernels.pallas.gpu_combine import combine
from jaxattn.kernels.pallas.gpu_shape import GpuTiles, shape_for
from jaxattn.kernels.pallas.gpu_work import Work, decode_work, prefill_work, ranges_of
from jaxattn.kernels.ragged import token_places


@partial(
    jax.jit,
    static_argnames=(
        "sm_scale",
        "sliding_window",
        "soft_cap",
        "image_rule",
        "causal",
        "update_kv_cache",
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
    tiles: GpuTiles,
    interpret: Any,
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """See `jaxattn.ragged_paged_attention`, which validates and calls this.

    `tiles` are sizes in place of the kernel's own. `interpret` runs the kernels on a CPU.
    """
    layout = layout_of(kv_pages, *keys.shape[1:])
    tokens, q_heads, head_dim = queries.shape
    if first_page is None:
        first_page = jnp.zeros_like(kv_lens)
    if update_kv_cache:
        kv_pages = write_tokens(
            kv_pages,
            keys,
            values,
            kv_lens,
            page_indices,
            cu_q_lens,
            distribution,
            first_page,
        )
    pages = page_array(kv_pages)
    # Copies out of bounds raise nothing on a GPU: what is no page is the null page.
    is_page = (0 < page_indices) & (page_indices < len(pages))
    table = jnp.where(is_page, page_indices, 0)
    places = token_places(tokens, kv_lens, cu_q_lens, distribution)
    ranges = ranges_of(
        places,
        kv_lens,
        image_spans,
        sliding_window=sliding_window,
        causal=causal,
        image_rule=image_rule,
    )
    shapes = [
        shape_for(
            layout,
            num_q_heads=q_heads,
            decode=decode,
            soft_cap=soft_cap,
            sm_scale=sm_scale,
            tiles=tiles,
        )
        for decode in (True, False)
    ]
    seqs = min(len(kv_lens), tokens)
    works: list[Work] = [
        decode_work(ranges, distribution[0], seqs, shapes[0]),
        prefill_work(ranges, cu_q_lens, distribution, shapes[1]),
    ]
    lanes = shapes[0].lane_tiles * shapes[0].lanes
    padded = jnp.pad(queries, ((0, 0), (0, 0), (0, lanes - head_dim)))
    # Over a mesh a kernel takes no reference that varies: this one does so in its contents only,
    # and the zeros of padding give its value the axes of the queries again.
    out = jax.new_ref(jnp.zeros(padded.shape, padded.dtype))
    scales = kv_pages.scales if isinstance(kv_pages, QuantizedPages) else None
    for shape, work in zip(shapes, works, strict=True):
        partial_results = attend(
            padded,
            pages,
            scales,
            sinks,
            table,
            first_page,
            work,
            out,
            shape=shape,
            interpret=interpret,
        )
        combine(*partial_results, work, out, shape=shape, interpret=interpret)
    result = jnp.where(places.real[:, None, None], jax.freeze(out), jnp.zeros_like(padded))
    return result[..., :head_dim], kv_pages
