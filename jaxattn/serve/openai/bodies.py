"""The bodies of OpenAI's requests as pydantic models: what is honoured, and what is refused.

Parameters of OpenAI's that are not supported are fields that only take the values that ask for
nothing. Unknown names are errors.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from jaxattn.sampling import MAX_LOGPROBS

MAX_PROMPTS = 2048  # of a body
MAX_CHOICES = 128  # of a prompt
_MAX_STOPS = 64


def _check_off(given: bool) -> bool:
    """Literal[False] would take 0 as well."""
    if given:
        raise ValueError("only false is possible")
    return given


def _check_on(given: bool) -> bool:
    if not given:
        raise ValueError("only true is possible")
    return given


On = Annotated[bool, AfterValidator(_check_on), Field(json_schema_extra={"const": True})]
Off = Annotated[bool, AfterValidator(_check_off), Field(json_schema_extra={"const": False})]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
TokenIds = Annotated[list[Count], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
EmptyList = Annotated[list[Any], Field(max_length=0)]
EmptyObject = Annotated[dict[str, Any], Field(max_length=0)]


class _Strict(BaseModel):
    """No unknown names, no conversions ("1" is no number), no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: Off | None = None


class _Body(_Strict):
    """What both kinds of requests have in common. null is a parameter's default."""

    model: str
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=_MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, Field(description="Accepted for clients that send it.")] = None
    # Ours, by the names that other servers have for them.
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=_MAX_STOPS)] | None = None
    # Not supported.
    logit_bias: EmptyObject | None = None


class CompletionBody(_Body):
    """`/v1/completions`."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[Count, Field(description="0 only with echo; default 16")] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    # Not supported.
    best_of: Annotated[int, Field(description="Only as large as n")] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(_Strict):
    """Where an image is."""

    url: Annotated[str, Field(description="data:image/...;base64,... (http if the server may)")]
    # Not supported: the model sees every image in one resolution.
    detail: Literal["auto"] | None = None


class ImagePart(_Strict):
    """An image in a user's message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Message(_Strict):
    """A turn of a conversation. The null fields are those of an answer that is sent back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart | ImagePart], Field(min_length=1, fail_fast=True)]
    # Not supported.
    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: EmptyList | None = None
    tool_calls: EmptyList | None = None


class TextFormat(_Strict):
    """The only response format."""

    type: Literal["text"]


class ChatBody(_Body):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: (
        Annotated[Positive, Field(description="Default: what the model's length leaves")] | None
    ) = None
    max_tokens: Annotated[Positive, Field(description="The older name of it")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    # Not supported.
    tools: EmptyList | None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: On | None = None
    functions: EmptyList | None = None
    function_call: Literal["none"] | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None
    metadata: EmptyObject | None = None
    store: Off | None = None
    service_tier: Literal["auto", "default"] | None = None


UNSUPPORTED = frozenset(
    "logit_bias best_of suffix tools tool_choice parallel_tool_calls functions function_call "
    "response_format modalities audio prediction reasoning_effort verbosity web_search_options "
    "metadata store service_tier name refusal annotations tool_calls include_obfuscation "
    "detail".split()
)
