"""Ragged paged batches built from contiguous keys and values, and what they must give.

Everything here is plain numpy on the host except `quantize` (the format under test) and the
oracle's arithmetic, so that a mistake in the paged code cannot hide in its test.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.kernels import layout, reference
from jaxattn.kernels.layout import KVPages
from jaxattn.kernels.mask import visible

SCALE = 0.4
# Ids that are no page, and (by `random_ids`) pages of others: all may stand in a dead column.
NO_PAGE = (-1, -7, 2**31 - 1, -(2**31))


@dataclass(frozen=True)
class Case:
    """One call's arguments (numpy), and the contiguous `stored` keys and values behind them."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    pool: np.ndarray  # [num_pages, page_size, 2, kv_heads, head_dim], before it is laid out
    scales: np.ndarray | None  # [num_pages, page_size, 2, kv_heads]
    kv_lens: np.ndarray
    table: np.ndarray
    cu_q_lens: np.ndarray
    distribution: np.ndarray
    lengths: tuple[tuple[int, int], ...]  # (q_len, kv_len) of the real sequences
    stored: tuple[tuple[np.ndarray, np.ndarray], ...]  # per sequence [kv_len, kv_heads, head_dim]
    first_page: np.ndarray | None = None
    image_spans: np.ndarray | None = None

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.pool.shape[1]

    @property
    def num_tokens(self) -> int:
        """Real tokens; rows from here on are padding."""
        return sum(q_len for q_len, _ in self.lengths)

    def places(self) -> Iterator[tuple[int, int, int]]:
        """(flat row, sequence, absolute position) of every real token."""
        row = 0
        for sequence, (q_len, kv_len) in enumerate(self.lengths):
            for position in range(kv_len - q_len, kv_len):
                yield row, sequence, position
                row += 1

    def rows(self, sequence: int) -> slice:
        """The flat rows of one sequence."""
        start = sum(q_len for q_len, _ in self.lengths[:sequence])
        return slice(start, start + self.lengths[sequence][0])

    def pages(self) -> KVPages:
        """The pool as a call takes it."""
        return jax.tree.map(jnp.asarray, laid_out(self.pool, self.scales))


def laid_out(pool: np.ndarray, scales: np.ndarray | None = None) -> Any:
    """The pool in the page layout, vector by vector; padding is zero, or NaN in a row of NaN."""
    num_pages, page_size, _, kv_heads, head_dim = pool.shape
    made = layout.KVLayout(
        num_kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=pool.dtype.name
    )
    shapes: Any = made.pages(num_pages)
    out = np.zeros(layout.page_array(shapes).shape, pool.dtype)
    if not np.issubdtype(pool.dtype, np.integer):
        out[np.isnan(pool.astype(np.float32)).all(axis=(2, 3, 4))] = np.nan
    new_scales: Any = None if scales is None else np.zeros(shapes.scales.shape, np.float32)
    for kind, head, tile in np.ndindex(2, kv_heads, made.lane_tiles):
        row, phase, lane = made.place(kind, head, tile)
        vector = pool[:, :, kind, head, 128 * tile : 128 * (tile + 1)]
        out[:, :, row, phase, lane : lane + vector.shape[-1]] = vector
        if scales is not None:
            lanes = np.arange(page_size) * made.pack + phase
            new_scales[:, made.scale_row(kind, head), lanes] = scales[:, :, kind, head]
    packed: Any = out
    return packed if scales is None else layout.QuantizedPages(packed, new_scales)


