"""Which sequence owns which page, and what they share. Host only, deterministic.

Physical page 0 of every group is the null page: never allocated, never owned.
"""

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxattn.cache.pool import NULL_PAGE, PagePool
from jaxattn.cache.prefix import Block, Match, find_prefix
from jaxattn.cache.sizing import cdiv, check_max_len, demand, live_pages
from jaxattn.spec import check_positive_int

if TYPE_CHECKING:
    from jaxattn.cache.plan import CachePlan


@dataclass
class _Sequence:
    """Tokens computed, tokens placed, and for each group the physical pages, oldest first.

    Pages are C integers, which numpy copies into page tables in one piece.
    `block`: its last whole block in the prefix tree, `num_blocks` the blocks up to there.
    """

    settled: int
    length: int
    pages: list[array]
    block: Block
    num_blocks: int


class PageAllocator:
    """Hands the pages of every group to sequences.

    A sequence is admitted, grown and settled once per step, and released when it finishes or is
    preempted. `num_pages[g]` counts the null page. With `prefix_reuse`, whole pages of settled
    tokens can be found by later sequences that begin with the same tokens, until the pages are
    needed for something else. Caller's errors are ValueErrors.
    """

    def __init__(
        self, plan: "CachePlan", num_pages: Sequence[int], *, prefix_reuse: bool = False
    ) -> None:
        if len(num_pages) != len(plan.groups):
            raise ValueError(
                f"{num_pages=}: the plan has {len(plan.groups)} groups, one count each"
            )
        for count in num_pages:
            check_positive_int("num_pages", count)
            if count < 2:
                raise ValueError(f"{num_pages=}: a group needs at least 2, the null page and one")
        sizes = {group.store.page_size for group in plan.groups}
        if prefix_reuse and len(sizes) > 1:
            raise ValueError(f"prefix_reuse needs one page size, the groups have {sorted(sizes)}")
        self.plan = plan
        self.num_pages = tuple(num_pages)
        self.prefix_reuse = prefix_reuse
        self._stores = [group.store for group in plan.groups]
        self._pools = [PagePool(group, count) for group, count in enumerate(num_pages)]
        self._root = Block(None, (), len(num_pages))
        self._sequences: dict[Hashable, _Sequence] = {}

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages per group that no sequence owns."""
        return tuple(pool.available for pool in self._pools)

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest beginning of a prompt that is in the cache; at least one token is left."""
        return find_prefix(self._root, self._stores, tokens if self.prefix_reuse else ())

    def has_room(
        self, match: Match, length: int, others: Mapping[Hashable, int], step_tokens: int
    ) -> bool:
        """Whether to take in a sequence of `length` tokens that begins with `match`.

        `others`: every admitted sequence and its tokens. Charged are the pages that each holds
        once all of its tokens are computed, and once for the whole batch those of the tokens in
        flight, at most `step_tokens`.
        """
        no_pages = np.zeros(len(self._pools), int)
        wanted, in_flight = no_pages.copy(), no_pages.copy()
        newcomer = match.num_tokens, length, match.pages
        for settled, tokens, pages in (newcomer, *map(self._extent, others.items())):
            after = np.array(demand(self.plan, [(max(tokens - 1, settled), tokens)]))
            in_flight += demand(self.plan, [(settled, tokens)]) - after
            wanted += np.maximum(after - [len(each) for each in pages], 0)
        for group, (store, pool) in enumerate(zip(self._stores, self._pools, strict=True)):
            wanted[group] += pool.idle(match.pages[group])
            wanted[group] += min(in_flight[group], cdiv(step_tokens, store.page_size))
        return bool((wanted <= self.free_pages).all())

    def _extent(self, item: tuple[Hashable, int]) -> tuple[int, int, Sequence[Sequence[int]]]:
        """Tokens settled, all tokens, and pages of an admitted sequence."""
        seq_id, tokens = item
        sequence = self._get(seq_id)
        return sequence.settled, tokens, sequence.pages

    def admit(self, seq_id: Hashable, match: Match | None = None) -> None:
        """Start a sequence: of no tokens and no pages, or with those of a fresh `match`."""
        if seq_id in self._sequences:
            raise ValueError(f"{seq_id=} is already admitted: release it first")
        match = match or self.match(())
        for pool, pages in zip(self._pools, match.pages, strict=True):
            pool.hold(pages)
        match.block.users += 1
        self._sequences[seq_id] = _Sequence(
            settled=match.num_tokens,
            length=match.num_tokens,
            pages=[array("i", pages) for pages in match.pages],
            block=match.block,
            num_blocks=match.num_tokens // self._stores[0].page_size,
        )

    def grow(self, lengths: Mapping[Hashable, int]) -> bool:
        """Place tokens up to each sequence's length: pages in every group for all of them.

        False, and nothing changes, if the pages are not there.
        """
        missing: dict[Hashable, list[int]] = {}
        for seq_id, length in lengths.items():
            sequence = self._get(seq_id)
            if length < sequence.length:
                raise ValueError(
                    f"{seq_id=} has {sequence.length} tokens: {length=} would shrink it"
                )
            if length > sequence.length:
                check_max_len(self.plan, length)
            wanted = demand(self.plan, [(sequence.settled, length)])
            missing[seq_id] = [
                want - len(have) for want, have in zip(wanted, sequence.pages, strict=True)
            ]
        totals = np.sum([*missing.values(), [0] * len(self._pools)], axis=0)
        if (totals > self.free_pages).any():
            return False
        for seq_id, counts in missing.items():
            sequence = self._get(seq_id)
            for pages, pool, count in zip(sequence.pages, self._pools, counts, strict=True):
                pages.extend(pool.take(count))
            sequence.length = lengths[seq_id]
        return True

    def settle(self, seq_id: Hashable, length: int, tokens: Sequence[int] = ()) -> None:
        """Tokens below `length` are computed: free the pages that the next query cannot see.

        `tokens`: the sequence's ids, for whole pages to be found by others.
        """
        sequence = self._get(seq_id)
        if not sequence.settled <= length <= sequence.length:
            raise ValueError(
                f"{seq_id=} has {sequence.settled} tokens settled and {sequence.length} placed: "
                f"cannot settle {length=}"
            )
        if self.prefix_reuse:
            self._keep(sequence, tokens, min(length, len(tokens)))
        kept = demand(self.plan, [(length, sequence.length)])
        for pages, pool, count in zip(sequence.pages, self._pools, kept, strict=True):
            dead = len(pages) - count
            pool.drop(pages[:dead])
            del pages[:dead]
        sequence.settled = length

    def _keep(self, sequence: _Sequence, tokens: Sequence[int], known: int) -> None:
        """Put the blocks that are whole within `tokens[:known]` into the prefix tree."""
        page_size = self._stores[0].page_size
        first = [self._live(group, sequence).start for group in range(len(self._pools))]
        while (sequence.num_blocks + 1) * page_size <= known:
            index, start = sequence.num_blocks, sequence.num_blocks * page_size
            block = sequence.block.child(tuple(tokens[start : start + page_size]))
            for group, pool in enumerate(self._pools):
                if index >= first[group]:  # not given back before the tokens were known
                    pool.keep(sequence.pages[group][index - first[group]], block)
            self._move(sequence, block)
            sequence.num_blocks += 1

    def _move(self, sequence: _Sequence, block: Block) -> None:
        block.users += 1
        sequence.block.users -= 1
        sequence.block.prune()
        sequence.block = block

    def release(self, seq_id: Hashable) -> None:
        """Forget a sequence, finished or preempted: all its pages are free again."""
        sequence = self._get(seq_id)
        for pages, pool in zip(sequence.pages, self._pools, strict=True):
            pool.drop(reversed(pages))  # the end goes first: others may begin like this one
        self._move(sequence, self._root)
        self._root.users -= 1
        del self._sequences[seq_id]

    def page_table(
        self, group: int, seq_ids: Sequence[Hashable], *, rows: int, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The page table of a batch: page_indices int32[rows, width], first_page int32[rows].

        Column j of row i is logical page first_page[i] + j of seq_ids[i]. Unused entries are the
        null page, first_page of unused rows is 0.
        """
        if len(seq_ids) > rows:
            raise ValueError(f"{rows=} are too few for {len(seq_ids)} sequences")
        page_indices = np.full((rows, width), NULL_PAGE, np.int32)
        first_page = np.zeros(rows, np.int32)
        for row, seq_id in enumerate(seq_ids):
            sequence = self._get(seq_id)
            pages = sequence.pages[group]
            if len(pages) > width:
                raise ValueError(
                    f"{width=} is too small: {seq_id=} has {len(pages)} live pages in {group=}; "
                    "use table_width() of the plan"
                )
            page_indices[row, : len(pages)] = np.frombuffer(pages, np.intc)
            first_page[row] = self._live(group, sequence).start
        return page_indices, first_page

    def check(self) -> None:
        """Assert every invariant."""
        for group, pool in enumerate(self._pools):
            pool.check([page for each in self._sequences.values() for page in each.pages[group]])
            for sequence in self._sequences.values():
                assert 0 <= sequence.settled <= sequence.length <= self.plan.max_len, sequence
                # pages are the logical ones live.start, live.start + 1, ...: as many as are live
                assert len(sequence.pages[group]) == len(self._live(group, sequence)), sequence
                assert len(set(sequence.pages[group])) == len(sequence.pages[group]), sequence
                assert sequence.block.is_reachable, sequence

    def _live(self, group: int, sequence: _Sequence) -> range:
        return live_pages(self._stores[group], sequence.settled, sequence.length)

    def _get(self, seq_id: Hashable) -> _Sequence:
        if seq_id not in self._sequences:
            raise ValueError(f"{seq_id=} is not admitted")
        return self._sequences[seq_id]
