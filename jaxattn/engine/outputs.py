"""What a request gives back, in the shape that users of serving engines know."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """Natural log-probability of a token under the model, and its rank (1 is the most likely)."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. `logprobs[i]` maps token ids to `Logprob` for the i-th new token.

    `stop_reason` is the stop string or stop token id that ended the text, None for the model's
    own stop tokens or the length.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its `n` continuations.

    `prompt_token_ids` has the id after the vocabulary for every token of an image. In
    `prompt_logprobs` those are None, since nothing predicts them, and so is the first token.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None


@dataclass(frozen=True)
class StreamChunk:
    """New text of one continuation of one prompt. The last chunk has a `finish_reason`.

    Text that may yet turn out to be half a character or the start of a stop string is held back,
    so that the chunks of a continuation concatenate to its `text`.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
