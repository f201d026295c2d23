"""Batches of the GPU benchmark: planted ones that find mistakes, and large ones that take time."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_shapes import QUERY_DTYPE, Row
from jaxattn.kernels.layout import KVPages, QuantizedPages, write_tokens

DEAD_PAGES = 8  # that no sequence owns
LOUD = 64.0  # the first value in a window, so that a window off by one is heard
PADDING = 3  # tokens and sequences behind those that are real


@dataclass(frozen=True)
class Work:
    """Sequences of `(new tokens, length)`; all decode (one new token each), or none."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    decode: bool

    @property
    def tokens(self) -> int:
        """New ones, together."""
        return sum(q_len for q_len, _ in self.lengths)

    def visible(self, window: int | None) -> int:
        """Keys that the queries of each sequence see, together."""
        most = window or max(kv_len for _, kv_len in self.lengths)
        return sum(min(kv_len, most + q_len - 1) for q_len, kv_len in self.lengths)

    def pairs(self, window: int | None) -> int:
        """Pairs of a query and a key that it sees."""
        total = 0
        for q_len, kv_len in self.lengths:
            seen = np.arange(kv_len - q_len + 1, kv_len + 1)
            total += int(np.minimum(seen, window or kv_len).sum())
        return total


def _blank_pool(row: Row, num_pages: int) -> KVPages:
    """Pages of NaN; of 127 with scales of NaN where the dtype has none. The null page is zero."""

    def blank(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        value = jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 127
        return jnp.full(leaf.shape, value, leaf.dtype).at[0].set(0)

    return jax.tree.map(blank, row.layout.pages(num_pages))


def planted(row: Row, chunk: int) -> tuple[Any, ...]:
    """Arrays of a mixed batch, in the order of `gpu_shapes.arguments`.

    Everything that nobody sees is NaN: pages without an owner, rows behind a sequence's end or
    before its window, queries of padding. Table entries behind a sequence's end are no pages.
    Lengths are at and around the window's edge; chunks have about `chunk` new tokens.
    """
    edge = row.sliding_window or 2 * chunk
    decode = [(1, 1), (1, edge), (1, edge + 1), (1, 2 * edge + 37)]
    lengths = [*decode, (chunk, chunk), (chunk // 3, edge + chunk), (1, 5)]
    q_lens, kv_lens = np.array(lengths + [(0, 0)] * PADDING, np.int32).T
    rng = np.random.default_rng(0)
    counts = -(-kv_lens // row.page_size)
    num_pages = 1 + int(counts.sum()) + DEAD_PAGES
    ids = 1 + rng.permutation(num_pages - 1).astype(np.int32)
    table = rng.choice(np.array([-5, num_pages, 2**30], np.int32), (len(counts), counts.max() + 2))
    for line, end, count in zip(table, np.cumsum(counts), counts, strict=True):
        line[:count] = ids[end - count : end]

    def draw(tokens: int, heads: int) -> np.ndarray:
        return rng.normal(size=(tokens, heads, row.head_dim)).astype(np.float32)

    history = kv_lens - q_lens
    starts = np.concatenate([[0], np.cumsum(history)]).astype(np.int32)
    old = [draw(int(starts[-1]), row.num_kv_heads) for _ in ("keys", "values")]
    if row.sliding_window:
        for start, length in zip(starts, history, strict=False):
            dead = max(length - row.sliding_window + 1, 0)
            for each in old:
                each[start : start + dead] = np.nan
            if dead:
                old[1][start + dead] *= LOUD
    every = jnp.full(3, len(lengths), jnp.int32)
    pages = jax.jit(write_tokens, donate_argnums=0)(
        _blank_pool(row, num_pages),
        *(jnp.asarray(each, QUERY_DTYPE) for each in old),
        jnp.asarray(history),
        jnp.asarray(table),
        jnp.asarray(starts),
        every,
    )
    tokens = int(q_lens.sum())

    def new(heads: int) -> jax.Array:
        values = draw(tokens + PADDING, heads)
        values[tokens:] = np.nan
        return jnp.asarray(values, QUERY_DTYPE)

    out: list[Any] = [
        *(new(row.num_q_heads), new(row.num_kv_heads), new(row.num_kv_heads), pages),
        jnp.asarray(kv_lens),
        jnp.asarray(table),
        jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
        jnp.array([len(decode), len(decode), len(lengths)], jnp.int32),
    ]
    if row.sinks:
        out.append(jnp.asarray(rng.normal(size=row.num_q_heads), jnp.float32))
    if row.image_rule != "none":
        spans = np.zeros((tokens + PADDING, 2), np.int32)
        image = np.array([chunk // 8, chunk // 2], np.int32)  # of the sequence that is all new
        spans[len(decode) + image[0] : len(decode) + image[1]] = image
        out.append(jnp.asarray(spans))
    return tuple(out)


def bits(pages: KVPages) -> list[np.ndarray]:
    """A pool's arrays as integers, of which NaN equals itself."""
    arrays = pages if isinstance(pages, QuantizedPages) else (pages,)
    return [np.asarray(each).view(f"u{each.dtype.itemsize}") for each in arrays]


def large(
    row: Row, work: Work, *, seqs: int, table_tokens: int, pool_pages: int
) -> tuple[Any, ...] | None:
    """A work's `kv_lens`, table, `cu_q_lens` and distribution, padded to these sizes.

    Pages are in no order; those before a window are none. None if the pool has too few.
    """
    width = table_tokens // row.page_size
    table = np.zeros((seqs, width), np.int32)
    ids = 1 + np.random.default_rng(0).permutation(pool_pages - 1).astype(np.int32)
    used = 0
    for line, (q_len, kv_len) in zip(table, work.lengths, strict=False):
        oldest = max(kv_len - q_len - (row.sliding_window or kv_len) + 1, 0) // row.page_size
        end = -(-kv_len // row.page_size)
        if used + end - oldest > len(ids):
            return None
        line[oldest:end] = ids[used : used + end - oldest]
        used += end - oldest
    q_lens, kv_lens = np.zeros((2, seqs), np.int32)
    q_lens[: len(work.lengths)], kv_lens[: len(work.lengths)] = np.array(work.lengths).T
    count = len(work.lengths)
    decode = count if work.decode else 0
    return (
        jnp.asarray(kv_lens),
        jnp.asarray(table),
        jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
        jnp.array([decode, decode, count], jnp.int32),
    )
