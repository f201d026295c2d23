"""Bodies of requests become jobs, or errors that name the parameter; results become bodies."""

import json

import pytest

from jaxattn import SamplingParams
from jaxattn.sampling import MAX_LOGPROBS
from jaxattn.serve.openai.bodies import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    ImageUrl,
    Message,
    StreamOptions,
)
from jaxattn.serve.openai.errors import RequestError
from jaxattn.serve.openai.requests import CHAT_COMPLETIONS, COMPLETIONS, parse, submit
from jaxattn.serve.openai.responses import response, token_name
from tests import tiny_model
from tests.live_server import make_llm

USER = {"role": "user", "content": "the hen"}
MAX_LEN = 64


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_model.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return make_llm(path, max_model_len=MAX_LEN)


def run(llm, url, **body):
    job = parse(url, {"model": "tiny", "temperature": 0, **body}, llm)
    sequences = submit(job, llm)
    while llm.engine.has_work:
        llm.engine.step()
    # In any order: they are sorted by prompt and continuation.
    return response(job, sequences[::-1], request_id="id-1", created=7, model="tiny")


def refused(llm, url, **body):
    with pytest.raises(RequestError) as caught:
        parse(url, {"model": "tiny", **body}, llm)
    error = caught.value
    assert error.body()["error"]["message"] == error.message == str(error)
    json.dumps(error.body())
    return error


# Requests


def test_defaults_of_a_completion(llm):
    job = parse(COMPLETIONS, {"model": "m", "prompt": "the hen"}, llm)
    assert job.prompts == (tuple(llm.tokenizer.encode("the hen")),)
    assert job.texts == ("the hen",)
    assert job.params == SamplingParams(max_tokens=16)
    assert (job.model, job.max_tokens, job.num_sequences) == ("m", 16, 1)
    assert not (job.echo or job.stream or job.include_usage)


def test_defaults_of_a_chat(llm):
    job = parse(CHAT_COMPLETIONS, {"model": "m", "messages": [USER]}, llm)
    text = "<start_of_turn>user\nthe hen<end_of_turn>\n<start_of_turn>model\n"
    assert job.prompts == (tuple(llm.tokenizer.encode(text)),)
    assert job.params == SamplingParams(max_tokens=MAX_LEN - len(job.prompts[0]))


def test_the_default_length_is_what_is_left(llm):
    job = parse(COMPLETIONS, {"model": "m", "prompt": [5] * (MAX_LEN - 3)}, llm)
    assert job.max_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([5, 6], (None,)),
        ([[5, 6], [7]], (None, None)),
    ],
)
def test_kinds_of_prompts(llm, prompt, texts):
    job = parse(COMPLETIONS, {"model": "m", "prompt": prompt}, llm)
    assert job.texts == texts
    ids = [[5, 6], [7]][: len(texts)]
    assert job.prompts == tuple(
        tuple(ids[place] if text is None else llm.tokenizer.encode(text))
        for place, text in enumerate(texts)
    )


SHARED = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "n": 2,
    "seed": 3,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.25,
    "repetition_penalty": 1.5,
    "ignore_eos": True,
    "stop_token_ids": [9, 10],
}


def test_every_parameter_of_a_completion(llm):
    body = SHARED | {"prompt": "a", "max_tokens": 9, "stop": "x", "logprobs": 2, "echo": True}
    body |= {"user": "me", "stream": True, "stream_options": {"include_usage": True}}
    job = parse(COMPLETIONS, {"model": "m"} | body, llm)
    assert job.params == SamplingParams(
        **SHARED, max_tokens=9, stop="x", logprobs=2, prompt_logprobs=2
    )
    assert job.echo and job.stream and job.include_usage and job.num_sequences == 2
    known = {*body, "model", "best_of", *UNSUPPORTED}
    assert known >= {*CompletionBody.model_fields}


