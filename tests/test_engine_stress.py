"""Ten thousand requests through barely enough pages, every key checked by a shadow runner."""

import random
from collections import Counter

import pytest

from jaxattn.cache.pages import PageAllocator
from jaxattn.sampling import SamplingParams
from tests import tiny_model
from tests.engine_checks import (
    FAILING,
    Injected,
    Patience,
    assert_empty,
    assert_sound,
    break_next,
    check_matches,
    least_memory,
)
from tests.shadow_runner import VOCAB, ShadowRunner, continuation
from tests.tiny_model import PlainText

MAX_LEN = 64
TINY = tiny_model.model()

# What a step holds, and the pool as a multiple of the least that an engine takes. `eager`: who
# waits is let in whenever pages are free, so that those who run lose theirs often.
TIGHT = {
    "exactly one sequence": dict(page_size=1, chunk=8, seqs=8, memory=1, eager=True),
    "a page more": dict(page_size=3, chunk=16, seqs=4, memory=1.1),
    "short ones": dict(page_size=3, chunk=8, seqs=8, memory=2, expected_len=6),
    "one group": dict(page_size=4, chunk=6, seqs=6, memory=1, hybrid_kv_cache=False),
    "two replicas": dict(page_size=5, chunk=30, seqs=5, memory=1, replicas=2, eager=True),
    "no reuse": dict(page_size=9, chunk=5, seqs=5, memory=1, prefix_reuse=False, eager=True),
}


def make_engine(patch, *, page_size, chunk, seqs, memory, replicas=1, eager=False, **options):
    patch.setattr("jaxattn.engine.engine.Runner", ShadowRunner)
    patch.setattr(ShadowRunner, "num_replicas", replicas)
    if eager:
        patch.setattr(PageAllocator, "has_room", lambda *_: True)
    options |= dict(page_size=page_size, max_num_seqs=seqs, max_num_batched_tokens=chunk)
    roomy = tiny_model.engine(TINY, max_model_len=MAX_LEN, **options)
    least = least_memory(roomy.plan, max_len=MAX_LEN, step_tokens=chunk)
    return tiny_model.engine(TINY, max_model_len=MAX_LEN, memory=int(memory * least), **options)


class Traffic:
    """Random requests: beginnings that many share, few or many tokens, stops that come early."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.texts = [self.random.choices(range(3, VOCAB), k=MAX_LEN) for _ in range(6)]

    def request(self):
        longest = MAX_LEN - 1 if self.random.random() < 0.05 else 14
        length = self.random.randint(1, longest)
        shared = self.random.randint(0, length)
        tail = self.random.choices(range(3, VOCAB), k=self.random.choice([0, length - shared]))
        prompt = self.random.choice(self.texts)[: length - len(tail)] + tail
        stops = tuple(self.random.sample(range(3, VOCAB), 15))
        count = self.random.randint(1, 40 if self.random.random() < 0.1 else 6)
        return prompt, SamplingParams(max_tokens=count, temperature=0, stop_token_ids=stops)


def answer(prompt, params):
    """What a request gets when it is alone."""
    tokens = continuation(prompt, min(params.max_tokens, MAX_LEN - len(prompt)))
    for index, token in enumerate(tokens):
        if token in params.stop_token_ids:
            return tokens[: index + 1], "stop"
    return tokens, "length"


def run(engine, num_requests, patch, seed):
    """Feed requests, abort some, break some steps; `{finish reason: how many}`."""
    traffic, patience = Traffic(seed), Patience(engine)
    draw = traffic.random.random
    live, reasons, added = {}, Counter(), 0
    while added < num_requests or engine.has_work:
        while added < num_requests and len(live) < 24 and draw() < 0.7:
            prompt, params = traffic.request()
            sequence = engine.add(prompt, params, seed=0, stream=PlainText())
            live[sequence.id] = sequence
            added += 1
        with patch.context() as broken:
            if draw() < 0.005:
                break_next(engine, traffic.random.choice(FAILING), broken)
            news = engine.step()
        assert_sound(engine)
        for each in news:
            if isinstance(each.error, Injected):
                patience.forgive()
            elif each.error:
                raise each.error
            if each.finish_reason:
                del live[each.id]
                reasons[each.finish_reason] += 1
                tokens, reason = answer(each.tokens[: each.num_prompt], each.params)
                if each.finish_reason == "error":
                    assert each.new_tokens == tokens[: len(each.new_tokens)]
                else:
                    assert (each.new_tokens, each.finish_reason) == (tokens, reason)
        assert all(each.finish_reason is None for each in live.values()), "ended, not reported"
        patience.check()
        if draw() < 0.02 and live:
            gone = traffic.random.sample(sorted(live), traffic.random.randint(1, len(live)) // 3)
            engine.abort([live.pop(each) for each in gone])
            reasons["abort"] += len(gone)
            assert_sound(engine)
    assert not live and added == num_requests == sum(reasons.values())
    assert_empty(engine)
    return reasons


@pytest.mark.parametrize("tight", TIGHT)
def test_ten_thousand_requests_in_all(tight, monkeypatch):
    check(tight, 10_000 // len(TIGHT) + 1, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("tight", TIGHT)
def test_ten_thousand_requests_each(tight, monkeypatch):
    check(tight, 10_000, monkeypatch)


def check(tight, num_requests, patch):
    engine = make_engine(patch, **TIGHT[tight])
    check_matches(patch)
    reasons = run(engine, num_requests, patch, seed=num_requests)
    stats = engine.stats()
    print(tight, engine.num_pages, dict(reasons), stats)
    assert min(reasons[each] for each in ("stop", "length", "abort", "error")) > num_requests / 200
    assert stats.preemptions > num_requests / 100 or "eager" not in TIGHT[tight]
    assert (stats.prefix_hit_tokens > num_requests / 100) == (tight != "no reuse")
