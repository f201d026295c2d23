"""The server over real sockets: errors, limits, disconnects, time-outs, failures, metrics."""

import dataclasses
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxattn.serve.http.metrics import Metrics
from tests import tiny_model
from tests.live_server import MODEL, live_server, make_llm, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"model": MODEL, "prompt": "the hen", "max_tokens": 2000, "ignore_eos": True}
SHORT = {"model": MODEL, "prompt": "the hen", "max_tokens": 3, "temperature": 0}
MAX_WAITING = 6


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_model.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return make_llm(path)


@pytest.fixture(scope="module")
def shared(llm):
    with live_server(llm, max_body_bytes=100_000, max_waiting=MAX_WAITING) as live:
        yield live


@pytest.fixture
def live(shared):
    yield shared
    wait_until(shared.is_empty)


class RawRequest:
    """A POST by hand, to be dropped at any time."""

    def __init__(self, live, path, body, headers=""):
        host, port = live.url.removeprefix("http://").split(":")
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        if "content-length" not in headers:
            head += f"Content-Length: {len(data)}\r\n"
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.socket.sendall((head + headers + "\r\n").encode() + data)

    def read_until(self, text: bytes) -> bytes:
        data = b""
        while text not in data:
            more = self.socket.recv(4096)
            assert more, data
            data += more
        return data

    def close(self):
        self.socket.close()


def error_of(answer, status, code=None):
    """Checks an answer's status and OpenAI's shape."""
    found, headers, body = answer
    assert found == status, body
    assert headers["content-type"] == "application/json"
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"] and error["type"] and error["code"] == code
    return error


# Answers


def test_completions_and_chat(live):
    status, headers, body = live.post(COMPLETIONS, SHORT)
    assert status == 200 and headers["x-request-id"] == body["id"]
    assert body["id"].startswith("cmpl-") and body["model"] == MODEL
    messages = [{"role": "user", "content": "the hen"}]
    body = live.post(CHAT, {"model": MODEL, "messages": messages, "max_tokens": 2})[2]
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"


def test_cached_tokens_are_counted(live):
    body = SHORT | {"prompt": [*range(5, 45)]}
    cached, hits = [], metric(live, "jaxattn_prefix_hit_tokens_total")
    for _ in range(2):
        usage = live.post(COMPLETIONS, body)[2]["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and 0 < cached[1] < 40 == usage["prompt_tokens"]
    wait_until(lambda: metric(live, "jaxattn_prefix_hit_tokens_total") == hits + cached[1])


def test_models(live):
    status, _, body = live.request("GET", "/v1/models")
    assert status == 200 and body["object"] == "list"
    (card,) = body["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 2048)
    assert live.request("GET", f"/v1/models/{MODEL}")[2] == card
    error_of(live.request("GET", "/v1/models/gpt-4"), 404, "model_not_found")
    error_of(live.request("GET", "/v1/models/a/b"), 404, "model_not_found")


def test_health(live):
    assert live.request("GET", "/health")[::2] == (200, {"status": "ok"})


def events(answer):
    """The data of server-sent events."""
    status, headers, text = answer
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    parts = text.split("\n\n")
    assert parts.pop() == "" and all(part.startswith("data: ") for part in parts)
    return [part.removeprefix("data: ") for part in parts]


def test_a_stream_says_what_a_whole_answer_says(live):
    body = SHORT | {"prompt": ["the hen", "a"], "n": 2, "max_tokens": 20, "temperature": 1.0}
    body |= {"seed": 7, "logprobs": 2, "echo": True, "ignore_eos": True}
    whole = live.post(COMPLETIONS, body)[2]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(live.post(COMPLETIONS, body | options))
    assert done == "[DONE]"
    usage = json.loads(usage)
    assert usage["choices"] == [] and usage["object"] == "text_completion"
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 80
    choices = [{"text": "", "logprobs": None, "finish_reason": None} for _ in range(4)]
    for chunk in map(json.loads, chunks):
        assert chunk["id"] == usage["id"] and chunk["usage"] is None
        (choice,) = chunk["choices"]
        told = choices[choice["index"]]
        assert told["finish_reason"] is None
        told["text"] += choice["text"]
        told["finish_reason"] = choice["finish_reason"]
        told["logprobs"] = told["logprobs"] or {name: [] for name in choice["logprobs"]}
        for name, values in choice["logprobs"].items():
            told["logprobs"][name] += values
    assert [{"index": index} | each for index, each in enumerate(choices)] == whole["choices"]
    assert len(chunks) >= 80


def test_a_streamed_chat(live):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "the hen"}]}
    body |= {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 2}
    whole = live.post(CHAT, body)[2]["choices"][0]
    *chunks, done = events(live.post(CHAT, body | {"stream": True}))
    assert done == "[DONE]"
    chunks = [json.loads(each) for each in chunks]
    assert all("usage" not in each for each in chunks)
    deltas = [each["choices"][0] for each in chunks]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert all("role" not in each["delta"] for each in deltas[1:])
    assert deltas[-1]["delta"] == {} and deltas[-1]["finish_reason"] == "length"
    assert all(each["finish_reason"] is None for each in deltas[:-1])
    text = "".join(each["delta"].get("content", "") for each in deltas)
    assert text == whole["message"]["content"]
    content = [
        entry for each in deltas if each["logprobs"] for entry in each["logprobs"]["content"]
    ]
    assert content == whole["logprobs"]["content"]


