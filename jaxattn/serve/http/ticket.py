"""A job in the engine, as the asyncio side sees it: `Ticket`, and the `News` that it gets."""

import asyncio
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from jaxattn.engine.outputs import Logprob
from jaxattn.engine.sequence import Sequence
from jaxattn.serve.openai.errors import RequestError
from jaxattn.serve.openai.requests import Job


@dataclass(frozen=True)
class News:
    """What a step gave one continuation.

    The sequence belongs to the engine's thread until it has ended, but for its numbers and its
    prompt's log-probabilities, which are complete with the first news.
    """

    sequence: Sequence
    text: str
    token_ids: Sequences[int]
    logprobs: Sequences[dict[int, Logprob]]
    finish_reason: str | None


class Ticket:
    """`await next()` until `num_open` is 0.

    A streamed job has news of every step, another one only of the ends of its continuations.
    `arrived`: when the request came, by `time.monotonic`.
    """

    def __init__(self, job: Job, arrived: float):
        self.job = job
        self.arrived = arrived
        self.num_open = job.num_sequences
        self._news: asyncio.Queue[News | RequestError] = asyncio.Queue()

    async def next(self) -> News:
        """The next news. Raises RequestError if the job failed."""
        news = await self._news.get()
        if isinstance(news, RequestError):
            raise news
        return news

    def deliver(self, news: News | RequestError) -> None:
        """Called in the asyncio thread."""
        if isinstance(news, News) and news.finish_reason is not None:
            self.num_open -= 1
        self._news.put_nowait(news)