def as_stored(tokens: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """(elements, scales or None, float32 values that they stand for)."""
    if jnp.dtype(dtype).itemsize > 1:
        elements = np.asarray(tokens).astype(jnp.dtype(dtype))
        return elements, None, elements.astype(np.float32)
    elements, scales = map(np.asarray, layout.quantize(jnp.asarray(tokens), jnp.dtype(dtype)))
    with np.errstate(invalid="ignore"):  # tokens of padding are NaN
        return elements, scales, elements.astype(np.float32) * scales[..., None]


def make_case(
    lengths: Sequence[tuple[int, int]],
    *,
    page_size: int,
    head_dim: int = 8,
    kv_heads: int = 1,
    ratio: int = 2,
    query_dtype: str = "float32",
    kv_dtype: str = "float32",
    decode: int = 0,
    tokens: int | None = None,
    seqs: int | None = None,
    width: int | None = None,
    num_pages: int | None = None,
    seed: int = 0,
) -> Case:
    """A batch whose pool holds every sequence's past; its new tokens are still to be written.

    `lengths`: (q_len, kv_len) per sequence, the first `decode` of them decode sequences. `tokens`,
    `seqs`, `width` (pages per sequence) and `num_pages` pad the arrays to a common shape. Padding
    holds garbage: queries, keys and values are NaN, lengths and page ids are stale.
    """
    rng = np.random.default_rng(seed)
    lengths = tuple(lengths)
    real_tokens = sum(q_len for q_len, _ in lengths)
    tokens, seqs = tokens or real_tokens, seqs or len(lengths)
    pages_of = [-(-kv_len // page_size) for _, kv_len in lengths]
    width = width or max(pages_of)
    num_pages = num_pages or -(-(sum(pages_of) + 4) // 32) * 32  # page 0, some of nobody's

    def draw(*shape):
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(query_dtype))

    queries = np.full((tokens, kv_heads * ratio, head_dim), np.nan, jnp.dtype(query_dtype))
    new = np.full((2, tokens, kv_heads, head_dim), np.nan, jnp.dtype(query_dtype))
    queries[:real_tokens] = draw(real_tokens, *queries.shape[1:])
    pool = np.zeros((num_pages, page_size, 2, kv_heads, head_dim), jnp.dtype(kv_dtype))
    scales = np.zeros(pool.shape[:-1], np.float32) if jnp.dtype(kv_dtype).itemsize == 1 else None
    table = np.zeros((seqs, width), np.int32)
    free = list(rng.permutation(np.arange(1, num_pages)))
    stored = []
    for sequence, (q_len, kv_len) in enumerate(lengths):
        ids = [free.pop() for _ in range(pages_of[sequence])]
        table[sequence, : len(ids)] = ids
        history = draw(kv_len, 2, kv_heads, head_dim)
        start = sum(length for length, _ in lengths[:sequence])
        new[:, start : start + q_len] = history[kv_len - q_len :].swapaxes(0, 1)
        elements, token_scales, floats = as_stored(history, kv_dtype)
        stored.append((floats[:, 0], floats[:, 1]))
        for position in range(kv_len - q_len):
            place = ids[position // page_size], position % page_size
            pool[place] = elements[position]
            if scales is not None and token_scales is not None:
                scales[place] = token_scales[position]
    padding = seqs - len(lengths)
    table[len(lengths) :] = rng.integers(-3, num_pages + 3, (padding, width))
    q_lens = [q_len for q_len, _ in lengths] + [0] * padding
    return Case(
        queries=queries,
        keys=new[0],
        values=new[1],
        pool=pool,
        scales=scales,
        kv_lens=np.array([kv_len for _, kv_len in lengths] + [5] * padding, np.int32),
        table=table,
        cu_q_lens=np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
        distribution=np.array([decode, decode, len(lengths)], np.int32),
        lengths=lengths,
        stored=tuple(stored),
    )


@partial(
    jax.jit, static_argnames=("sm_scale", "soft_cap", "sliding_window", "causal", "image_rule")
)
def _oracle(queries, keys, values, q_places, k_places, spans, sinks, sm_scale, soft_cap, **mask):
    seen = visible(q_places[:, 1], k_places[:, 1], image_spans=spans, **mask)
    seen &= q_places[:, None, 0] == k_places[None, :, 0]
    return reference.attention(
        queries, keys, values, seen, sm_scale=sm_scale, soft_cap=soft_cap, sinks=sinks
    )


def expected(
    case: Case,
    *,
    sm_scale: float = SCALE,
    soft_cap: float | None = None,
    sinks: Any = None,
    **mask: Any,
) -> np.ndarray:
    """The float32 oracle on the contiguous keys and values; zeros for padding."""
    mask = {"sliding_window": None, "causal": True, "image_rule": "clamp"} | mask
    q_places = np.full((len(case.queries), 2), -1, np.int32)
    for row, sequence, position in case.places():
        q_places[row] = sequence, position
    k_places = np.array(
        [(s, p) for s, (_, kv_len) in enumerate(case.lengths) for p in range(kv_len)], np.int32
    )
    keys, values = (np.concatenate(part) for part in zip(*case.stored, strict=True))
    spare = -len(keys) % 128  # few compiled shapes
    keys, values = (np.pad(each, ((0, spare), (0, 0), (0, 0))) for each in (keys, values))
    k_places = np.pad(k_places, ((0, spare), (0, 0)), constant_values=-2)
    out = _oracle(
        np.nan_to_num(case.queries.astype(np.float32)),
        *(keys, values, q_places, k_places, case.image_spans, sinks, sm_scale, soft_cap),
        **mask,
    )
    return np.asarray(out)


def expected_pool(case: Case) -> tuple[np.ndarray, np.ndarray | None]:
    """The whole pool (and scales) after the new tokens are written, and nothing else."""
    pool, scales = case.pool.copy(), None if case.scales is None else case.scales.copy()
    new = np.stack([case.keys, case.values], axis=1)
    elements, token_scales, _ = as_stored(new, pool.dtype)
    for row, sequence, position in case.places():
        first = 0 if case.first_page is None else case.first_page[sequence]
        column = position // case.page_size - first
        if not 0 <= column < case.table.shape[1]:
            continue
        page = case.table[sequence, column]
        if 0 < page < len(pool):
            pool[page, position % case.page_size] = elements[row]
            if scales is not None and token_scales is not None:
                scales[page, position % case.page_size] = token_scales[row]
    return pool, scales


def written(case: Case) -> Case:
    """The same case with its new tokens already in the pool, and NaN as the new tokens."""
    pool, scales = expected_pool(case)
    nan = np.full_like(case.keys, np.nan)
    return replace(case, pool=pool, scales=scales, keys=nan, values=nan)


def readable(case: Case, window: int | None) -> Iterator[range]:
    """Per sequence the positions `first .. kv_len` that its new queries can see, or none."""
    for q_len, kv_len in case.lengths:
        first = 0 if window is None else max(0, kv_len - q_len - window + 1)
        yield range(first, kv_len) if q_len else range(0)


def poisoned(case: Case, window: int | None, seed: int = 0) -> Case:
    """The same case with all that no query may see spoilt.

    NaN in every row of the pool that no query reads (but in the null page): pages of nobody, of
    sequences without queries, rows below the window and beyond `kv_len`. Stale, negative and
    too large ids in every table column without a readable row.
    """
    rng = np.random.default_rng(seed)
    num_pages, page_size = case.pool.shape[:2]
    alive = np.zeros((num_pages, page_size), bool)
    alive[0] = True
    table = rng.integers(1, num_pages, case.table.shape, np.int32)
    no_page = rng.choice(np.array([*NO_PAGE, num_pages, num_pages + 9], np.int32), table.shape)
    table = np.where(rng.random(table.shape) < 0.5, table, no_page)
    for sequence, positions in enumerate(readable(case, window)):
        for position in positions:
            column = position // page_size
            table[sequence, column] = case.table[sequence, column]
            alive[table[sequence, column], position % page_size] = True
    pool, scales = case.pool.copy(), None if case.scales is None else case.scales.copy()
    pool[~alive] = -128 if pool.dtype == np.int8 else np.nan
    if scales is not None:
        scales[~alive] = np.nan
    return replace(case, pool=pool, scales=scales, table=table)


def live_only(case: Case, window: int | None) -> Case:
    """The same case with tables that hold only live pages, and their `first_page`."""
    first_page = np.full(len(case.table), 3, np.int32)
    first_page[: len(case.lengths)] = 0
    live = {}
    for sequence, positions in enumerate(readable(case, window)):
        if positions:
            first, last = positions[0] // case.page_size, positions[-1] // case.page_size
            first_page[sequence] = first
            live[sequence] = case.table[sequence, first : last + 1]
    table = np.zeros((len(case.table), max(map(len, live.values()))), np.int32)
    for sequence, ids in live.items():
        table[sequence, : len(ids)] = ids
    return replace(case, table=table, first_page=first_page)


def with_images(case: Case, images: Mapping[int, Sequence[tuple[int, int]]]) -> Case:
    """The same case with `images[sequence] = [(start, end), ...]`; padding has stale spans."""
    spans = np.tile(np.array([0, 99], np.int32), (len(case.queries), 1))
    for row, sequence, position in case.places():
        spans[row] = next(
            (span for span in images.get(sequence, ()) if span[0] <= position < span[1]), (0, 0)
        )
    return replace(case, image_spans=spans)


def bits(array: Any) -> np.ndarray:
    """Comparable bytes: NaN equals itself, -0.0 does not equal 0.0."""
    return np.ascontiguousarray(array).view(np.uint8)


def tolerance(query_dtype: str, kv_dtype: str) -> float:
    """Largest error: a few float32 roundings, or bfloat16 weights, values and output."""
    if query_dtype == "float32":
        return 2e-5
    return 2e-2 if kv_dtype == "float32" else 5e-2
