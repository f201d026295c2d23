"""The engine's thread: it steps, and trades jobs and news with an asyncio loop."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxattn.engine.llm import LLM
from jaxattn.engine.sequence import Sequence
from jaxattn.engine.stats import EngineStats
from jaxattn.serve.http.metrics import Metrics
from jaxattn.serve.http.ticket import News, Ticket
from jaxattn.serve.openai.errors import RequestError
from jaxattn.serve.openai.requests import Job, submit
from jaxattn.serve.openai.responses import check_ended_well

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """A continuation that has not ended."""

    ticket: Ticket
    num_tokens: int = 0
    last_token: float = 0.0  # when


class EngineLoop:
    """One thread owns the engine and steps it; jobs are added and dropped between its steps.

    Commands go to the thread through a queue; news come back by `call_soon_threadsafe`, once for
    each step. All methods without an underscore are called in the asyncio thread.

    Args:
        max_waiting: most continuations that wait.
    """

    def __init__(self, llm: LLM, metrics: Metrics, *, max_waiting: int):
        self.stats: EngineStats = llm.engine.stats()  # after the last step
        self.error: BaseException | None = None  # what the thread died of
        self._llm = llm
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._tickets: set[Ticket] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # What follows is the thread's.
        self._running = True
        self._sequences: dict[Ticket, list[Sequence]] = {}
        self._open: dict[int, _Open] = {}  # by the sequence's id()
        self._logged: Exception | None = None

    def start(self) -> None:
        """Start the thread; news go to the asyncio loop that runs."""
        self._asyncio = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its step."""
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    def check_alive(self) -> None:
        """Raise RequestError (503) if the thread is dead."""
        if self.error is not None:
            raise _died(self.error)

    @property
    def num_waiting(self) -> int:
        """Continuations that have been submitted and do not run yet."""
        return max(0, sum(each.num_open for each in self._tickets) - self.stats.running)

    def submit(self, job: Job, arrived: float) -> Ticket:
        """Queue a job; `finish` its ticket in any case.

        Raises RequestError: 429 if too many wait, 400 if the job alone is too many, 503 if the
        thread is dead.
        """
        self.check_alive()
        if job.num_sequences > self._max_waiting:
            raise RequestError(
                400,
                f"{len(job.prompts)} prompts with n={job.params.n} are {job.num_sequences} "
                f"continuations; at most {self._max_waiting} can wait here: send fewer at a time",
                param="n",
                code="too_many_continuations",
            )
        if self.num_waiting + job.num_sequences > self._max_waiting:
            raise RequestError(
                429,
                f"{self.num_waiting} continuations are waiting, and at most {self._max_waiting} "
                "may: try again later",
                code="queue_full",
            )
        ticket = Ticket(job, arrived)
        self._tickets.add(ticket)
        self._idle.clear()
        self._commands.put(lambda: self._add(ticket))
        return ticket

    def finish(self, ticket: Ticket) -> None:
        """Forget a job, ended or not; its pages are free before the next step."""
        self._tickets.discard(ticket)
        if not self._tickets:
            self._idle.set()
        self._commands.put(lambda: self._drop(ticket))

    def fail_all(self, error: RequestError) -> None:
        """End all jobs with an error."""
        for ticket in self._tickets:
            ticket.deliver(error)

    async def idle(self) -> None:
        """Wait until there are no jobs."""
        await self._idle.wait()

    def _stop(self) -> None:
        self._running = False

    def _run(self) -> None:
        engine = self._llm.engine
        try:
            while self._running:
                self._obey(wait=not engine.has_work)
                news = []
                if engine.has_work and self._running:
                    news = self._news(engine.step())
                self.stats = engine.stats()
                self._send(news)
        except BaseException as error:
            _log.exception("the engine's thread died")
            self.error = error
            self._asyncio.call_soon_threadsafe(self.fail_all, _died(error))

    def _obey(self, *, wait: bool) -> None:
        """Carry out all commands; wait for the first if there is nothing else to do."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            command()
            wait = False

    def _add(self, ticket: Ticket) -> None:
        try:
            sequences = submit(ticket.job, self._llm)
        except ValueError as error:
            self._send([(ticket, RequestError(400, str(error), code="invalid_value"))])
            return
        self._sequences[ticket] = sequences
        for sequence in sequences:
            self._open[id(sequence)] = _Open(ticket)

    def _drop(self, ticket: Ticket) -> None:
        sequences = self._sequences.pop(ticket, [])
        self._llm.engine.abort([each for each in sequences if self._open.pop(id(each), None)])

    def _news(self, sequences: Iterable[Sequence]) -> list[tuple[Ticket, News | RequestError]]:
        """What a step brought, for those who wait for it."""
        now = time.monotonic()
        found: list[tuple[Ticket, News | RequestError]] = []
        for sequence in sequences:
            entry = self._open.get(id(sequence))
            if entry is None:
                continue
            token_ids = sequence.take_tokens()
            first = entry.num_tokens
            self._observe(entry, len(token_ids), now)
            reason = sequence.finish_reason
            if reason is not None:
                del self._open[id(sequence)]
            elif not token_ids:
                continue  # a piece of its prompt was computed
            try:
                check_ended_well(sequence)
            except RequestError as error:
                self._log_once(sequence)
                found.append((entry.ticket, error))
                continue
            if entry.ticket.job.stream:
                text = sequence.take_text()
                logprobs = sequence.logprobs[first : first + len(token_ids)]
                found.append((entry.ticket, News(sequence, text, token_ids, logprobs, reason)))
            elif reason is not None:
                found.append((entry.ticket, News(sequence, "", (), (), reason)))
        return found

    def _log_once(self, sequence: Sequence) -> None:
        """A step that fails ends many sequences with the same error."""
        if sequence.error is not self._logged:
            self._logged = sequence.error
            _log.error("a step failed", exc_info=sequence.error)

    def _observe(self, entry: _Open, num_tokens: int, now: float) -> None:
        if num_tokens == 0:
            return
        if entry.num_tokens == 0:
            self._metrics.first_tokens(now - entry.ticket.arrived, num_tokens)
        else:
            self._metrics.next_tokens(now - entry.last_token, num_tokens)
        entry.num_tokens += num_tokens
        entry.last_token = now

    def _send(self, items: list[tuple[Ticket, News | RequestError]]) -> None:
        if items:
            self._asyncio.call_soon_threadsafe(_deliver, items)


def _deliver(items: list[tuple[Ticket, News | RequestError]]) -> None:
    for ticket, news in items:
        ticket.deliver(news)


def _died(error: BaseException) -> RequestError:
    return RequestError(
        503, f"the engine has stopped ({type(error).__name__}: {error})", code="engine_dead"
    )
