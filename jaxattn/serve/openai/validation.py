"""Checks of bodies by pydantic, explained as OpenAI would: one error that names the parameter."""

import reprlib
from typing import Any

from pydantic import BaseModel, ValidationError

from jaxattn.serve.openai.bodies import UNSUPPORTED, ChatBody, CompletionBody
from jaxattn.serve.openai.errors import RequestError


def validate[Body: BaseModel](model: type[Body], body: Any) -> Body:
    """A body as one of the models of `bodies.py`, or RequestError (400)."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _explain(error, body) from None


def unsupported(param: str, message: str) -> RequestError:
    """The error for what OpenAI's API has and this one has not."""
    return RequestError(400, message, param=param, code="unsupported_parameter")


def _explain(invalid: ValidationError, body: Any) -> RequestError:
    """The first of pydantic's errors; of the alternatives of a union the one that got furthest."""
    errors = invalid.errors(include_url=False, include_context=False)
    if not isinstance(body, dict):
        return RequestError(400, "the body is not a JSON object", code="invalid_type")
    if not errors[0]["loc"]:  # a key with half of a surrogate pair
        name = reprlib.repr(errors[0]["input"])
        return RequestError(400, f"{name} is no parameter's name", code="unknown_parameter")
    field = errors[0]["loc"][0]
    of_other_kinds = {each["loc"][:-1] for each in errors if each["type"] == "literal_error"}
    error = max(
        (each for each in errors if each["loc"][0] == field),
        key=lambda each: (
            len(each["loc"]),
            each["loc"][:-1] not in of_other_kinds,
            not each["type"].endswith("_type"),
        ),
    )
    path, names = _path(error["loc"], error["type"])
    got = reprlib.repr(error["input"])
    if error["type"] == "extra_forbidden" and field not in UNSUPPORTED:
        return RequestError(
            400, f"unknown parameter {path!r}", param=path, code="unknown_parameter"
        )
    if error["type"] == "missing":
        return RequestError(
            400, f"{path} is missing", param=path, code="missing_required_parameter"
        )
    if error["type"] == "literal_error" and names[-2:] == ["content", "type"]:
        return unsupported(
            path, f"{path}={got}: text and image_url are supported, not sound or files"
        )
    if field in UNSUPPORTED or names[-1] in UNSUPPORTED:
        param = str(field) if field in UNSUPPORTED else path
        value = reprlib.repr(body.get(field)) if field in UNSUPPORTED else got
        return unsupported(param, f"{param}={value} is not supported: leave it out")
    if field == "prompt":
        return RequestError(
            400,
            f"prompt={reprlib.repr(body['prompt'])}: a prompt is a string or a list of token ids, "
            "not empty, or a list of one kind of them",
            param="prompt",
            code="invalid_value",
        )
    return RequestError(400, f"{path}={got}: {error['msg']}", param=path, code="invalid_value")


def _path(location: tuple[int | str, ...], kind: str) -> tuple[str, list[str]]:
    """`messages[0].content` and its names, without the names that pydantic gives to types."""
    path, names = "", list[str]()
    for number, part in enumerate(location):
        last = number == len(location) - 1
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _FIELDS or (last and kind == "extra_forbidden"):
            names.append(part)
            path += f".{part}" if path else part
    return path, names


_FIELDS = frozenset(
    "messages role content type text image_url url detail stream_options include_usage "
    "include_obfuscation name refusal audio function_call annotations tool_calls".split()
) | {*CompletionBody.model_fields, *ChatBody.model_fields}
