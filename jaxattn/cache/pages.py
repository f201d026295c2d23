"""Pages on the host: how many a batch must hold, and which sequence owns which.

A *logical* page is the index of a page within its sequence, a *physical* page the index of a
page within its group's pool. Physical page 0 is the null page: never allocated, never owned.

A sequence with `settled` tokens computed and `length` tokens placed has the tokens
[settled, length) in flight. Pages are taken for `length` and given back for `settled`, never for
`length`: a step that still runs may read them. W = 5, page_size = 4, settled = 9, length = 11:

    token          0 1 2 3 | 4 5 6 7 | 8 9 10 .
    next query, 9            . x x x   x q          sees k > 9 - 5
    logical page   freed   | 1       | 2            live_pages = range(1, 3)
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxattn.spec import StoreSpec, check_positive_int

if TYPE_CHECKING:  # the plan sizes itself with `demand`
    from jaxattn.cache.plan import CachePlan

NULL_PAGE = 0


def cdiv(numerator: int, denominator: int) -> int:
    """Integer division, rounded up."""
    return -(-numerator // denominator)


def live_pages(store: StoreSpec, settled: int, length: int) -> range:
    """Logical pages a sequence must hold while its tokens [settled, length) are computed.

    The next query is at position `settled` and sees keys k > settled - retention.
    """
    if not 0 <= settled <= length:
        raise ValueError(f"{settled=}, {length=}: expected 0 <= settled <= length")
    first_token = 0 if store.retention is None else max(0, settled - store.retention + 1)
    return range(first_token // store.page_size, cdiv(length, store.page_size))


def demand(plan: "CachePlan", extents: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Pages that each group needs for a batch of (settled, length), null page not counted.

    The one sizing function: planning, admission and allocation all call it.
    """
    extents = list(extents)
    return tuple(
        sum(len(live_pages(group.store, settled, length)) for settled, length in extents)
        for group in plan.groups
    )


def worst_demand(
    plan: "CachePlan", *, max_num_seqs: int, max_len: int, step_tokens: int
) -> tuple[int, ...]:
    """Pages per group with which no batch runs dry: the largest `demand`, reached, per group.

    Over all batches of at most `max_num_seqs` sequences of at most `max_len` tokens, with at
    most `step_tokens` tokens in flight in the whole batch. Null page not counted.
    """
    for name, value in (("max_num_seqs", max_num_seqs), ("step_tokens", step_tokens)):
        check_positive_int(name, value)
    check_max_len(plan, max_len)
    return tuple(
        demand(plan, worst_extents(group.store, max_num_seqs, max_len, step_tokens))[index]
        for index, group in enumerate(plan.groups)
    )