def test_every_parameter_of_a_chat(llm):
    body = SHARED | {"messages": [USER], "max_completion_tokens": 9, "stop": list("abcdef")}
    body |= {"logprobs": True, "top_logprobs": 2, "user": "me", "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    job = parse(CHAT_COMPLETIONS, {"model": "m"} | body, llm)
    assert job.params == SamplingParams(**SHARED, max_tokens=9, stop=list("abcdef"), logprobs=2)
    assert job.stream and job.include_usage and not job.echo
    known = {*body, "model", "max_tokens", *UNSUPPORTED}
    assert known >= {*ChatBody.model_fields}


def test_logprobs_of_a_chat_alone_report_the_token(llm):
    body = {"model": "m", "messages": [USER]}
    assert parse(CHAT_COMPLETIONS, body | {"logprobs": True}, llm).params.logprobs == 0
    assert parse(CHAT_COMPLETIONS, body | {"logprobs": False}, llm).params.logprobs is None
    old = parse(CHAT_COMPLETIONS, body | {"max_tokens": 5}, llm)
    assert old.params.max_tokens == old.max_tokens == 5


def test_null_is_the_default(llm):
    for url, model, prompt in (
        (COMPLETIONS, CompletionBody, {"prompt": "a"}),
        (CHAT_COMPLETIONS, ChatBody, {"messages": [USER]}),
    ):
        body = {name: None for name in model.model_fields} | {"model": "m"} | prompt
        plain = parse(url, {"model": "m"} | prompt, llm)
        assert parse(url, body, llm) == plain


def test_values_that_ask_for_nothing(llm):
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "functions": [],
        "function_call": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "logit_bias": {},
        "metadata": {},
        "store": False,
        "service_tier": "auto",
    }
    body = {"model": "m", "messages": [USER]}
    assert parse(CHAT_COMPLETIONS, body | nothing, llm) == parse(CHAT_COMPLETIONS, body, llm)
    body = {"model": "m", "prompt": "a", "n": 2}
    same = parse(COMPLETIONS, body | {"best_of": 2, "suffix": "", "logit_bias": {}}, llm)
    assert same == parse(COMPLETIONS, body, llm)


def test_parts_developers_and_answers_that_are_sent_back(llm):
    answer = {"role": "assistant", "content": "on", "refusal": None, "tool_calls": None}
    answer |= {"audio": None, "function_call": None, "annotations": []}
    parts = {"role": "user", "content": [{"type": "text", "text": "the hen"}]}
    messages = [{"role": "developer", "content": "a pan"}, parts, answer, USER]
    job = parse(CHAT_COMPLETIONS, {"model": "m", "messages": messages}, llm)
    assert job.texts == (
        "<start_of_turn>user\na pan\n\nthe hen<end_of_turn>\n<start_of_turn>model\non"
        "<end_of_turn>\n<start_of_turn>user\nthe hen<end_of_turn>\n<start_of_turn>model\n",
    )


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "is not supported: leave it out"),
        ({"tool_choice": "auto"}, "tool_choice", "tool_choice='auto' is not supported"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "is not supported"),
        ({"functions": [{}]}, "functions", "is not supported"),
        ({"function_call": "auto"}, "function_call", "is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format", "is not supported"),
        ({"response_format": "text"}, "response_format", "is not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "is not supported"),
        ({"audio": {"voice": "x"}}, "audio", "is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "is not supported"),
        ({"prediction": {}}, "prediction", "is not supported"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "is not supported"),
        ({"verbosity": "low"}, "verbosity", "is not supported"),
        ({"web_search_options": {}}, "web_search_options", "is not supported"),
        ({"metadata": {"a": "b"}}, "metadata", "is not supported"),
        ({"store": True}, "store", "is not supported"),
        ({"store": 0}, "store", "is not supported"),
        ({"service_tier": "flex"}, "service_tier", "is not supported"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "is not supported",
        ),
    ],
)
def test_what_openai_has_and_we_do_not(llm, body, param, message):
    error = refused(llm, CHAT_COMPLETIONS, messages=[USER], **body)
    assert (error.status, error.param, error.code) == (400, param, "unsupported_parameter")
    assert message in error.message and error.type == "invalid_request_error"


def test_what_completions_do_not_have(llm):
    for body, param in (
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
    ):
        error = refused(llm, COMPLETIONS, prompt="a", **body)
        assert (error.param, error.code) == (param, "unsupported_parameter")