def test_only_the_prompt_streamed(live):
    body = SHORT | {"max_tokens": 0, "echo": True, "stream": True}
    chunk, done = events(live.post(COMPLETIONS, body))
    assert done == "[DONE]"
    choice = {"index": 0, "text": "the hen", "logprobs": None, "finish_reason": "length"}
    assert json.loads(chunk)["choices"] == [choice]


def test_stop_strings_are_never_streamed(live):
    text = live.post(COMPLETIONS, SHORT | {"max_tokens": 40})[2]["choices"][0]["text"]
    stop = text[10:13]
    body = SHORT | {"max_tokens": 40, "stop": stop, "stream": True}
    chunks = [json.loads(each)["choices"][0] for each in events(live.post(COMPLETIONS, body))[:-1]]
    assert "".join(each["text"] for each in chunks) == text[: text.index(stop)]
    assert chunks[-1]["finish_reason"] == "stop"


def test_many_at_once_are_the_same_as_alone(live):
    bodies = [SHORT | {"prompt": "the hen"[: 1 + number], "max_tokens": 9} for number in range(5)]
    bodies.append(SHORT | {"temperature": 1.3, "seed": 4, "max_tokens": 9})
    alone = [live.post(COMPLETIONS, body)[2]["choices"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = pool.map(lambda body: live.post(COMPLETIONS, body)[2]["choices"], bodies)
        assert list(together) == alone


# Errors


def test_wrong_urls_and_methods(live):
    error_of(live.request("GET", "/"), 404, "unknown_url")
    error_of(live.post("/v1/embeddings", {}), 404, "unknown_url")
    error_of(live.post(COMPLETIONS + "/", SHORT), 404, "unknown_url")
    answer = live.request("GET", COMPLETIONS)
    error_of(answer, 405, "method_not_allowed")
    assert answer[1]["allow"] == "POST"
    error_of(live.request("DELETE", "/v1/models"), 405, "method_not_allowed")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"{'a': 1}", b'{"a": 1} x', b"\xff", b'{"a": NaN}', b"[" * 90_000),
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_no_json(live, path, data):
    assert "not JSON" in error_of(live.post(path, data), 400, "invalid_json")["message"]


@pytest.mark.parametrize("data", [b"[]", b'"x"', b"5", b"null"])
def test_no_object(live, data):
    error_of(live.post(COMPLETIONS, data), 400, "invalid_type")


def test_wrong_content_types(live):
    code = "unsupported_media_type"
    error = error_of(live.post(COMPLETIONS, SHORT, content_type="text/plain"), 415, code)
    assert "'text/plain': send application/json" in error["message"]
    error_of(live.post(COMPLETIONS, SHORT, content_type=""), 415, code)
    error_of(live.post(COMPLETIONS, SHORT, content_encoding="gzip"), 415, code)
    kind = "Application/JSON; charset=utf-8"
    assert live.post(COMPLETIONS, SHORT, content_type=kind)[0] == 200


def test_wrong_parameters_are_named(live):
    error = error_of(live.post(COMPLETIONS, SHORT | {"foo": 1}), 400, "unknown_parameter")
    assert error["param"] == "foo" and error["type"] == "invalid_request_error"
    answer = live.post(COMPLETIONS, SHORT | {"tools": []})
    assert error_of(answer, 400, "unsupported_parameter")["param"] == "tools"


def test_an_unknown_model(live):
    for name in ("gpt-4", "gpt-\udc00"):
        error = error_of(live.post(COMPLETIONS, SHORT | {"model": name}), 404, "model_not_found")
        assert error["param"] == "model" and f"{name!r}" in error["message"]


def test_a_long_prompt(live):
    answer = live.post(COMPLETIONS, SHORT | {"prompt": [5] * 2048})
    error = error_of(answer, 400, "context_length_exceeded")
    assert "max_model_len=2048" in error["message"]


def test_an_error_before_the_first_token_of_a_stream_has_its_own_status(live, monkeypatch):
    monkeypatch.setattr(live.llm.engine.runner, "dispatch", explode)
    error = error_of(live.post(COMPLETIONS, SHORT | {"stream": True}), 500, "model_error")
    assert error["type"] == "server_error"


# Limits


def test_a_long_body(live):
    long = SHORT | {"prompt": "a" * 100_000}
    error_of(live.post(COMPLETIONS, long), 413, "request_too_large")
    # No Content-Length: it is counted as it comes, and the rest is not waited for.
    chunk = b"%x\r\n%s\r\n" % (60_000, b" " * 60_000)
    request = RawRequest(
        live, COMPLETIONS, chunk * 2, "Transfer-Encoding: chunked\r\ncontent-length-is: none\r\n"
    )
    assert request.read_until(b"request_too_large").startswith(b"HTTP/1.1 413")
    request.close()


def test_a_full_queue(live):
    with live.held() as gate, ThreadPoolExecutor(1) as pool:
        # Four run, held back; the queue takes six more.
        first = RawRequest(live, COMPLETIONS, LONG | {"n": 4})
        gate.step(8)
        wait_until(lambda: live.service.loop.stats.running == 4)
        second = pool.submit(live.post, COMPLETIONS, SHORT | {"n": MAX_WAITING})
        wait_until(lambda: live.service.loop.num_waiting == MAX_WAITING)
        answer = live.post(COMPLETIONS, SHORT)
        error = error_of(answer, 429, "queue_full")
        assert error["type"] == "rate_limit_error" and int(answer[1]["retry-after"]) >= 1
        first.close()
        gate.open()
        assert second.result()[0] == 200
    assert live.post(COMPLETIONS, SHORT)[0] == 200
    answer = live.post(COMPLETIONS, SHORT | {"n": MAX_WAITING + 1})
    assert error_of(answer, 400, "too_many_continuations")["param"] == "n"


def test_timeouts(live, monkeypatch):
    soon = dataclasses.replace(live.service.settings, timeout_seconds=0.3)
    monkeypatch.setattr(live.service, "settings", soon)
    answer = live.post(COMPLETIONS, LONG)
    error = error_of(answer, 504, "timeout")
    assert "longer than 0.3 s" in error["message"] and error["type"] == "server_error"
    assert answer[1]["x-should-retry"] == "false"
    wait_until(live.is_empty)
    last = events(live.post(COMPLETIONS, LONG | {"stream": True}))[-1]
    assert json.loads(last)["error"]["code"] == "timeout"
    wait_until(live.is_empty)
    # A body that does not come.
    request = RawRequest(live, COMPLETIONS, b"{", "content-length: 100\r\n")
    answer = request.read_until(b"}}")
    request.close()
    assert answer.startswith(b"HTTP/1.1 408") and b"reading the body took longer" in answer


# Clients that go away


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_frees_its_pages_within_a_step(live, stream, n):
    with live.held() as gate:
        request = RawRequest(live, COMPLETIONS, LONG | {"stream": stream, "n": n})
        gate.step(5)
        if stream:
            request.read_until(b"data: ")
        gate.arrive()  # the engine is in a step
        assert live.service.loop.stats.running == n and not live.is_empty()
        request.close()
        wait_until(lambda: not live.service.loop._tickets)
        steps = live.llm.engine.stats().steps
        gate._allowed.release()  # the step in which the client went away
        gate.step()  # settles it, if the engine is one ahead, and starts no other
        wait_until(live.is_empty)
        assert live.llm.engine.stats().steps <= steps + 1
    requests = metric(live, "jaxattn_http_requests_total", path=COMPLETIONS, status="499")
    assert stream or requests >= 1


def test_a_client_that_goes_away_from_the_queue(live):
    with live.held() as gate:
        first = RawRequest(live, COMPLETIONS, LONG | {"n": 4})
        gate.step()
        second = RawRequest(live, COMPLETIONS, LONG)
        wait_until(lambda: len(live.service.loop._tickets) == 2)
        second.close()
        first.close()
        wait_until(lambda: not live.service.loop._tickets)
    wait_until(live.is_empty)


def test_a_client_that_goes_away_while_it_sends(live):
    request = RawRequest(live, COMPLETIONS, b"{", "content-length: 100\r\n")
    request.close()
    assert live.post(COMPLETIONS, SHORT)[0] == 200


def test_disconnects_in_a_crowd(live):
    """Those who stay get what they would get alone."""
    expected = live.post(COMPLETIONS, SHORT | {"max_tokens": 30})[2]["choices"]
    with ThreadPoolExecutor(2) as pool:
        for count in range(1, 6):
            leaver = RawRequest(live, COMPLETIONS, LONG | {"stream": True, "seed": count})
            stayer = pool.submit(live.post, COMPLETIONS, SHORT | {"max_tokens": 30})
            leaver.read_until(b"data: ")
            leaver.close()
            assert stayer.result()[2]["choices"] == expected


# Failures


def explode(*args, **kwargs):
    raise FloatingPointError("the step failed")


def test_a_step_that_fails_takes_its_requests_and_not_the_server(live, monkeypatch):
    with live.held() as gate, ThreadPoolExecutor(1) as pool:
        stream = RawRequest(live, COMPLETIONS, LONG | {"stream": True})
        gate.step(3)
        stream.read_until(b"data: ")
        whole = pool.submit(live.post, COMPLETIONS, LONG)
        wait_until(lambda: len(live.service.loop._tickets) == 2)
        gate.step(2)
        gate.arrive()
        with monkeypatch.context() as patch:
            patch.setattr(live.llm.engine.runner, "dispatch", explode)
            gate._allowed.release()
            error = error_of(whole.result(), 500, "model_error")
            assert "FloatingPointError: the step failed" in error["message"]
            told = stream.read_until(b"model_error")
            stream.close()
            assert b'data: {"error":{' in told and b"[DONE]" not in told
        gate.open()
        assert live.post(COMPLETIONS, SHORT)[0] == 200


def test_a_response_that_cannot_be_made_is_a_500(live, monkeypatch):
    monkeypatch.setattr("jaxattn.serve.http.exchange.response", explode)
    error = error_of(live.post(COMPLETIONS, SHORT), 500, "internal_error")
    assert error["type"] == "server_error"
    monkeypatch.setattr("jaxattn.serve.http.service.Service.check_model", explode)
    error_of(live.request("GET", "/v1/models/x"), 500, "internal_error")


def test_a_dead_thread(tmp_path_factory, llm, monkeypatch):
    with live_server(llm) as live:
        monkeypatch.setattr(llm.engine, "step", explode)
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(live.post, COMPLETIONS, LONG) for _ in range(2)]
            for answer in answers:
                error_of(answer.result(), 503, "engine_dead")
        error_of(live.request("GET", "/health"), 503, "engine_dead")
        error_of(live.post(COMPLETIONS, SHORT), 503, "engine_dead")
        assert live.request("GET", "/metrics")[0] == 200
    monkeypatch.undo()
    for sequences in live.service.loop._sequences.values():
        llm.engine.abort(sequences)
    while llm.engine.has_work:
        llm.engine.step()


