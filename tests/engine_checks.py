"""What must hold of an engine after every step, and hooks that make its life hard."""

from collections.abc import Container, Iterator, Sequence
from itertools import count

import jax
import pytest

from jaxattn.cache.pages import PageAllocator
from jaxattn.cache.prefix import Block, Match
from jaxattn.cache.sizing import demand, pool_pages, worst_demand
from jaxattn.engine.engine import Engine
from jaxattn.spec import StoreSpec

FAILING = ("runner.dispatch", "runner.load", "schedulers[0].settle", "_fetch")


class Injected(Exception):
    """Raised by a test in the middle of a step."""


def assert_sound(engine: Engine) -> None:
    """Every invariant of the engine between two steps."""
    used = [0] * len(engine.plan.groups)
    for scheduler in engine.schedulers:
        allocator = scheduler.allocator
        assert_allocator(allocator)
        holders = [*scheduler.running, *scheduler._ending]
        assert allocator._sequences.keys() == {each.id for each in holders}
        for each in holders:
            owned = allocator._sequences[each.id]
            assert (owned.settled, owned.length) == (each.num_settled, each.num_placed)
            seen = demand(engine.plan, [(each.num_settled, each.num_placed)])
            assert seen == tuple(map(len, owned.pages)), "more or fewer pages than it can see"
        slots = [each.slot for each in holders] + scheduler._slots
        assert sorted(slots) == list(range(scheduler.max_num_seqs)), slots
        assert all(each.finish_reason is not None for each in scheduler._ending)
        live = [*scheduler.running, *scheduler.waiting]
        assert all(each.finish_reason is None for each in live)
        order = [each.id for each in live]
        assert order == sorted(set(order)), "not in order of arrival"
        for group in range(len(used)):
            held = {page for each in allocator._sequences.values() for page in each.pages[group]}
            used[group] += len(held)
    assert engine.stats().pages_used == tuple(used)


def assert_allocator(allocator: PageAllocator) -> None:
    """`check()`, and that the prefix tree and the pools tell the same."""
    allocator.check()
    users: dict[int, int] = {}
    for sequence in allocator._sequences.values():
        users[id(sequence.block)] = users.get(id(sequence.block), 0) + 1
    for block in blocks(allocator._root):
        assert block.users == users.get(id(block), 0)
        for pool, page in zip(allocator._pools, block.pages, strict=True):
            assert page is None or pool._blocks[page] is block
        known = any(page is not None for page in block.pages)
        assert block.parent is None or known or block.users or block.children, "not pruned"
    for pool in allocator._pools:
        assert not pool._blocks.keys() & set(pool._free), "a free page is found by others"


def assert_empty(engine: Engine) -> None:
    """Nothing to do, every page and every slot free."""
    assert_sound(engine)
    assert not engine.has_work
    for scheduler in engine.schedulers:
        free = tuple(pages - 1 for pages in engine.num_pages)
        assert scheduler.allocator.free_pages == free
        assert len(scheduler._slots) == scheduler.max_num_seqs


def blocks(block: Block) -> Iterator[Block]:
    """A prefix tree's blocks."""
    yield block
    for child in block.children.values():
        yield from blocks(child)


def brute_match(root: Block, stores: Sequence[StoreSpec], tokens: Sequence[int]) -> int:
    """Tokens that can be reused, by the rule: every key that the next query sees is in a page.

    Knows nothing of the tree's edges: it compares whole beginnings, key by key.
    """
    known: list[set[tuple[int, ...]]] = [set() for _ in stores]
    for block in blocks(root):
        for group, page in enumerate(block.pages):
            if page is not None:
                known[group].add(beginning(block))
    return longest_known(known, stores, tokens)


