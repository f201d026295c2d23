"""A windowed layer's work and memory follow its window, not its context: counted, not timed."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import kv_pages_shape
from jaxattn.kernels import xla
from jaxattn.kernels.layout import LANES
from tests.attention_cases import make_case, run

PAGE_SIZE = 16
NO_OPTIONS = {
    "sm_scale": 0.4,
    "soft_cap": None,
    "sinks": None,
    "image_spans": None,
    "image_rule": "clamp",
    "causal": True,
    "first_page": None,
    "update_kv_cache": True,
}


@pytest.fixture
def reads(monkeypatch):
    """The page ids of every step of the kernel, as they are read on the device."""
    seen = []
    read_pages = xla.read_pages

    def spy(kv_pages, page_ids, **heads):
        jax.debug.callback(lambda ids: seen.append(np.asarray(ids)), page_ids)
        return read_pages(kv_pages, page_ids, **heads)

    monkeypatch.setattr(xla, "read_pages", spy)
    return seen


def walk(case, window, reads):
    """Run the kernel outside its own jit cache; (loop steps, pages read, null page left out)."""
    reads.clear()
    attention = partial(xla.ragged_paged_attention.__wrapped__, **NO_OPTIONS, sliding_window=window)
    arrays = (case.kv_lens, case.table, case.cu_q_lens, case.distribution)
    out, _ = jax.jit(attention)(
        *map(jnp.asarray, (case.queries, case.keys, case.values)),
        case.pages(),
        *map(jnp.asarray, arrays),
    )
    out.block_until_ready()
    jax.effects_barrier()
    return len(reads), {int(page) for ids in reads for page in ids} - {0}


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("window", [24, 512])
def test_a_windowed_layer_reads_its_window_only(reads, window, q_len):
    steps, contexts = {}, (1024, 4096, 32768)
    for context in contexts:
        case = make_case(
            [(q_len, context)], page_size=PAGE_SIZE, decode=int(q_len == 1), width=32768 // 16
        )
        steps[context], pages = walk(case, window, reads)
        first = (context - q_len - window + 1) // PAGE_SIZE
        live = case.table[0, first : -(-context // PAGE_SIZE)]
        assert pages == set(live.tolist())
    assert len(set(steps.values())) == 1
    assert steps[32768] <= (window + q_len) // xla.BLOCK_KV + 2


def test_a_global_layer_reads_its_context_and_no_more(reads):
    """The table's width costs nothing."""
    for context in (300, 1000):
        case = make_case([(1, context)], page_size=PAGE_SIZE, decode=1, width=2048)
        steps, pages = walk(case, None, reads)
        assert steps == -(-context // xla.BLOCK_KV)
        assert pages == set(case.table[0, : -(-context // PAGE_SIZE)].tolist())


def arrays_of(jaxpr):
    """Every array that a jaxpr makes, those of its inner jaxprs included."""
    for equation in jaxpr.eqns:
        inner = [
            value
            for parameter in equation.params.values()
            for value in (parameter if isinstance(parameter, tuple | list) else (parameter,))
            if hasattr(value, "eqns") or hasattr(value, "jaxpr")
        ]
        for sub in inner:
            yield from arrays_of(getattr(sub, "jaxpr", sub))
        for variable in equation.outvars:
            yield variable.aval


def largest(width, tokens, window, num_pages=100_003):
    """Elements of the largest array but the pool (whose shape only the write may have)."""
    pool = kv_pages_shape(
        num_pages=num_pages, page_size=PAGE_SIZE, num_kv_heads=1, head_dim=8, dtype="float32"
    )
    new = jax.ShapeDtypeStruct((tokens, 1, 8), jnp.float32)
    queries = jax.ShapeDtypeStruct((tokens, 2, 8), jnp.float32)
    lengths, offsets, three = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (4, 5, 3))
    table = jax.ShapeDtypeStruct((4, width), jnp.int32)
    attention = partial(xla.ragged_paged_attention.__wrapped__, **NO_OPTIONS, sliding_window=window)
    jaxpr = jax.make_jaxpr(attention)(queries, new, new, pool, lengths, table, offsets, three)
    shapes = [aval.shape for aval in arrays_of(jaxpr.jaxpr) if hasattr(aval, "shape")]
    assert pool.shape in shapes  # the walk sees the inside: the write is there
    return max(int(np.prod(shape)) for shape in shapes if shape != pool.shape)


@pytest.mark.parametrize("tokens", [1, 8, 300])
@pytest.mark.parametrize("window", [24, None])
def test_no_array_grows_with_the_table(tokens, window):
    size = largest(32768 // PAGE_SIZE, tokens, window)
    assert size == largest(8, tokens, window)
    # Scores of one item's step, its keys and values as they lie in pages (128 floats a token), or
    # the new ones, whichever is more.
    block_q = min(tokens, xla.BLOCK_Q)
    assert size <= max(
        block_q * 2 * xla.BLOCK_KV,
        xla.BLOCK_KV * LANES,
        tokens * LANES,
        2 * (tokens + block_q) * 16,
    )


def test_pages_outside_the_window_may_hold_anything():
    """A 32k context of NaN and of ids beyond the pool, but for the window."""
    case = make_case([(1, 32768)], page_size=PAGE_SIZE, decode=1)
    clean, _ = run(case, "xla", sliding_window=24)
    live = case.table[0, -3:]
    pool = np.full_like(case.pool, np.nan)
    pool[live], pool[0] = case.pool[live], 0
    table = np.full_like(case.table, 2**31 - 1)
    table[0, -3:] = live
    out, _ = run(replace(case, pool=pool, table=table), "xla", sliding_window=24)
    np.testing.assert_array_equal(out, clean)
