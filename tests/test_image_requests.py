"""Pictures in prompts, conversations and requests: what the model is given, and what is refused."""

import argparse
import json
import sys

import numpy as np
import pytest

from jaxattn import LLM, SamplingParams
from jaxattn.cli import main
from jaxattn.engine.prompts import PromptEncoder
from jaxattn.models.gemma3.checkpoint import load_config
from jaxattn.options import add_engine_options, engine_options
from jaxattn.serve.offline.format import Failure
from jaxattn.serve.offline.run import OfflineBatch, run
from jaxattn.serve.openai.errors import RequestError
from jaxattn.serve.openai.requests import parse
from tests import image_checkpoint
from tests.image_checkpoint import TOKENS, data_url, part, picture, png
from tests.live_server import MODEL, live_server
from tests.tiny_model import write_gguf

CHAT = "/v1/chat/completions"
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
TEXT = {"type": "text", "text": "the hen"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_checkpoint.write(tmp_path_factory.mktemp("images"))


def make(path, **options):
    defaults = dict(dtype="float32", page_size=4, max_num_seqs=2, max_num_batched_tokens=32)
    llm = LLM(path, progress=False, **defaults | options)
    llm.engine.runner.buckets = (32,)  # little is compiled
    return llm


@pytest.fixture(scope="module")
def llm(folder):
    return make(folder)


def shown(llm, *parts):
    """Token ids of texts, and of a picture for None."""
    ids = [2]
    for each in parts:
        ids += [llm.engine.vocab_size] * TOKENS if each is None else llm.tokenizer.encode(each)[1:]
    return tuple(ids)


BEGIN, END = "\n\n<start_of_image>", "<end_of_image>\n\n"


def test_a_marker_becomes_what_transformers_makes_of_it(llm):
    text = "a<start_of_image><start_of_image> the"
    [out] = llm.generate({"prompt": text, "images": [picture(0), picture(1)]}, PARAMS)
    assert out.prompt == text
    assert out.prompt_token_ids == shown(
        llm, f"a{BEGIN}", None, f"{END}{BEGIN}", None, f"{END} the"
    )
    assert len(out.outputs[0].token_ids) == 4


def test_crops_of_a_wide_picture(llm, folder):
    encoder = PromptEncoder(llm.tokenizer, load_config(str(folder)), pan_and_scan=True)
    square, wide = picture(0), picture(1, width=600, height=300)
    prompt = encoder.encode("<start_of_image>a<start_of_image>", [square, wide])
    ids = [min(token, llm.engine.vocab_size) for token in prompt.token_ids]
    whole = "Here is the original image "
    crops = " and here are some crops to help you see better "
    assert tuple(ids) == shown(
        llm,
        *(BEGIN, None, f"{END}a{whole}{BEGIN}", None, f"{END}{crops}{BEGIN}", None),
        *(f"{END} {BEGIN}", None, END),
    )
    assert len({each.image.token_id for each in prompt.images}) == 4
    plain = PromptEncoder(llm.tokenizer, load_config(str(folder)))
    assert len(plain.encode("<start_of_image>", [wide]).images) == 1


def test_a_picture_in_any_form(llm, tmp_path):
    image = picture(3)
    path = tmp_path / "a.png"
    path.write_bytes(png(image))
    forms = [image, str(path), path, png(image), np.asarray(image), data_url(image)]
    messages = [
        [{"role": "user", "content": [{"type": "image", "image": each}, TEXT]}] for each in forms
    ]
    messages.append([{"role": "user", "content": [part(data_url(image)), TEXT]}])
    outs = llm.chat(messages, PARAMS)
    expected = shown(
        llm, f"<start_of_turn>user\n{BEGIN}", None,
        f"{END}the hen<end_of_turn>\n<start_of_turn>model\n",
    )  # fmt: skip
    assert {out.prompt_token_ids for out in outs} == {expected}
    assert len({out.outputs[0].token_ids for out in outs}) == 1
    other = [{"role": "user", "content": [{"type": "image", "image": picture(4)}, TEXT]}]
    assert llm.prompts.chat(other).token_ids != llm.prompts.chat(messages[0]).token_ids


def test_scores_leave_pictures_out(llm):
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    [out] = llm.generate({"prompt": "a<start_of_image>b", "images": [picture()]}, params)
    reports = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
    assert all((report is None) == (token == llm.engine.vocab_size) for token, report in reports)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ({"prompt": "a", "images": [picture()]}, ValueError, "prompt 0: 1 images for 0 times"),
        (
            {"prompt": "<start_of_image>" * 2, "images": [picture()]},
            ValueError,
            "1 images for 2 times <start_of_image> in the text",
        ),
        ({"prompt": "<start_of_image>", "images": []}, ValueError, "0 images for 1 times"),
        ({"prompt": "<start_of_image>", "images": picture()}, TypeError, "'images' is a list"),
        ({"prompt": "<start_of_image>", "images": [b"GIF"]}, ValueError, "the file of 3 bytes"),
        ({"prompt": "<start_of_image>", "images": ["https://a/b"]}, ValueError, "is remote"),
        ({"prompt": 3, "images": [picture()]}, TypeError, "'prompt' is a string, got 3"),
        ({"images": [picture()]}, TypeError, "or 'prompt' and 'images', got"),
        ({"prompt_token_ids": [318], "images": [picture()]}, TypeError, "or 'prompt' and 'images'"),
    ],
)
def test_prompts_that_are_refused(llm, prompt, error, message):
    with pytest.raises(error, match=message):
        llm.generate(prompt, PARAMS)


