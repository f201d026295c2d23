"""`LLM` through the real loading path: a tiny GGUF file with a vocabulary of its own."""

import gc

import jax
import numpy as np
import pytest

from jaxattn import LLM, Logprob, SamplingParams, UnsupportedAttentionError
from tests import tiny_model
from tests.tiny_model import NUM_TENSORS

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=8, temperature=1.5, ignore_eos=True)
PROMPTS = ["the hen", "in there on a thin pan", "a", "re re re re re re re"]


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    return tiny_model.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def shared_llm(gguf_path):
    return make_llm(gguf_path)


@pytest.fixture
def llm(shared_llm):
    yield shared_llm
    assert_empty(shared_llm)


def make_llm(path, **options):
    defaults = dict(
        dtype="float32",
        page_size=3,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        progress=False,
    )
    return LLM(path, **defaults | options)


def assert_empty(llm):
    assert not llm.engine.has_work
    [scheduler] = llm.engine.schedulers
    scheduler.allocator.check()
    assert scheduler.allocator.free_pages == tuple(pages - 1 for pages in llm.engine.num_pages)


def texts(outputs):
    return [[each.text for each in out.outputs] for out in outputs]


def test_the_vocabulary_is_read(llm):
    assert llm.tokenizer.encode("the") == [2, tiny_model.vocabulary()[0].index("the")]
    assert llm.tokenizer.decode(llm.tokenizer.encode("the \u20ac\n")) == "the \u20ac\n"
    assert llm.tokenizer.eos_ids == (1, 106)


def test_a_string(llm):
    (out,) = llm.generate("the hen", GREEDY)
    assert out.prompt == "the hen"
    assert out.prompt_token_ids == tuple(llm.tokenizer.encode("the hen"))
    assert out.prompt_logprobs is None
    (completion,) = out.outputs
    assert completion.index == 0
    assert len(completion.token_ids) == 8
    assert completion.text == llm.tokenizer.decode(completion.token_ids) != ""
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.logprobs is None


def test_a_list_comes_back_in_order(llm):
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [out.prompt for out in outputs] == PROMPTS
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        assert llm.generate([prompt], GREEDY)[0].outputs == out.outputs
    assert len({out.outputs[0].token_ids for out in outputs}) == len(PROMPTS)


def test_token_ids(llm):
    ids = llm.tokenizer.encode("the hen")
    (text, same, single) = llm.generate(
        ["the hen", {"prompt_token_ids": ids}, {"prompt_token_ids": (5,)}], GREEDY
    )
    assert same.prompt is None and same.prompt_token_ids == tuple(ids)
    assert same.outputs == text.outputs
    assert single.prompt_token_ids == (5,)  # no <bos> is added
    assert llm.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs == text.outputs


def test_no_prompts(llm):
    assert llm.generate([]) == []
    assert list(llm.stream([])) == []
    assert llm.chat([]) == []


def test_params_for_each(llm):
    params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (1, 5)]
    outputs = llm.generate(PROMPTS[:2], params)
    assert [len(out.outputs[0].token_ids) for out in outputs] == [1, 5]


def test_the_default_params_are_sixteen_random_tokens(llm):
    (out,) = llm.generate("the hen")
    assert 1 <= len(out.outputs[0].token_ids) <= 16


def test_logprobs_have_vllms_shape(llm):
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=1)
    (out,) = llm.generate("the hen", params)
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    for report, token in zip(out.prompt_logprobs[1:], out.prompt_token_ids[1:], strict=True):
        assert token in report and len(report) <= 2
    completion = out.outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids)
    for report, token in zip(completion.logprobs, completion.token_ids, strict=True):
        entry = report[token]
        assert isinstance(entry, Logprob)
        assert entry.rank == 1 and entry.logprob < 0
        assert entry.decoded_token == llm.tokenizer.token(token)
    (short,) = llm.generate({"prompt_token_ids": [2]}, params)
    assert short.prompt_logprobs == (None,)