def test_unsupported_names_are_fields():
    """Their errors come from the models, so that the OpenAPI document has them too."""
    models = (CompletionBody, ChatBody, Message, ImageUrl, StreamOptions)
    assert UNSUPPORTED <= {name for model in models for name in model.model_fields}


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "file", "file": {"file_id": "a"}}], "messages[0].content[0].type"),
        (
            [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}],
            "messages[0].content[1].type",
        ),
    ],
)
def test_sound_and_files_are_refused(llm, content, param):
    error = refused(llm, CHAT_COMPLETIONS, messages=[{"role": "user", "content": content}])
    assert (error.status, error.param, error.code) == (400, param, "unsupported_parameter")
    assert "text and image_url are supported, not sound or files" in error.message


@pytest.mark.parametrize(
    ("image_url", "param", "code", "message"),
    [
        ({"url": "data:,"}, "messages", "invalid_value", "has no vision tower"),
        ({"url": "https://a/b.png"}, "messages", "invalid_value", "has no vision tower"),
        ({"url": "/etc/passwd"}, "messages", "invalid_value", "begins with data:, http:// or"),
        ({"url": 3}, "messages[0].content[0].image_url.url", "invalid_value", "valid string"),
        ({}, "messages[0].content[0].image_url.url", "missing_required_parameter", "is missing"),
        ("data:,", "messages[0].content[0].image_url", "invalid_value", "valid dictionary"),
        (
            {"url": "data:,", "detail": "high"},
            "messages[0].content[0].image_url.detail",
            "unsupported_parameter",
            "='high' is not supported",
        ),
        (
            {"url": "data:,", "size": 3},
            "messages[0].content[0].image_url.size",
            "unknown_parameter",
            "unknown parameter",
        ),
    ],
)
def test_images_of_a_text_model_and_wrong_ones(llm, image_url, param, code, message):
    content = [{"type": "image_url", "image_url": image_url}]
    error = refused(llm, CHAT_COMPLETIONS, messages=[{"role": "user", "content": content}])
    assert (error.status, error.param, error.code) == (400, param, code)
    assert message in error.message


