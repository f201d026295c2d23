"""The float32 oracle and the mask against their definitions, one query and one key at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.kernels.mask import visible
from jaxattn.kernels.reference import attention
from tests.attention_cases import sees

CAUSAL_3 = """
    1 0 0 0 0 0
    1 1 0 0 0 0
    1 1 1 0 0 0
    0 1 1 1 0 0
    0 0 1 1 1 0
    0 0 0 1 1 1
"""
CAUSAL = """
    1 0 0 0 0 0
    1 1 0 0 0 0
    1 1 1 0 0 0
    1 1 1 1 0 0
    1 1 1 1 1 0
    1 1 1 1 1 1
"""
ITSELF = """
    1 0 0 0 0 0
    0 1 0 0 0 0
    0 0 1 0 0 0
    0 0 0 1 0 0
    0 0 0 0 1 0
    0 0 0 0 0 1
"""
SYMMETRIC_3 = """
    1 1 1 0 0 0
    1 1 1 1 0 0
    1 1 1 1 1 0
    0 1 1 1 1 1
    0 0 1 1 1 1
    0 0 0 1 1 1
"""
ALL = "\n".join(["1 1 1 1 1 1"] * 6)
CLAMP_3 = """
    1 0 0 0 0 0
    1 1 0 0 0 0
    1 1 1 1 1 0
    0 1 1 1 1 0
    0 0 1 1 1 0
    0 0 0 1 1 1
"""
CLAMP_2 = """
    1 0 0 0 0 0
    1 1 0 0 0 0
    0 1 1 1 1 0
    0 0 1 1 1 0
    0 0 0 1 1 0
    0 0 0 0 1 1
"""
EXTEND_2 = """
    1 0 0 0 0 0
    1 1 0 0 0 0
    0 1 1 1 1 0
    0 0 1 1 1 0
    0 0 1 1 1 0
    0 0 0 0 1 1
"""
GLOBAL_IMAGE = """
    1 0 0 0 0 0
    1 1 0 0 0 0
    1 1 1 1 1 0
    1 1 1 1 1 0
    1 1 1 1 1 0
    1 1 1 1 1 1