# Keys


def test_api_keys(llm):
    with live_server(llm, api_key="s\u00e9same") as live:
        key = "s\u00e9same".encode().decode("latin-1")
        for wrong in ({}, {"authorization": "Bearer no"}, {"authorization": f"Basic {key}"}):
            answer = live.post(COMPLETIONS, SHORT, **wrong)
            assert error_of(answer, 401, "invalid_api_key")["type"] == "invalid_request_error"
            assert answer[1]["www-authenticate"] == "Bearer"
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
                error_of(live.request("GET", path, **wrong), 401, "invalid_api_key")
        assert live.request("GET", "/health")[0] == 200
        assert live.post(COMPLETIONS, SHORT, authorization=f"Bearer {key}")[0] == 200
        assert live.post(COMPLETIONS, SHORT, authorization=f"bearer {key}")[0] == 200


# The end


def test_the_end_waits_for_what_runs(llm):
    with live_server(llm) as live, live.held() as gate, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(live.post, COMPLETIONS, SHORT)
        gate.step()
        gate.arrive()
        live.drain()
        wait_until(lambda: live.service.draining)
        error_of(live.request("GET", "/health"), 503, "shutting_down")
        refused = live.post(COMPLETIONS, SHORT)
        error_of(refused, 503, "shutting_down")
        assert refused[1]["retry-after"]
        late = RawRequest(live, COMPLETIONS, b"", "content-length: 100\r\n")
        assert late.read_until(b"shutting_down").startswith(b"HTTP/1.1 503")
        late.close()
        gate.open()
        assert answer.result()[0] == 200
        live.join()