@pytest.mark.parametrize(
    ("body", "param", "code", "message"),
    [
        ({"foo": 1}, "foo", "unknown_parameter", "unknown parameter 'foo'"),
        ({"fo\ud800o": 1}, None, "unknown_parameter", r"'fo\\ud800o' is no parameter's name"),
        ({"temperature": "1"}, "temperature", "invalid_value", "valid number"),
        ({"temperature": -1}, "temperature", "invalid_value", "temperature=-1: .*equal to 0"),
        ({"temperature": float("nan")}, "temperature", "invalid_value", "finite"),
        ({"temperature": float("inf")}, "temperature", "invalid_value", "finite"),
        ({"top_p": 0}, "top_p", "invalid_value", "greater than 0"),
        ({"top_p": 1.5}, "top_p", "invalid_value", "less than or equal to 1"),
        ({"n": 0}, "n", "invalid_value", "greater than or equal to 1"),
        ({"n": 10**9}, "n", "invalid_value", "less than or equal to 128"),
        ({"n": True}, "n", "invalid_value", "n=True"),
        ({"seed": -1}, "seed", "invalid_value", "seed=-1"),
        ({"seed": 2**32}, "seed", "invalid_value", "seed=4294967296"),
        ({"stop": [""]}, "stop[0]", "invalid_value", "at least 1 character"),
        ({"stop": [1]}, "stop[0]", "invalid_value", "valid string"),
        ({"stop": ["x"] * 65}, "stop", "invalid_value", "at most 64"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value", "equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value", "equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value", "0.001"),
        ({"top_k": -1}, "top_k", "invalid_value", "equal to 0"),
        ({"min_p": 2}, "min_p", "invalid_value", "equal to 1"),
        ({"stop_token_ids": [300]}, "stop_token_ids", "invalid_value", "has 300: .* 0 to 299"),
        ({"user": 5}, "user", "invalid_value", "valid string"),
        ({"stream": "yes"}, "stream", "invalid_value", "valid boolean"),
        ({"stream_options": {}}, "stream_options", "invalid_value", "needs stream=true"),
        (
            {"stream": True, "stream_options": {"x": 1}},
            "stream_options.x",
            "unknown_parameter",
            "unknown parameter 'stream_options.x'",
        ),
    ],
)
def test_wrong_values(llm, body, param, code, message):
    for url, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT_COMPLETIONS, {"messages": [USER]})):
        error = refused(llm, url, **prompt, **body)
        assert (error.status, error.param, error.code) == (400, param, code)
        with pytest.raises(RequestError, match=message):
            raise error


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "prompt is missing"),
        ({"prompt": None}, "prompt", "prompt=None: a prompt is a string or a list"),
        ({"prompt": ""}, "prompt", "prompt='': a prompt is"),
        ({"prompt": []}, "prompt", r"prompt=\[\]: a prompt is"),
        ({"prompt": 5}, "prompt", "prompt=5: a prompt is"),
        ({"prompt": ["a", 5]}, "prompt", r"prompt=\['a', 5\]: a prompt is"),
        ({"prompt": ["a", ""]}, "prompt", "a prompt is"),
        ({"prompt": [[5], []]}, "prompt", "a prompt is"),
        ({"prompt": [5, True]}, "prompt", "a prompt is"),
        ({"prompt": [-1]}, "prompt", "a prompt is"),
        ({"prompt": [300]}, "prompt", r"token ids \[300\] are outside 0 to 299"),
        ({"prompt": [[5], [300]]}, "prompt", r"prompt\[1\]: token ids \[300\]"),
        ({"prompt": "\ud800"}, "prompt", "a prompt is"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "only with echo=true"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "equal to 0"),
        ({"prompt": "a", "max_tokens": 2.5}, "max_tokens", "valid integer"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
        ({"prompt": "a", "logprobs": MAX_LOGPROBS + 1}, "logprobs", "equal to 64"),
        ({"prompt": "a", "messages": [USER]}, "messages", "unknown parameter 'messages'"),
    ],
)
def test_wrong_completions(llm, body, param, message):
    error = refused(llm, COMPLETIONS, **body)
    assert (error.status, error.param) == (400, param)
    with pytest.raises(RequestError, match=message):
        raise error


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        (None, "messages", "messages=None"),
        ([], "messages", "at least 1 item"),
        ("hi", "messages", "messages='hi': .*valid list"),
        ([5], r"messages[0]", r"messages\[0\]=5"),
        ([{"role": "user"}], "messages[0].content", r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": None}], "messages[0].content", "content=None"),
        ([{"role": "tool", "content": "x"}], "messages[0].role", "role='tool': .*'system'"),
        ([USER | {"name": "me"}], "messages[0].name", "name='me' is not supported"),
        ([USER | {"foo": 1}], "messages[0].foo", r"unknown parameter 'messages\[0\]\.foo'"),
        ([USER, USER], "messages", "message 1 has role 'user'"),
        ([{"role": "system", "content": "x"}], "messages", "add a user message"),
        ([{"role": "user", "content": "\ud800"}], "messages", "half a surrogate pair"),
    ],
)
def test_wrong_messages(llm, messages, param, message):
    error = refused(llm, CHAT_COMPLETIONS, messages=messages)
    assert (error.status, error.param) == (400, param)
    with pytest.raises(RequestError, match=message):
        raise error


def test_wrong_chats(llm):
    error = refused(llm, CHAT_COMPLETIONS, messages=[USER], top_logprobs=2)
    assert error.param == "top_logprobs" and "needs logprobs=true" in error.message
    error = refused(llm, CHAT_COMPLETIONS, messages=[USER], max_tokens=2, max_completion_tokens=2)
    assert error.param == "max_tokens" and "give one of them" in error.message
    error = refused(llm, CHAT_COMPLETIONS, messages=[USER], prompt="a")
    assert (error.param, error.code) == ("prompt", "unknown_parameter")


@pytest.mark.parametrize("body", [None, [], "x", 5, {}, {"prompt": "a"}])
def test_no_object_or_no_model(llm, body):
    with pytest.raises(RequestError, match=r"is not a JSON object|is missing"):
        parse(COMPLETIONS, body, llm)


def test_lengths(llm):
    code = "context_length_exceeded"
    error = refused(llm, COMPLETIONS, prompt=[5] * MAX_LEN)
    assert (error.param, error.code) == ("prompt", code) and "max_model_len=64" in error.message
    parse(COMPLETIONS, {"model": "m", "prompt": [5] * (MAX_LEN - 1), "max_tokens": 1}, llm)
    error = refused(llm, COMPLETIONS, prompt=[[5], [5] * (MAX_LEN - 1)], max_tokens=2)
    assert (error.param, error.code) == ("max_tokens", code) and "at most 1" in error.message
    error = refused(llm, CHAT_COMPLETIONS, messages=[USER | {"content": "x" * MAX_LEN}])
    assert (error.param, error.code) == ("messages", code)
    error = refused(llm, CHAT_COMPLETIONS, messages=[USER], max_completion_tokens=MAX_LEN)
    assert (error.param, error.code) == ("max_completion_tokens", code)


