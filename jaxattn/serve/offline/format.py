"""Lines of OpenAI's batch format: requests come in, results and errors go out."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxattn.serve.openai.errors import RequestError

RESULT_BEGINS = b'{"id": "batch_req_'
ERROR_BEGINS = b'{"line": '
_KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class BatchRequest:
    """A line of the input: the body is still to be checked."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A request that was served: the body of its response."""

    line: int
    custom_id: str
    request_id: str
    body: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """What is written of it."""
        response = {"status_code": 200, "request_id": self.request_id, "body": self.body}
        return {
            "id": f"batch_req_{self.request_id}",
            "custom_id": self.custom_id,
            "response": response,
            "error": None,
        }


@dataclass(frozen=True)
class Failure:
    """A line that was not served, and why: `error` has OpenAI's shape."""

    line: int
    custom_id: str | None
    error: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """What is written of it."""
        return {"line": self.line, "custom_id": self.custom_id, "error": self.error}


def decode_line(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises RequestError."""
    try:
        record = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg}, column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else error
        )
        raise RequestError(400, f"the line is not JSON: {reason}", code="invalid_json") from None
    if not isinstance(record, dict):
        raise RequestError(
            400, f"the line is JSON, but {record!r:.40} is no object", code="invalid_type"
        )
    return record


def check_request(record: dict[str, Any]) -> BatchRequest:
    """The request of a line's object. Raises RequestError that names the key."""
    for name in _KEYS:
        if name not in record:
            raise RequestError(
                400, f"{name} is missing", param=name, code="missing_required_parameter"
            )
    for name in record:
        if name not in _KEYS:
            raise RequestError(
                400,
                f"unknown key {name!r}: a line has {', '.join(_KEYS)}",
                param=name,
                code="unknown_parameter",
            )
    custom_id, method, url, body = (record[name] for name in _KEYS)
    _expect("custom_id", custom_id, "a string, not empty", isinstance(custom_id, str) and custom_id)
    _expect("method", method, "'POST'", method == "POST")
    _expect("url", url, "a string", isinstance(url, str))
    _expect("body", body, "an object", isinstance(body, dict))
    return BatchRequest(custom_id, url, body)


def custom_id_of(record: Any) -> str | None:
    """The custom_id of a decoded line, None if it has none that can be used."""
    custom_id = record.get("custom_id") if isinstance(record, dict) else None
    return custom_id if isinstance(custom_id, str) and custom_id else None


def custom_id_in(raw: bytes) -> str | None:
    """The custom_id of a line as it is in the file."""
    try:
        return custom_id_of(decode_line(raw))
    except RequestError:
        return None


def index_ids(
    lines: Iterable[tuple[int, str | None]], where: Callable[[int], str]
) -> dict[str, int]:
    """Line number of every custom_id. Raises ValueError if two lines have the same one.

    Args:
        lines: numbers and ids of an input; None is a line without an id.
        where: says a number to a person, such as "line 3".
    """
    index: dict[str, int] = {}
    for number, custom_id in lines:
        if custom_id is None:
            continue
        first = index.setdefault(custom_id, number)
        if first != number:
            raise ValueError(
                f"custom_id {custom_id!r} is on {where(first)} and on {where(number)}: results are "
                "told apart by it; give every request its own"
            )
    return index


def line_of_result(
    custom_id: str | None, index: dict[str, int], done: set[int], *, where: str, input: Path
) -> int:
    """Which line of the input a result is for.

    Raises ValueError if it is no result, of another input, or the second for a line of `done`.
    `where` says which result it is to a person, `input` is the one that `index` is of.
    """
    if custom_id is None:
        raise ValueError(
            f"{where} is not a result: the output is left as it is; name another or repair it"
        )
    line = index.get(custom_id)
    if line is None:
        raise ValueError(
            f"{where} is the result of {custom_id!r}, which is not in {input}: the output belongs "
            "to another input; name another output"
        )
    if line in done:
        raise ValueError(f"{where} is the second result of {custom_id!r}: remove one of them")
    return line


def encode_line(record: dict[str, Any]) -> bytes:
    """A record as a line of a file, with its end. Half a surrogate pair is written as \\uXXXX."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


def _expect(name: str, value: object, expected: str, holds: object) -> None:
    if not holds:
        raise RequestError(
            400, f"{name}={value!r:.60}: expected {expected}", param=name, code="invalid_value"
        )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
