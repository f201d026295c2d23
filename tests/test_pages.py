"""The page allocator against a shadow pool that knows what every next query reads."""

from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxattn.cache.pages import PageAllocator
from jaxattn.cache.plan import group_layers
from jaxattn.cache.sizing import demand, live_pages, table_width, worst_demand
from jaxattn.spec import LayerSpec, MaskSpec, StoreSpec


def make_plan(*layers, max_len):
    """A plan with one layer per (page_size, window)."""
    return group_layers(
        [
            LayerSpec(
                name=f"layer{index}",
                num_q_heads=1,
                scale=1.0,
                mask=MaskSpec(sliding_window=window),
                store=StoreSpec(page_size=page, num_kv_heads=1, head_dim=8, dtype="float32"),
            )
            for index, (page, window) in enumerate(layers)
        ],
        max_len=max_len,
    )


# Windows that page sizes do not divide, a window of one, one shorter than a page, and no window.
MIXED = make_plan((4, 6), (3, None), (5, 1), (4, 2), (4, 16), max_len=40)


def store(page, retention):
    return StoreSpec(
        page_size=page, num_kv_heads=1, head_dim=8, dtype="float32", retention=retention
    )


@pytest.mark.parametrize(
    ("page", "window", "settled", "length", "expected"),
    [
        (4, None, 0, 0, range(0, 0)),
        (4, None, 9, 10, range(0, 3)),
        (4, 5, 9, 11, range(1, 3)),  # the drawing in the module: sees keys 5..9
        (4, 5, 7, 11, range(0, 3)),  # sees key 3, the last of page 0
        (4, 5, 8, 11, range(1, 3)),  # sees key 4, the first of page 1
        (4, 5, 0, 40, range(0, 10)),  # nothing settled, nothing freed
        (4, 1, 8, 8, range(2, 2)),  # the next query sees only itself
        (4, 1, 8, 9, range(2, 3)),
    ],
)
def test_live_pages(page, window, settled, length, expected):
    live = live_pages(store(page, window), settled, length)
    assert (live.start, live.stop) == (expected.start, expected.stop)


@settings(deadline=None)
@given(st.integers(1, 9), st.none() | st.integers(1, 30), st.integers(0, 60), st.integers(0, 60))
def test_live_pages_hold_what_is_seen_or_in_flight_and_the_next_token(page, window, a, b):
    settled, length = sorted((a, b))
    slots = range(-(-length // page) * page)  # the last page has room for what comes next
    live = {slot // page for slot in slots if window is None or slot > settled - window}
    assert set(live_pages(store(page, window), settled, length)) == live


@pytest.mark.parametrize(("settled", "length"), [(-1, 4), (5, 4)])
def test_live_pages_of_impossible_lengths(settled, length):
    with pytest.raises(ValueError, match=rf"settled={settled}, length=4: expected 0 <= settled"):
        live_pages(store(4, 5), settled, length)


def test_demand_adds_up_a_batch():
    assert demand(MIXED, []) == (0, 0, 0, 0, 0)
    assert demand(MIXED, iter([(9, 11), (0, 4)])) == (2 + 1, 4 + 2, 2 + 1, 1 + 1, 3 + 1)


def most_pages(store, *, max_num_seqs, max_len, step_tokens):
    """The largest demand, by trying every batch."""
    best = [0] * (step_tokens + 1)  # by tokens in flight
    for settled in range(max_len + 1):
        for length in range(settled, min(max_len, settled + step_tokens) + 1):
            pages = len(live_pages(store, settled, length))
            best[length - settled] = max(best[length - settled], pages)
    batches = product(range(step_tokens + 1), repeat=max_num_seqs)
    return max(sum(best[c] for c in batch) for batch in batches if sum(batch) <= step_tokens)


@pytest.mark.parametrize("page", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 4, 7, None])
def test_worst_demand_is_the_maximum_over_all_batches(page, window):
    for max_len, max_num_seqs, step_tokens in product((1, 6, 11), (1, 2, 3), (1, 2, 5, 8)):
        plan = make_plan((page, window), max_len=max_len)
        stored = plan.groups[0].store
        limits = dict(max_len=max_len, step_tokens=step_tokens)
        most = most_pages(stored, max_num_seqs=max_num_seqs, **limits)
        assert worst_demand(plan, max_num_seqs=max_num_seqs, **limits) == (most,), limits
        assert table_width(plan, 0, **limits) == most_pages(stored, max_num_seqs=1, **limits)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 40), st.integers(1, 60))
