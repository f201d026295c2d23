"""Bugs put into the TPU kernels on purpose: a small check of each kernel must see every one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxattn.kernels import layout
from jaxattn.kernels.pallas import (
    tpu,
    tpu_decode_copies,
    tpu_decode_products,
    tpu_prefill,
    tpu_prefill_copies,
    tpu_prefill_softmax,
    tpu_prefill_tile,
    tpu_prefill_work,
)
from tests.attention_cases import (
    bits,
    expected,
    expected_pool,
    fresh_call,
    laid_out,
    make_case,
    poisoned,
    run,
    tolerance,
)

WINDOW = 11
MODES = ("eager", "on_wait")
# More sequences than slots, some without a past, one of another length after another.
DECODE = ((1, 37), (1, 1), (1, 16), (1, 50), (1, 8), (1, 12))
PREFILL = ((9, 9), (0, 7), (21, 50), (3, 12))
# What a check of a broken kernel ends in: wrong numbers, or the interpreter found a race, a read
# out of bounds, or a page that is none.
CAUGHT = (AssertionError, jax.errors.JaxRuntimeError)

Ring, Tile = tpu_decode_copies.Ring, tpu_decode_products.Tile
Copies, Work = tpu_prefill_copies.Copies, tpu_prefill_work.Work


def check_decode(monkeypatch, mode="eager", *, dtype="float32", window=WINDOW):
    """Decode alone: outputs are the oracle's, and the whole pool is as it should be."""
    monkeypatch.setattr(
        tpu, "prefill", lambda queries, new, pages, scales, out, *_, **__: (out, pages)
    )
    _check(DECODE, len(DECODE), mode, dtype, window)


def check_prefill(monkeypatch, mode="eager", *, dtype="float32", window=WINDOW):
    """Prefill alone."""
    monkeypatch.setattr(
        tpu, "decode", lambda queries, new, pages, *_, **__: (jnp.zeros_like(queries), pages)
    )
    _check(PREFILL, 0, mode, dtype, window)


def _check(lengths, decode, mode, dtype, window):
    page_size = 32 if dtype == "int8" else 8
    query_dtype = "float32" if dtype == "int8" else dtype
    geometry = dict(page_size=page_size, head_dim=128, query_dtype=query_dtype, kv_dtype=dtype)
    case = poisoned(make_case(lengths, decode=decode, **geometry), window)
    options = {"sliding_window": window, "mode": mode}
    out, pages = run(case, "pallas_tpu", jitted=fresh_call(), **options)
    limit = tolerance(query_dtype, dtype)
    wanted = expected(case, sliding_window=window)
    np.testing.assert_allclose(out.astype(np.float32), wanted, atol=limit, rtol=limit)
    pool = laid_out(*expected_pool(case))
    assert np.array_equal(bits(layout.page_array(pages)), bits(layout.page_array(pool)))


def nothing(*_, **__):
    """In place of something that has an effect."""


# Broken parts: `mutant(original)` is what replaces it.


def nearer(original):
    """A window one key shorter."""
    return lambda kv_lens, window, spans: original(kv_lens, window - 1, spans)


def further(original):
    """A window one key longer."""
    return lambda kv_lens, window, spans: original(kv_lens, window + 1, spans)


def sees_nearer(original):
    """The mask of a window one key shorter."""
    return lambda *places, sliding_window, **rule: original(
        *places, sliding_window=sliding_window - 1, **rule
    )


def sees_further(original):
    """The mask of a window one key longer."""
    return lambda *places, sliding_window, **rule: original(
        *places, sliding_window=sliding_window + 1, **rule
    )


def first_key_late(original):
    """The first key of a range is left out."""

    def late(self, block, count):
        first, end = original(self, block, count)
        return first + 1, end

    return late


def all_unmasked(original):
    """Edge tiles are taken for whole ones."""

    def visits(self, block, first, end):
        something, _ = original(self, block, first, end)
        return something, something

    return visits


def to_slot_zero(original):
    """Copies that land in the first slot of the ring, whichever they were meant for."""
    return lambda self, slot, first, count: original(self, 0, first, count)


def without_phase(original):
    """Every vector in a word is taken for a key of every head."""

    def seen(self):
        columns = self.tile.shape[0] * self.shape.layout.pack
        column = jax.lax.broadcasted_iota(jnp.int32, (self.shape.product_rows, columns), 1)
        return column < self.span[1] * self.shape.layout.pack

    return seen


def without_where(original):
    """Rows of a tile beyond its tokens keep what they held before: NaN, at first."""

    class Numpy:
        where = staticmethod(lambda condition, this, other: this)

        def __getattr__(self, name):
            return getattr(original, name)

    return Numpy()