def test_n_continuations_differ(llm):
    params = SamplingParams(max_tokens=8, temperature=1.5, n=3, seed=5, ignore_eos=True)
    first, second = llm.generate(PROMPTS[:2], params)
    assert [each.index for each in first.outputs] == [0, 1, 2]
    assert len({each.token_ids for each in first.outputs}) == 3
    alone = SamplingParams(max_tokens=8, temperature=1.5, seed=5, ignore_eos=True)
    assert llm.generate(PROMPTS[1], alone)[0].outputs[0] == second.outputs[0]


def test_seeds(llm, gguf_path):
    seeded = SamplingParams(max_tokens=8, temperature=1.5, seed=3, ignore_eos=True)
    assert texts(llm.generate(PROMPTS, seeded)) == texts(llm.generate(PROMPTS, seeded))
    same_prompt = llm.generate(["the hen"] * 3, RANDOM)
    assert len({out.outputs[0].token_ids for out in same_prompt}) == 3
    drawn = []
    for seed in (7, 7, 8):
        llm._next_seed = make_llm(gguf_path, seed=seed)._next_seed
        drawn.append(texts(llm.generate("the hen", RANDOM)))
    assert drawn[0] == drawn[1] != drawn[2]


def test_stop_strings_end_the_text(llm):
    (plain,) = llm.generate("the hen", GREEDY)
    whole = plain.outputs[0].text
    stop = whole[3:5]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, stop=[stop, "absent"])
    completion = llm.generate("the hen", params)[0].outputs[0]
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    shown = "".join(chunk.text for chunk in llm.stream("the hen", params))
    assert shown == completion.text


@pytest.mark.parametrize("stop", [1, 106])
def test_stop_tokens_of_the_model_end_the_text(llm, tmp_path, monkeypatch, stop):
    """A model that says the same, but two of its words are now a newline, 107, and a stop token."""
    prompt = llm.tokenizer.encode("the hen")
    plain = llm.generate("the hen", GREEDY)[0].outputs[0].token_ids
    word, last = list(dict.fromkeys(plain[1:]))[:2]
    assert not {word, last, stop, 107} & {*prompt, plain[0]}
    weights = tiny_model.weights()
    order = list(range(tiny_model.VOCAB))
    for token, new in ((word, 107), (last, stop)):
        order[token], order[new] = new, token
    monkeypatch.setattr(
        tiny_model, "weights", lambda *_: weights | {"embed": weights["embed"][np.array(order)]}
    )
    renamed = make_llm(tiny_model.write_gguf(tmp_path / "renamed.gguf"))
    assert renamed.engine.eos_ids == (1, 106)
    expected = [order[token] for token in plain]
    end = expected.index(stop) + 1
    assert 107 in expected[: end - 1] and end < len(expected)
    params = SamplingParams(max_tokens=8, temperature=0)
    completion = renamed.generate("the hen", params)[0].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert list(completion.token_ids) == expected[:end]
    assert completion.text == renamed.tokenizer.decode(expected[: end - 1])
    further = renamed.generate("the hen", GREEDY)[0].outputs[0]  # ignores the stop token
    assert (further.finish_reason, list(further.token_ids)) == ("length", expected)


def test_chat(llm):
    messages = [{"role": "user", "content": "the hen"}]
    (out,) = llm.chat(messages, GREEDY)
    assert out.prompt == "<start_of_turn>user\nthe hen<end_of_turn>\n<start_of_turn>model\n"
    assert out.prompt_token_ids[:2] == (2, 105)
    assert out.prompt_token_ids.count(2) == 1 and 106 in out.prompt_token_ids
    assert [each.outputs for each in llm.chat([messages, messages], GREEDY)] == [out.outputs] * 2
    with pytest.raises(ValueError, match="unknown role 'robot'"):
        llm.chat([{"role": "robot", "content": "hi"}])


