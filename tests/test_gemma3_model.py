"""The whole model against a float64 implementation that shares nothing with it but the config."""

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import group_layers, init_cache
from jaxattn.batch import PageTable, RaggedBatch
from jaxattn.cache.pages import PageAllocator
from jaxattn.cache.sizing import table_width, worst_demand
from jaxattn.models.gemma3.config import Gemma3Config, layer_pattern
from jaxattn.models.gemma3.model import Gemma3, layer_specs
from jaxattn.models.gemma3.sharding import random_weights
from jaxattn.models.gemma3.weights import expected_shapes
from tests.single_sequence import SingleSequence

WINDOW = 8
LENGTH = 40  # five windows
TOLERANCE = 2e-5  # measured: 8.5e-6
CONFIG = Gemma3Config(
    embed_dim=24,
    mlp_dim=40,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    query_scale=12**-0.5,  # not head_dim's
    max_position=256,
    layers=layer_pattern(7, sliding_window=WINDOW, global_factor=8.0),
    vocab_size=64,
)
IDS = np.random.default_rng(1).integers(0, CONFIG.vocab_size, LENGTH)


@cache
def weights() -> dict[str, np.ndarray]:
    """Large enough that every part matters, norms included."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) * (0.3 if len(shape) == 1 else 0.25)).astype(np.float32)
        for name, shape in expected_shapes(CONFIG).items()
    }


def model(config: Gemma3Config = CONFIG) -> Gemma3:
    return Gemma3(config, {name: jnp.asarray(array) for name, array in weights().items()})


@cache
def run(
    config: Gemma3Config = CONFIG,
    *,
    chunk: int = LENGTH,
    hybrid: bool = True,
    backend: str = "xla",
) -> np.ndarray:
    """Logits at every position, through pages of 3 tokens."""
    sequence = SingleSequence(
        model(config),
        page_size=3,
        max_len=LENGTH,
        paddings=(chunk,),
        hybrid=hybrid,
        backend=backend,
    )
    return sequence.logits(sequence.prefill(IDS, chunk))


# The float64 implementation: one position after the other, one head after the other.


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x * x)) + eps) * (1 + weight)


def rotate(head: np.ndarray, position: int, theta: float, factor: float) -> np.ndarray:
    """As complex numbers: the first half of a head real, the second imaginary."""
    half = len(head) // 2
    angles = [position / factor * theta ** (-2 * i / len(head)) for i in range(half)]
    turned = (head[:half] + 1j * head[half:]) * np.exp(1j * np.array(angles))
    return np.concatenate([turned.real, turned.imag])


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def float64_logits(config: Gemma3Config = CONFIG) -> np.ndarray:
    wide = {name: array.astype(np.float64) for name, array in weights().items()}
    stream = wide["embed"][IDS] * math.sqrt(config.embed_dim)
    eps = config.rms_norm_eps
    group = config.num_q_heads // config.num_kv_heads
    for index, record in enumerate(config.layers):
        own = {n.split(".")[2]: w for n, w in wide.items() if n.startswith(f"layers.{index}.")}
        theta, factor = record.rope_theta, record.rope_factor
        keys, values, added = [], [], []
        for position, x in enumerate(stream):
            x = norm(x, own["attn_norm"], eps)
            queries = (own["q"] @ x).reshape(config.num_q_heads, -1)
            new_keys = (own["k"] @ x).reshape(config.num_kv_heads, -1)
            keys.append(
                [rotate(norm(k, own["k_norm"], eps), position, theta, factor) for k in new_keys]
            )
            values.append((own["v"] @ x).reshape(config.num_kv_heads, -1))
            window = record.sliding_window
            seen = [p for p in range(position + 1) if window is None or p > position - window]
            heads = []
            for number, query in enumerate(queries):
                query = rotate(norm(query, own["q_norm"], eps), position, theta, factor)
                scores = [query @ keys[p][number // group] * config.query_scale for p in seen]
                weight = np.exp(np.array(scores) - max(scores))
                weight /= weight.sum()
                heads.append(
                    sum(w * values[p][number // group] for w, p in zip(weight, seen, strict=True))
                )
            added.append(norm(own["o"] @ np.concatenate(heads), own["post_attn_norm"], eps))
        stream = stream + added
        for x in stream:
            y = norm(x, own["mlp_norm"], eps)
            y = own["down"] @ (gelu_tanh(own["gate"] @ y) * (own["up"] @ y))
            x += norm(y, own["post_mlp_norm"], eps)
    return np.stack([wide["embed"] @ norm(x, wide["final_norm"], eps) for x in stream])


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return float64_logits()


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_logits_at_every_position(expected, backend):
    assert expected.std() > 1
    np.testing.assert_allclose(run(backend=backend), expected, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_prefill_and_decode(expected, chunk):
    np.testing.assert_allclose(run(chunk=chunk), expected, atol=TOLERANCE)


def test_without_the_hybrid_cache_the_logits_are_bit_equal():
    np.testing.assert_array_equal(run(chunk=7), run(chunk=7, hybrid=False))


def changed(**changes) -> Gemma3Config:
    """The config with other values in its global layers, or with other values of its own."""
    layer = changes.pop("global_layers", {})
    layers = tuple(replace(r, **layer) if r.sliding_window is None else r for r in CONFIG.layers)
    return replace(CONFIG, layers=layers, **changes)


@pytest.mark.parametrize(
    "config",
    [
        changed(global_layers={"rope_factor": 1.0}),
        changed(global_layers={"sliding_window": WINDOW}),
        changed(global_layers={"rope_theta": 10_000.0}, query_scale=0.25, rms_norm_eps=1e-2),
    ],
    ids=["factor", "window on all layers", "theta, scale and eps"],
)
def test_settings_reach_the_logits(expected, config):
    """By more than the tolerance above, and as the float64 implementation says."""
    logits = run(config)
    assert np.abs(logits - expected).max() > 1e-2
    np.testing.assert_allclose(logits, float64_logits(config), atol=TOLERANCE)
    if config.layers[5].sliding_window == WINDOW:  # within one window nothing differs
        np.testing.assert_allclose(logits[:WINDOW], expected[:WINDOW], atol=TOLERANCE)


def test_sequences_of_a_batch_do_not_see_each_other(expected):
    """A decode, a chunk and a whole prompt in one ragged step, padded in tokens and sequences."""
    page_size, lengths, new = 3, (30, 21, 11), (1, 9, 11)
    tiny = model()
    specs = layer_specs(CONFIG, page_size=page_size, kv_dtype="float32")
    plan = group_layers(specs, max_len=LENGTH)
    limits = {"max_len": LENGTH, "step_tokens": LENGTH}
    num_pages = [1 + n for n in worst_demand(plan, max_num_seqs=3, **limits)]
    widths = [table_width(plan, group, **limits) for group in range(len(plan.groups))]
    pages = PageAllocator(plan, num_pages)
    cache = init_cache(plan, num_pages)

    @jax.jit
    def compute(ids, batch, cache):
        hidden, cache = tiny(ids, cache, plan=plan, batch=batch, backend="xla")
        return tiny.logits(hidden), cache

    def step(ids, seqs, kv_lens, q_lens, distribution, cache):
        batch = RaggedBatch(
            kv_lens=jnp.array(np.pad(kv_lens, (0, 4 - len(seqs))), jnp.int32),
            cu_q_lens=jnp.array(np.cumsum([0, *q_lens] + [0] * (4 - len(seqs))), jnp.int32),
            distribution=jnp.array(distribution, jnp.int32),
            tables=tuple(
                PageTable(
                    *map(
                        jnp.asarray,
                        pages.page_table(group, seqs, rows=4, width=width),
                    )
                )
                for group, width in enumerate(widths)
            ),
        )
        batch.check(tuple(num_pages))
        padded = np.pad(ids, (0, 32 - len(ids))).astype(np.int32)
        logits, cache = compute(padded, batch, cache)
        return logits[: len(ids)], cache

    for seq, (length, tokens) in enumerate(zip(lengths, new, strict=True)):
        pages.admit(seq)
        before = length - tokens
        if before:
            assert pages.grow({seq: before})
            _, cache = step(IDS[:before], [seq], [before], [before], (0, 1, 1), cache)
            pages.settle(seq, before)
        assert pages.grow({seq: length})
    ids = np.concatenate([IDS[n - t : n] for n, t in zip(lengths, new, strict=True)])
    logits, _ = step(ids, [0, 1, 2], lengths, new, (1, 3, 3), cache)
    wanted = np.concatenate([expected[n - t : n] for n, t in zip(lengths, new, strict=True)])
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCE)


def test_bfloat16_is_near(expected):
    narrow = {name: jnp.asarray(array, jnp.bfloat16) for name, array in weights().items()}
    sequence = SingleSequence(
        Gemma3(CONFIG, narrow), page_size=3, max_len=LENGTH, paddings=(LENGTH,)
    )
    logits = sequence.logits(sequence.prefill(IDS, LENGTH))
    assert logits.dtype == np.float32
    error = np.abs(logits - expected)
    assert error.mean() < 0.1 * expected.std()
    assert error.max() > 1e-3  # it was bfloat16


def test_weights_that_do_not_fit():
    wrong = {name: jnp.asarray(array) for name, array in weights().items()}
    wrong["layers.2.q"] = wrong["layers.2.q"][:-1]
    del wrong["final_norm"]
    with pytest.raises(ValueError, match=r"they differ in \['final_norm', 'layers\.2\.q'\]"):
        Gemma3(CONFIG, wrong)


def test_a_plan_of_another_model():
    specs = layer_specs(CONFIG, page_size=3, kv_dtype="float32")[:5]
    plan = group_layers(specs, max_len=LENGTH)
    batch = RaggedBatch(*(jnp.zeros(1, jnp.int32) for _ in range(3)), tables=())
    with pytest.raises(ValueError, match="a plan of 5 layers for 7 blocks"):
        model()(jnp.zeros(1, jnp.int32), init_cache(plan, [2]), plan=plan, batch=batch)


def test_random_weights():
    small = replace(CONFIG, layers=CONFIG.layers[:1])
    drawn = random_weights(small, jax.random.key(0), dtype="bfloat16", scale=0.5)
    assert {name: array.shape for name, array in drawn.items()} == expected_shapes(small)
    for array in drawn.values():
        assert array.dtype == (jnp.float32 if array.ndim == 1 else jnp.bfloat16)
    assert 0.45 < float(jnp.std(drawn["embed"].astype(jnp.float32))) < 0.55
