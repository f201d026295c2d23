"""Which sequences compute how many tokens in the next step: decode first, then prefill chunks."""

from collections import deque
from collections.abc import Hashable
from itertools import islice
from typing import NamedTuple

from jaxattn.cache.pages import PageAllocator
from jaxattn.engine.images import PlacedImage, whole_images
from jaxattn.engine.sequence import Sequence

STEPS_IN_FLIGHT = 2  # one runs while the next is scheduled and started


class Scheduled(NamedTuple):
    """A sequence's share of a step: its tokens [start, start + num_tokens).

    `samples`: these reach its end, so that the step chooses the token after them. `fresh`: its
    first share since it was admitted.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    fresh: bool

    @property
    def images(self) -> list[PlacedImage]:
        """Images that it computes: to their ends, and whole unless their beginning was cached."""
        end = self.start + self.num_tokens
        return [each for each in self.sequence.images if self.start < each.end <= end]


class Scheduler:
    """First come, first served, on the pages of one cache.

    A sequence is *waiting*, *running* (it holds a slot and pages), or gone. Who is running is in
    order of arrival; when pages run out the youngest goes back to waiting and loses them, to be
    computed again. So the oldest always goes on, and the pools need to hold no more than one
    sequence of the largest length: every request ends.

    A step may be scheduled while the one before it runs. Then nobody is preempted: a scheduler
    that would have to schedules nothing, and does it once that step is settled.

    An image is computed in one step, so that a share may end early, or wait. A step must hold one
    and a token of each other sequence: then the oldest that is not decoding always goes on.

    `buckets`: the token counts that steps are compiled for, ascending.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        buckets: tuple[int, ...],
    ):
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.buckets = buckets
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = self.prefix_query_tokens = self.prefix_hit_tokens = 0
        self._ending: list[Sequence] = []  # ended while a step that computes them runs
        self._slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        """Whether a sequence is waiting or running, or holds pages until a step is settled."""
        return bool(self.waiting or self.running or self._ending)

    @property
    def num_requests(self) -> int:
        """How many wait and run."""
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step, decode sequences first. Pages for all of its tokens are taken."""
        budget, preempted = self._budget(), False
        while not self.allocator.grow(self._ends(shares := self._shares(budget))):
            if any(each.in_flight for each in (*self.running, *self._ending)):
                return []
            self._preempt(self.running[-1])
            preempted = True
        step = [self._place(*share, fresh=False) for share in shares]
        if not preempted:
            step += self._admit(budget - sum(share.num_tokens for share in step))
        return sorted(step, key=lambda share: share.num_tokens > 1)

    def _budget(self) -> int:
        """Tokens for this step: what is pending, unless that would leave its bucket half empty."""
        candidates = (*self.running, *islice(self.waiting, len(self._slots)))
        pending = min(sum(each.num_pending for each in candidates), self.max_num_batched_tokens)
        largest = max((each.largest_piece for each in candidates), default=1)
        decoding = sum(each.num_pending == 1 for each in self.running)
        smaller = max((size for size in self.buckets if size <= pending), default=0)
        larger = min(size for size in self.buckets if size >= pending)
        if decoding + largest <= smaller and 4 * pending < 3 * larger:
            return smaller
        return pending

    def _shares(self, budget: int) -> list[tuple[Sequence, int]]:
        """Running sequences and how many tokens of each fit into the budget."""
        shares = []
        for sequence in sorted(self.running, key=lambda each: each.num_pending > 1):
            count = min(sequence.num_pending, budget)
            count = whole_images(sequence.images, sequence.num_placed, count)
            if count:
                shares.append((sequence, count))
                budget -= count
        return shares

    @staticmethod
    def _ends(shares: list[tuple[Sequence, int]]) -> dict[Hashable, int]:
        """The length that each sequence gets, by id."""
        return {sequence.id: sequence.num_placed + count for sequence, count in shares}

    @staticmethod
    def _place(sequence: Sequence, count: int, *, fresh: bool) -> Scheduled:
        """Count a share as placed."""
        start = sequence.num_placed
        sequence.num_placed += count
        samples = sequence.num_placed == sequence.num_chosen
        sequence.num_unknown += samples
        return Scheduled(sequence, start, count, samples, fresh)

    def _admit(self, budget: int) -> list[Scheduled]:
        """Take in those who waited longest, as far as budget, slots and pages go."""
        step: list[Scheduled] = []
        while budget > 0 and self.waiting and self._slots:
            sequence = self.waiting[0]
            reusable = sequence.tokens if sequence.may_reuse else []
            match = self.allocator.match(reusable)
            others: dict[Hashable, int] = {each.id: each.num_chosen for each in self.running}
            room = self.allocator.has_room(match, sequence.num_chosen, others, self.buckets[-1])
            if self.running and not room:
                break
            count = min(sequence.num_chosen - match.num_tokens, budget)
            count = whole_images(sequence.images, match.num_tokens, count)
            if not count:
                break
            self.allocator.admit(sequence.id, match)
            if not self.allocator.grow({sequence.id: match.num_tokens + count}):
                self.allocator.release(sequence.id)
                break
            self.running.append(self.waiting.popleft())
            sequence.num_settled = sequence.num_placed = match.num_tokens
            sequence.slot = self._slots.pop()
            if sequence.num_preemptions == 0:
                sequence.num_cached_tokens = match.num_tokens
            self.prefix_query_tokens += len(reusable)
            self.prefix_hit_tokens += match.num_tokens
            step.append(self._place(sequence, count, fresh=True))
            budget -= count
        return step

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of those who wait; its pages are free."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.restart()
        self.waiting.appendleft(sequence)

    def settle(self, step: list[Scheduled]) -> None:
        """The step's tokens are in the cache; pages that no later query can see are free."""
        for share in step:
            sequence = share.sequence
            sequence.num_settled += share.num_tokens
            self.allocator.settle(sequence.id, sequence.num_settled, sequence.tokens)
            if sequence in self._ending and not sequence.in_flight:
                self._ending.remove(sequence)
                self._give_back(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Give back everything that a sequence holds, once no step that runs computes it."""
        if sequence in self.running:
            self.running.remove(sequence)
            if sequence.in_flight:
                self._ending.append(sequence)
            else:
                self._give_back(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def restart(self, allocator: PageAllocator) -> None:
        """The cache is lost: everybody waits again, and `allocator` hands out an empty one."""
        self.allocator = allocator
        for sequence in (*self.running, *self._ending):
            sequence.restart()
            sequence.slot = None
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self._ending.clear()
        self._slots = list(range(self.max_num_seqs - 1, -1, -1))

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.allocator.release(sequence.id)
        self._slots.append(sequence.slot)
        sequence.slot = None