def worst_extents(
    store: StoreSpec, max_num_seqs: int, max_len: int, step_tokens: int
) -> list[tuple[int, int]]:
    """The batch of (settled, length) that needs most pages of one group.

    Proof. (1) With c tokens in flight, moving a sequence up by one page moves its first live
    page by at most one and its last by one, so a worst one ends in the last page; the shortest
    that does, one token into it, has the lowest first page. (2) It holds
    cdiv(max_len, P) - max(0, x - c) // P pages, x = length - retention + 1: one page more costs
    x % P + 1 <= P tokens in flight, each further one P, until page 0 is live. (3) Prices never
    fall along a sequence, so buying the cheapest first, over all sequences, is optimal.
    """
    page = store.page_size
    length = (cdiv(max_len, page) - 1) * page + 1
    oldest = 0 if store.retention is None else max(0, length - store.retention + 1)
    cheap, left = oldest % page + 1, step_tokens
    buyers = min(max_num_seqs, left // cheap) if oldest >= page else 0
    left -= buyers * cheap
    extents = [(length, length)] * (max_num_seqs - buyers)
    for _ in range(buyers):
        more = min(left // page, oldest // page - 1)
        left -= more * page
        extents.append((length - cheap - more * page, length))
    return extents


def table_width(plan: "CachePlan", group: int, *, max_len: int, step_tokens: int) -> int:
    """The most live pages one sequence may have in a group: the width of its page table."""
    return worst_demand(plan, max_num_seqs=1, max_len=max_len, step_tokens=step_tokens)[group]


def check_max_len(plan: "CachePlan", max_len: int) -> None:
    """Raise unless the plan was made for sequences of `max_len` tokens."""
    check_positive_int("max_len", max_len)
    if max_len > plan.max_len:
        raise ValueError(
            f"{max_len=} is longer than the plan's max_len={plan.max_len}: "
            "plan the layers again with the larger max_len"
        )


@dataclass
class _Sequence:
    """Tokens computed, tokens placed, and for each group the physical pages, oldest first."""

    settled: int
    length: int
    pages: list[list[int]]


class PageAllocator:
    """Hands the pages of every group to sequences. Host only, deterministic, last in first out.

    A sequence is admitted, grown and settled once per step, and released when it finishes or is
    preempted. `num_pages[g]` counts the null page. Caller's errors are ValueErrors.
    """

    def __init__(self, plan: "CachePlan", num_pages: Sequence[int]) -> None:
        if len(num_pages) != len(plan.groups):
            raise ValueError(
                f"{num_pages=}: the plan has {len(plan.groups)} groups, one count each"
            )
        for count in num_pages:
            check_positive_int("num_pages", count)
            if count < 2:
                raise ValueError(f"{num_pages=}: a group needs at least 2, the null page and one")
        self.plan = plan
        self.num_pages = tuple(num_pages)
        self._free = [list(range(count - 1, NULL_PAGE, -1)) for count in num_pages]
        self._sequences: dict[Hashable, _Sequence] = {}

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages per group that no sequence owns."""
        return tuple(len(free) for free in self._free)

    def admit(self, seq_id: Hashable) -> None:
        """Start a sequence of no tokens and no pages."""
        if seq_id in self._sequences:
            raise ValueError(f"{seq_id=} is already admitted: release it first")
        self._sequences[seq_id] = _Sequence(0, 0, [[] for _ in self.plan.groups])

    def grow(self, seq_id: Hashable, length: int) -> bool:
        """Place tokens up to `length`: pages in every group, or False and nothing changes."""
        sequence = self._get(seq_id)
        if length < sequence.length:
            raise ValueError(f"{seq_id=} has {sequence.length} tokens: {length=} would shrink it")
        if length > sequence.length:
            check_max_len(self.plan, length)
        wanted = demand(self.plan, [(sequence.settled, length)])
        missing = [want - len(have) for want, have in zip(wanted, sequence.pages, strict=True)]
        if any(count > free for count, free in zip(missing, self.free_pages, strict=True)):
            return False
        for pages, free, count in zip(sequence.pages, self._free, missing, strict=True):
            pages.extend(free.pop() for _ in range(count))
        sequence.length = length
        return True

    def settle(self, seq_id: Hashable, length: int) -> None:
        """Tokens below `length` are computed: free the pages that the next query cannot see."""
        sequence = self._get(seq_id)
        if not sequence.settled <= length <= sequence.length:
            raise ValueError(
                f"{seq_id=} has {sequence.settled} tokens settled and {sequence.length} placed: "
                f"cannot settle {length=}"
            )
        kept = demand(self.plan, [(length, sequence.length)])
        for pages, free, count in zip(sequence.pages, self._free, kept, strict=True):
            dead = len(pages) - count
            free.extend(reversed(pages[:dead]))
            del pages[:dead]
        sequence.settled = length

    def release(self, seq_id: Hashable) -> None:
        """Forget a sequence, finished or preempted: all its pages are free again."""
        sequence = self._get(seq_id)
        for pages, free in zip(sequence.pages, self._free, strict=True):
            free.extend(reversed(pages))
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
            pages = self._get(seq_id).pages[group]
            if len(pages) > width:
                raise ValueError(
                    f"{width=} is too small: {seq_id=} has {len(pages)} live pages in {group=}; "
                    "use table_width() of the plan"
                )
            page_indices[row, : len(pages)] = pages
            first_page[row] = self._live(group, seq_id).start
        return page_indices, first_page

    def check(self) -> None:
        """Assert every invariant."""
        for group, (count, free) in enumerate(zip(self.num_pages, self._free, strict=True)):
            owned = [page for each in self._sequences.values() for page in each.pages[group]]
            # sorted lists, not sets: a page with two owners, lost or null shows in the comparison
            assert sorted(owned + free) == list(range(NULL_PAGE + 1, count)), (group, owned, free)
            for seq_id, sequence in self._sequences.items():
                assert 0 <= sequence.settled <= sequence.length <= self.plan.max_len, sequence
                # pages are the logical ones live.start, live.start + 1, ...: as many as are live
                assert len(sequence.pages[group]) == len(self._live(group, seq_id)), sequence

    def _live(self, group: int, seq_id: Hashable) -> range:
        sequence = self._get(seq_id)
        return live_pages(self.plan.groups[group].store, sequence.settled, sequence.length)

    def _get(self, seq_id: Hashable) -> _Sequence:
        if seq_id not in self._sequences:
            raise ValueError(f"{seq_id=} is not admitted")
        return self._sequences[seq_id]