"""
IMAGE_2_TO_4 = [(0, 0), (0, 0), (2, 5), (2, 5), (2, 5), (7, 7)]


@pytest.mark.parametrize(
    ("drawn", "options"),
    [
        (CAUSAL_3, {"sliding_window": 3}),
        (CAUSAL, {"sliding_window": None}),
        (CAUSAL, {"sliding_window": 6}),
        (ITSELF, {"sliding_window": 1}),
        (SYMMETRIC_3, {"sliding_window": 3, "causal": False}),
        (ITSELF, {"sliding_window": 1, "causal": False}),
        (ALL, {"sliding_window": None, "causal": False}),
        (CLAMP_3, {"sliding_window": 3, "image_rule": "clamp"}),
        (CLAMP_3, {"sliding_window": 3, "image_rule": "extend"}),  # the image fits the window
        (CLAMP_2, {"sliding_window": 2, "image_rule": "clamp"}),
        (EXTEND_2, {"sliding_window": 2, "image_rule": "extend"}),
        (GLOBAL_IMAGE, {"sliding_window": None, "image_rule": "clamp"}),
        (GLOBAL_IMAGE, {"sliding_window": None, "image_rule": "extend"}),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_drawn_masks(drawn, options):
    drawn = np.array(drawn.split(), int).reshape(6, 6).astype(bool)
    spans = jnp.array(IMAGE_2_TO_4, jnp.int32) if "image_rule" in options else None
    for start in (0, 100):  # absolute positions: the drawing moves with them
        positions = start + jnp.arange(6, dtype=jnp.int32)
        moved = None if spans is None else jnp.where(spans[:, :1] < spans[:, 1:], spans + start, 0)
        seen = visible(positions, positions, image_spans=moved, **options)
        np.testing.assert_array_equal(seen, drawn)
        # Rows and columns stand alone: any subset of queries and keys gives the same bits.
        rows = moved if moved is None else moved[2:4]
        part = visible(positions[2:4], positions[1:], image_spans=rows, **options)
        np.testing.assert_array_equal(part, drawn[2:4, 1:])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rule", ["none", "clamp", "extend"])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 40])
def test_mask_is_its_definition(window, rule, causal):
    spans = [(4, 9) if 4 <= q < 9 else (15, 30) if 15 <= q < 30 else (0, 0) for q in range(33)]
    drawn = [
        [
            sees(
                q,
                k,
                window=window,
                causal=causal,
                span=(0, 0) if rule == "none" else spans[q],
                rule=rule,
            )
            for k in range(33)
        ]
        for q in range(33)
    ]
    positions = jnp.arange(33, dtype=jnp.int32)
    image_spans = None if rule == "none" else jnp.array(spans, jnp.int32)
    seen = visible(
        positions,
        positions,
        sliding_window=window,
        causal=causal,
        image_spans=image_spans,
        image_rule=rule,
    )
    np.testing.assert_array_equal(seen, drawn)


def looped(queries, keys, values, seen, scale, soft_cap=None, sinks=None):
    """softmax([cap(scale q k), sink]) @ [v, 0] in float64, from the definition."""
    out = np.zeros(queries.shape)
    groups = queries.shape[1] // keys.shape[1]
    for query in range(len(queries)):
        for head in range(queries.shape[1]):
            total = 0.0 if sinks is None else np.exp(np.float64(sinks[head]))
            for key in range(len(keys)):
                if not seen[query][key]:
                    continue
                score = scale * np.dot(
                    queries[query, head].astype(np.float64), keys[key, head // groups]
                )
                if soft_cap is not None:
                    score = soft_cap * np.tanh(score / soft_cap)
                total += np.exp(score)
                out[query, head] += np.exp(score) * values[key, head // groups]
            if total:
                out[query, head] /= total
    return out


def drawn_tokens(seed, tokens=14, q_heads=4, kv_heads=2, head_dim=8):
    rng = np.random.default_rng(seed)
    shapes = (q_heads, kv_heads, kv_heads)
    return [rng.standard_normal((tokens, heads, head_dim), np.float32) for heads in shapes]


@pytest.mark.parametrize("soft_cap", [None, 0.8])
@pytest.mark.parametrize("sinks", [None, np.array([0.3, -2.0, 4.0, 0.0], np.float32)])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_attention_is_its_definition(window, sinks, soft_cap):
    queries, keys, values = drawn_tokens(seed=1)
    seen = np.array([[sees(q, k, window=window) for k in range(14)] for q in range(14)])
    out = attention(
        *map(jnp.asarray, (queries, keys, values, seen)),
        sm_scale=0.6,
        soft_cap=soft_cap,
        sinks=None if sinks is None else jnp.asarray(sinks),
    )
    assert out.dtype == jnp.float32
    expect = looped(queries, keys, values, seen, 0.6, soft_cap, sinks)
    np.testing.assert_allclose(out, expect, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [1, 3, 7, None])
def test_one_hot_values_count_the_keys(window):
    """Each key's value is its own unit vector, so an output row is the row of weights."""
    tokens = 20
    queries, keys, _ = drawn_tokens(seed=2, tokens=tokens, q_heads=1, kv_heads=1)
    values = np.eye(tokens, dtype=np.float32)[:, None, :]
    padded = [np.pad(each, ((0, 0), (0, 0), (0, tokens - 8))) for each in (queries, keys)]
    positions = jnp.arange(tokens, dtype=jnp.int32)
    seen = visible(positions, positions, sliding_window=window)
    weights = np.asarray(attention(*map(jnp.asarray, (*padded, values)), seen, sm_scale=0.5))[:, 0]
    counts = [min(q + 1, window or tokens) for q in range(tokens)]
    np.testing.assert_array_equal((weights > 0).sum(axis=1), counts)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


def test_queries_that_see_nothing_are_zero():
    queries, keys, values = drawn_tokens(seed=3, tokens=5)
    seen = np.zeros((5, 5), bool)
    seen[2, :2] = True
    for sinks in (None, jnp.zeros(4)):
        out = np.asarray(
            attention(*map(jnp.asarray, (queries, keys, values, seen)), sm_scale=1.0, sinks=sinks)
        )
        assert out[2].any()
        assert not np.delete(out, 2, axis=0).any()


def test_nan_that_nobody_sees_does_not_matter():
    queries, keys, values = drawn_tokens(seed=4)
    seen = np.array([[sees(q, k, window=4) and k > 2 for k in range(14)] for q in range(14)])
    clean = attention(*map(jnp.asarray, (queries, keys, values, seen)), sm_scale=1.0)
    keys[:3], values[:3] = np.nan, np.inf
    spoilt = attention(*map(jnp.asarray, (queries, keys, values, seen)), sm_scale=1.0)
    np.testing.assert_array_equal(clean, spoilt)


def test_low_precision_inputs_are_raised_to_float32():
    queries, keys, values = (each.astype(jnp.bfloat16) for each in drawn_tokens(seed=5))
    seen = np.ones((14, 14), bool)
    out = attention(*map(jnp.asarray, (queries, keys, values, seen)), sm_scale=0.6)
    raised = [each.astype(np.float32) for each in (queries, keys, values)]
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, looped(*raised, seen, 0.6), atol=2e-6, rtol=2e-6)