def first_block_only(original):
    """Outputs of later blocks of queries are left as they were."""

    def pack(shape, refs, softmax, block):
        pl.when(block == 0)(lambda: original(shape, refs, softmax, block))

    return pack


def first_sequence_only(original):
    """New tokens of the second and later sequences are not written."""
    return lambda self, seq: pl.when(seq == 0)(lambda: original(self, seq))


def no_page(original):
    """No new token has a page."""
    return lambda *arguments: jnp.zeros_like(original(*arguments))


def page_after(original):
    """New tokens go to the page after their own."""
    return lambda *arguments: original(*arguments) + 1


def scales_of_first_page(original):
    """All columns get the scales of a tile's first page."""

    def scales(self, product, kind):
        whole = original(self, product, kind)
        page = self.shape.layout.page_size * self.shape.layout.pack
        return jnp.tile(whole[:, :page], (1, whole.shape[1] // page))

    return scales


def replaced(value):
    return lambda original: value


# (owner, name, mutant, how it is checked). A dropped wait gives right numbers when copies happen
# at once, but is a race then; when they happen as late as they may, the numbers are wrong.
WAIT_DECODE = (Ring, "wait", replaced(nothing))
WAIT_TILE = (Copies, "wait_tile", replaced(nothing))
WAIT_QUERIES = (Copies, "wait_queries", replaced(nothing))
MASK = (tpu_prefill_softmax, "sees")
MUTANTS = {
    "decode: a wait dropped, eager": (*WAIT_DECODE, check_decode),
    "decode: a wait dropped, on wait": (*WAIT_DECODE, partial(check_decode, mode="on_wait")),
    "decode: window one key short": (tpu, "_first_visible", nearer, check_decode),
    "decode: window one key long": (tpu, "_first_visible", further, check_decode),
    "decode: new tokens not written": (tpu, "_one_per_sequence", no_page, check_decode),
    "decode: new tokens on a wrong page": (tpu, "_one_per_sequence", page_after, check_decode),
    "decode: wrong slot": (Ring, "_tile", to_slot_zero, check_decode),
    "decode: stale rows": (Ring, "clear", replaced(nothing), check_decode),
    "decode: phase forgotten": (
        *(Tile, "seen", without_phase),
        partial(check_decode, dtype="bfloat16"),
    ),
    "decode: wrong scales": (
        *(Tile, "column_scales", scales_of_first_page),
        partial(check_decode, dtype="int8"),
    ),
    "prefill: a wait for a tile dropped, eager": (*WAIT_TILE, check_prefill),
    "prefill: a wait for a tile dropped, on wait": (
        *WAIT_TILE,
        partial(check_prefill, mode="on_wait"),
    ),
    "prefill: a wait for queries dropped": (*WAIT_QUERIES, check_prefill),
    "prefill: a wait for outputs dropped": (Copies, "wait_sent", replaced(nothing), check_prefill),
    "prefill: a wait for written tokens dropped": (
        *(Copies, "wait_written", replaced(nothing)),
        partial(check_prefill, mode="on_wait"),
    ),
    "prefill: window one key short": (*MASK, sees_nearer, check_prefill),
    "prefill: window one key long": (*MASK, sees_further, check_prefill),
    "prefill: first key not fetched": (Work, "range", first_key_late, check_prefill),
    "prefill: edges not masked": (Work, "visits", all_unmasked, check_prefill),
    "prefill: a block not written": (tpu_prefill, "_pack_output", first_block_only, check_prefill),
    "prefill: new tokens not written": (Copies, "write_new", first_sequence_only, check_prefill),
    "prefill: stale rows": (tpu_prefill_tile, "jnp", without_where, check_prefill),
    "prefill: wrong slot": (Copies, "_tile", to_slot_zero, check_prefill),
}


WITHOUT_A_BUG = [
    *(partial(check, mode=mode) for check in (check_decode, check_prefill) for mode in MODES),
    *(partial(check_decode, dtype=dtype) for dtype in ("bfloat16", "int8")),
]


@pytest.mark.parametrize(
    "check", WITHOUT_A_BUG, ids=lambda check: f"{check.func.__name__} {check.keywords}"
)
def test_without_a_bug(monkeypatch, check):
    """What the checks below find is not there before."""
    check(monkeypatch)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_is_seen(monkeypatch, name):
    owner, attribute, mutant, check = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant(getattr(owner, attribute)))
    try:
        with pytest.raises(CAUGHT):
            check(monkeypatch)
    finally:
        pltpu.reset_tpu_interpret_mode_state()
