"""The sampler against exact probabilities and a plain numpy implementation."""

from dataclasses import replace

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis.extra import numpy as hnp

from jaxattn.engine import sampler
from jaxattn.engine.sampler import (
    ParamTable,
    TokenHistory,
    _inverse_cdf,
    keep_likely,
    penalise,
    token_history,
)
from jaxattn.sampling import MAX_LOGPROBS, SamplingParams

DRAWS = 8192
VOCAB = 12
LOGITS = np.array([2.0, 1.5, 1.5, 0.5, 0.0, 0.0, -1.0, -1.0, -2.0, -3.0, -8.0, 1.0], np.float32)


top_logprobs = jax.jit(sampler.top_logprobs)
ASKED = sampler.Asked(*[True] * 7)
compiled_choose = jax.jit(
    lambda logits, params, asked, history: sampler.choose(logits, params, asked, lambda: history)
)


def choose(logits, params, history=None, asked=ASKED):
    """The sampler's, by default with nothing in the history."""
    nothing = TokenHistory(np.zeros(logits.shape, bool), np.zeros(logits.shape, np.int32))
    return compiled_choose(logits, params, asked, history or nothing)


def rows_of(*params, seeds=None, samples=None, steps=None):
    count = len(params)
    seeds = range(count) if seeds is None else seeds
    samples = [0] * count if samples is None else samples
    steps = [0] * count if steps is None else steps
    table = ParamTable(count)
    for slot, each in enumerate(zip(params, seeds, samples, strict=True)):
        table.set(slot, each[0], seed=each[1], sample=each[2])
    return table.rows(np.arange(count), np.array(steps, np.int32))


def expected_probabilities(logits, params):
    """Temperature, min_p, top_k, top_p, in this order, in float64 and with a sort."""
    probabilities = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    kept = probabilities >= params.min_p * probabilities.max()
    probabilities = np.where(kept, probabilities, 0)
    if params.top_k:
        least = np.sort(probabilities)[::-1][min(params.top_k, len(probabilities)) - 1]
        probabilities = np.where(probabilities >= least, probabilities, 0)
    if params.top_p < 1:
        ordered = np.sort(probabilities)[::-1]
        enough = np.cumsum(ordered) >= params.top_p * ordered.sum()
        probabilities = np.where(probabilities >= ordered[np.argmax(enough)], probabilities, 0)
    return probabilities / probabilities.sum()


def draw(logits, params, count=DRAWS):
    """Token ids of `count` rows of the same logits, each with a seed of its own."""
    column = rows_of(params, params)  # two, so that a padding row is not needed
    many = jax.tree.map(lambda array: np.full(count, array[0]), column)
    many = replace(many, seed=np.arange(count, dtype=np.uint32))
    return np.asarray(choose(np.tile(logits, (count, 1)), many))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 2},  # the second and third tie
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 1000},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"min_p": 0.3, "top_k": 5, "top_p": 0.8, "temperature": 1.3},
    ],
    ids=str,
)
def test_draws_follow_the_exact_probabilities(asked):
    params = SamplingParams(**asked)
    exact = expected_probabilities(LOGITS, params)
    counts = np.bincount(draw(LOGITS, params), minlength=VOCAB)
    assert (counts[exact == 0] == 0).all()
    kept = exact > 0
    chi_square = ((counts - DRAWS * exact)[kept] ** 2 / (DRAWS * exact[kept])).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5, (counts / DRAWS, exact)


def test_the_order_of_filters():
    """top_p is of what top_k leaves, and both are of what min_p leaves."""
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    likelihood = np.exp(logits - logits.max())

    def kept(**asked):
        filtered = jax.jit(keep_likely)(likelihood, rows_of(SamplingParams(**asked)), ASKED)
        return np.flatnonzero(np.asarray(filtered)[0]).tolist()

    assert kept(top_p=0.65) == [0, 1]
    assert kept(top_k=2, top_p=0.65) == [0, 1]  # of 0.7: 0.57, 1
    assert kept(top_k=2, top_p=0.55) == [0]
    assert kept(min_p=0.6, top_p=0.55) == [0]  # of 0.7 again; of 1 it would be two
    assert kept(top_p=0.55) == [0, 1]


FLOATS = st.floats(-6, 6, width=16)


