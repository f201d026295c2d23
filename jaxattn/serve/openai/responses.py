"""From finished continuations to the JSON body of a response."""

from collections.abc import Sequence as Sequences
from typing import Any

from jaxattn.engine.outputs import Logprob
from jaxattn.engine.sequence import Sequence
from jaxattn.models.gemma3.tokenizer import TextStream, Tokenizer
from jaxattn.serve.openai.errors import RequestError
from jaxattn.serve.openai.requests import COMPLETIONS, Job

_LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


def response(
    job: Job, sequences: Sequences[Sequence], *, request_id: str, created: int, model: str
) -> dict[str, Any]:
    """The whole body, not streamed.

    `sequences`: all of the job's continuations, ended, in any order. `created`: seconds since
    1970. Raises RequestError if one of them failed (500) or was aborted (503).
    """
    ordered = sorted(sequences, key=lambda each: (each.prompt_index, each.index))
    for each in ordered:
        check_ended_well(each)
    choice = completion_choice if job.url == COMPLETIONS else chat_choice
    return {
        "id": request_id,
        "object": "text_completion" if job.url == COMPLETIONS else "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice(job, each) for each in ordered],
        "usage": usage(job, ordered),
    }


def check_ended_well(sequence: Sequence) -> None:
    """Raise RequestError for a continuation that ended in an error or was aborted."""
    if sequence.finish_reason == "error":
        error = sequence.error
        raise RequestError(
            500, f"the model failed: {type(error).__name__}: {error}", code="model_error"
        )
    if sequence.finish_reason == "abort":
        raise RequestError(503, "the request was aborted before its end", code="aborted")


def usage(job: Job, sequences: Sequences[Sequence]) -> dict[str, Any]:
    """Token counts; a prompt with several continuations counts once."""
    prompt_tokens = sum(map(len, job.prompts))
    completion_tokens = sum(len(each.new_tokens[: job.max_tokens]) for each in sequences)
    cached = sum(each.num_cached_tokens for each in sequences if each.index == 0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def choice_index(job: Job, sequence: Sequence) -> int:
    """The place of a continuation among the choices: by prompt, then continuation."""
    return sequence.prompt_index * job.params.n + sequence.index


def finish_reason(job: Job, reason: str | None) -> str | None:
    """ "stop" or "length", None while a continuation runs. Without new tokens it is "length"."""
    return "length" if reason is not None and job.max_tokens == 0 else reason


def completion_choice(job: Job, sequence: Sequence) -> dict[str, Any]:
    """A choice of `/v1/completions`."""
    reports = CompletionLogprobs(job, sequence.prompt_index)
    text, entries = "", list[dict[str, Any]]()
    if job.echo:
        text = reports.prompt_text
        entries += reports.prompt(sequence.prompt_logprobs)
    if job.max_tokens:
        output = sequence.output()
        text += output.text
        entries += reports.new(output.token_ids, output.logprobs or ())
    return {
        "index": choice_index(job, sequence),
        "text": text,
        "logprobs": completion_logprobs(job, entries),
        "finish_reason": finish_reason(job, sequence.finish_reason),
    }


def chat_choice(job: Job, sequence: Sequence) -> dict[str, Any]:
    """A choice of `/v1/chat/completions`."""
    output = sequence.output()
    return {
        "index": choice_index(job, sequence),
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": chat_logprobs(job, output.token_ids, output.logprobs or ()),
        "finish_reason": finish_reason(job, sequence.finish_reason),
    }


class CompletionLogprobs:
    """Entries of a choice's `logprobs`, token by token; it counts the characters before each."""

    def __init__(self, job: Job, prompt_index: int):
        self._job = job
        self._ids = job.prompts[prompt_index]
        self._text = job.texts[prompt_index]
        tokenizer = job.tokenizer
        bos = (tokenizer.bos_id,)
        given = self._text is not None and self._text.startswith(tokenizer.token(bos[0]))
        self._num_unseen = int(self._ids[:1] == bos and not given)  # a <bos> that was added
        self._stream = TextStream(tokenizer, skip_special=True)
        self._offset = 0

    @property
    def prompt_text(self) -> str:
        """What `echo` repeats: the prompt as it was given, or the text of its tokens."""
        if self._text is not None:
            return self._text
        ids = self._ids[self._num_unseen :]
        return self._job.tokenizer.decode(ids, skip_special=False)

    def prompt(self, logprobs: Sequences[dict[int, Logprob] | None]) -> list[dict[str, Any]]:
        """Entries of the prompt's tokens; `logprobs` are those of all but the first."""
        if self._job.params.logprobs is None:
            return []
        seen = TextStream(self._job.tokenizer, skip_special=False)
        entries = []
        for position, token in enumerate(self._ids):
            report = logprobs[position - 1] if position else None
            entries.append(self._entry(token, report))
            if position >= self._num_unseen:
                self._offset += len(seen.step(token))
        self._offset = len(self.prompt_text)
        return entries

    def new(
        self, token_ids: Sequences[int], logprobs: Sequences[dict[int, Logprob]]
    ) -> list[dict[str, Any]]:
        """Entries of new tokens, in their order."""
        entries = []
        for token, report in zip(token_ids, logprobs, strict=False):
            entries.append(self._entry(token, report))
            self._offset += len(self._stream.step(token))
        return entries

    def _entry(self, token: int, report: dict[int, Logprob] | None) -> dict[str, Any]:
        tokenizer, top = self._job.tokenizer, dict[str, float]()
        for each, logprob in (report or {}).items():
            name = token_name(tokenizer, each)  # of two tokens with one text the likelier counts
            top[name] = max(_finite(logprob.logprob), top.get(name, -float("inf")))
        return {
            "tokens": token_name(tokenizer, token),
            "token_logprobs": None if report is None else _finite(report[token].logprob),
            "top_logprobs": None if report is None or not self._job.params.logprobs else top,
            "text_offset": self._offset,
        }


def completion_logprobs(job: Job, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Entries of tokens, turned into lists; None if they were not asked for."""
    if job.params.logprobs is None:
        return None
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    lists: dict[str, Any] = {name: [each[name] for each in entries] for name in names}
    return lists | ({} if job.params.logprobs else {"top_logprobs": None})


def chat_logprobs(
    job: Job, token_ids: Sequences[int], logprobs: Sequences[dict[int, Logprob]]
) -> dict[str, Any] | None:
    """A chat choice's `logprobs` for new tokens; None if they were not asked for."""
    if job.params.logprobs is None:
        return None
    content = []
    for token, report in zip(token_ids, logprobs, strict=True):
        likely = sorted(report, key=lambda each: report[each].rank)
        content.append(
            _chat_entry(job.tokenizer, token, report)
            | {
                "top_logprobs": [
                    _chat_entry(job.tokenizer, each, report)
                    for each in likely[: job.params.logprobs]
                ]
            }
        )
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token: int, report: dict[int, Logprob]) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token),
        "logprob": _finite(report[token].logprob),
        "bytes": list(tokenizer.token_bytes(token, skip_special=False)),
    }


def token_name(tokenizer: Tokenizer, token: int) -> str:
    r"""A token's text; of half a character "bytes:\xe2\x82", so that no two are alike."""
    data = tokenizer.token_bytes(token, skip_special=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