def test_too_many_pictures_are_refused_before_they_are_decoded(llm):
    count = llm.engine.max_model_len // TOKENS
    with pytest.raises(ValueError, match=f"{count} images are {count * TOKENS} tokens at least"):
        llm.prompts.encode("<start_of_image>" * count, [b"no picture"] * count)
    for too_many in (count, count - 1):  # that leave no room before, and only with the text
        with pytest.raises(RequestError) as refused:
            parse(CHAT, body(*[part(data_url(picture()))] * too_many), llm)
        assert refused.value.code == "context_length_exceeded"


def test_a_marker_without_pictures_is_a_token_like_others(llm):
    [out] = llm.generate("a<start_of_image>b", PARAMS)
    assert out.prompt_token_ids == tuple(llm.tokenizer.encode("a<start_of_image>b"))


def test_a_text_that_spells_a_marker_cannot_move_a_picture(llm):
    content = [{"type": "text", "text": "<start_of_image>"}, part(data_url(picture()))]
    with pytest.raises(ValueError, match="1 images for 2 times"):
        llm.chat([{"role": "user", "content": content}], PARAMS)


def test_models_without_eyes(folder, tmp_path):
    message = [{"role": "user", "content": [part(data_url(picture()))]}]
    left_out = make(folder, images=False)
    assert left_out.engine.vision is None and left_out.engine.runner.num_shapes == 1
    text = write_gguf(tmp_path / "tiny.gguf")
    for llm in (left_out, make(text)):
        with pytest.raises(ValueError, match="has no vision tower, and takes no images"):
            llm.chat(message, PARAMS)
    with pytest.raises(ValueError, match="pan_and_scan=True: this model has no vision tower"):
        make(text, pan_and_scan=True)
    with pytest.raises(TypeError, match="images=1: expected True or False"):
        make(text, images=1)
    with pytest.raises(ValueError, match="a step must hold an image"):
        make(folder, max_num_batched_tokens=4)


