"""Lines in an engine: results, failures, and an engine that is kept full."""

import json
from types import SimpleNamespace

import pytest

from jaxattn import LLM, SamplingParams
from jaxattn.engine.sequence import Sequence
from jaxattn.models.gemma3.chat import render_chat
from jaxattn.serve.offline.format import Failure, Result
from jaxattn.serve.offline.run import OfflineBatch, run
from tests import tiny_model
from tests.offline_cases import CHAT, ENGINE, MODEL, mixed, request


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_model.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return LLM(path, **ENGINE, progress=False)


def numbered(requests):
    for number, each in enumerate(requests, 1):
        yield number, each if isinstance(each, bytes) else json.dumps(each).encode()


def complete(llm, requests, *, seed=0):
    """Outcomes in the order in which they came."""
    outcomes = []
    batch = OfflineBatch(llm, model=MODEL, seed=seed)
    assert run(batch, numbered(requests), outcomes.append, window=8, stop=lambda: False)
    assert batch.num_sequences == 0
    assert len(outcomes) == len({each.line for each in outcomes}) == len(requests)
    return outcomes


def texts(outcomes):
    """The texts of each result's choices, by custom_id."""
    assert all(isinstance(each, Result) for each in outcomes), outcomes
    return {
        each.custom_id: [
            choice["text"] if "text" in choice else choice["message"]["content"]
            for choice in each.body["choices"]
        ]
        for each in outcomes
    }


def test_results_are_those_of_the_llm(llm):
    requests = mixed(12)
    found = texts(complete(llm, requests))
    for each in requests:
        body = each["body"]
        prompt = body["prompt"] if "prompt" in body else render_chat(body["messages"])
        params = SamplingParams(max_tokens=body["max_tokens"], temperature=0, ignore_eos=True)
        (out,) = llm.generate(prompt, params)
        assert found[each["custom_id"]] == [out.outputs[0].text]


def test_a_result_has_the_line_and_a_body(llm):
    results = complete(llm, [request("a", "the hen"), request("b", "the hen", url=CHAT)])
    by_line = {each.line: each for each in results}
    assert {line: each.custom_id for line, each in by_line.items()} == {1: "a", 2: "b"}
    assert by_line[1].body["object"] == "text_completion"
    assert by_line[2].body["object"] == "chat.completion"
    for each, prefix in ((by_line[1], "cmpl"), (by_line[2], "chatcmpl")):
        assert each.body["id"] == f"{prefix}-{each.request_id}"
        assert each.body["model"] == MODEL
        assert each.body["usage"]["completion_tokens"] == 6


def test_several_prompts_and_continuations_are_one_result(llm):
    prompts = ["the hen", "in there", "a"]
    alone = texts(complete(llm, [request(each, each, n=2, seed=7) for each in prompts]))
    together = texts(complete(llm, [request("all", prompts, n=2, seed=7)]))
    assert together["all"] == [text for each in prompts for text in alone[each]]


def drawn(custom_ids, **options):
    return [
        request(each, "the hen", temperature=1.5, max_tokens=12, **options) for each in custom_ids
    ]


def test_draws_without_a_seed_belong_to_the_custom_id(llm):
    ids = ["a", "b", "c", "d", "e"]
    found = texts(complete(llm, drawn(ids)))
    assert len({text for (text,) in found.values()}) == len(ids)
    assert texts(complete(llm, drawn(ids[::-1]))) == found
    assert texts(complete(llm, drawn("c"))) == {"c": found["c"]}
    assert texts(complete(llm, drawn("c"), seed=1)) != {"c": found["c"]}


def test_prompts_of_a_line_without_a_seed_draw_apart(llm):
    line = request("a", ["the hen"] * 3, temperature=1.5, max_tokens=12)
    assert len(set(texts(complete(llm, [line]))["a"])) == 3


def test_a_seed_is_honoured(llm):
    found = texts(complete(llm, drawn("ab", seed=5)))
    assert found["a"] == found["b"]
    assert texts(complete(llm, drawn("a", seed=5), seed=1)) == {"a": found["a"]}