def test_an_unknown_url(llm):
    with pytest.raises(RequestError, match="unknown url '/v1/embeddings'") as caught:
        parse("/v1/embeddings", {}, llm)
    assert caught.value.status == 404


# Responses


def test_a_completion(llm):
    body = run(llm, COMPLETIONS, prompt="the hen", max_tokens=4, ignore_eos=True)
    (out,) = llm.generate("the hen", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert body == {
        "id": "id-1",
        "object": "text_completion",
        "created": 7,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": out.outputs[0].text,
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 4,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_choices_are_ordered_by_prompt_and_continuation(llm):
    params = SamplingParams(max_tokens=4, temperature=1.5, n=2, seed=5)
    outs = llm.generate(["the hen", "a"], params)
    body = run(
        llm, COMPLETIONS, prompt=["the hen", "a"], max_tokens=4, temperature=1.5, n=2, seed=5
    )
    assert [each["index"] for each in body["choices"]] == [0, 1, 2, 3]
    texts = [each.text for out in outs for each in out.outputs]
    assert [each["text"] for each in body["choices"]] == texts
    assert len(set(texts)) == 4
    assert body["usage"]["prompt_tokens"] == 7  # each prompt once


def test_a_chat(llm):
    body = run(llm, CHAT_COMPLETIONS, messages=[USER], max_tokens=3, ignore_eos=True)
    (out,) = llm.chat([USER], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": out.outputs[0].text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    assert body["choices"] == [choice]
    assert body["usage"]["completion_tokens"] == 3


def test_stop_is_told_and_cut_off(llm):
    (out,) = llm.generate("the hen", SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    text = out.outputs[0].text
    stop = text[5:7]
    body = run(llm, COMPLETIONS, prompt="the hen", max_tokens=30, ignore_eos=True, stop=[stop])
    assert body["choices"][0]["text"] == text[: text.index(stop)]
    assert body["choices"][0]["finish_reason"] == "stop"


def test_logprobs_of_a_completion(llm):
    params = SamplingParams(
        max_tokens=6, temperature=0, logprobs=3, prompt_logprobs=3, ignore_eos=True
    )
    (out,) = llm.generate("the hen", params)
    options = {"prompt": "the hen", "max_tokens": 6, "logprobs": 3, "ignore_eos": True}
    choice = run(llm, COMPLETIONS, **options, echo=True)["choices"][0]
    ids = [*out.prompt_token_ids, *out.outputs[0].token_ids]
    reports = [*out.prompt_logprobs, *out.outputs[0].logprobs]
    assert choice["text"] == "the hen" + out.outputs[0].text
    lists = choice["logprobs"]
    assert lists["tokens"] == [token_name(llm.tokenizer, each) for each in ids]
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    for position in range(1, len(ids)):
        report = reports[position]
        assert lists["token_logprobs"][position] == report[ids[position]].logprob
        assert lists["top_logprobs"][position] == {
            token_name(llm.tokenizer, each): entry.logprob for each, entry in report.items()
        }
    assert lists["text_offset"][:5] == [0, 0, 3, 4, 6]  # <bos>, the, " ", he, n
    assert lists["text_offset"][5] == 7
    new = run(llm, COMPLETIONS, **options)["choices"][0]["logprobs"]
    assert new["tokens"] == lists["tokens"][5:]
    assert new["token_logprobs"] == lists["token_logprobs"][5:]
    assert new["text_offset"] == [each - 7 for each in lists["text_offset"][5:]]


def test_only_the_prompt(llm):
    options = {"prompt": "the hen", "echo": True, "logprobs": 0}
    body = run(llm, COMPLETIONS, **options, max_tokens=0)
    whole = run(llm, COMPLETIONS, **options, max_tokens=1)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("the hen", "length")
    assert body["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["top_logprobs"] is None
    lists = whole["choices"][0]["logprobs"]
    assert choice["logprobs"]["token_logprobs"] == lists["token_logprobs"][:-1]
    assert run(llm, COMPLETIONS, prompt="a", echo=True, max_tokens=0)["choices"][0] == {
        "index": 0,
        "text": "a",
        "logprobs": None,
        "finish_reason": "length",
    }


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("<bos>the<end_of_turn>a", "<bos>the<end_of_turn>a"),
        ("a<start_of_turn>", "a<start_of_turn>"),
        ([2, 105, 10], "<start_of_turn>{10}"),
        ([105, 2], "<start_of_turn><bos>"),
    ],
)
def test_echo_of_control_tokens(llm, prompt, text):
    choice = run(llm, COMPLETIONS, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    text = text.replace("{10}", llm.tokenizer.token(10))
    assert choice["choices"][0]["text"] == text
    lists = choice["choices"][0]["logprobs"]
    shown = 0
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert offset == shown
        if not (token == "<bos>" and shown == 0 and not text.startswith("<bos>")):
            shown += len(token)
    assert shown == len(text)


def test_logprobs_of_a_chat(llm):
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=2, ignore_eos=True)
    (out,) = llm.chat([USER], params)
    options = {"messages": [USER], "max_tokens": 3, "ignore_eos": True, "logprobs": True}
    body = run(llm, CHAT_COMPLETIONS, **options, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for entry, token, report in zip(
        content, out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True
    ):
        assert entry["token"] == token_name(llm.tokenizer, token)
        assert bytes(entry["bytes"]) == llm.tokenizer.token_bytes(token, skip_special=False)
        assert entry["logprob"] == report[token].logprob
        likely = sorted(report.values(), key=lambda each: each.rank)[:2]
        assert [each["logprob"] for each in entry["top_logprobs"]] == [
            each.logprob for each in likely
        ]
    body = run(llm, CHAT_COMPLETIONS, **options)
    assert [each["top_logprobs"] for each in body["choices"][0]["logprobs"]["content"]] == [[]] * 3


def test_names_of_tokens(llm):
    pieces = tiny_model.vocabulary()[0]
    assert token_name(llm.tokenizer, pieces.index("the")) == "the"
    assert token_name(llm.tokenizer, pieces.index("<0xE2>")) == r"bytes:\xe2"
    assert token_name(llm.tokenizer, 106) == "<end_of_turn>"


def test_minus_infinity_is_no_json(llm, monkeypatch):
    job = parse(COMPLETIONS, {"model": "m", "prompt": "a", "max_tokens": 1, "logprobs": 1}, llm)
    (sequence,) = submit(job, llm)
    while llm.engine.has_work:
        llm.engine.step()
    (report,) = sequence.logprobs
    for token in report:
        object.__setattr__(report[token], "logprob", -float("inf"))
    body = response(job, [sequence], request_id="x", created=1, model="m")
    json.dumps(body, allow_nan=False)
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_a_job_is_queued_whole_or_not_at_all(llm, monkeypatch):
    add, added = llm.engine.add, []

    def fail_third(*args, **kwargs):
        if len(added) == 2:
            raise ValueError("no third one")
        added.append(add(*args, **kwargs))
        return added[-1]

    monkeypatch.setattr(llm.engine, "add", fail_third)
    job = parse(COMPLETIONS, {"model": "m", "prompt": "a", "n": 3}, llm)
    with pytest.raises(ValueError, match="no third one"):
        submit(job, llm)
    assert [each.finish_reason for each in added] == ["abort"] * 2
    assert not llm.engine.has_work


def test_a_failed_step_is_a_500_and_an_abort_a_503(llm, monkeypatch):
    def fail(*args, **kwargs):
        raise FloatingPointError("no numbers")

    job = parse(COMPLETIONS, {"model": "m", "prompt": "a"}, llm)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "dispatch", fail)
        sequences = submit(job, llm)
        while llm.engine.has_work:
            llm.engine.step()
    with pytest.raises(RequestError, match="FloatingPointError: no numbers") as caught:
        response(job, sequences, request_id="x", created=1, model="m")
    assert (caught.value.status, caught.value.type) == (500, "server_error")
    sequences = submit(job, llm)
    llm.engine.abort(sequences)
    with pytest.raises(RequestError, match="aborted") as caught:
        response(job, sequences, request_id="x", created=1, model="m")
    assert caught.value.status == 503
