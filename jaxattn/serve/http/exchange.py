"""One request for completions, from the first byte of its body to the last of its response."""

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxattn.serve.http.json_body import ClientGone, read_json
from jaxattn.serve.http.replies import DONE, error_reply, event, reply
from jaxattn.serve.http.service import Service
from jaxattn.serve.http.ticket import Ticket
from jaxattn.serve.openai.chunks import Chunks
from jaxattn.serve.openai.errors import RequestError
from jaxattn.serve.openai.requests import COMPLETIONS, parse
from jaxattn.serve.openai.responses import response

_LAST_WORDS_SECONDS = 1.0  # to say that a response is late to a client that may not read
_log = logging.getLogger(__name__)


class Exchange(Response):
    """Answers a request, streamed or whole. If the client goes away, its pages become free."""

    def __init__(self, service: Service, url: str):
        super().__init__()
        prefix = "cmpl" if url == COMPLETIONS else "chatcmpl"
        self._service = service
        self._url = url
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._arrived = time.monotonic()
        self._streams = False  # the headers of a stream are out
        self._stage = "reading the body"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._service.settings.timeout_seconds):
                await self._answer(scope, receive, send)
        except ClientGone:
            return
        except TimeoutError:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    await self._fail(self._late(), scope, receive, send)
        except RequestError as error:
            await self._fail(error, scope, receive, send)
        except Exception as error:
            _log.exception("a request failed")
            failure = RequestError(500, f"{type(error).__name__}: {error}", code="internal_error")
            await self._fail(failure, scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        service.check_ready()
        body = await read_json(Headers(scope=scope), receive, service.settings.max_body_bytes)
        self._stage = "computing"
        job = await asyncio.to_thread(parse, self._url, body, service.llm)
        service.check_model(job.model)
        service.check_ready()
        ticket = service.loop.submit(job, self._arrived)
        try:
            if job.stream:
                await _or_gone(receive, self._stream(ticket, send))
            else:
                whole = await _or_gone(receive, self._whole(ticket))
                await whole(scope, receive, send)
        finally:
            service.loop.finish(ticket)

    async def _whole(self, ticket: Ticket) -> Response:
        sequences = [(await ticket.next()).sequence for _ in range(ticket.job.num_sequences)]
        body = response(
            ticket.job,
            sequences,
            request_id=self._id,
            created=self._created,
            model=ticket.job.model,
        )
        return reply(body, headers={"x-request-id": self._id})

    async def _stream(self, ticket: Ticket, send: Send) -> None:
        """The first news come before the headers, so that an early error has its own status."""
        job = ticket.job
        chunks = Chunks(job, request_id=self._id, created=self._created, model=job.model)
        open_choices = job.num_sequences
        while open_choices:
            news = await ticket.next()
            await self._send(b"".join(map(event, chunks.news(news))), send)
            open_choices -= news.finish_reason is not None
        await self._send(b"".join(map(event, chunks.end())) + DONE, send, more=False)

    async def _send(self, data: bytes, send: Send, *, more: bool = True) -> None:
        """A piece of the stream, after the headers if it is the first."""
        if not self._streams:
            self._streams = True
            headers = {"x-request-id": self._id, "cache-control": "no-store"}
            start = Response(None, 200, headers, media_type="text/event-stream")
            del start.headers["content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": start.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _fail(self, error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._streams:
            await self._send(event(error.body()), send, more=False)
        else:
            await error_reply(error, {"x-request-id": self._id})(scope, receive, send)

    def _late(self) -> RequestError:
        return RequestError(
            408 if self._stage == "reading the body" else 504,
            f"{self._stage} took longer than {self._service.settings.timeout_seconds:g} s",
            code="timeout",
        )


async def _or_gone[Result](receive: Receive, work: Coroutine[None, None, Result]) -> Result:
    """The result of `work`; it is cancelled, and ClientGone raised, if the client goes away."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
