"""The engine's scheduler and pages without a model: which requests run when, on how many pages."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxattn.cache.pages import PageAllocator
from jaxattn.cache.plan import CachePlan
from jaxattn.engine.engine import token_buckets
from jaxattn.engine.scheduler import STEPS_IN_FLIGHT, Scheduler
from jaxattn.engine.sequence import Sequence as Continuation
from jaxattn.sampling import SamplingParams


class TracedStep(NamedTuple):
    """The pages of every group that sequences hold once a step is scheduled, and who runs."""

    pages: tuple[int, ...]
    running: int
    preemptions: int  # up to here


class NoText:
    """A text stream for tokens that mean nothing."""

    def step(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def trace(
    plan: CachePlan,
    num_pages: Sequence[int],
    requests: Iterable[tuple[int, int]],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> Iterator[TracedStep]:
    """Run requests of (prompt tokens, new tokens), all there from the start, as `Engine` does.

    A step is scheduled while the one before it runs, and settled after that.
    """
    scheduler = Scheduler(
        PageAllocator(plan, num_pages),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        buckets=token_buckets(max_num_seqs, max_num_batched_tokens),
    )
    for number, (prompt, new) in enumerate(requests):
        params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        rest: Any = dict(prompt_index=number, index=0, seed=0, max_len=plan.max_len, eos_ids=())
        scheduler.add(Continuation(number, [0] * prompt, params, stream=NoText(), **rest))
    in_flight: deque = deque()
    while scheduler.has_work:
        if step := scheduler.schedule():
            in_flight.append(step)
            free = scheduler.allocator.free_pages
            yield TracedStep(
                tuple(have - 1 - left for have, left in zip(num_pages, free, strict=True)),
                len(scheduler.running),
                scheduler.num_preemptions,
            )
        if len(in_flight) == STEPS_IN_FLIGHT or not step:
            settled = in_flight.popleft()
            scheduler.settle(settled)
            for share in settled:
                if share.samples and share.sequence.finish_reason is None:
                    share.sequence.add_token(0)
                    if share.sequence.finish_reason is not None:
                        scheduler.finish(share.sequence)
