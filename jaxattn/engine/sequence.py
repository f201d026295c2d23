"""One continuation in progress: its tokens, how far the cache holds them, and its text so far."""

from collections.abc import Sequence as Sequences
from typing import Protocol

from jaxattn.engine.images import PlacedImage
from jaxattn.engine.outputs import CompletionOutput, FinishReason, Logprob
from jaxattn.sampling import SamplingParams


class TextStream(Protocol):
    """Turns ids into text one at a time; returns only text that is complete."""

    def step(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Sequence:
    """A prompt, the tokens that follow it, and the request's parameters.

    The device runs a step ahead of the host, so that a token may be chosen and not yet known:

        tokens     p p p p p p n n ? ?        num_prompt = 6, len(tokens) = 8, num_unknown = 2
        computed   = = = = = = = - -          num_settled = 7, num_placed = 9, num_pending = 1

    Tokens below `num_settled` are in the cache for certain, those below `num_placed` once the
    steps that run are done. `prompt_index` and `index` say which prompt and continuation it is.
    `images` are those of the prompt, in order.
    """

    def __init__(
        self,
        sequence_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt_index: int,
        index: int,
        seed: int,
        max_len: int,
        eos_ids: tuple[int, ...],
        stream: TextStream,
        images: Sequences[PlacedImage] = (),
    ):
        self.id = sequence_id
        self.tokens = list(prompt_token_ids)
        self.num_prompt = len(prompt_token_ids)
        self.images = tuple(images)
        self.params = params
        self.prompt_index = prompt_index
        self.index = index
        self.seed = seed
        self.num_settled = self.num_placed = self.num_unknown = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # found in the cache when it was first admitted
        self.slot: int | None = None  # its row in the runner's buffers while it runs
        self.max_len = min(max_len, self.num_prompt + params.max_tokens)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: Exception | None = None
        self.logprobs: list[dict[int, Logprob]] = []
        self.prompt_logprobs: list[dict[int, Logprob] | None] = []
        self._eos_ids = () if params.ignore_eos else eos_ids
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self._stream = stream
        self._text = ""
        self._num_text_taken = 0
        self._num_tokens_taken = 0

    @property
    def num_chosen(self) -> int:
        """All tokens, those that are not yet known included."""
        return len(self.tokens) + self.num_unknown

    @property
    def num_pending(self) -> int:
        """Tokens that are still to be computed, so that the next one can be chosen."""
        return self.num_chosen - self.num_placed if self.num_chosen < self.max_len else 0

    @property
    def largest_piece(self) -> int:
        """The most tokens that have to be computed in one step before it ends."""
        left = [each for each in self.images if each.end > self.num_placed]
        return max((each.end - each.start for each in left), default=1)

    @property
    def in_flight(self) -> bool:
        """Whether a step that computes some of it is not settled yet."""
        return self.num_placed > self.num_settled

    @property
    def may_reuse(self) -> bool:
        """Whether cached tokens need not be computed: not if their log-probabilities are due."""
        due = 0 if self.params.prompt_logprobs is None else self.num_prompt - 1
        return len(self.prompt_logprobs) >= due

    def restart(self) -> None:
        """Nothing of it is in the cache any more: compute it again, up to the last known token."""
        self.num_settled = self.num_placed = self.num_unknown = 0

    @property
    def new_tokens(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt :]

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End from outside: aborted, or a step failed."""
        self.finish_reason, self.error = reason, error

    def add_token(self, token: int) -> None:
        """Append a chosen token and decide whether the continuation ends with it."""
        self.tokens.append(token)
        self.num_unknown -= 1
        is_stop = token in self._eos_ids or token in self._stop_token_ids
        is_last = is_stop or len(self.tokens) >= self.max_len
        searched = len(self._text)
        if not is_stop:
            self._text += self._stream.step(token)
        if is_last:
            self._text += self._stream.finish()
        found = [
            (self._text.find(text, max(0, searched - len(text) + 1)), text)
            for text in self.params.stop_strings
        ]
        found = [(where, text) for where, text in found if where >= 0]
        if found:
            where, self.stop_reason = min(found)
            self._text = self._text[:where]
            self.finish_reason = "stop"
        elif is_stop:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self._stop_token_ids else None
        elif is_last:
            self.finish_reason = "length"

    def take_text(self) -> str:
        """Text not yet taken, less an end that may still become a stop string."""
        end = len(self._text)
        if self.finish_reason is None:
            end -= max(map(self._held_back, self.params.stop_strings), default=0)
        text = self._text[self._num_text_taken : end]
        self._num_text_taken = max(self._num_text_taken, end)
        return text

    def take_tokens(self) -> list[int]:
        """New tokens not yet taken."""
        tokens = self.tokens[self.num_prompt + self._num_tokens_taken :]
        self._num_tokens_taken += len(tokens)
        return tokens

    def _held_back(self, stop: str) -> int:
        sizes = range(min(len(stop) - 1, len(self._text)), 0, -1)
        return next((size for size in sizes if self._text.endswith(stop[:size])), 0)

    def output(self) -> CompletionOutput:
        """The continuation as it stands."""
        return CompletionOutput(
            index=self.index,
            text=self._text,
            token_ids=tuple(self.new_tokens),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
        )
