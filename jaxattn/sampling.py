"""How a next token is chosen: a request's parameters, checked on the host."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LOGPROBS = 64  # the compiled step reports this many at most


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request asks of its continuation. All of it is honoured; unknown names are errors.

    Args:
        max_tokens: at most this many new tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k best tokens, and those that tie with the k-th; 0 keeps all.
        top_p: keep the fewest best tokens whose probabilities sum to at least this, and those
            that tie with the last; 1 keeps all.
        min_p: drop tokens less probable than this fraction of the best one; 0 keeps all.
        seed: the same seed gives the same draws, whatever else is in the batch. None: the next
            of the LLM's own.
        stop: string or strings that end the text; they are cut off it.
        stop_token_ids: ids that end the text, besides the model's own.
        n: number of independent continuations.
        logprobs: report this many most likely tokens, and the chosen one, at every new token.
        prompt_logprobs: the same for every prompt token but the first.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the
            prompt or the text (Keskar et al., 2019); 1 is none.
        presence_penalty: subtracted from the logits of tokens in the new text.
        frequency_penalty: subtracted once for every time that a token is in the new text.
        ignore_eos: do not end at the model's own stop tokens.

    Log-probabilities are the model's: before penalties, temperature and filters. The order is
    penalties, temperature, min_p, top_k, top_p.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            limit.check(name, getattr(self, name))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, Sequence)):
                raise TypeError(f"{name}={value!r}: expected a list")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise ValueError(f"stop={self.stop!r}: expected non-empty strings")
        if not all(_is_int(token) and token >= 0 for token in self.stop_token_ids or ()):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r}: expected ids of at least 0")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos={self.ignore_eos!r}: expected True or False")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1, 0, 0)


@dataclass(frozen=True, kw_only=True)
class _Limit:
    """The numbers that a parameter may be."""

    least: float
    most: float = math.inf
    above: bool = False  # `least` itself is excluded
    whole: bool = False
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        if value is None and self.optional:
            return
        number = _is_int(value) or (isinstance(value, float) and not self.whole)
        if not number:
            raise TypeError(f"{name}={value!r}: expected {'an int' if self.whole else 'a number'}")
        assert isinstance(value, int | float)
        enough = self.least < value if self.above else self.least <= value
        if not (enough and value <= self.most and math.isfinite(value)):
            expected = f"{'above' if self.above else 'at least'} {self.least}"
            if self.most < math.inf:
                expected += f" and at most {self.most}"
            raise ValueError(f"{name}={value}: expected {expected}")


_LIMITS = {
    "max_tokens": _Limit(least=1, whole=True),
    "temperature": _Limit(least=0),
    "top_k": _Limit(least=0, most=2**31 - 1, whole=True),
    "top_p": _Limit(least=0, most=1, above=True),
    "min_p": _Limit(least=0, most=1),
    "seed": _Limit(least=0, most=2**32 - 1, whole=True, optional=True),
    "n": _Limit(least=1, most=1024, whole=True),
    "logprobs": _Limit(least=0, most=MAX_LOGPROBS, whole=True, optional=True),
    "prompt_logprobs": _Limit(least=0, most=MAX_LOGPROBS, whole=True, optional=True),
    "repetition_penalty": _Limit(least=0.001, most=1000),
    "presence_penalty": _Limit(least=-2, most=2),
    "frequency_penalty": _Limit(least=-2, most=2),
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
