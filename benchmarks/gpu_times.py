"""The works that the GPU benchmark times, and how long one call takes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.clock import Deadline, chained, timed
from benchmarks.gpu_batches import Work, large
from benchmarks.gpu_shapes import QUERY_DTYPE, Row, attention

TABLE_TOKENS = 131_072
DECODE_SEQS, PREFILL_SEQS = 128, 8  # all works have so many, of which those at the end are padding
# A step is so many calls, which share their plan of work as the layers of a model do.
CALLS = 6
DECODE_STEPS, PREFILL_STEPS = 5, 1
POOL_SHARE = 0.6  # of the memory that jax may use

_4B = Row(model="4B", num_q_heads=8, num_kv_heads=4, head_dim=256)
_27B = Row(model="27B", num_q_heads=32, num_kv_heads=16, head_dim=128)
COMPARED_ROWS = (  # with rivals
    _27B,
    replace(_27B, sliding_window=1024),
    _4B,
    replace(_4B, sliding_window=1024),
)
TIMED = (
    *COMPARED_ROWS,
    replace(_27B, page_size=128),
    replace(_4B, kv_dtype="int8", page_size=32),
    replace(_27B, kv_dtype="float8_e4m3fn", page_size=32),
)
DECODE = tuple(
    Work(f"decode {seqs} x {length:,}", ((1, length),) * seqs, decode=True)
    for length in (1024, 8192, 32_768, TABLE_TOKENS)
    for seqs in (1, 8, 32, DECODE_SEQS)
)
PREFILL = (
    Work("prefill 1 x 4,096", ((4096, 4096),), decode=False),
    Work("prefill 8 x 4,096", ((4096, 4096),) * 8, decode=False),
    Work("prefill 1 x 32,768", ((32_768, 32_768),), decode=False),
    Work("prefill 2,048 behind 129,024", ((2048, TABLE_TOKENS),), decode=False),
)
COMPARED_WORKS = tuple(
    work
    for work in DECODE + PREFILL
    if work.name in ("decode 1 x 32,768", "decode 32 x 8,192", "prefill 8 x 4,096")
)


@dataclass(frozen=True)
class Device:
    """What the device has, and reaches by itself."""

    memory: int  # bytes that jax may use
    copy: float  # bytes per second
    matrix: float  # operations per second


def pool_pages(row: Row, device: Device) -> int:
    """Pages of the pool that all works of a row share: for half of the largest work, or as fit."""
    tokens = DECODE_SEQS * TABLE_TOKENS // 2
    return min(tokens, int(POOL_SHARE * device.memory) // row.token_bytes) // row.page_size + 1


def step(row: Row, state: tuple, *rest: Any) -> tuple:
    """CALLS calls, of which each one's output is the next one's queries."""
    (queries, pages), (keys, values, *where) = state, rest
    for _ in range(CALLS):
        queries, pages = attention(row, queries, keys, values, pages, *where)
    return queries, pages


def call_seconds(
    row: Row, device: Device, works: tuple[Work, ...], until: Deadline
) -> Iterator[tuple[Work, float | str]]:
    """Seconds of one call for each work, or why there are none.

    Works of one kind and so many new tokens share a program, padded alike, and all share a pool.
    """
    count = pool_pages(row, device)
    pages = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), row.layout.pages(count))
    programs: dict[int, Any] = {}
    for work in works:
        if until.over:
            yield work, "no time left"
            continue
        tokens, seqs = (DECODE_SEQS,) * 2 if work.decode else (work.tokens, PREFILL_SEQS)
        steps = DECODE_STEPS if work.decode else PREFILL_STEPS
        sizes = {"seqs": seqs, "table_tokens": TABLE_TOKENS, "pool_pages": count}
        where = large(row, work, **sizes)
        if where is None:
            yield work, "the pool is too small"
            continue
        if tokens not in programs:
            programs[tokens] = chained(partial(step, row), steps)
        key = jax.random.key(0)
        queries = jax.random.normal(key, (tokens, row.num_q_heads, row.head_dim), QUERY_DTYPE)
        new = jax.random.normal(key, (tokens, row.num_kv_heads, row.head_dim), QUERY_DTYPE)
        rest = new, new, *where
        run = programs[tokens]
        taken, (_, pages) = timed(lambda state: run(state, *rest), (queries, pages), steps)  # noqa: B023
        yield work, taken / CALLS