def longest_known(
    known: Sequence[Container[tuple[int, ...]]], stores: Sequence[StoreSpec], tokens: Sequence[int]
) -> int:
    """The same, of the beginnings that each group knows."""
    page_size = stores[0].page_size
    for boundary in range((len(tokens) - 1) // page_size * page_size, 0, -page_size):
        if all(
            tuple(tokens[: (key // page_size + 1) * page_size]) in known[group]
            for group, store in enumerate(stores)
            for key in range(boundary)
            if store.retention is None or key > boundary - store.retention
        ):
            return boundary
    return 0


def beginning(block: Block) -> tuple[int, ...]:
    """All tokens from the root to the end of a block."""
    above = beginning(block.parent) if block.parent is not None else ()
    return above + block.tokens


def check_matches(patch: pytest.MonkeyPatch) -> None:
    """From now on every match of every allocator is compared with the brute force."""
    match = PageAllocator.match

    def checked(allocator: PageAllocator, tokens: Sequence[int]) -> Match:
        found = match(allocator, tokens)
        expected = brute_match(allocator._root, allocator._stores, tokens)
        assert found.num_tokens == (expected if allocator.prefix_reuse else 0)
        assert beginning(found.block) == tuple(tokens[: found.num_tokens])
        return found

    patch.setattr(PageAllocator, "match", checked)


def least_memory(plan, *, max_len: int, step_tokens: int) -> int:
    """Bytes below which an engine is refused: one sequence of the largest length."""
    one = worst_demand(plan, max_num_seqs=1, max_len=max_len, step_tokens=step_tokens)
    return sum((1 + pages) * plan.page_bytes(group) for group, pages in enumerate(one))


def narrow(
    engine: Engine, *, chunk: int, memory: float, prefix_reuse: bool, typical_len: int = 0
) -> None:
    """Empty an engine, and make it one of fewer pages and tokens a step without compiling again.

    `memory`: times the least that it needs. Its first pages are the pool; the rest is never used.
    """
    engine._in_flight.clear()
    max_len = engine.max_model_len
    least = least_memory(engine.plan, max_len=max_len, step_tokens=chunk)
    engine.num_pages = pool_pages(
        engine.plan,
        int(memory * least),
        max_len=max_len,
        typical_len=typical_len or max_len,
        step_tokens=chunk,
    )
    made = engine.runner.program.num_pages
    engine.num_pages = tuple(map(min, engine.num_pages, made))
    engine._prefix_reuse = prefix_reuse
    engine.max_num_batched_tokens = chunk
    for scheduler in engine.schedulers:
        scheduler.running.clear()
        scheduler.waiting.clear()
        scheduler.max_num_seqs = min(chunk, engine.runner.program.max_num_seqs)
        scheduler.max_num_batched_tokens = chunk
        scheduler.buckets = (*(size for size in engine.buckets if size < chunk), chunk)
        scheduler.restart(engine._new_allocator())


def evict(allocator: PageAllocator, group: int, count: int | None = None) -> None:
    """Take `count` pages that nobody holds, or all of them, and give them back."""
    pool = allocator._pools[group]
    pool.drop(pool.take(pool.available if count is None else min(count, pool.available)))


def break_next(engine: Engine, where: str, patch: pytest.MonkeyPatch) -> None:
    """The next call of `where` fails, with the buffers gone as after a donation."""
    owner, name = {
        "runner.dispatch": (engine.runner, "dispatch"),
        "runner.load": (engine.runner, "load"),
        "schedulers[0].settle": (engine.schedulers[0], "settle"),
        "_fetch": (engine, "_fetch"),
    }[where]

    def fail(*args, **kwargs):
        patch.undo()
        jax.tree.map(lambda pages: pages.delete(), engine.runner.buffers)
        raise Injected(where)

    patch.setattr(owner, name, fail)


class Patience:
    """Nobody starves: the oldest request ends within the steps that its tokens take."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.oldest: int | None = None
        self.steps = count()

    def check(self) -> None:
        """After every step."""
        live = [
            each.id
            for scheduler in self.engine.schedulers
            for each in (*scheduler.running, *scheduler.waiting)
        ]
        if min(live, default=None) != self.oldest:
            self.forgive()
            self.oldest = min(live, default=None)
        # a token a step at least, and a step without it while another one is settled
        limit = 2 * self.engine.max_model_len + 4
        assert next(self.steps) < limit, f"request {self.oldest} starves"

    def forgive(self) -> None:
        """Everything begins again: a step failed."""
        self.steps = count()
