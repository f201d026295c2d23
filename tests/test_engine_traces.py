"""Random traces through the engine on a tiny model: everybody gets what it would get alone."""

from functools import cache
from itertools import count

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxattn.cache.pages import PageAllocator
from jaxattn.engine.engine import plan_engine
from jaxattn.engine.scheduler import Scheduler
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
    evict,
    least_memory,
    narrow,
)
from tests.tiny_model import VOCAB, WINDOW, PlainText

MAX_LEN = 64
SURE_MARGIN = 1e-3  # below this two right float32 programs may choose differently
TINY = tiny_model.model()
ENGINES = [(1, True), (3, True), (4, True), (3, False)]  # page size, hybrid

_rng = np.random.default_rng(2023)
FIRST, SECOND, THIRD = (_rng.integers(3, VOCAB, MAX_LEN).tolist() for _ in range(3))
PROMPTS = [
    *(FIRST[:length] for length in (1, 2, 3, 7, 8, 9, 12, 13, 16, 24, 25, 26, 40, 63)),
    *(FIRST[:same] + SECOND[:more] for same, more in ((1, 2), (8, 8), (12, 1), (24, 9))),
    *(SECOND[:length] for length in (4, 12, 17, 30)),
    THIRD[:61],
]
STOPS = tuple(range(0, VOCAB, 9))
PARAMS = [
    SamplingParams(max_tokens=1, temperature=0),
    SamplingParams(max_tokens=6, temperature=0),
    SamplingParams(max_tokens=20, temperature=0),
    SamplingParams(max_tokens=15, temperature=0, stop_token_ids=STOPS),
    SamplingParams(max_tokens=9, temperature=0, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=0),
    SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(max_tokens=8, temperature=1.0, n=2),
    SamplingParams(
        max_tokens=12, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, presence_penalty=1.0, n=2
    ),
    SamplingParams(max_tokens=10, temperature=1.5, stop_token_ids=STOPS, logprobs=1),
    SamplingParams(max_tokens=20, temperature=0, stop=[*map(chr, STOPS), chr(60) + chr(61)]),
]


@cache
def make_engine(page_size, hybrid, num_shapes=1):
    """Compiled once; `narrow` makes it one of fewer pages and tokens a step."""
    engine = tiny_model.engine(
        TINY,
        max_model_len=MAX_LEN,
        page_size=page_size,
        max_num_seqs=4,
        max_num_batched_tokens=3 * WINDOW,
        hybrid_kv_cache=hybrid,
    )
    engine.runner.buckets = engine.runner.buckets[-num_shapes:]
    return engine


def add(engine, prompt, params, index=0, stream=None):
    seed = len(prompt) + params.max_tokens
    return engine.add(prompt, params, seed=seed, index=index, stream=stream or PlainText())


def run(engine, prompt, params):
    sequence = add(engine, prompt, params)
    while engine.has_work:
        engine.step()
        assert_sound(engine)
    return sequence


@cache
def alone(prompt_index, params_index, index=0):
    """The request in an empty engine with room for everything and one group, without reuse."""
    engine = make_engine(16, hybrid=False)
    narrow(engine, chunk=3 * WINDOW, memory=100, prefix_reuse=False)
    sequence = add(engine, PROMPTS[prompt_index], PARAMS[params_index], index)
    while engine.has_work:
        engine.step()
    assert_empty(engine)
    return sequence


def assert_as_alone(sequence, text=None):
    """Its result, or as far as it came."""
    key = PROMPTS.index(sequence.tokens[: sequence.num_prompt]), PARAMS.index(sequence.params)
    expected = alone(*key, sequence.index)
    count = len(sequence.new_tokens)
    if sequence.finish_reason in ("stop", "length"):
        ours, theirs = sequence.output(), expected.output()
        for name in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert len(sequence.prompt_logprobs) == len(expected.prompt_logprobs)
        assert text is None or text == ours.text
    assert sequence.new_tokens == expected.new_tokens[:count]
    assert_scores(sequence.logprobs, expected.logprobs)
    assert_scores(sequence.prompt_logprobs, expected.prompt_logprobs)


def assert_scores(ours, theirs):
    """Equal reports, of as many tokens as we have."""
    assert len(ours) <= len(theirs)
    for our, their in zip(ours, theirs, strict=False):
        assert our.keys() == their.keys()
        for token, score in our.items():
            assert abs(score.logprob - their[token].logprob) < 2e-4
            assert (score.rank, score.decoded_token) == (
                their[token].rank,
                their[token].decoded_token,
            )


def test_the_greedy_choices_are_sure():
    """So that rounding, which chunks and batches change, never decides."""
    engine = make_engine(16, hybrid=False)
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=2)
    sequences = [add(engine, prompt, params) for prompt in PROMPTS]
    while engine.has_work:
        engine.step()
    for each in sequences:
        for report in each.logprobs:
            first, second = sorted(score.logprob for score in report.values())[::-1][:2]
            assert first - second > SURE_MARGIN


