"""Requests from lines, through an engine that is kept full, to results."""

import time
import uuid
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jaxattn.engine.llm import LLM
from jaxattn.engine.sequence import Sequence
from jaxattn.serve.offline.format import (
    Failure,
    Result,
    check_request,
    custom_id_of,
    decode_line,
)
from jaxattn.serve.openai.errors import RequestError
from jaxattn.serve.openai.requests import Job, parse
from jaxattn.serve.openai.responses import response

WINDOW = 4  # continuations in the engine, as a multiple of those that run at a time
Deliver = Callable[[Result | Failure], None]


@dataclass(eq=False)
class _Request:
    """A line in the engine."""

    line: int
    custom_id: str
    job: Job
    deliver: Deliver
    created: int = field(default_factory=lambda: int(time.time()))
    sequences: list[Sequence] = field(default_factory=list)


class OfflineBatch:
    """Lines of OpenAI's batch format in an engine; whoever adds one gets its outcome delivered.

    Requests that state no seed draw by their custom_id, so that a line's result does not depend
    on the lines around it, on the process that it runs in, or on interruptions.

    Args:
        llm: its engine is stepped by nobody else.
        model: the name that bodies must ask for.
        seed: of requests that state none.
    """

    def __init__(self, llm: LLM, *, model: str, seed: int):
        self._llm = llm
        self._model = model
        self._seed = seed
        self._requests: dict[Sequence, _Request] = {}
        self.num_tokens = 0  # generated so far

    @property
    def num_sequences(self) -> int:
        """Continuations that are waiting or running."""
        return len(self._requests)

    def add(self, line: int, raw: bytes, deliver: Deliver) -> None:
        """Queue a line's request. A line that is no good is delivered at once, as a failure."""
        custom_id = None
        try:
            record = decode_line(raw)
            custom_id = custom_id_of(record)
            request = check_request(record)
            job = parse(request.url, request.body, self._llm)
            self._check(job)
        except RequestError as error:
            deliver(Failure(line, custom_id, error.body()["error"]))
            return
        self._submit(_Request(line, request.custom_id, job, deliver))

    def _check(self, job: Job) -> None:
        """Refuse what makes sense over HTTP alone, and other models than this one."""
        if job.stream:
            raise RequestError(
                400,
                "stream=true: a batch writes whole responses; leave it out",
                param="stream",
                code="unsupported_parameter",
            )
        if job.model != self._model:
            raise RequestError(
                404,
                f"model={job.model!r}: this run serves {self._model!r}; --served-model-name gives "
                "it another name",
                param="model",
                code="model_not_found",
            )

    def _submit(self, request: _Request) -> None:
        params = request.job.params
        for prompt_index, prompt in enumerate(request.job.prompts):
            seed = params.seed
            if seed is None:
                seed = (_line_seed(self._seed, request.custom_id) + prompt_index) % 2**32
            for index in range(params.n):
                sequence = self._llm.engine.add(
                    list(prompt),
                    params,
                    seed=seed,
                    stream=self._llm.tokenizer.stream(),
                    images=request.job.images[prompt_index],
                    prompt_index=prompt_index,
                    index=index,
                )
                request.sequences.append(sequence)
                self._requests[sequence] = request

    def step(self) -> None:
        """One step of the engine; requests that end with it are delivered."""
        for sequence in self._llm.engine.step():
            self.num_tokens += len(sequence.take_tokens())
            request = self._requests.get(sequence)
            if request is None:
                continue
            if sequence.finish_reason in ("error", "abort"):  # the rest of the request is in vain
                self._llm.engine.abort(request.sequences)
            elif any(each.finish_reason is None for each in request.sequences):
                continue
            for each in request.sequences:
                del self._requests[each]
            request.deliver(self._outcome(request))

    def _outcome(self, request: _Request) -> Result | Failure:
        request_id = uuid.uuid4().hex
        prefix = "chatcmpl" if request.job.url.startswith("/v1/chat") else "cmpl"
        # The failed continuation first: its error says more than that the others were aborted.
        failed = [each for each in request.sequences if each.finish_reason == "error"]
        try:
            body = response(
                request.job,
                failed or request.sequences,
                request_id=f"{prefix}-{request_id}",
                created=request.created,
                model=self._model,
            )
        except RequestError as error:
            return Failure(request.line, request.custom_id, error.body()["error"])
        return Result(request.line, request.custom_id, request_id, body)

    def close(self) -> None:
        """Drop what is waiting or running; nothing more is delivered."""
        self._llm.engine.abort(list(self._requests))
        self._requests.clear()


def run(
    batch: OfflineBatch,
    lines: Iterable[tuple[int, bytes]],
    deliver: Deliver,
    *,
    window: int,
    stop: Callable[[], bool],
) -> bool:
    """Complete lines, with about `window` continuations in the engine at any time.

    `stop` is asked between steps; True ends the run early. Returns whether all was done.
    """
    try:
        for number, raw in lines:
            batch.add(number, raw, deliver)
            while not (stopped := stop()) and batch.num_sequences >= window:
                batch.step()
            if stopped:
                return False
        while batch.num_sequences:
            batch.step()
            if stop():
                return not batch.num_sequences
        return True
    finally:
        batch.close()


def _line_seed(seed: int, custom_id: str) -> int:
    return zlib.crc32(custom_id.encode("utf-8", "surrogatepass"), seed)
