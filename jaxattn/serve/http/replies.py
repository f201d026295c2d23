"""JSON over HTTP: bodies, errors with their headers, server-sent events."""

import json
from typing import Any

from starlette.responses import Response

from jaxattn.serve.openai.errors import RequestError

DONE = b"data: [DONE]\n\n"


def encode(data: dict[str, Any]) -> bytes:
    """JSON in ASCII, which half a surrogate pair in an error's message cannot break."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


def reply(
    data: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response of JSON."""
    return Response(encode(data), status, headers, media_type="application/json")


def error_reply(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """An error in OpenAI's shape, with what its status says in headers.

    OpenAI's clients repeat requests that ran out of time, unless `x-should-retry` forbids it: a
    late answer would be late again, and the work is thrown away.
    """
    extra = dict(headers or {})
    if error.status == 401:
        extra["www-authenticate"] = "Bearer"
    elif error.status in (429, 503):
        extra["retry-after"] = "1"
    elif error.status in (408, 504):
        extra["x-should-retry"] = "false"
    return reply(error.body(), error.status, extra)