@given(
    hnp.arrays(np.float32, (4, 37), elements=FLOATS),
    st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
    st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_filters_keep_what_a_sort_keeps(logits, top_ps, top_ks, min_ps):
    params = [
        SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p)
        for top_p, top_k, min_p in zip(top_ps, top_ks, min_ps, strict=True)
    ]
    likelihood = np.exp(logits - logits.max(axis=1, keepdims=True))
    for row, each in zip(likelihood, params, strict=True):
        assume(np.abs(row - each.min_p).min() > 1e-6)  # not where rounding decides
        before = expected_probabilities(np.log(row), replace(each, top_p=1.0))
        running = np.cumsum(np.sort(before)[::-1])
        assume(each.top_p == 1 or np.abs(running - each.top_p).min() > 1e-5)
    kept = np.asarray(jax.jit(keep_likely)(likelihood, rows_of(*params), ASKED)) > 0
    for row, each, ours in zip(likelihood, params, kept, strict=True):
        np.testing.assert_array_equal(ours, expected_probabilities(np.log(row), each) > 0)


@pytest.mark.parametrize("top_p", [1e-3, 1e-30, 1e-40, 1e-300])
def test_a_tiny_top_p_keeps_the_best(top_p):
    assert (draw(LOGITS, SamplingParams(top_p=top_p), 64) == 0).all()


def test_a_huge_temperature_is_flat():
    assert len(set(draw(LOGITS, SamplingParams(temperature=1e300), 256).tolist())) == VOCAB


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-40, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    assert (draw(100 * LOGITS, SamplingParams(temperature=temperature), 64) == 0).all()


def test_equal_logits():
    flat = np.zeros(VOCAB, np.float32)
    counts = np.bincount(draw(flat, SamplingParams(top_k=1)), minlength=VOCAB)
    assert (np.abs(counts / DRAWS - 1 / VOCAB) < 0.02).all()  # all tie
    assert int(choose(flat[None], rows_of(SamplingParams(temperature=0)))[0]) == 0


@pytest.mark.parametrize("asked", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_minus_infinity_is_never_drawn(asked):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[4, 7]] = 1.0
    assert set(draw(logits, SamplingParams(**asked), 256).tolist()) == {4, 7}


def test_greedy():
    logits = np.random.default_rng(0).normal(size=(5, VOCAB)).astype(np.float32)
    params = rows_of(*[SamplingParams(temperature=0)] * 5)
    np.testing.assert_array_equal(choose(logits, params), logits.argmax(axis=1))
    plain = sampler.Asked.by([SamplingParams(temperature=0)], samples=True)
    assert plain == (True, *[False] * 6)
    np.testing.assert_array_equal(choose(logits, params, asked=plain), logits.argmax(axis=1))
    unset = ParamTable(5).rows(np.arange(5), np.zeros(5, np.int32))
    np.testing.assert_array_equal(choose(logits, unset), logits.argmax(axis=1))


def test_the_history_is_that_of_the_tokens():
    tokens = np.array([[3, 5, 3, 5, 5, 7, 9], [4, 4, 1, 8, 8, 8, 8]], np.int32)
    history = token_history(tokens, np.array([3, 2], np.int32), np.array([6, 3], np.int32), VOCAB)
    expected = history_of([[3, 5], [4]], [[5, 5, 7], [1]])  # what is beyond the length is not read
    np.testing.assert_array_equal(history.in_prompt, expected.in_prompt)
    np.testing.assert_array_equal(history.counts, expected.counts)


def test_greedy_rows_among_random_ones():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(64, VOCAB)).astype(np.float32)
    greedy, random = SamplingParams(temperature=0), SamplingParams(temperature=5.0)
    params = rows_of(*[greedy if row % 2 else random for row in range(64)])
    chosen = np.asarray(choose(logits, params))
    best = logits.argmax(axis=1)
    np.testing.assert_array_equal(chosen[1::2], best[1::2])
    assert (chosen[::2] != best[::2]).sum() > 10


def test_a_draw_depends_on_its_own_row_only():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(32, 300)).astype(np.float32)
    asked = [
        SamplingParams(temperature=rng.uniform(0.5, 2), top_k=int(rng.integers(0, 50)))
        for _ in range(32)
    ]
    seeds, samples, steps = rng.integers(0, 2**32, 32), rng.integers(0, 4, 32), range(32)
    batch = np.asarray(choose(logits, rows_of(*asked, seeds=seeds, samples=samples, steps=steps)))
    order = rng.permutation(32)
    shuffled = rows_of(
        *[asked[row] for row in order], seeds=seeds[order], samples=samples[order], steps=order
    )
    np.testing.assert_array_equal(choose(logits[order], shuffled), batch[order])
    for row in range(0, 32, 5):
        alone = rows_of(asked[row], seeds=[seeds[row]], samples=[samples[row]], steps=[steps[row]])
        assert int(choose(logits[row : row + 1], alone)[0]) == batch[row]


@pytest.mark.parametrize("varied", ["seeds", "samples", "steps"])
def test_seed_sample_and_step_all_count(varied):
    flat = np.zeros((64, 1000), np.float32)
    fixed = {"seeds": [7] * 64, "samples": [0] * 64, "steps": [0] * 64}
    same = np.asarray(choose(flat, rows_of(*[SamplingParams()] * 64, **fixed)))
    assert len(set(same.tolist())) == 1
    fixed[varied] = range(64)
    different = np.asarray(choose(flat, rows_of(*[SamplingParams()] * 64, **fixed)))
    assert len(set(different.tolist())) > 50


