"""Clients that others wrote: OpenAI's Python library, sync and async, and curl."""

import asyncio
import json
import subprocess
from contextlib import closing

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from jaxattn import SamplingParams
from tests import tiny_model
from tests.live_server import MODEL, live_server, make_llm, wait_until

KEY = "a key"
PROMPT = "the hen"
MESSAGES = [{"role": "system", "content": "a pan"}, {"role": "user", "content": PROMPT}]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
IGNORE_EOS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_model.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return make_llm(path)


@pytest.fixture(scope="module")
def expected(llm):
    """What the library itself says, before the server's thread owns the engine."""
    (out,) = llm.generate(PROMPT, GREEDY)
    (chat,) = llm.chat(MESSAGES, GREEDY)
    return {"completion": out.outputs[0].text, "chat": chat.outputs[0].text}


@pytest.fixture(scope="module")
def live(llm, expected):
    with live_server(llm, api_key=KEY) as live:
        yield live
        wait_until(live.is_empty)


@pytest.fixture(scope="module")
def client(live):
    with OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def complete(client, **options):
    defaults = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    return client.completions.create(**defaults | options, extra_body=IGNORE_EOS)


def chat(client, **options):
    defaults = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 12}
    defaults["temperature"] = 0
    return client.chat.completions.create(**defaults | options, extra_body=IGNORE_EOS)


def test_models(client):
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completions(client, expected):
    body = complete(client)
    assert body.choices[0].text == expected["completion"]
    assert body.choices[0].finish_reason == "length" and body.choices[0].logprobs is None
    assert (body.usage.prompt_tokens, body.usage.completion_tokens) == (5, 12)
    assert body.usage.prompt_tokens_details.cached_tokens >= 0
    assert body._request_id == body.id


def test_chat(client, expected):
    body = chat(client)
    message = body.choices[0].message
    assert (message.role, message.content) == ("assistant", expected["chat"])
    # The answer goes back as the library has it, nulls and all.
    again = [*MESSAGES, message, {"role": "user", "content": "and on"}]
    assert chat(client, messages=again).usage.prompt_tokens > body.usage.prompt_tokens


def test_streams(client, expected):
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].text for each in chunks[:-1]) == expected["completion"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert len({each.id for each in chunks}) == 1
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(each.choices[0].delta.content or "" for each in chunks)
    assert text == expected["chat"]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_stream_that_is_closed_early(client, live):
    with closing(complete(client, stream=True, max_tokens=2000)) as stream:
        next(iter(stream))
    wait_until(live.is_empty)


def test_logprobs(client):
    logprobs = complete(client, logprobs=2, echo=True).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 5 + 12
    assert logprobs.token_logprobs[0] is None and max(logprobs.token_logprobs[1:]) <= 0
    # Greedy: the chosen token is the best of the two.
    for chosen, top in zip(logprobs.token_logprobs[5:], logprobs.top_logprobs[5:], strict=True):
        assert chosen == max(top.values())
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == 12
    assert all(each.logprob == each.top_logprobs[0].logprob for each in content)
    streamed = []
    for chunk in chat(client, logprobs=True, top_logprobs=2, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content


def test_n_stop_and_seed(client, expected):
    options = {"n": 3, "temperature": 1.5}
    texts = [each.text for each in complete(client, seed=4, **options).choices]
    assert len(set(texts)) == 3
    assert [each.text for each in complete(client, seed=4, **options).choices] == texts
    assert [each.text for each in complete(client, seed=5, **options).choices] != texts
    unseeded = [complete(client, temperature=1.5).choices[0].text for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    stop = expected["completion"][4:6]
    choice = complete(client, stop=["never", stop]).choices[0]
    assert choice.text == expected["completion"].partition(stop)[0]
    assert choice.finish_reason == "stop"


def test_tools_are_refused(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match=r"tools=.* is not supported") as caught:
        chat(client, tools=[tool])
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        chat(client, response_format={"type": "json_object"})
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError, match="no vision tower"):
        chat(client, messages=[{"role": "user", "content": image}])
    assert chat(client, tools=[]).choices


def test_errors_are_its_own(client, live):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'"):
        complete(client, model="gpt-4")
    with pytest.raises(openai.BadRequestError, match="temperature=-1"):
        complete(client, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="max_model_len=2048"):
        complete(client, prompt=[5] * 3000)
    wrong = client.with_options(api_key="no")
    with pytest.raises(openai.AuthenticationError, match="API key"):
        complete(wrong)
    with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings"):
        client.embeddings.create(model=MODEL, input="a")


def test_an_error_in_mid_stream(client, live, monkeypatch):
    def explode(*args):
        raise FloatingPointError("the step failed")

    stream = complete(client, stream=True, max_tokens=2000)
    next(iter(stream))
    with monkeypatch.context() as patch:
        patch.setattr(live.llm.engine.runner, "dispatch", explode)
        with pytest.raises(openai.APIError, match="FloatingPointError: the step failed"):
            list(stream)
    wait_until(live.is_empty)


def test_async(live, expected):
    async def ask():
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as client:
            whole, chatted, stream, alien = await asyncio.gather(
                complete(client),
                chat(client),
                complete(client, stream=True),
                complete(client, model="gpt-4"),
                return_exceptions=True,
            )
            assert whole.choices[0].text == expected["completion"]
            assert chatted.choices[0].message.content == expected["chat"]
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == expected["completion"]
            assert isinstance(alien, openai.NotFoundError)
            many = await asyncio.gather(*(complete(client, prompt="the") for _ in range(12)))
            assert len({each.choices[0].text for each in many}) == 1
            # A task that is cancelled closes its connection.
            task = asyncio.create_task(complete(client, max_tokens=2000))
            while not live.service.loop.stats.running:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask())
    wait_until(live.is_empty)


def curl(live, *arguments) -> tuple[int, str]:
    """Status and body of what curl fetched."""
    command = ["curl", "--silent", "--show-error", "--max-time", "60", "-w", "\n%{http_code}"]
    command += ["-H", f"Authorization: Bearer {KEY}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


def test_curl(live, expected):
    data = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | IGNORE_EOS
    url, json_type = f"{live.url}/v1/completions", "Content-Type: application/json"
    status, text = curl(live, url, "-H", json_type, "-d", json.dumps(data))
    assert status == 200
    assert json.loads(text)["choices"][0]["text"] == expected["completion"]
    status, text = curl(live, url, "-N", "-H", json_type, "-d", json.dumps(data | {"stream": True}))
    *chunks, done = text.strip().split("\n\n")
    assert status == 200 and done == "data: [DONE]"
    texts = [json.loads(each.removeprefix("data: "))["choices"][0]["text"] for each in chunks]
    assert "".join(texts) == expected["completion"]
    status, text = curl(live, url, "-d", json.dumps(data))  # curl says it is a form
    assert status == 415 and "send application/json" in text
    assert curl(live, f"{live.url}/health") == (200, '{"status":"ok"}')


def test_curl_with_a_body_that_is_too_long(live, tmp_path):
    """It is told so, although it has not sent everything: 40 MB, and no length in front."""
    file = tmp_path / "body"
    file.write_bytes(b" " * 40_000_000)
    url = f"{live.url}/v1/completions"
    headers = ["-H", "Content-Type: application/json", "-H", "Transfer-Encoding: chunked"]
    status, text = curl(live, url, *headers, "--data-binary", f"@{file}")
    assert status == 413 and json.loads(text)["error"]["code"] == "request_too_large"
