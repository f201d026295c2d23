"""Reads the JSON body of a request."""

import json
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from jaxattn.serve.openai.errors import RequestError


class ClientGone(Exception):
    """The client closed its connection before the response was complete."""


async def read_json(headers: Headers, receive: Receive, max_bytes: int) -> Any:
    """The decoded body.

    Raises RequestError: 415 if it is said to be anything but plain JSON, 413 as soon as it is
    longer than `max_bytes`, 400 if it is no JSON. Raises ClientGone.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            415,
            f"the content type is {kind!r}: send application/json",
            code="unsupported_media_type",
        )
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise RequestError(
            415, f"content-encoding {encoding!r}: send it plain", code="unsupported_media_type"
        )
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_long(max_bytes)
    data = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data += message.get("body", b"")
        if len(data) > max_bytes:
            raise _too_long(max_bytes)
        more = message.get("more_body", False)
    return decode(bytes(data))


def decode(data: bytes) -> Any:
    """JSON in UTF-8. Raises RequestError (400)."""
    try:
        return json.loads(data.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _too_long(max_bytes: int) -> RequestError:
    return RequestError(413, f"the body is longer than {max_bytes} bytes", code="request_too_large")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
