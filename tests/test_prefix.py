"""The prefix tree and the page pool: against brute force, and against a shadow of every page."""

from collections import Counter
from copy import deepcopy

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxattn.cache.pages import PageAllocator
from jaxattn.cache.pool import PagePool
from jaxattn.cache.prefix import Block, find_prefix
from jaxattn.spec import StoreSpec
from tests.engine_checks import (
    assert_allocator,
    beginning,
    blocks,
    brute_match,
    evict,
    longest_known,
)
from tests.shadow_runner import hashes
from tests.test_pages import make_plan


def store(page, retention):
    return StoreSpec(
        page_size=page, num_kv_heads=1, head_dim=8, dtype="float32", retention=retention
    )


class Pools(RuleBasedStateMachine):
    """A pool beside lists that say who is to be taken next."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(0, 8)
        self.root = Block(None, (), 1)
        self.free = list(range(1, 8))  # the next one first
        self.kept = []  # the longest unused one first
        self.held = Counter()
        self.known = {}  # page -> block
        self.births = 0

    @rule(count=st.integers(0, 4))
    def take(self, count):
        order = self.free + self.kept
        assert self.pool.available == len(order)
        expected = order[: min(count, len(order))]
        assert self.pool.take(len(expected)) == expected
        self.free = [page for page in self.free if page not in expected]
        self.kept = [page for page in self.kept if page not in expected]
        self.held.update(expected)
        for page in expected:
            block = self.known.pop(page, None)
            assert block is None or block.pages == [None]

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def hold(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.known)), max_size=3, unique=True))
        assert self.pool.idle(pages) == sum(not self.held[page] for page in pages)
        self.pool.hold(pages)
        self.held.update(pages)
        self.kept = [page for page in self.kept if page not in pages]

    @precondition(lambda self: +self.held)
    @rule(data=st.data())
    def drop(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(+self.held)), max_size=4, unique=True))
        self.pool.drop(pages)
        self.held.subtract(pages)
        idle = [page for page in pages if not self.held[page]]
        self.free = [page for page in idle if page not in self.known] + self.free
        self.kept += [page for page in idle if page in self.known]

    @precondition(lambda self: +self.held)
    @rule(data=st.data())
    def keep(self, data):
        page = data.draw(st.sampled_from(sorted(+self.held)))
        self.births += 1
        block = self.root.child((self.births,))
        self.pool.keep(page, block)
        assert block.pages == [None if page in self.known else page]
        self.known.setdefault(page, block)
        block.prune()

    @precondition(lambda self: self.known and +self.held)
    @rule(data=st.data())
    def keep_what_is_known(self, data):
        """Two sequences computed the same tokens: the first one's page stays the one."""
        block = data.draw(st.sampled_from(list(self.known.values())))
        before = block.pages.copy()
        self.pool.keep(data.draw(st.sampled_from(sorted(+self.held))), block)
        assert block.pages == before

    @invariant()
    def holds_its_invariants(self):
        self.pool.check(list(self.held.elements()))
        assert {id(block) for block in self.root.children.values()} == {
            id(block) for block in self.known.values()
        }


Pools.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPools = Pools.TestCase


@pytest.mark.parametrize("damage", ["leak", "twice", "null page", "holders", "block", "orphan"])
def test_check_of_a_pool_sees_damage(damage):
    pool, root = PagePool(0, 6), Block(None, (), 1)
    first, second = pool.take(2)
    for page in (first, second):
        pool.keep(page, root.child((page,)))
    pool.drop([first])
    pool.check([second])
    match damage:
        case "leak":
            pool._free.pop()
        case "twice":
            pool._free.append(first)
        case "null page":
            pool._free.append(0)
        case "holders":
            pool._holders[second] = 2
        case "block":
            pool._blocks[second].pages[0] = first
        case "orphan":
            del root.children[first,]
    with pytest.raises(AssertionError):
        pool.check([second])


def random_tree(random, page_size, num_groups, texts):
    """A tree of some texts' blocks, where each group has lost some of its pages."""
    root, pages = Block(None, (), num_groups), iter(range(1, 10_000))
    presence = random.choice([0.5, 0.9, 1.0])
    for text in texts:
        block = root
        for start in range(0, len(text) - page_size + 1, page_size):
            block = block.child(tuple(text[start : start + page_size]))
            for group in range(num_groups):
                if block.pages[group] is None and random.random() < presence:
                    block.pages[group] = next(pages)
    return root


