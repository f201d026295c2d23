"""The bodies of responses as pydantic models, for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Closed):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Closed):
    """What went wrong."""

    error: ErrorDetail


class PromptTokensDetails(_Closed):
    cached_tokens: int


class Usage(_Closed):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobLists(_Closed):
    """One entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(_Closed):
    index: int
    text: str
    logprobs: CompletionLogprobLists | None
    finish_reason: Literal["stop", "length"]


class CompletionResponse(_Closed):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class LikelyToken(_Closed):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobLists(_Closed):
    content: list[ChatToken]
    refusal: None


class Answer(_Closed):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Closed):
    index: int
    message: Answer
    logprobs: ChatLogprobLists | None
    finish_reason: Literal["stop", "length"]


class ChatResponse(_Closed):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(_Closed):
    """`max_model_len`: most tokens of a prompt and its continuation."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Closed):
    object: Literal["list"]
    data: list[ModelCard]


class Health(_Closed):
    status: Literal["ok"]


def reference(model: type[BaseModel]) -> dict[str, Any]:
    """How the OpenAPI document refers to a model."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}
