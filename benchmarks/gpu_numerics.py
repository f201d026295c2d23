"""Rows of the GPU benchmark against the reference, on planted batches."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.gpu_batches import bits, planted
from benchmarks.gpu_shapes import BACKEND, Row, attention
from jaxattn import UnsupportedAttentionError

CHUNK = 300  # new tokens of a chunk
TOLERANCE = 2e-2  # of `difference`; bfloat16 rounds by 4e-3
SMALL_CHUNK, SMALL_WINDOW, SMALL_KV_HEADS = 70, 40, 2  # in the interpreter


def small(row: Row) -> Row:
    """The row with few heads and a short window, for the interpreter."""
    kv_heads = min(row.num_kv_heads, SMALL_KV_HEADS)
    return replace(
        row,
        num_kv_heads=kv_heads,
        num_q_heads=row.num_q_heads // row.num_kv_heads * kv_heads,
        sliding_window=SMALL_WINDOW if row.sliding_window else None,
    )


def difference(row: Row, chunk: int, options: dict[str, Any]) -> float:
    """The largest `|out - reference| / (1 + |reference|)`; NaN if any is.

    Raises AssertionError if the pools differ in a bit.
    """
    arrays = planted(row, chunk)

    def call(backend: str, options: dict[str, Any]) -> tuple[np.ndarray, Any]:
        run = jax.jit(partial(attention, row, backend=backend, **options))
        out, pages = run(*arrays)
        return np.asarray(out, np.float32), pages

    out, pages = call(BACKEND, options)
    expected, expected_pages = call("reference", {})
    for got, wanted in zip(bits(pages), bits(expected_pages), strict=True):
        if not np.array_equal(got, wanted):
            raise AssertionError(f"{np.sum(got != wanted):,} elements of the pool differ")
    # By numpy: the largest of large arrays, by XLA on a CPU, passes over NaN.
    return float(np.max(np.abs(out - expected) / (1 + np.abs(expected))))


def verdict(row: Row, chunk: int, options: dict[str, Any]) -> tuple[str, bool]:
    """What to write about a row, and whether it is right. A refusal is."""
    try:
        worst = difference(row, chunk, options)
    except UnsupportedAttentionError as error:
        return "refused: " + " ".join(str(error).split()), True
    except Exception as error:  # a row that fails is a line of the table, and the next one's turn
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", False
    return f"{worst:.1e}", worst <= TOLERANCE  # false for NaN
