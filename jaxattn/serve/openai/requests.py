"""From the JSON body of a request to token ids and sampling parameters."""

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any

from jaxattn.engine.errors import PromptTooLongError
from jaxattn.engine.images import PlacedImage
from jaxattn.engine.llm import LLM
from jaxattn.engine.sequence import Sequence
from jaxattn.models.gemma3.tokenizer import Tokenizer
from jaxattn.sampling import SamplingParams
from jaxattn.serve.openai.bodies import ChatBody, CompletionBody, Message
from jaxattn.serve.openai.errors import RequestError as RequestError
from jaxattn.serve.openai.validation import unsupported, validate

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
_DEFAULT_MAX_TOKENS = 16  # of completions; a chat goes on as long as there is room


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request that has been checked and can run: `params.n` continuations of every prompt.

    `texts` has the prompts as they were given, None for token ids; `images` those of each prompt,
    in order. `max_tokens` is what was asked
    for: 0 is only the prompt, although the engine makes one token then.
    """

    url: str
    model: str
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str | None, ...]
    images: tuple[tuple[PlacedImage, ...], ...]
    params: SamplingParams
    max_tokens: int
    echo: bool
    stream: bool
    include_usage: bool
    tokenizer: Tokenizer

    @property
    def num_sequences(self) -> int:
        """Continuations of all prompts."""
        return len(self.prompts) * self.params.n


def parse(url: str, body: Any, llm: LLM) -> Job:
    """Check a decoded body for `/v1/completions` or `/v1/chat/completions`.

    Raises RequestError (400, or 404 for another url) that names the parameter.
    """
    if url == COMPLETIONS:
        return _parse_completion(validate(CompletionBody, body), llm)
    if url == CHAT_COMPLETIONS:
        return _parse_chat(validate(ChatBody, body), llm)
    raise RequestError(
        404, f"unknown url {url!r}: use {COMPLETIONS} or {CHAT_COMPLETIONS}", code="unknown_url"
    )


def submit(job: Job, llm: LLM) -> list[Sequence]:
    """Queue a job's continuations, ordered by prompt and continuation: all of them or none."""
    sequences: list[Sequence] = []
    try:
        for prompt_index, prompt in enumerate(job.prompts):
            seed = llm.next_seed() if job.params.seed is None else job.params.seed
            for index in range(job.params.n):
                sequence = llm.engine.add(
                    list(prompt),
                    job.params,
                    seed=seed,
                    stream=llm.tokenizer.stream(),
                    images=job.images[prompt_index],
                    prompt_index=prompt_index,
                    index=index,
                )
                sequences.append(sequence)
    except BaseException:
        llm.engine.abort(sequences)
        raise
    return sequences


def _parse_completion(body: CompletionBody, llm: LLM) -> Job:
    n, echo = _default(body.n, 1), bool(body.echo)
    if body.best_of not in (None, n):
        raise unsupported("best_of", f"best_of={body.best_of} is not supported, except as n={n}")
    if body.max_tokens == 0 and not echo:
        raise RequestError(
            400,
            "max_tokens=0 makes sense only with echo=true: ask for at least 1 token",
            param="max_tokens",
            code="invalid_value",
        )
    prompts: list[Any]
    if isinstance(body.prompt, str) or isinstance(body.prompt[0], int):
        prompts = [body.prompt]
    else:
        prompts = list(body.prompt)
    texts = tuple(each if isinstance(each, str) else None for each in prompts)
    ids = _encode(prompts, "prompt", llm)
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = min(_DEFAULT_MAX_TOKENS, *(_room(each, llm) for each in ids))
    _check_room(ids, max_tokens, "max_tokens", llm)
    return Job(
        url=COMPLETIONS,
        prompts=ids,
        texts=texts,
        images=((),) * len(ids),
        params=_params(
            body,
            llm,
            max_tokens=max(1, max_tokens),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if echo else None,
        ),
        max_tokens=max_tokens,
        echo=echo,
        **_common(body, llm),
    )