def test_no_batch_demands_more_than_the_worst(data, max_num_seqs, max_len, step_tokens):
    extents, budget = [], step_tokens
    for _ in range(max_num_seqs):
        length = data.draw(st.integers(0, max_len))
        in_flight = data.draw(st.integers(0, min(length, budget)))
        budget -= in_flight
        extents.append((length - in_flight, length))
    worst = worst_demand(MIXED, max_num_seqs=max_num_seqs, max_len=max_len, step_tokens=step_tokens)
    assert all(np.less_equal(demand(MIXED, extents), worst))


def test_tokens_in_flight_are_charged_once_for_the_batch():
    plan = make_plan((16, 512), max_len=8192)
    limits = dict(max_len=8192, step_tokens=2048)
    one = worst_demand(plan, max_num_seqs=1, **limits)[0]
    assert one == 33 + 1 + (2048 - 3) // 16
    # at rest 33 pages each; 3 tokens in flight buy each a 34th, the other 1856 buy one per 16
    assert worst_demand(plan, max_num_seqs=64, **limits)[0] == 64 * 34 + (2048 - 64 * 3) // 16
    assert table_width(plan, 0, **limits) == one


def test_limits_that_were_not_planned():
    with pytest.raises(ValueError, match=r"max_len=41 is longer than the plan's max_len=40"):
        worst_demand(MIXED, max_num_seqs=1, max_len=41, step_tokens=1)
    with pytest.raises(ValueError, match="max_num_seqs=0: expected at least 1"):
        worst_demand(MIXED, max_num_seqs=0, max_len=40, step_tokens=1)
    with pytest.raises(ValueError, match="step_tokens=0: expected at least 1"):
        table_width(MIXED, 0, max_len=40, step_tokens=0)