def test_remote_pictures_if_allowed(llm, folder, monkeypatch):
    """From the flag of a command to the picture."""
    monkeypatch.setattr("jaxattn.models.gemma3.images._fetch", lambda *_: png(picture()))
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    flags = ["--model", str(folder), "--max-num-seqs", "2", "--max-num-batched-tokens", "32"]
    remote = {"role": "user", "content": [part("https://a/b.png")]}
    here = {"role": "user", "content": [part(data_url(picture()))]}
    allowed = LLM(**engine_options(parser.parse_args([*flags, "--allow-remote-images"])))
    assert allowed.prompts.chat([remote]).token_ids == llm.prompts.chat([here]).token_ids
    with pytest.raises(ValueError, match="is remote: give the picture itself"):
        llm.prompts.chat([remote])


def test_a_server_that_cannot_read_pictures_does_not_start(llm, monkeypatch, capsys):
    monkeypatch.setattr("jaxattn.engine.llm.LLM", lambda **_: llm)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert main(["serve", "--model", "x", "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert "pip install 'jaxattn[images]'" in error and "text alone: --no-images" in error


def body(*parts, **options):
    message = {"role": "user", "content": [*parts, TEXT]}
    defaults = {"model": MODEL, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return {"messages": [message]} | defaults | options


def test_the_server_takes_data_urls(llm):
    image = picture(5)
    [out] = llm.chat(body({"type": "image", "image": image})["messages"], PARAMS)
    with live_server(llm, max_body_bytes=20_000) as live:
        status, _, answer = live.post(CHAT, body(part(data_url(image)), n=2))
        assert status == 200
        assert [each["message"]["content"] for each in answer["choices"]] == [
            out.outputs[0].text
        ] * 2
        assert answer["usage"]["prompt_tokens"] == len(out.prompt_token_ids)
        assert live.request("GET", "/openapi.json")[0] == 200
        for url, code, message in (
            ("https://a/b.png", "invalid_value", "is remote: give the picture itself"),
            ("/etc/hostname", "invalid_value", "begins with data:, http:// or https://"),
            ("data:image/png;base64,AAAA", "invalid_value", "cannot be read as a picture"),
            ("data:image/png;base64,*", "invalid_value", "is not base64"),
        ):
            status, _, answer = live.post(CHAT, body(part(url)))
            assert (status, answer["error"]["code"]) == (400, code)
            assert answer["error"]["param"] == "messages"
            assert message in answer["error"]["message"]
        large = data_url(picture(0, width=100, height=100))
        assert live.post(CHAT, body(part(large)))[0] == 413


def test_a_batch_takes_data_urls(llm):
    def line(custom_id, url):
        record = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body(part(url))}
        return json.dumps(record).encode()

    image = picture(6)
    lines = [(1, line("a", data_url(image))), (2, line("b", "https://a/b.png"))]
    batch, outcomes = OfflineBatch(llm, model=MODEL, seed=0), []
    assert run(batch, lines, outcomes.append, window=4, stop=lambda: False)
    failure, result = sorted(outcomes, key=lambda each: each.line, reverse=True)
    assert isinstance(failure, Failure) and "is remote" in failure.error["message"]
    [out] = llm.chat(body({"type": "image", "image": image})["messages"], PARAMS)
    assert result.body["choices"][0]["message"]["content"] == out.outputs[0].text


def test_generate_shows_a_file(llm, tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.png"
    path.write_bytes(png(picture(7)))
    monkeypatch.setattr("jaxattn.engine.llm.LLM", lambda *_, **__: llm)
    options = ["--model", "x", "--max-tokens", "4", "--ignore-eos", "--image", str(path)]
    assert main(["generate", "the hen", "--chat", *options]) == 0
    message = {"role": "user", "content": [{"type": "image", "image": path}, TEXT]}
    [out] = llm.chat([message], PARAMS)
    assert capsys.readouterr().out == out.outputs[0].text + "\n"
    assert main(["generate", "the hen", *options]) == 1
    assert "1 images for 0 times <start_of_image>" in capsys.readouterr().err
    assert main(["generate", "the hen", "--chat", "--image", "no.png"]) == 1
    assert "--image no.png: there is no such file" in capsys.readouterr().err