def _parse_chat(body: ChatBody, llm: LLM) -> Job:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise RequestError(
            400,
            "max_tokens is the older name of max_completion_tokens: give one of them",
            param="max_tokens",
            code="invalid_value",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(
            400,
            f"top_logprobs={body.top_logprobs} needs logprobs=true",
            param="top_logprobs",
            code="invalid_value",
        )
    try:
        prompt = llm.prompts.chat([_turn(each) for each in body.messages])
    except ValueError as error:
        raise RequestError(400, str(error), param="messages", code=_code(error)) from None
    _check_prompt(prompt.token_ids, prompt.images, "messages", llm)
    ids = (tuple(prompt.token_ids),)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, name)
    if max_tokens is None:
        max_tokens = _room(ids[0], llm)
    _check_room(ids, max_tokens, name, llm)
    return Job(
        url=CHAT_COMPLETIONS,
        prompts=ids,
        texts=(prompt.text,),
        images=(prompt.images,),
        params=_params(
            body,
            llm,
            max_tokens=max_tokens,
            logprobs=_default(body.top_logprobs, 0) if body.logprobs else None,
            prompt_logprobs=None,
        ),
        max_tokens=max_tokens,
        echo=False,
        **_common(body, llm),
    )


def _turn(message: Message) -> dict[str, Any]:
    """A message as `render_chat` has it."""
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.model_dump(include={"content"})["content"]}


def _common(body: CompletionBody | ChatBody, llm: LLM) -> dict[str, Any]:
    """What both urls take alike."""
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            400,
            "stream_options needs stream=true",
            param="stream_options",
            code="invalid_value",
        )
    options = body.stream_options
    return {
        "model": body.model,
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "tokenizer": llm.tokenizer,
    }


def _params(
    body: CompletionBody | ChatBody,
    llm: LLM,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    names = (
        *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "n"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos"),
    )
    given = {name: getattr(body, name) for name in names}
    wrong = [token for token in body.stop_token_ids or () if token >= llm.engine.vocab_size]
    if wrong:
        raise RequestError(
            400,
            f"stop_token_ids has {wrong[0]}: the ids are 0 to {llm.engine.vocab_size - 1}",
            param="stop_token_ids",
            code="invalid_value",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **{name: value for name, value in given.items() if value is not None},
    )


def _encode(prompts: list[Any], param: str, llm: LLM) -> tuple[tuple[int, ...], ...]:
    """Token ids of strings, and of token ids themselves; all are checked."""
    encoded = []
    for number, prompt in enumerate(prompts):
        where = f"{param}[{number}]: " if len(prompts) > 1 else ""
        try:
            ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        except ValueError as error:
            raise RequestError(400, f"{where}{error}", param=param, code="invalid_value") from None
        _check_prompt(ids, (), param, llm, where)
        encoded.append(tuple(ids))
    return tuple(encoded)


def _check_prompt(
    ids: Sequences[int], images: Sequences[PlacedImage], param: str, llm: LLM, where: str = ""
) -> None:
    try:
        llm.engine.check_prompt(ids, images)
    except ValueError as error:
        raise RequestError(400, f"{where}{error}", param=param, code=_code(error)) from None


def _code(error: ValueError) -> str:
    too_long = isinstance(error, PromptTooLongError)
    return "context_length_exceeded" if too_long else "invalid_value"


def _room(prompt: tuple[int, ...], llm: LLM) -> int:
    return llm.engine.max_model_len - len(prompt)


def _check_room(prompts: Iterable[tuple[int, ...]], max_tokens: int, param: str, llm: LLM) -> None:
    for prompt in prompts:
        if max_tokens > _room(prompt, llm):
            raise RequestError(
                400,
                f"{param}={max_tokens} after a prompt of {len(prompt)} tokens is more than the "
                f"model's {llm.engine.max_model_len}: ask for at most {_room(prompt, llm)}",
                param=param,
                code="context_length_exceeded",
            )


def _default[Value](value: Value | None, default: Value) -> Value:
    return default if value is None else value