def test_stream_interleaves_and_equals_generate(llm):
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=1, n=2, ignore_eos=True, stop="zz")
    outputs = llm.generate(PROMPTS, params)
    text = {(i, j): "" for i in range(len(PROMPTS)) for j in range(2)}
    tokens, reasons, order = {key: () for key in text}, {}, []
    for chunk in llm.stream(PROMPTS, params):
        key = chunk.prompt_index, chunk.index
        assert key not in reasons, "a chunk after the last"
        text[key] += chunk.text
        tokens[key] += chunk.token_ids
        order.append(key)
        if chunk.finish_reason is not None:
            reasons[key] = chunk.finish_reason
    for (i, j), shown in text.items():
        completion = outputs[i].outputs[j]
        assert shown == completion.text
        assert tokens[i, j] == completion.token_ids
        assert reasons[i, j] == completion.finish_reason
    assert order != sorted(order)  # several at a time


def test_closing_a_stream_frees_everything(llm):
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert_empty(llm)
    assert len(llm.generate("a", GREEDY)) == 1


def test_forgetting_a_stream_frees_everything(llm):
    next(llm.stream(PROMPTS, GREEDY))
    gc.collect()
    assert_empty(llm)


def test_two_open_streams(llm):
    first, second = llm.stream("the hen", GREEDY), llm.stream("a", GREEDY)
    next(first)
    with pytest.raises(RuntimeError, match="still open: exhaust it or close it first"):
        next(second)
    with pytest.raises(RuntimeError, match="still open"):
        llm.generate("a", GREEDY)
    rest = "".join(chunk.text for chunk in first)
    assert llm.generate("the hen", GREEDY)[0].outputs[0].text.endswith(rest)


def test_an_old_stream_never_touches_a_new_one(llm):
    """The old one is done but not exhausted: a chunk of its last step is still to come."""
    expected = "".join(chunk.text for chunk in llm.stream("a", GREEDY))
    for end in (lambda stream: stream.close(), list):
        old = llm.stream([{"prompt_token_ids": [5]}] * 2, GREEDY)
        next(chunk for chunk in old if chunk.finish_reason is not None)
        new = llm.stream("a", GREEDY)
        text = next(new).text
        left = end(old)
        assert left is None or [chunk.prompt_index for chunk in left] == [1]
        assert text + "".join(chunk.text for chunk in new) == expected


