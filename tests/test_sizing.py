"""Pools of so many bytes, and how many sequences they hold: against trying every count."""

import random
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from jaxattn.cache.pages import PageAllocator
from jaxattn.cache.plan import group_layers
from jaxattn.cache.sizing import capacity, pool_pages, table_width, worst_demand
from jaxattn.models.gemma3.config import CONFIGS
from jaxattn.models.gemma3.model import layer_specs
from tests.engine_checks import least_memory
from tests.test_pages import make_plan

MAX_LEN = 24
plans = st.builds(
    lambda page, windows: make_plan(*((page, window) for window in windows), max_len=MAX_LEN),
    st.integers(1, 5),
    # windows of 1 in pages of 1 hold nothing between two steps: any number of them fits
    st.lists(st.none() | st.integers(2, MAX_LEN - 1), min_size=1, max_size=3, unique=True),
)


def size(plan, num_pages):
    return sum(pages * plan.page_bytes(group) for group, pages in enumerate(num_pages))


def holds(plan, num_pages, number, **limits):
    worst = worst_demand(plan, max_num_seqs=number, **limits)
    return all(1 + need <= have for need, have in zip(worst, num_pages, strict=True))


@settings(max_examples=200, deadline=None)
@given(
    plans,
    st.floats(1, 12),
    st.integers(1, MAX_LEN),
    st.integers(1, MAX_LEN),
    st.integers(1, 9),
    st.none() | st.integers(1, 9),
)
def test_pools_against_trying_every_count(
    plan, factor, max_len, typical_len, step_tokens, max_num_seqs
):
    assume(typical_len <= max_len)
    memory = int(factor * least_memory(plan, max_len=max_len, step_tokens=step_tokens))
    num_pages = pool_pages(
        plan,
        memory,
        max_len=max_len,
        typical_len=typical_len,
        step_tokens=step_tokens,
        max_num_seqs=max_num_seqs,
    )
    assert size(plan, num_pages) <= memory
    assert holds(plan, num_pages, 1, max_len=max_len, step_tokens=step_tokens)

    def pages(number, length):
        worst = worst_demand(plan, max_num_seqs=number, max_len=length, step_tokens=step_tokens)
        return [1 + need for need in worst]

    expected = one = pages(1, max_len)
    for number in count(1):
        more = list(map(max, pages(number, typical_len), one))
        if size(plan, more) > memory or number > (max_num_seqs or number):
            break
        expected = more
        assert holds(plan, num_pages, number, max_len=typical_len, step_tokens=step_tokens)
    # What is left over goes, page by page, to the groups that keep everything, as far as that is
    # of use, then to all.
    everything = [g for g, each in enumerate(plan.groups) if each.store.retention is None]
    useful = pages(max_num_seqs, max_len) if max_num_seqs else [memory] * len(plan.groups)
    while any(expected[g] < useful[g] for g in everything):
        more = [each + (g in everything) for g, each in enumerate(expected)]
        if size(plan, more) > memory:
            break
        expected = more
    while size(plan, more := [each + 1 for each in expected]) <= memory:
        expected = more
    assert num_pages == tuple(expected)


@settings(max_examples=100, deadline=None)
@given(plans, st.floats(1, 12), st.integers(1, MAX_LEN), st.integers(1, 9))
def test_capacity_against_trying_every_count(plan, factor, length, step_tokens):
    memory = int(factor * least_memory(plan, max_len=MAX_LEN, step_tokens=step_tokens))
    num_pages = pool_pages(
        plan, memory, max_len=MAX_LEN, typical_len=MAX_LEN, step_tokens=step_tokens
    )
    limits = dict(max_len=length, step_tokens=step_tokens)
    number = next(n for n in count(1) if not holds(plan, num_pages, n, **limits)) - 1
    assert capacity(plan, num_pages, length=length, step_tokens=step_tokens) == number >= 1