class Schedules(RuleBasedStateMachine):
    """Random schedules on a tight pool. Each slot of the pool remembers who wrote it last."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(MIXED, [9, 12, 5, 6, 14])
        self.extents = {}  # of the shadow: seq_id -> (settled, length)
        self.births = {}  # an id may return: what its earlier life wrote is not its own
        self.pools = [
            np.full((count, group.store.page_size, 2), -1)
            for count, group in zip(self.allocator.num_pages, MIXED.groups, strict=True)
        ]

    def slots(self, group, seq_id, tokens):
        """Where the page table puts tokens of a sequence: physical page and offset."""
        page = MIXED.groups[group].store.page_size
        table, first = self.allocator.page_table(group, [seq_id], rows=1, width=14)
        columns = tokens // page - first[0]
        assert (columns >= 0).all()
        return table[0, columns], tokens % page

    def marks(self, seq_id, tokens):
        return np.stack([np.full_like(tokens, self.births[seq_id]), tokens], axis=-1)

    def state(self):
        tables = [
            self.allocator.page_table(group, list(self.extents), rows=4, width=14)
            for group in range(len(MIXED.groups))
        ]
        return self.allocator.free_pages, [[part.tolist() for part in table] for table in tables]

    def grow(self, seq_id, length):
        settled, before = self.extents[seq_id]
        wanted = demand(MIXED, [(settled, length)])
        owned = demand(MIXED, [(settled, before)])
        fits = all(np.subtract(wanted, owned) <= self.allocator.free_pages)
        state = self.state()
        assert self.allocator.grow({seq_id: length}) is fits
        if not fits:
            assert self.state() == state
            return
        self.extents[seq_id] = (settled, length)
        tokens = np.arange(before, length)
        for group, pool in enumerate(self.pools):
            pool[self.slots(group, seq_id, tokens)] = self.marks(seq_id, tokens)

    @rule(seq_id=st.integers(0, 3))
    def admit(self, seq_id):
        if seq_id in self.extents:
            with pytest.raises(ValueError, match=f"seq_id={seq_id} is already admitted"):
                self.allocator.admit(seq_id)
            return
        self.allocator.admit(seq_id)
        self.extents[seq_id] = (0, 0)
        self.births[seq_id] = 1 + max(self.births.values(), default=0)

    @precondition(lambda self: self.extents)
    @rule(data=st.data(), tokens=st.integers(0, 12))
    def chunk(self, data, tokens):
        seq_id = data.draw(st.sampled_from(sorted(self.extents)))
        self.grow(seq_id, min(40, self.extents[seq_id][1] + tokens))

    @precondition(lambda self: self.extents)
    @rule()
    def decode_all(self):
        for seq_id, (_, length) in list(self.extents.items()):
            self.grow(seq_id, min(40, length + 1))
            self.settle_to(seq_id, self.extents[seq_id][1])

    def settle_to(self, seq_id, settled):
        self.allocator.settle(seq_id, settled)
        self.extents[seq_id] = (settled, self.extents[seq_id][1])

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def settle(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.extents)))
        self.settle_to(seq_id, data.draw(st.integers(*self.extents[seq_id])))

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def release(self, data):
        """Finish, or preempt with tokens in flight."""
        seq_id = data.draw(st.sampled_from(sorted(self.extents)))
        self.allocator.release(seq_id)
        del self.extents[seq_id]

    @invariant()
    def holds_its_invariants(self):
        self.allocator.check()
        owned = np.subtract(self.allocator.num_pages, 1) - self.allocator.free_pages
        assert tuple(owned) == demand(MIXED, self.extents.values())

    @invariant()
    def every_next_query_reads_what_its_sequence_wrote(self):
        for seq_id, (settled, length) in self.extents.items():
            for group, pool in enumerate(self.pools):
                window = MIXED.groups[group].store.retention
                seen = 0 if window is None else max(0, settled - window + 1)
                tokens = np.arange(seen, length)
                read = pool[self.slots(group, seq_id, tokens)]
                np.testing.assert_array_equal(read, self.marks(seq_id, tokens))

    @invariant()
    def the_null_page_is_never_written(self):
        assert all((pool[0] == -1).all() for pool in self.pools)


Schedules.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedules = Schedules.TestCase


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.randoms(use_true_random=False))
def test_pools_of_the_worst_demand_never_run_dry(max_num_seqs, step_tokens, random):
    limits = dict(max_num_seqs=max_num_seqs, max_len=40, step_tokens=step_tokens)
    allocator = PageAllocator(MIXED, [pages + 1 for pages in worst_demand(MIXED, **limits)])
    widths = [table_width(MIXED, g, max_len=40, step_tokens=step_tokens) for g in range(5)]
    lengths = dict.fromkeys(range(max_num_seqs), 0)
    for seq_id in lengths:
        allocator.admit(seq_id)
    for _ in range(30):
        budget = step_tokens
        for seq_id, length in lengths.items():
            tokens = random.randint(0, min(budget, 40 - length))
            budget -= tokens
            lengths[seq_id] = length + tokens
            assert allocator.grow({seq_id: length + tokens})
        for group, width in enumerate(widths):
            allocator.page_table(group, list(lengths), rows=max_num_seqs, width=width)
        for seq_id, length in lengths.items():
            allocator.settle(seq_id, length)
        allocator.check()


def test_a_step_by_hand():
    plan = make_plan((4, 5), (4, None), max_len=32)
    allocator = PageAllocator(plan, [5, 6])
    allocator.admit("a")
    allocator.admit("b")
    assert allocator.grow({"a": 9}) and allocator.grow({"b": 3})
    assert allocator.free_pages == (0, 1)
    assert not allocator.grow({"b": 5})  # group 1 has a page, group 0 does not: neither is taken
    assert allocator.free_pages == (0, 1)
    allocator.settle("a", 7)  # the query at 7 sees key 3, on page 0
    assert allocator.free_pages == (0, 1)
    allocator.settle("a", 8)
    assert allocator.free_pages == (1, 1)
    assert allocator.grow({"b": 5})

    table, first_page = allocator.page_table(0, ["b", "a"], rows=3, width=4)
    assert table.dtype == first_page.dtype == np.int32
    np.testing.assert_array_equal(table, [[4, 1, 0, 0], [2, 3, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(first_page, [0, 1, 0])
    table, first_page = allocator.page_table(1, ["b", "a"], rows=2, width=3)
    np.testing.assert_array_equal(table, [[4, 5, 0], [1, 2, 3]])
    np.testing.assert_array_equal(first_page, [0, 0])

    allocator.release("a")
    allocator.release("b")
    assert allocator.free_pages == (4, 5)
    allocator.check()


def test_callers_errors():
    plan = make_plan((4, 5), (4, None), max_len=32)
    with pytest.raises(ValueError, match=r"num_pages=\[5\]: the plan has 2 groups"):
        PageAllocator(plan, [5])
    with pytest.raises(ValueError, match=r"num_pages=\[5, 1\]: a group needs at least 2"):
        PageAllocator(plan, [5, 1])
    allocator = PageAllocator(plan, [9, 9])
    for call in (allocator.release, lambda seq_id: allocator.grow({seq_id: 1})):
        with pytest.raises(ValueError, match="seq_id='a' is not admitted"):
            call("a")
    with pytest.raises(ValueError, match="seq_id='a' is not admitted"):
        allocator.page_table(0, ["a"], rows=1, width=1)
    allocator.admit("a")
    with pytest.raises(ValueError, match="seq_id='a' is already admitted"):
        allocator.admit("a")
    assert allocator.grow({"a": 9})
    with pytest.raises(ValueError, match="has 9 tokens: length=8 would shrink it"):
        allocator.grow({"a": 8})
    with pytest.raises(ValueError, match="max_len=33 is longer than the plan's max_len=32"):
        allocator.grow({"a": 33})
    with pytest.raises(ValueError, match="0 tokens settled and 9 placed: cannot settle length=10"):
        allocator.settle("a", 10)
    allocator.settle("a", 6)
    with pytest.raises(ValueError, match="6 tokens settled and 9 placed: cannot settle length=5"):
        allocator.settle("a", 5)
    with pytest.raises(ValueError, match="width=2 is too small: seq_id='a' has 3 live pages"):
        allocator.page_table(1, ["a"], rows=1, width=2)
    with pytest.raises(ValueError, match="rows=0 are too few for 1 sequences"):
        allocator.page_table(1, ["a"], rows=0, width=3)
    allocator.check()


@pytest.mark.parametrize("damage", ["leak", "two owners", "null page", "extra page"])
def test_check_sees_damage(damage):
    allocator = PageAllocator(make_plan((4, 5), max_len=32), [9])
    for seq_id in "ab":
        allocator.admit(seq_id)
        assert allocator.grow({seq_id: 8})
    allocator.check()
    first, second = (allocator._sequences[seq_id].pages[0] for seq_id in "ab")
    match damage:
        case "leak":
            allocator._pools[0]._free.pop()
        case "two owners":
            first[0] = second[0]
        case "null page":
            first[0] = 0
        case "extra page":
            first.append(allocator._pools[0]._free.pop())
    with pytest.raises(AssertionError):
        allocator.check()
