"""From news to the chunks of a streamed response."""

from collections.abc import Iterable
from typing import Any

from jaxattn.serve.http.ticket import News
from jaxattn.serve.openai.requests import COMPLETIONS, Job
from jaxattn.serve.openai.responses import (
    CompletionLogprobs,
    chat_logprobs,
    choice_index,
    completion_logprobs,
    finish_reason,
    usage,
)


class Chunks:
    """The chunks of one job. `created`: seconds since 1970."""

    def __init__(self, job: Job, *, request_id: str, created: int, model: str):
        self._job = job
        self._chat = job.url != COMPLETIONS
        self._begun: dict[int, CompletionLogprobs] = {}  # by the choice's index
        self._ended: list[News] = []
        self._head = {
            "id": request_id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": model,
        }

    def news(self, news: News) -> Iterable[dict[str, Any]]:
        """The chunks of one continuation's news."""
        if news.finish_reason is not None:
            self._ended.append(news)
        choices = self._chat_choices(news) if self._chat else self._completion_choices(news)
        index = choice_index(self._job, news.sequence)
        for choice in choices:
            extra = {"usage": None} if self._job.include_usage else {}
            yield self._head | {"choices": [{"index": index} | choice]} | extra

    def end(self) -> Iterable[dict[str, Any]]:
        """What follows the last news: the usage, if it was asked for."""
        if self._job.include_usage:
            sequences = [each.sequence for each in self._ended]
            yield self._head | {"choices": [], "usage": usage(self._job, sequences)}

    def _completion_choices(self, news: News) -> Iterable[dict[str, Any]]:
        index = choice_index(self._job, news.sequence)
        text, entries = "", list[dict[str, Any]]()
        if index not in self._begun:
            self._begun[index] = CompletionLogprobs(self._job, news.sequence.prompt_index)
            if self._job.echo:
                text = self._begun[index].prompt_text
                entries += self._begun[index].prompt(news.sequence.prompt_logprobs)
        if self._job.max_tokens:
            text += news.text
            entries += self._begun[index].new(news.token_ids, news.logprobs)
        if text or entries or news.finish_reason:
            yield {
                "text": text,
                "logprobs": completion_logprobs(self._job, entries),
                "finish_reason": finish_reason(self._job, news.finish_reason),
            }

    def _chat_choices(self, news: News) -> Iterable[dict[str, Any]]:
        index = choice_index(self._job, news.sequence)
        if index not in self._begun:
            self._begun[index] = CompletionLogprobs(self._job, 0)
            delta = {"role": "assistant", "content": "", "refusal": None}
            yield {"delta": delta, "logprobs": None, "finish_reason": None}
        logprobs = chat_logprobs(self._job, news.token_ids, news.logprobs)
        if news.text or (logprobs and logprobs["content"]):
            yield {"delta": {"content": news.text}, "logprobs": logprobs, "finish_reason": None}
        if news.finish_reason is not None:
            reason = finish_reason(self._job, news.finish_reason)
            yield {"delta": {}, "logprobs": None, "finish_reason": reason}