@settings(max_examples=400, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 4),
    # a window of 1 needs no page at all: one of the others must say what is known
    st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3).filter(lambda r: set(r) != {1}),
)
def test_find_prefix_against_brute_force(random, page_size, retentions):
    stores = [store(page_size, each) for each in retentions]
    stem = random.choices((1, 2), k=20)
    texts = [
        stem[: random.randint(0, 20)] + random.choices((1, 2), k=random.randint(0, 8))
        for _ in range(4)
    ]
    root = random_tree(random, page_size, len(stores), texts)
    by_beginning = {beginning(block): block for block in blocks(root)}
    for text in [*texts, stem, [], stem + stem]:
        found = find_prefix(root, stores, text)
        assert found.num_tokens == brute_match(root, stores, text)
        assert found.num_tokens < max(1, len(text))
        assert found.block is by_beginning[tuple(text[: found.num_tokens])]
        for group, retention in enumerate(retentions):
            seen = sorted(
                {
                    key // page_size
                    for key in range(found.num_tokens)
                    if retention is None or key > found.num_tokens - retention
                }
            )
            path = [by_beginning[tuple(text[: (page + 1) * page_size])] for page in seen]
            assert found.pages[group] == [block.pages[group] for block in path]


@pytest.mark.parametrize(
    ("window", "lost", "expected"),
    [
        (None, set(), 12),
        (None, {0}, 0),
        (None, {2}, 8),
        (1, {0, 1, 2}, 12),  # the next query sees only itself: no page is needed
        (2, {0, 1}, 12),  # it sees one key before it, the last of block 2
        (5, {0, 1}, 12),  # cdiv(5 - 1, 4) = 1 block
        (6, {0, 1}, 0),  # cdiv(6 - 1, 4) = 2 blocks
        (6, {0}, 12),
        (6, {2}, 8),
        (9, {0}, 12),
        (10, {0}, 0),
    ],
)
def test_what_a_window_needs_of_a_prefix(window, lost, expected):
    root = block = Block(None, (), 1)
    tokens = list(range(13))
    for index in range(3):
        block = block.child(tuple(tokens[4 * index : 4 * index + 4]))
        block.pages[0] = None if index in lost else index + 1
    found = find_prefix(root, [store(4, window)], tokens)
    assert found.num_tokens == expected == brute_match(root, [store(4, window)], tokens)
    assert find_prefix(root, [store(4, window)], tokens[:12]).num_tokens < 12  # one token is left


WINDOWS = (1, 2, 7, None)  # of one token, less than a page, more than two pages, none
MAX_LEN = 30
PLAN = make_plan(*((3, window) for window in WINDOWS), max_len=MAX_LEN)