@pytest.mark.parametrize(("page_size", "hybrid"), ENGINES)
@pytest.mark.parametrize("chunk", [4, 24])
def test_the_least_memory_is_what_an_engine_takes(page_size, hybrid, chunk):
    """So that `narrow` makes the pools that the option `memory` makes."""
    options = dict(
        dtype="float32",
        kv_dtype="float32",
        page_size=page_size,
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=chunk,
        hybrid_kv_cache=hybrid,
    )
    engine = make_engine(page_size, hybrid)
    narrow(engine, chunk=chunk, memory=1, prefix_reuse=True)
    least = least_memory(engine.plan, max_len=MAX_LEN, step_tokens=chunk)
    plan, num_pages = plan_engine(TINY.config, memory=least, **options)
    assert (plan, num_pages) == (engine.plan, engine.num_pages)
    assert engine.capacity(MAX_LEN) == 1
    with pytest.raises(ValueError, match=f"one sequence of 64 tokens takes {least} "):
        plan_engine(TINY.config, memory=least - 1, **options)


class BrokenText(PlainText):
    """A text stream that fails, in the middle of settling a step."""

    def __init__(self, good):
        self.good = good

    def step(self, token_id):
        self.good -= 1
        if self.good < 0:
            raise Injected("text")
        return super().step(token_id)

    def finish(self):
        raise Injected("the end of a text")


class Traces(RuleBasedStateMachine):
    """Requests come, run, are dropped, and steps fail, on pools of any size."""

    @initialize(
        which=st.sampled_from(ENGINES),
        chunk=st.sampled_from([1, 2, 5, 8, 11, 24]),
        memory=st.sampled_from([1, 1.2, 2, 100]),
        typical_len=st.sampled_from([5, MAX_LEN]),
        prefix_reuse=st.booleans(),
        eager=st.booleans(),
    )
    def start(self, which, chunk, memory, typical_len, prefix_reuse, eager):
        self.patch, self.broken = pytest.MonkeyPatch(), pytest.MonkeyPatch()
        check_matches(self.patch)
        if eager:  # whoever waits is let in when pages are free: more preemption
            self.patch.setattr(PageAllocator, "has_room", lambda *_: True)
        self.engine = make_engine(*which, num_shapes=2 if which == (4, True) else 1)
        narrow(
            self.engine,
            chunk=chunk,
            memory=memory,
            prefix_reuse=prefix_reuse,
            typical_len=typical_len,
        )
        self.live, self.texts = {}, {}
        self.scheduled = []  # the last step; it may have to wait for the one before it

        def schedule(scheduler, schedule=Scheduler.schedule):
            step = schedule(scheduler)
            self.scheduled = [step] if step else self.scheduled
            return step

        self.patch.setattr(Scheduler, "schedule", schedule)
        self.patience = Patience(self.engine)

    @rule(
        prompt=st.sampled_from(PROMPTS),
        params=st.sampled_from(PARAMS),
        times=st.sampled_from([1, 1, 1, 2, 4]),
    )
    def add(self, prompt, params, times):
        for index in [*range(params.n)] * times:
            self.keep(add(self.engine, prompt, params, index))

    @rule(prompt=st.sampled_from(PROMPTS), good=st.integers(0, 6))
    def add_one_whose_text_fails(self, prompt, good):
        self.keep(add(self.engine, prompt, PARAMS[1], stream=BrokenText(good)))

    def keep(self, sequence):
        self.live[sequence.id] = sequence
        self.texts[sequence.id] = ""

    @rule(times=st.integers(1, 8))
    def steps(self, times):
        for _ in range(times):
            self.step()

    def step(self):
        running = [part for step in self.engine._in_flight for part in step.shares]
        news = self.engine.step()
        assert_sound(self.engine)
        assert len({each.id for each in news}) == len(news)
        lost = {share.sequence.id for part in (*running, *self.scheduled) for share in part}
        for each in news:
            assert each.id in self.live, "news of one that had ended"
            self.texts[each.id] += each.take_text()
            if each.finish_reason == "error":
                if not isinstance(each.error, Injected):
                    raise each.error
                assert each.id in lost
                self.patience.forgive()
            if isinstance(each._stream, BrokenText):
                assert each.finish_reason in (None, "error"), "a part of its text is missing"
            if each.finish_reason is not None:
                assert_as_alone(self.live.pop(each.id), self.texts.pop(each.id))
        assert all(each.finish_reason is None for each in self.live.values()), "ended, no news"
        self.patience.check()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        gone = data.draw(st.sets(st.sampled_from(sorted(self.live)), min_size=1))
        gone = [self.live.pop(each) for each in gone]
        self.engine.abort(gone)
        for each in gone:
            assert each.finish_reason == "abort"
            assert_as_alone(each)

    @rule(where=st.sampled_from(FAILING))
    def break_the_next_step(self, where):
        self.broken.undo()
        break_next(self.engine, where, self.broken)

    @rule(group=st.integers(0, 1), count=st.integers(1, 8))
    def evict(self, group, count):
        evict(self.engine.schedulers[0].allocator, group % len(self.engine.plan.groups), count)

    @invariant()
    def is_sound(self):
        if hasattr(self, "engine"):
            assert_sound(self.engine)

    def teardown(self):
        self.broken.undo()
        try:
            while self.engine.has_work:
                self.step()
            assert_empty(self.engine)
            assert not self.live
        finally:
            self.patch.undo()