def test_an_interrupt_leaves_the_llm_usable(llm, monkeypatch):
    expected = texts(llm.generate(PROMPTS, GREEDY))

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    engine = llm.engine
    for owner, name in (
        (engine.runner, "dispatch"),
        (engine.schedulers[0], "settle"),
        (engine, "_fetch"),
        (llm.tokenizer, "stream"),
        (llm, "_bar"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY)
        assert_empty(llm)
    with monkeypatch.context() as patch:
        patch.setattr("jaxattn.engine.llm._chunk", interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:  # holds the frames, as a notebook does
            llm.generate(PROMPTS, GREEDY)
        assert_empty(llm)
        del caught
    with monkeypatch.context() as patch:
        patch.setattr("rich.progress.Progress.update", interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            llm.generate(PROMPTS, GREEDY)
        assert_empty(llm)
        del caught
    assert texts(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (None, TypeError, "prompts=None: expected a prompt or a list of prompts"),
        (5, TypeError, "prompts=5: expected a prompt or a list"),
        ([5, 6], TypeError, "prompt 0: expected a string or a dict with just 'prompt_token_ids'"),
        (["a", None], TypeError, "prompt 1: expected a string or a dict"),
        ({"prompt": "a", "image": 1}, TypeError, "prompt 0: expected a string or a dict"),
        ({"prompt_token_ids": [1], "more": 1}, TypeError, "prompt 0: expected a string"),
        ({"prompt_token_ids": None}, TypeError, "prompt_token_ids is a list of ints, got None"),
        ({"prompt_token_ids": "12"}, TypeError, "prompt_token_ids is a list of ints, got '12'"),
        ({"prompt_token_ids": [5, True]}, TypeError, r"are ints, got \[5, True\]"),
        ({"prompt_token_ids": [5, 1.0]}, TypeError, r"are ints, got \[5, 1.0\]"),
        ({"prompt_token_ids": []}, ValueError, "prompt 0: the prompt is empty"),
        ({"prompt_token_ids": [300]}, ValueError, r"token ids \[300\] are outside 0 to 299"),
        ("", ValueError, "prompt 0 is empty: give some text"),
        (["a", ""], ValueError, "prompt 1 is empty"),
        (["a", "q" * 70], ValueError, "prompt 1: the prompt has 71 tokens; max_model_len=64"),
    ],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_wrong_prompts(llm, method, prompts, error, message):
    with pytest.raises(error, match=message):
        getattr(llm, method)(prompts)  # the stream says so at once, not at its first chunk


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([GREEDY], ValueError, "1 sampling params for 2 prompts"),
        ([GREEDY, None], TypeError, "prompt 1: expected SamplingParams, got None"),
        (5, TypeError, "params=5: expected SamplingParams or a list"),
        ({"max_tokens": 5}, TypeError, "expected SamplingParams or a list"),
    ],
)
def test_wrong_params(llm, params, error, message):
    with pytest.raises(error, match=message):
        llm.generate(["a", "b"], params)


def test_unknown_keywords(llm, gguf_path):
    for call in (llm.generate, llm.stream):
        with pytest.raises(TypeError, match="max_tokens"):
            call("a", max_tokens=5)
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        make_llm(gguf_path, gpu_memory_utilization=0.9)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"backend": "pallas_tpu"},
            UnsupportedAttentionError,
            r"pallas_tpu: on cpu \(cpu\): supported: platform tpu",
        ),
        ({"backend": "cuda"}, ValueError, "backend='cuda': the backends are"),
        ({"page_size": -1}, ValueError, "page_size=-1"),
        ({"max_model_len": 5000}, ValueError, "max_model_len=5000: .*positions end at 4096"),
        ({"max_model_len": 0}, ValueError, "max_model_len=0: expected at least 1"),
        ({"max_num_seqs": 32}, ValueError, "max_num_batched_tokens=8 is less than"),
        ({"dtype": "float16"}, ValueError, "dtype='float16': use 'bfloat16' or 'float32'"),
        ({"kv_dtype": ""}, ValueError, "dtype='': a cache stores one of"),
        ({"seed": -1}, ValueError, "seed=-1: expected an int of at least 0"),
        ({"seed": True}, ValueError, "seed=True: expected an int of at least 0"),
        ({"max_model_len": 1}, ValueError, "max_model_len=1: a prompt token and a new token"),
        ({"hybrid_kv_cache": "no"}, TypeError, "hybrid_kv_cache='no': expected True or False"),
    ],
)
def test_options_are_refused_before_weights_are_loaded(
    gguf_path, monkeypatch, options, error, message
):
    monkeypatch.setattr("jaxattn.engine.llm.stream_weights", None)
    with pytest.raises(error, match=message):
        make_llm(gguf_path, **options)


def test_an_interrupt_while_requests_are_queued(llm, monkeypatch):
    add, calls = llm.engine.add, []

    def interrupt_second(*args, **kwargs):
        if calls:
            raise KeyboardInterrupt
        calls.append(args)
        return add(*args, **kwargs)

    monkeypatch.setattr(llm.engine, "add", interrupt_second)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert calls
    assert_empty(llm)


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="'' is neither a file nor a folder"):
        make_llm("")
    with pytest.raises(ValueError, match=r"none\.gguf' is neither a file nor a folder"):
        make_llm(tmp_path / "none.gguf")


def test_progress_goes_to_standard_error(llm, gguf_path, capsys, monkeypatch):
    llm.generate("a", GREEDY)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(llm, "_progress", True)
    llm.generate("a", GREEDY)
    out, err = capsys.readouterr()
    assert out == "" and "generating" in err and "1/1" in err and "tokens/s" in err
    make_llm(gguf_path, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "loading" in err and f"{2 * NUM_TENSORS}/{2 * NUM_TENSORS}" in err


@pytest.mark.parametrize(
    "options",
    [{}, {"hybrid_kv_cache": False}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_the_caches_bytes_are_the_plans(gguf_path, options):
    engine = make_llm(gguf_path, **options).engine
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.buffers.cache))
    sizes = enumerate(engine.num_pages)
    assert arrays == sum(count * engine.plan.page_bytes(group) for group, count in sizes)


def test_the_default_length_is_the_models(gguf_path):
    assert make_llm(gguf_path, max_model_len=None).engine.max_model_len == 4096