class Sharing(RuleBasedStateMachine):
    """Sequences that begin alike on a tight pool; every page remembers its keys' histories."""

    stem = [1, 2, 1, 1, 2, 2] * 5

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(PLAN, [7, 8, 12, 19], prefix_reuse=True)
        self.texts = {}  # of the sequences
        self.extents = {}  # (settled, length)
        self.known = [{} for _ in WINDOWS]  # beginning -> page, of each group
        self.pools = [np.zeros((count, 3), np.uint64) for count in self.allocator.num_pages]

    def pages(self, group, seq_id, blocks):
        """The physical pages of some logical ones."""
        table, first = self.allocator.page_table(group, [seq_id], rows=1, width=20)
        columns = np.asarray(blocks, int) - first[0]
        assert (columns >= 0).all()
        return table[0, columns]

    @rule(seq_id=st.integers(0, 3), fork=st.integers(0, 24), tail=st.integers(1, 2))
    def admit(self, seq_id, fork, tail):
        if seq_id in self.texts:
            return
        text = self.stem[:fork] + [tail] * (MAX_LEN - fork)
        prompt = text[: fork + 2]
        match = self.allocator.match(prompt)
        assert match.num_tokens == longest_known(self.known, self.allocator._stores, prompt)
        self.allocator.admit(seq_id, match)
        self.texts[seq_id], self.extents[seq_id] = text, (match.num_tokens, match.num_tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.integers(1, 9))
    def grow(self, data, count):
        seq_id = data.draw(st.sampled_from(sorted(self.texts)))
        settled, before = self.extents[seq_id]
        length = min(MAX_LEN, before + count)
        held = [self.held(group) for group in range(len(WINDOWS))]
        if not self.allocator.grow({seq_id: length}):
            return
        self.extents[seq_id] = settled, length
        positions = np.arange(before, length)
        for group, pool in enumerate(self.pools):
            taken = self.held(group) - held[group]
            for prefix in [p for p, page in self.known[group].items() if page in taken]:
                del self.known[group][prefix]
            where = self.pages(group, seq_id, positions // 3), positions % 3
            pool[where] = hashes(self.texts[seq_id])[positions]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def settle(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.texts)))
        settled, length = self.extents[seq_id]
        now, text = data.draw(st.integers(settled, length)), self.texts[seq_id]
        for block in range(settled // 3, now // 3):
            for group in range(len(WINDOWS)):
                page = self.pages(group, seq_id, [block])[0]
                self.known[group].setdefault(tuple(text[: 3 * block + 3]), page)
        self.allocator.settle(seq_id, now, text[: data.draw(st.integers(now, length))])
        self.extents[seq_id] = now, length

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def release(self, data):
        """With tokens in flight or without."""
        seq_id = data.draw(st.sampled_from(sorted(self.texts)))
        self.allocator.release(seq_id)
        del self.texts[seq_id], self.extents[seq_id]

    @rule(group=st.integers(0, len(WINDOWS) - 1), count=st.integers(1, 4))
    def evict(self, group, count):
        free = set(self.allocator._pools[group]._free)
        kept = list(self.allocator._pools[group]._kept)  # the longest unused first
        evict(self.allocator, group, count)
        gone = kept[: max(0, count - len(free))]
        self.known[group] = {p: page for p, page in self.known[group].items() if page not in gone}

    def held(self, group):
        return {page for each in self.allocator._sequences.values() for page in each.pages[group]}

    @invariant()
    def holds_its_invariants(self):
        assert_allocator(self.allocator)
        sizes = np.subtract(self.allocator.num_pages, 1)
        held = [len(self.held(group)) for group in range(len(WINDOWS))]
        assert self.allocator.free_pages == tuple(sizes - held)

    @invariant()
    def every_next_query_reads_what_its_own_text_wrote(self):
        for seq_id, (settled, length) in self.extents.items():
            for group, window in enumerate(WINDOWS):
                positions = np.arange(0 if window is None else max(0, settled - window + 1), length)
                where = self.pages(group, seq_id, positions // 3), positions % 3
                read = self.pools[group][where]
                assert (read == hashes(self.texts[seq_id])[positions]).all()

    @invariant()
    def what_is_known_is_true(self):
        for group, known in enumerate(self.known):
            for prefix, page in known.items():
                assert (self.pools[group][page] == hashes(prefix)[-3:]).all()
        for text in [self.stem, *self.texts.values()]:
            found = self.allocator.match(text)
            assert found.num_tokens == longest_known(self.known, self.allocator._stores, text)


Sharing.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSharing = Sharing.TestCase


def admit(allocator, seq_id, tokens, *, settled=None):
    """Admit a sequence, place its tokens and settle them; how many were in the cache."""
    match = allocator.match(tokens)
    allocator.admit(seq_id, match)
    assert allocator.grow({seq_id: len(tokens)})
    allocator.settle(seq_id, len(tokens) if settled is None else settled, tokens)
    return match.num_tokens


def test_two_sequences_compute_the_same_block_at_once():
    allocator = PageAllocator(make_plan((2, None), max_len=16), [9], prefix_reuse=True)
    tokens = [1, 2, 3, 4, 5]
    for seq_id in "ab":
        allocator.admit(seq_id, allocator.match(tokens))
        assert allocator.grow({seq_id: 5})
    for seq_id in "ab":
        allocator.settle(seq_id, 5, tokens)
        allocator.check()
    first, second = (allocator.page_table(0, [seq_id], rows=1, width=3)[0][0] for seq_id in "ab")
    assert not {*first} & {*second}
    assert allocator.match(tokens).pages[0] == [*first[:2]]  # the first one's, once
    allocator.release("a")
    assert allocator.free_pages == (5,)
    evict(allocator, 0)
    assert allocator.match(tokens).num_tokens == 0  # the second one's pages are only its own
    allocator.settle("b", 5, tokens)
    assert allocator.grow({"b": 6})
    allocator.settle("b", 6, [*tokens, 6])
    assert_allocator(allocator)
    allocator.release("b")
    assert allocator.free_pages == (8,)
    assert_allocator(allocator)


def test_a_block_without_pages_stays_while_its_sequence_goes_on():
    allocator = PageAllocator(make_plan((2, 1), max_len=16), [4], prefix_reuse=True)
    assert admit(allocator, "a", [1, 2, 3, 4]) == 0
    assert allocator.free_pages == (3,)  # the next query sees only itself
    evict(allocator, 0)
    assert_allocator(allocator)
    assert allocator.grow({"a": 6})
    allocator.settle("a", 6, [1, 2, 3, 4, 5, 6])
    assert_allocator(allocator)
    assert allocator.match([1, 2, 3, 4, 5, 6, 7]).num_tokens == 6
    allocator.release("a")
    evict(allocator, 0)
    assert not allocator._root.children
    assert_allocator(allocator)


def test_the_end_of_a_prompt_is_taken_before_its_beginning_and_old_ones_before_new_ones():
    allocator = PageAllocator(make_plan((2, None), max_len=16), [9], prefix_reuse=True)
    old, new = [1] * 8, [2] * 8
    for seq_id, tokens in (("old", old), ("new", new)):
        assert admit(allocator, seq_id, tokens) == 0
        allocator.release(seq_id)
    found = []
    for _ in range(9):
        found.append(tuple(allocator.match([*each, 3]).num_tokens for each in (old, new)))
        allocator._pools[0].take(min(1, allocator.free_pages[0]))
    assert found == [*((n, 8) for n in (8, 6, 4, 2)), *((0, n) for n in (8, 6, 4, 2, 0))]


def test_a_hit_makes_a_prompt_new_again():
    allocator = PageAllocator(make_plan((2, None), max_len=16), [9], prefix_reuse=True)
    for seq_id, tokens in (("a", [1] * 8), ("b", [2] * 8)):
        admit(allocator, seq_id, tokens)
        allocator.release(seq_id)
    assert admit(allocator, "c", [1] * 7) == 6
    assert allocator.grow({"c": 8})
    assert admit(allocator, "d", [3] * 8) == 0  # takes what was longest unused: b's
    assert [allocator.match([token] * 9).num_tokens for token in (1, 2, 3)] == [6, 0, 8]
    assert_allocator(allocator)


def test_held_pages_are_never_taken():
    allocator = PageAllocator(make_plan((2, None), max_len=16), [9], prefix_reuse=True)
    admit(allocator, "a", [1] * 8)
    admit(allocator, "b", [1] * 9)  # shares four
    allocator.release("a")
    assert allocator.free_pages == (3,)
    allocator.admit("c")
    assert not allocator.grow({"c": 7}) and allocator.grow({"c": 6})
    assert allocator.match([1] * 9).num_tokens == 8
    assert_allocator(allocator)


def test_tokens_that_are_told_late_are_kept_where_they_still_are():
    """The window has given back the first pages: only the other group can still offer them."""
    allocator = PageAllocator(make_plan((2, 2), (2, None), max_len=16), [9, 9], prefix_reuse=True)
    allocator.admit("a")
    assert allocator.grow({"a": 8})
    allocator.settle("a", 7)
    allocator.settle("a", 8, [1, 2, 3, 4, 5, 6, 7, 8])
    assert_allocator(allocator)
    assert allocator.match([1, 2, 3, 4, 5, 6, 9]).num_tokens == 0
    assert allocator.match([1, 2, 3, 4, 5, 6, 7, 8, 9]).num_tokens == 8


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(2, 14))
def test_room_is_the_room_that_there_is(data, num_pages):
    """Without windows `has_room` is exact: then and only then can all of them grow."""
    allocator = PageAllocator(make_plan((2, None), max_len=16), [num_pages], prefix_reuse=True)
    draw_tokens = st.lists(st.integers(1, 2), min_size=1, max_size=16)
    others = {}
    for seq_id in range(data.draw(st.integers(0, 5))):
        tokens = data.draw(draw_tokens)
        allocator.admit(seq_id, allocator.match(tokens))
        if not allocator.grow({seq_id: len(tokens)}):
            allocator.release(seq_id)
            continue
        settled = data.draw(st.integers(allocator._sequences[seq_id].settled, len(tokens)))
        allocator.settle(seq_id, settled, tokens)
        if data.draw(st.booleans()):
            allocator.release(seq_id)
        else:
            others[seq_id] = data.draw(st.integers(len(tokens), 16))
    tokens = data.draw(draw_tokens)
    match = allocator.match(tokens)
    room = allocator.has_room(match, len(tokens), others, step_tokens=3)
    trial = deepcopy(allocator)
    trial.admit("new", trial.match(tokens))
    assert room == trial.grow(others | {"new": len(tokens)})


def test_a_sequence_that_is_in_the_cache_asks_only_for_the_rest():
    allocator = PageAllocator(make_plan((2, None), max_len=16), [6], prefix_reuse=True)
    admit(allocator, "a", [1] * 8)
    allocator.release("a")  # five pages are free, four of them with its tokens
    match = allocator.match([1] * 12)
    assert match.num_tokens == 8
    assert allocator.has_room(match, 10, {}, step_tokens=4)
    assert not allocator.has_room(match, 11, {}, step_tokens=4)


def test_prefix_reuse_needs_one_page_size():
    plan = make_plan((2, 4), (3, None), max_len=16)
    with pytest.raises(ValueError, match=r"prefix_reuse needs one page size.*\[2, 3\]"):
        PageAllocator(plan, [9, 9], prefix_reuse=True)