class LongTraces(Traces):
    """The same, for longer."""


Traces.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
LongTraces.TestCase.settings = settings(max_examples=500, stateful_step_count=60, deadline=None)
TestTraces = Traces.TestCase
TestLongTraces = pytest.mark.slow(LongTraces.TestCase)


def send(engine, prompts, params_index=1):
    """Prompts one after the other; how many tokens of each were in the cache."""
    cached = []
    for prompt in prompts:
        sequence = run(engine, prompt, PARAMS[params_index])
        assert_as_alone(sequence)
        cached.append(sequence.num_cached_tokens)
    return cached


@pytest.mark.parametrize(("page_size", "hybrid"), ENGINES)
def test_the_same_prompts_again_and_again(page_size, hybrid, monkeypatch):
    """In every state of the cache; `check_matches` compares each with the brute force."""
    check_matches(monkeypatch)
    engine = make_engine(page_size, hybrid, num_shapes=2 if page_size == 4 else 1)
    narrow(engine, chunk=11, memory=100, prefix_reuse=True)
    allocator = engine.schedulers[0].allocator
    long, short, other = FIRST[:40], FIRST[:26], SECOND[:30]
    forked = FIRST[:24] + SECOND[:9]

    def whole(tokens):
        """Of so many that are cached: those in whole pages."""
        return tokens // page_size * page_size

    assert send(engine, [long] * 5) == [0] + 4 * [whole(39)]  # cold, then warm
    # A beginning: the window's pages before 25 were given back long ago, and are still known.
    assert send(engine, [short, forked] * 4) == [whole(25), whole(24)] + 3 * [whole(25), whole(32)]
    assert send(engine, [other] * 4) == [0] + 3 * [whole(29)]
    assert send(engine, [long] * 4) == 4 * [whole(39)]  # others' prompts in between

    for _ in range(4):  # the windows' pages are gone, those that hold everything are there
        windowed = [g for g, each in enumerate(engine.plan.groups) if each.store.retention]
        for group in windowed:
            evict(allocator, group)
        assert send(engine, [long, long]) == [0 if windowed else whole(39), whole(39)]
    for _ in range(4):  # the other way round
        evict(allocator, len(engine.plan.groups) - 1)
        assert send(engine, [long, long]) == [0, whole(39)]

    hits = []
    for left in range(5, 125, 10):  # half evicted: the longest unused pages go first
        for group in {left // 10 % len(engine.plan.groups), len(engine.plan.groups) - 1}:
            evict(allocator, group, allocator.free_pages[group] - left // page_size)
        hits += send(engine, [long, forked, other, short])
    print(sorted(set(hits)))
    assert len(set(hits)) > 4

    together = [add(engine, prompt, PARAMS[1]) for prompt in [long, short, long, forked] * 4]
    while engine.has_work:
        engine.step()
    for each in together:
        assert_as_alone(each)
    # Whoever wants the prompt's log-probabilities computes it, and others may reuse that.
    assert send(engine, [long, long], params_index=4) == [0, 0]
    assert send(engine, [long]) == [whole(39)]
    assert engine.stats().prefix_hit_tokens > 0
    assert_empty(engine)


@pytest.mark.parametrize(("page_size", "hybrid"), ENGINES)
def test_without_reuse_nothing_is_found(page_size, hybrid):
    engine = make_engine(page_size, hybrid, num_shapes=2 if page_size == 4 else 1)
    narrow(engine, chunk=24, memory=100, prefix_reuse=False)
    assert send(engine, [FIRST[:40]] * 3) == [0, 0, 0]


@pytest.mark.parametrize(("page_size", "hybrid"), ENGINES)
def test_hundreds_of_requests_through_the_least_memory(page_size, hybrid, monkeypatch):
    """A pool of exactly one sequence of the largest length; everybody is let in, many lose it."""
    check_matches(monkeypatch)
    monkeypatch.setattr(PageAllocator, "has_room", lambda *_: True)
    engine = make_engine(page_size, hybrid, num_shapes=2 if page_size == 4 else 1)
    narrow(engine, chunk=8, memory=1, prefix_reuse=page_size != 3)
    before = engine.stats()
    draw, sequences = np.random.default_rng(page_size), []
    for step in count(1):
        if len(sequences) == 100 and not engine.has_work:
            break
        while len(sequences) < 100 and engine.stats().waiting < 4:
            prompt = PROMPTS[draw.integers(len(PROMPTS))]
            sequences.append(add(engine, prompt, PARAMS[draw.integers(len(PARAMS))]))
        with monkeypatch.context() as broken:
            if step % 60 == 0:
                break_next(engine, FAILING[step // 60 % len(FAILING)], broken)
            engine.step()
        assert_sound(engine)
        if step % 50 == 0:
            engine.abort(sequences[-3:])
    for each in sequences:
        assert_as_alone(each)
    assert_empty(engine)
    reasons = {each.finish_reason for each in sequences}
    assert reasons == {"stop", "length", "abort", "error"}
    assert engine.stats().preemptions > before.preemptions
