"""The scheduler without a model: every step adds a token, every token asks for pages."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from jaxattn.cache.pages import PageAllocator
from jaxattn.cache.plan import group_layers
from jaxattn.cache.sizing import worst_demand
from jaxattn.engine.engine import token_buckets
from jaxattn.engine.images import Image, PlacedImage
from jaxattn.engine.scheduler import Scheduler
from jaxattn.engine.sequence import Sequence
from jaxattn.models.gemma3.model import layer_specs
from jaxattn.sampling import SamplingParams
from tests import tiny_model
from tests.tiny_model import PlainText

MAX_LEN = 60
PLAN = group_layers(
    layer_specs(tiny_model.config(), page_size=3, kv_dtype="float32"), max_len=MAX_LEN
)


def make_scheduler(max_num_seqs=3, max_num_batched_tokens=16):
    demand = worst_demand(
        PLAN, max_num_seqs=max_num_seqs, max_len=MAX_LEN, step_tokens=max_num_batched_tokens
    )
    return Scheduler(
        PageAllocator(PLAN, [pages + 1 for pages in demand]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        buckets=token_buckets(max_num_seqs, max_num_batched_tokens),
    )


def make_sequence(number, prompt_len, max_tokens, images=()):
    return Sequence(
        number,
        [1] * prompt_len,
        SamplingParams(max_tokens=max_tokens),
        prompt_index=number,
        index=0,
        seed=0,
        max_len=MAX_LEN,
        eos_ids=(),
        stream=PlainText(),
        images=images,
    )


def run_step(scheduler):
    """One step as the engine does it; `(id, tokens, samples)` of every share."""
    step = scheduler.schedule()
    shares = [(each.sequence.id, each.num_tokens, each.samples) for each in step]
    scheduler.allocator.check()
    scheduler.settle(step)
    for each in step:
        if each.samples:
            each.sequence.add_token(9)
        if each.sequence.finish_reason is not None:
            scheduler.finish(each.sequence)
    scheduler.allocator.check()
    return shares


def is_empty(scheduler):
    allocator = scheduler.allocator
    free = tuple(pages - 1 for pages in allocator.num_pages)
    return not scheduler.running and not scheduler.waiting and allocator.free_pages == free


@given(
    st.lists(st.tuples(st.integers(1, 59), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(4, 40),
)
@settings(max_examples=150, deadline=None)
def test_everything_finishes_within_the_budget(requests, max_num_seqs, budget):
    scheduler = make_scheduler(max_num_seqs, budget)
    sequences = [make_sequence(number, *each) for number, each in enumerate(requests)]
    for each in sequences:
        scheduler.add(each)
    admitted = []
    while scheduler.running or scheduler.waiting:
        pending = {each.id: each.num_pending for each in scheduler.running}
        shares = run_step(scheduler)
        assert shares, "a step that does nothing"
        tokens = [count for _, count, _ in shares]
        assert 1 <= sum(tokens) <= budget and min(tokens) > 0
        assert len(shares) <= max_num_seqs
        assert tokens == sorted(tokens, key=lambda count: count > 1)  # single tokens first
        scheduled = {number for number, _, _ in shares}
        decoding = {number for number, count in pending.items() if count == 1}
        assert decoding <= scheduled, "a decoding sequence had to wait"
        admitted += [number for number in sorted(scheduled) if number not in admitted]
    # First come, first served; prompts of one token go along with the decoding ones.
    long = [number for number in admitted if requests[number][0] > 1]
    assert long == sorted(long)
    for each, (prompt_len, max_tokens) in zip(sequences, requests, strict=True):
        assert len(each.new_tokens) == min(max_tokens, MAX_LEN - prompt_len)
        assert each.finish_reason == "length"
    assert is_empty(scheduler)


IMAGE = Image(np.zeros((1, 1, 3), np.float32), 300)
IMAGE_TOKENS = 7


def image_places(gaps):
    """Images after so many tokens each, and a token of text at the end."""
    places, position = [], 0
    for gap in gaps:
        position += gap
        places.append(PlacedImage(position, position + IMAGE_TOKENS, IMAGE))
        position += IMAGE_TOKENS
    return places, position + 1


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 9), max_size=3), st.integers(1, 9)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 4),
    st.integers(0, 20),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_images_are_whole_and_nobody_waits_for_ever(requests, max_num_seqs, more, decode_long):
    """With the least budget that an engine allows, or `more`."""
    scheduler = make_scheduler(max_num_seqs, IMAGE_TOKENS + max_num_seqs - 1 + more)
    sequences = []
    for number, (gaps, max_tokens) in enumerate(requests):
        places, length = image_places(gaps)
        tokens = 40 if decode_long and number % 2 else max_tokens
        sequences.append(make_sequence(number, length, tokens, places))
        scheduler.add(sequences[-1])
    while scheduler.running or scheduler.waiting:
        oldest = next((each for each in scheduler.running if each.num_pending > 1), None)
        step = scheduler.schedule()
        assert step, "a step that does nothing"
        assert oldest is None or oldest in [share.sequence for share in step], "the oldest waits"
        assert sum(share.num_tokens for share in step) <= scheduler.max_num_batched_tokens
        for share in step:
            end = share.start + share.num_tokens
            for each in share.sequence.images:
                assert end <= each.start or each.end <= end or share.start >= each.end
            computed = [each for each in share.sequence.images if share.start < each.end <= end]
            assert share.images == computed
        scheduler.settle(step)
        for share in step:
            if share.samples:
                share.sequence.add_token(9)
            if share.sequence.finish_reason is not None:
                scheduler.finish(share.sequence)
    assert all(each.finish_reason == "length" for each in sequences)
    assert is_empty(scheduler)


def test_a_long_prompt_comes_in_chunks_and_samples_once():
    scheduler = make_scheduler(1, 16)
    scheduler.add(make_sequence(0, 50, 2))
    shares = [run_step(scheduler) for _ in range(5)]
    assert sum(share[0][1] for share in shares[:4]) == 50
    assert [share[0][2] for share in shares] == [False, False, False, True, True]
    assert is_empty(scheduler)


def test_decoding_goes_on_while_a_prompt_is_computed():
    scheduler = make_scheduler(3, 8)
    scheduler.add(make_sequence(0, 4, 50))
    run_step(scheduler)
    scheduler.add(make_sequence(1, 30, 2))
    step = run_step(scheduler)
    assert step[0] == (0, 1, True)
    assert step[1][0] == 1 and 1 <= step[1][1] <= 7 and not step[1][2]


def test_more_prompts_than_places_wait_their_turn():
    scheduler = make_scheduler(2, 16)
    for number in range(5):
        scheduler.add(make_sequence(number, 3, 4))
    run_step(scheduler)
    assert [each.id for each in scheduler.running] == [0, 1]
    assert [each.id for each in scheduler.waiting] == [2, 3, 4]


def test_a_prompt_at_a_bucket_is_not_padded():
    """20 tokens would leave a step of 64 mostly empty: 16 first."""
    scheduler = Scheduler(
        make_scheduler(1, 64).allocator, max_num_seqs=1, max_num_batched_tokens=64, buckets=(16, 64)
    )
    scheduler.add(make_sequence(0, 20, 1))
    assert run_step(scheduler) == [(0, 16, False)]
    assert run_step(scheduler) == [(0, 4, True)]


def test_abort_frees_running_and_waiting():
    scheduler = make_scheduler(2, 16)
    sequences = [make_sequence(number, 20, 9) for number in range(4)]
    for each in sequences:
        scheduler.add(each)
    run_step(scheduler)
    assert scheduler.allocator.free_pages != tuple(n - 1 for n in scheduler.allocator.num_pages)
    for each in sequences:
        scheduler.finish(each)
        scheduler.finish(each)  # again changes nothing
        scheduler.allocator.check()
    assert is_empty(scheduler)


def test_a_pool_too_small_for_one_sequence_schedules_nothing():
    scheduler = make_scheduler(1, 16)
    scheduler.allocator = PageAllocator(PLAN, [2] * len(PLAN.groups))
    scheduler.add(make_sequence(0, 20, 9))
    assert scheduler.schedule() == []
    scheduler.allocator.check()
    assert scheduler.allocator.free_pages == (1, 1) and len(scheduler.waiting) == 1
