"""The outermost layer of a server: who may come in, and what is counted."""

import hmac
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxattn.serve.http.replies import error_reply
from jaxattn.serve.http.service import Service
from jaxattn.serve.openai.errors import RequestError

_CLIENT_GONE = 499
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_OPEN_PATHS = ("/health",)  # for probes, which have no key


class Guard:
    """ASGI middleware: asks for the API key and counts requests by path, method and status."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), _CLIENT_GONE

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._admits(scope):
                await self._app(scope, receive, watch)
            else:
                error = RequestError(401, "the API key is missing or wrong", code="invalid_api_key")
                await error_reply(error)(scope, receive, watch)
        except Exception:
            status = 500
            raise
        finally:
            # Labels come from a fixed set: strangers choose paths and methods.
            path = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._service.metrics.request(path, method, status, time.monotonic() - start)

    def _admits(self, scope: Scope) -> bool:
        key = self._service.settings.api_key
        if key is None or scope["path"] in _OPEN_PATHS:
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
        return same and scheme.lower() == "bearer"