@pytest.mark.parametrize(
    ("line", "param", "message"),
    [
        (b"{", None, "the line is not JSON"),
        (request("bad", "a") | {"method": "GET"}, "method", "method='GET': expected 'POST'"),
        (request("bad", "a", url="/v1/embeddings"), None, "unknown url '/v1/embeddings'"),
        (request("bad", "a", temperatur=1), "temperatur", "unknown parameter 'temperatur'"),
        (request("bad", "a", temperature=-1), "temperature", "temperature=-1"),
        (request("bad", "a", model="other"), "model", "model='other': this run serves 'tiny'"),
        (request("bad", "a", stream=True), "stream", "stream=true: a batch writes whole"),
        (request("bad", "the " * 200), "prompt", "max_model_len=96 leaves room for 95"),
        (request("bad", "a", max_tokens=96), "max_tokens", "ask for at most"),
        (request("bad", 5), "prompt", "a prompt is a string"),
    ],
)
def test_a_bad_line_fails_alone(llm, line, param, message):
    good = [request("first", "the hen"), request("last", "in there")]
    outcomes = complete(llm, [good[0], line, good[1]])
    (failure,) = [each for each in outcomes if isinstance(each, Failure)]
    assert failure.line == 2
    assert failure.custom_id == (None if line == b"{" else "bad")
    assert set(failure.error) == {"message", "type", "param", "code"}
    assert message in failure.error["message"]
    assert failure.error["param"] == param
    assert failure.error["type"] == "invalid_request_error"
    results = [each for each in outcomes if isinstance(each, Result)]
    assert texts(results) == texts(complete(llm, good))


def test_the_engine_is_kept_full_and_lines_are_streamed(llm):
    window, pulled, seen, outcomes = 8, [], [], []
    requests = mixed(40)

    def lines():
        for number, raw in numbered(requests):
            pulled.append(number)
            yield number, raw

    batch = OfflineBatch(llm, model=MODEL, seed=0)

    def stop():
        assert len(pulled) - len(outcomes) == batch.num_sequences <= window
        seen.append(batch.num_sequences)
        return False

    assert run(batch, lines(), outcomes.append, window=window, stop=stop)
    assert len(outcomes) == len(requests)
    full = seen[window - 1 : max(at for at, count in enumerate(seen) if count == window)]
    assert min(full) > ENGINE["max_num_seqs"]  # some wait, so that no place stays empty
    assert batch.num_tokens == sum(each["body"]["max_tokens"] for each in requests)


def test_a_run_that_is_stopped_keeps_what_is_finished(llm):
    outcomes = []
    batch = OfflineBatch(llm, model=MODEL, seed=0)
    done = run(
        batch, numbered(mixed(40)), outcomes.append, window=8, stop=lambda: len(outcomes) >= 5
    )
    assert not done
    assert 5 <= len(outcomes) < 40
    assert batch.num_sequences == 0
    assert len(complete(llm, mixed(6))) == 6  # and the engine is free again


def test_an_error_in_delivery_frees_the_engine(llm):
    def full_disk(outcome):
        raise OSError("no space left")

    batch = OfflineBatch(llm, model=MODEL, seed=0)
    with pytest.raises(OSError, match="no space left"):
        run(batch, numbered(mixed(20)), full_disk, window=8, stop=lambda: False)
    assert batch.num_sequences == 0
    stats = llm.engine.stats()
    assert (stats.waiting, stats.running) == (0, 0)


class FailingEngine:
    """Ends the sequences of one step with an error, those of the next well, and so on."""

    vocab_size = tiny_model.VOCAB
    max_model_len = ENGINE["max_model_len"]

    def __init__(self, size):
        self.size, self.queue, self.steps, self.aborted = size, [], 0, []

    def check_prompt(self, token_ids, images):
        pass

    def add(self, prompt, params, **options):
        options |= {"max_len": self.max_model_len, "eos_ids": ()}
        self.queue.append(Sequence(len(self.queue), prompt, params, **options))
        return self.queue[-1]

    def step(self):
        now, self.queue = self.queue[: self.size], self.queue[self.size :]
        self.steps += 1
        for each in now:
            if self.steps % 2:
                each.end("error", RuntimeError("out of memory"))
            else:
                each.add_token(70)
                each.end("length")
        return now

    def abort(self, sequences):
        for each in sequences:
            if each.finish_reason is None:
                self.aborted.append(each)
                self.queue.remove(each)
                each.end("abort")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_step_that_fails_takes_its_requests_alone(llm, size):
    engine = FailingEngine(size)
    fake = SimpleNamespace(engine=engine, tokenizer=llm.tokenizer)
    requests = [request(f"id-{number}", "a", n=2, max_tokens=1) for number in range(6)]
    outcomes = complete(fake, requests)
    failed = [each for each in outcomes if isinstance(each, Failure)]
    assert failed
    for each in failed:
        assert each.error["type"] == "server_error"
        assert "RuntimeError: out of memory" in each.error["message"]
        assert requests[each.line - 1]["custom_id"] == each.custom_id
    if size == 1:  # the first request's other half need not be computed, those of the rest were
        assert (len(failed), engine.steps, len(engine.aborted)) == (6, 11, 1)
    if size == 2:
        assert (len(failed), len(engine.aborted)) == (3, 0)
