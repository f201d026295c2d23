"""How many requests vLLM 0.33.0 takes in: its rules, written down from its source, not run.

- Groups: layers of one kind are cut into groups of equal size, the smaller of the numbers of
  global and windowed layers; shorter groups are padded. All draw blocks from one pool
  (`v1/core/kv_cache_planning.py`).
- Charge: a windowed group `cdiv(min(W - 1 + in_flight, length), block) + 1` blocks for every
  request, a global one `cdiv(length, block)` (`max_admission_blocks_per_request` in
  `v1/kv_cache_interface.py`). `in_flight` is `max_num_batched_tokens`, twice with asynchronous
  scheduling. The concurrency that it reports at the start is blocks / charge
  (`v1/core/kv_cache_utils.py`).
- Gate: a waiting request is taken in if its charge is free at that time, while those that run
  hold what they hold (`allocate_slots` in `v1/core/kv_cache_manager.py`).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxattn.cache.sizing import cdiv
from jaxattn.models.gemma3.config import Gemma3Config

VERSION = "0.33.0"
BLOCK = 16  # tokens, its default
STOCK_TOKENS = 8192  # max_num_batched_tokens of its server on an H100


@dataclass(frozen=True, kw_only=True)
class Groups:
    """A model's groups: the blocks of a request are counted over all of them."""

    windowed: int
    full: int
    window: int
    block_bytes: int

    @classmethod
    def of(cls, config: Gemma3Config, *, token_bytes: int) -> "Groups":
        """`token_bytes`: of the keys and values of one token in one layer."""
        windows = [layer.sliding_window for layer in config.layers if layer.sliding_window]
        full = config.num_layers - len(windows)
        size, most = sorted((full, len(windows)))
        if most < 1.5 * size:
            size = most
        return cls(
            windowed=cdiv(len(windows), size),
            full=cdiv(full, size),
            window=windows[0],
            block_bytes=size * BLOCK * token_bytes,
        )

    def charge(self, length: int, in_flight: int) -> int:
        """Blocks that a request of `length` tokens is charged, over all groups."""
        seen = min(self.window - 1 + in_flight, length)
        return self.full * cdiv(length, BLOCK) + self.windowed * (cdiv(seen, BLOCK) + 1)

    def gate(self, length: int, in_flight: int) -> int:
        """Blocks that must be free for a request that has `length` tokens when it comes."""
        most = cdiv(self.window - 1 + in_flight, BLOCK) + 1
        return self.full * cdiv(length, BLOCK) + self.windowed * min(cdiv(length, BLOCK), most)

    def held(self, placed: int, settled: int) -> int:
        """Blocks that it holds: windowed groups give back what no settled query sees."""
        dead = max(0, settled - self.window + 1) // BLOCK
        return self.full * cdiv(placed, BLOCK) + self.windowed * (cdiv(placed, BLOCK) - dead)

    def concurrency(self, memory: int, length: int, in_flight: int) -> float:
        """Requests of `length` tokens at a time, as it reports them at its start."""
        return memory // self.block_bytes / self.charge(length, in_flight)


@dataclass(eq=False)
class _Request:
    known: int  # tokens that can be computed
    last: int  # tokens at which it ends
    placed: int = 0
    settled: int = 0


class GatedStep(NamedTuple):
    """Who runs once a step is scheduled."""

    running: int
    preemptions: int  # up to here


class Gate:
    """Its scheduler as far as blocks go: who runs first, then those that wait; first come, first
    served; the youngest is preempted.

    Requests are (prompt tokens, new tokens), all there from the start.
    """

    def __init__(
        self,
        groups: Groups,
        memory: int,
        requests: Iterable[tuple[int, int]],
        *,
        max_num_batched_tokens: int,
        steps_in_flight: int,
    ):
        self.groups = groups
        self.num_blocks = memory // groups.block_bytes - 1  # one is the null block
        self.max_num_batched_tokens = max_num_batched_tokens
        self.steps_in_flight = steps_in_flight
        self.waiting = deque(_Request(prompt, prompt + new - 1) for prompt, new in requests)
        self.running: list[_Request] = []
        self.preemptions = 0
        self._in_flight: deque[list[tuple[_Request, int]]] = deque()

    def run(self) -> Iterator[GatedStep]:
        """Step until all are done."""
        while self.waiting or self.running:
            preemptions = self.preemptions
            self._in_flight.append([])
            left = self.max_num_batched_tokens
            for request in list(self.running):
                left -= self._continue(request, left)
            while left and self.preemptions == preemptions and self._admits(left):
                self.running.append(self.waiting.popleft())
                left -= self._place(self.running[-1], left)
            yield GatedStep(len(self.running), self.preemptions)
            if len(self._in_flight) == self.steps_in_flight:
                self._settle(self._in_flight.popleft())

    def _free(self) -> int:
        return self.num_blocks - sum(self._held(each) for each in self.running)

    def _held(self, request: _Request, more: int = 0) -> int:
        return self.groups.held(request.placed + more, request.settled)

    def _continue(self, request: _Request, left: int) -> int:
        """Place the next tokens of a running request; preempt the youngest until they fit."""
        count = min(request.known - request.placed, left)
        while count and request in self.running:
            if self._held(request, count) - self._held(request) <= self._free():
                return self._place(request, count)
            self._preempt()
        return 0

    def _admits(self, left: int) -> bool:
        if not self.waiting:
            return False
        tokens = self.waiting[0].known
        in_flight = self.steps_in_flight * self.max_num_batched_tokens
        first = self.groups.held(min(tokens, left), 0)
        return max(self.groups.gate(tokens, in_flight), first) <= self._free()

    def _place(self, request: _Request, most: int) -> int:
        count = min(request.known - request.placed, most)
        request.placed += count
        self._in_flight[-1].append((request, count))
        if request.placed == request.known < request.last:
            request.known += 1  # the token that the step chooses
        return count

    def _preempt(self) -> None:
        youngest = self.running.pop()
        youngest.placed = youngest.settled = 0
        for step in self._in_flight:
            step[:] = [share for share in step if share[0] is not youngest]
        self.waiting.appendleft(youngest)
        self.preemptions += 1

    def _settle(self, step: list[tuple[_Request, int]]) -> None:
        for request, count in step:
            request.settled += count
            if request.settled == request.last:
                self.running.remove(request)