def test_a_huge_vocabulary():
    size = 262_144
    logits = np.random.default_rng(3).normal(size=size).astype(np.float32)
    logits[[5, 131_072, size - 1]] = 20.0
    drawn = draw(logits, SamplingParams(), 12)
    assert set(draw(logits, SamplingParams(top_k=3), 12).tolist()) <= {5, 131_072, size - 1}
    assert set(drawn.tolist()) <= {5, 131_072, size - 1}
    flat = draw(np.zeros(size, np.float32), SamplingParams(), 12)
    assert len(set(flat.tolist())) == 12
    assert flat.min() < size // 3 and flat.max() > 2 * size // 3


def test_rounded_sums_never_lead_to_a_dropped_token():
    """Also for draws at the very edges of tokens, where a rounded sum may skip one."""
    rng = np.random.default_rng(4)
    size = 1025
    likelihood = np.where(rng.random((50, size)) < 0.3, rng.random((50, size)), 0)
    likelihood = likelihood.astype(np.float32)
    likelihood[:, [3, 600]] = 1.0
    running = np.cumsum(likelihood, axis=1)
    edges = running[:, ::20] / running[:, -1:]
    edges[:, 0], edges[:, -1] = 0, 1 - 2.0**-24
    tokens = jax.jit(jax.vmap(jax.vmap(_inverse_cdf, (None, 0))))(likelihood, edges)
    assert (np.take_along_axis(likelihood, np.asarray(tokens), 1) > 0).all()


def test_a_draw_lands_where_the_running_sum_passes_it():
    likelihood = np.zeros((3, 1025), np.float32)
    likelihood[:, [3, 600]] = 1.0
    tokens = jax.vmap(_inverse_cdf)(likelihood, np.array([0.0, 0.49, 0.5], np.float32))
    assert np.asarray(tokens).tolist() == [3, 3, 600]


def plain_penalties(logits, prompt, new, params):
    logits = logits.astype(np.float64).copy()
    for token in set(prompt) | set(new):
        positive = logits[token] > 0
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if positive else logits[token] * penalty
    for token in set(new):
        logits[token] -= params.presence_penalty + params.frequency_penalty * new.count(token)
    return logits


def history_of(prompts, news):
    in_prompt = np.zeros((len(prompts), VOCAB), bool)
    counts = np.zeros((len(prompts), VOCAB), np.int32)
    for row, (prompt, new) in enumerate(zip(prompts, news, strict=True)):
        in_prompt[row, prompt] = True
        np.add.at(counts[row], new, 1)
    return TokenHistory(in_prompt, counts)


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.4},
        {"presence_penalty": 1.5},
        {"presence_penalty": -1.5},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.7},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    ],
    ids=str,
)
def test_penalties(asked):
    prompts, news = [[0, 6, 3], [4], [9]], [[0, 0, 1, 8], [], [10, 10, 10]]
    params = SamplingParams(**asked)
    ours = penalise(
        jnp.asarray(np.tile(LOGITS, (3, 1))), rows_of(*[params] * 3), history_of(prompts, news)
    )
    plain = [plain_penalties(LOGITS, *each, params) for each in zip(prompts, news, strict=True)]
    np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-6)


def test_penalties_change_greedy_choices_and_only_their_row():
    penalised = SamplingParams(temperature=0, presence_penalty=2.0)
    logits, history = np.tile(LOGITS, (2, 1)), history_of([[], []], [[0], [0]])
    chosen = choose(logits, rows_of(penalised, SamplingParams(temperature=0)), history)
    assert np.asarray(chosen).tolist() == [1, 0]


def test_top_logprobs():
    logits = np.random.default_rng(5).normal(size=(6, 100)).astype(np.float32)
    tokens = np.array([0, 3, 99, 50, 7, 7], np.int32)
    ours = top_logprobs(logits, tokens)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    own = exact[np.arange(6), tokens]
    np.testing.assert_allclose(ours.logprob, own, atol=1e-5)
    np.testing.assert_array_equal(ours.rank, 1 + (exact > own[:, None]).sum(axis=1))
    best = np.argsort(-exact, axis=1)[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(ours.top_ids, best)
    np.testing.assert_allclose(ours.top_logprobs, np.take_along_axis(exact, best, 1), atol=1e-5)


def test_top_logprobs_of_a_small_vocabulary():
    ours = top_logprobs(LOGITS[None], np.array([1], np.int32))
    assert ours.top_ids.shape == (1, VOCAB)
    assert int(ours.rank[0]) == 2  # ties share the better rank