@settings(max_examples=60, deadline=None)
@given(plans, st.floats(1, 6), st.integers(1, MAX_LEN), st.integers(1, 9), st.integers(0, 2**32))
def test_as_many_as_the_capacity_never_run_dry(plan, factor, length, step_tokens, seed):
    memory = int(factor * least_memory(plan, max_len=MAX_LEN, step_tokens=step_tokens))
    num_pages = pool_pages(
        plan, memory, max_len=MAX_LEN, typical_len=length, step_tokens=step_tokens
    )
    number = capacity(plan, num_pages, length=length, step_tokens=step_tokens)
    allocator, draw = PageAllocator(plan, num_pages), random.Random(seed)
    lengths = dict.fromkeys(range(number), 0)
    for seq_id in lengths:
        allocator.admit(seq_id)
    while any(each < length for each in lengths.values()):
        budget = step_tokens
        for seq_id in draw.sample(sorted(lengths), number):
            tokens = draw.randint(0, min(budget, length - lengths[seq_id]))
            budget -= tokens
            lengths[seq_id] += tokens
            assert allocator.grow({seq_id: lengths[seq_id]})
        for seq_id, settled in lengths.items():
            allocator.settle(seq_id, settled)
    allocator.check()


def test_the_least_memory_to_the_byte():
    plan = make_plan((4, 6), (4, None), max_len=40)
    limits = dict(max_len=40, typical_len=40, step_tokens=8)
    # 40 tokens are 10 pages; a window of 6 and 8 tokens in flight see at most 4; two null pages
    page = 4 * 128 * 4  # 4 tokens, K and V in 128 lanes together, float32
    assert plan.page_bytes(0) == plan.page_bytes(1) == page
    least = (4 + 1 + 10 + 1) * page
    assert least_memory(plan, max_len=40, step_tokens=8) == least == 32768
    assert pool_pages(plan, least, **limits) == (5, 11)
    assert pool_pages(plan, least + page - 1, **limits) == (5, 11)
    assert pool_pages(plan, least + page, **limits) == (5, 12)
    with pytest.raises(
        ValueError,
        match=r"memory=32767 bytes of cache are too few: one sequence of 40 tokens takes 32768 "
        r"\(0.03125 MiB\); give more, or a smaller max_model_len",
    ):
        pool_pages(plan, least - 1, **limits)


def test_short_typical_sequences_move_memory_to_the_windows():
    plan = make_plan((4, 6), (4, None), max_len=40)
    limits = dict(max_len=40, step_tokens=8)
    long = pool_pages(plan, 160_000, typical_len=40, **limits)
    short = pool_pages(plan, 160_000, typical_len=6, **limits)
    assert long[0] < short[0] and short[1] < long[1]
    assert capacity(plan, short, length=6, step_tokens=8) > capacity(
        plan, long, length=6, step_tokens=8
    )
    assert capacity(plan, short, length=40, step_tokens=8) >= 1


def test_a_sequence_takes_a_page_at_least():
    """A window of 1 in pages of 1 holds nothing between two steps: no count would be too many."""
    plan = make_plan((1, 1), max_len=40)
    num_pages = pool_pages(plan, 50 * plan.page_bytes(0), max_len=40, typical_len=40, step_tokens=8)
    assert num_pages == (50,)
    assert capacity(plan, num_pages, length=40, step_tokens=8) == 49


def test_pools_that_hold_nobody():
    plan = make_plan((4, 6), (4, None), max_len=40)
    assert capacity(plan, (5, 10), length=40, step_tokens=8) == 0
    with pytest.raises(ValueError, match="max_len=41 is longer than the plan's max_len=40"):
        capacity(plan, (5, 11), length=41, step_tokens=8)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("hybrid", [True, False])
def test_published_sizes_fill_their_memory(name, hybrid):
    specs = layer_specs(CONFIGS[name], page_size=16, kv_dtype="bfloat16")
    plan = group_layers(specs, hybrid=hybrid, max_len=32768)
    memory = 64 * 2**30
    num_pages = pool_pages(plan, memory, max_len=32768, typical_len=8192, step_tokens=2048)
    together = sum(plan.page_bytes(group) for group in range(len(plan.groups)))
    assert memory - together < size(plan, num_pages) <= memory
    number = capacity(plan, num_pages, length=8192, step_tokens=2048)
    assert holds(plan, num_pages, number, max_len=8192, step_tokens=2048)
    assert not holds(plan, num_pages, number + 1, max_len=8192, step_tokens=2048)
    assert table_width(plan, 0, max_len=32768, step_tokens=2048) < num_pages[0]