@pytest.mark.parametrize("how", ["deadline", "second signal"])
def test_the_end_cancels_what_takes_too_long(llm, how):
    seconds = 0.2 if how == "deadline" else 60
    with live_server(llm, drain_seconds=seconds) as live, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(live.post, COMPLETIONS, LONG)
        stream = RawRequest(live, COMPLETIONS, LONG | {"stream": True})
        stream.read_until(b"data: ")
        wait_until(lambda: live.service.loop.stats.running == 2)
        live.drain()
        if how == "second signal":
            live.call(live.service.hurry)
        error_of(whole.result(), 503, "shutting_down")
        assert b'data: {"error":{' in stream.read_until(b"shutting_down")
        stream.close()
        live.join()
        assert not llm.engine.has_work


# Metrics


def metric(live, name, **labels):
    text = live.request("GET", "/metrics")[2]
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_metrics(live):
    names = {
        "prompt_tokens_total": 5,
        "generated_tokens_total": 7,
        "time_to_first_token_seconds_count": 1,
        "time_between_tokens_seconds_count": 6,
    }
    live.post(COMPLETIONS, SHORT)
    before = {name: metric(live, f"jaxattn_{name}") for name in names}
    answered = {"path": COMPLETIONS, "method": "POST", "status": "200"}
    count = metric(live, "jaxattn_http_requests_total", **answered)
    body = SHORT | {"max_tokens": 7, "ignore_eos": True}
    live.post(COMPLETIONS, body)
    for name, more in names.items():
        assert metric(live, f"jaxattn_{name}") == before[name] + more, name
    wait_until(lambda: metric(live, "jaxattn_http_requests_total", **answered) == count + 1)
    assert metric(live, "jaxattn_request_duration_seconds_count", path=COMPLETIONS) > 0
    assert metric(live, "jaxattn_generated_tokens_per_second") > 0
    for group in ("0", "1"):
        assert metric(live, "jaxattn_cache_pages", group=group) > 0
    text = live.request("GET", "/metrics")[2]
    for name in ("preemptions_total", "prefix_query_tokens_total", "prefix_hit_tokens_total"):
        assert f"\njaxattn_{name} " in text
    with live.held() as gate:
        request = RawRequest(live, COMPLETIONS, LONG | {"n": 5})
        gate.step(3)
        gate.arrive()
        assert metric(live, "jaxattn_sequences_running") == 4
        assert metric(live, "jaxattn_sequences_waiting") == 1
        assert metric(live, "jaxattn_cache_pages_used", group="1") > 0
        request.close()
    wait_until(live.is_empty)


def test_strangers_do_not_choose_labels(live):
    live.request("GET", "/no/such/url")
    live.request("BREW", "/v1/models")
    text = live.request("GET", "/metrics")[2]
    assert "such" not in text and "BREW" not in text
    assert 'path="other"' in text and 'method="other"' in text


def test_servers_count_for_themselves(live):
    live.request("GET", "/health")
    assert b"jaxattn_http_requests_total{" in live.service.metrics.text()
    assert b"jaxattn_http_requests_total{" not in Metrics().text()
