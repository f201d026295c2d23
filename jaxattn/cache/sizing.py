"""How many pages: of a sequence, of a batch, of the worst batch, and of a pool of so many bytes.

A *logical* page is the index of a page within its sequence. A sequence with `settled` tokens
computed and `length` tokens placed has the tokens [settled, length) in flight. Pages are taken
for `length` and given back for `settled`, never for `length`: a step that still runs may read
them. W = 5, page_size = 4, settled = 9, length = 11:

    token          0 1 2 3 | 4 5 6 7 | 8 9 10 .
    next query, 9            . x x x   x q          sees k > 9 - 5
    logical page   freed   | 1       | 2            live_pages = range(1, 3)
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from jaxattn.spec import StoreSpec, check_positive_int

if TYPE_CHECKING:  # the plan sizes itself with `demand`
    from jaxattn.cache.plan import CachePlan


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


def capacity(plan: "CachePlan", num_pages: Sequence[int], *, length: int, step_tokens: int) -> int:
    """How many sequences of `length` tokens pools of `num_pages` hold at a time, null pages in.

    So many always fit, with `step_tokens` tokens in flight in the whole batch.
    """
    return _most(
        # a page each at least: a window of 1 with pages of 1 holds none between two steps
        lambda count: (
            count < min(num_pages)
            and all(
                1 + need <= have
                for need, have in zip(
                    worst_demand(plan, max_num_seqs=count, max_len=length, step_tokens=step_tokens),
                    num_pages,
                    strict=True,
                )
            )
        )
    )


def pool_pages(
    plan: "CachePlan",
    memory: int,
    *,
    max_len: int,
    typical_len: int,
    step_tokens: int,
    max_num_seqs: int | None = None,
) -> tuple[int, ...]:
    """Pages of every group's pool, null page included, in at most `memory` bytes.

    As many as the most sequences of `typical_len` tokens need (at most `max_num_seqs`). What is
    left over goes to the groups that keep everything, until these sequences could all be of
    `max_len`, and then to all. At least one sequence of `max_len` fits: ValueError otherwise, with
    the bytes that it takes.
    """

    def pages(count: int) -> tuple[int, ...]:
        """For `count` typical sequences, and for one of the longest."""
        many = worst_demand(plan, max_num_seqs=count, max_len=typical_len, step_tokens=step_tokens)
        return tuple(1 + max(pair) for pair in zip(many, one, strict=True))

    def size(num_pages: Sequence[int]) -> int:
        return sum(count * plan.page_bytes(group) for group, count in enumerate(num_pages))

    one = worst_demand(plan, max_num_seqs=1, max_len=max_len, step_tokens=step_tokens)
    least = size([1 + need for need in one])
    if least > memory:
        raise ValueError(
            f"{memory=} bytes of cache are too few: one sequence of {max_len} tokens takes {least} "
            f"({least / 2**20:.4g} MiB); give more, or a smaller max_model_len"
        )
    each = sum(plan.page_bytes(group) for group in range(len(plan.groups)))
    most = _most(
        lambda count: (
            (max_num_seqs is None or count <= max_num_seqs)
            and count * each < memory
            and size(pages(count)) <= memory
        )
    )
    num_pages = list(pages(most) if most else (1 + need for need in one))
    keeps_all = [index for index, group in enumerate(plan.groups) if group.store.retention is None]
    if keeps_all:
        together = sum(plan.page_bytes(group) for group in keeps_all)
        more = (memory - size(num_pages)) // together
        if max_num_seqs is not None:
            longest = worst_demand(
                plan, max_num_seqs=max_num_seqs, max_len=max_len, step_tokens=step_tokens
            )
            more = min(more, max(1 + longest[group] - num_pages[group] for group in keeps_all))
        for group in keeps_all:
            num_pages[group] += more
    more = (memory - size(num_pages)) // each
    return tuple(count + more for count in num_pages)


def _most(fits: Callable[[int], bool]) -> int:
    """The largest count that fits, of 0 and above; if one fits, every smaller one does."""
    above = 1
    while fits(above):
        above *= 2
    low = above // 2
    while above - low > 1:
        middle = (low + above) // 2
        low, above = (middle, above) if fits(middle) else (low, middle)
    return low
