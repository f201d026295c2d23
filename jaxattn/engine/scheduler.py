"""Which sequences compute how many tokens in the next step: decode first, then prefill chunks."""

from collections import deque
from typing import NamedTuple

from jaxattn.cache.pages import PageAllocator
from jaxattn.engine.sequence import Sequence


class Scheduled(NamedTuple):
    """A sequence's share of a step: its next `num_tokens` tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's end, so that a token is to be chosen."""
        return self.num_tokens == self.sequence.num_pending


class Scheduler:
    """First come, first served. The pools hold `max_num_seqs` sequences of any allowed length.

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

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step, decode sequences first. Pages for all of its tokens are taken."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting.popleft()
            self.allocator.admit(sequence.id)
            self.running.append(sequence)
        budget = self._budget()
        step = []
        for sequence in sorted(self.running, key=lambda each: each.num_pending > 1):
            num_tokens = min(sequence.num_pending, budget)
            if num_tokens == 0:
                break
            if not self.allocator.grow(sequence.id, sequence.num_settled + num_tokens):
                raise RuntimeError("a page pool ran dry, although it was sized for every batch")
            budget -= num_tokens
            step.append(Scheduled(sequence, num_tokens))
        return sorted(step, key=lambda each: each.num_tokens > 1)

    def _budget(self) -> int:
        """Tokens for this step: what is pending, unless that would leave its bucket half empty."""
        pending = sum(each.num_pending for each in self.running)
        pending = min(pending, self.max_num_batched_tokens)
        decoding = sum(each.num_pending == 1 for each in self.running)
        smaller = max((size for size in self.buckets if size <= pending), default=0)
        larger = min(size for size in self.buckets if size >= pending)
        if decoding < smaller and 4 * pending < 3 * larger:
            return smaller
        return pending

    def settle(self, step: list[Scheduled]) -> None:
        """The step's tokens are in the cache; pages that no later query can see are free."""
        for sequence, num_tokens in step:
            sequence.num_settled += num_tokens
            self.allocator.settle(sequence.id, sequence.num_settled)

    def finish(self, sequence: Sequence) -> None:
        """Give back everything that a sequence holds, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.allocator.release(sequence.id)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
