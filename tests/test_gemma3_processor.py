"""Token ids and pixels of prompts with images against transformers' own `Gemma3Processor`."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from jaxattn.engine.prompts import EncodedPrompt, PromptEncoder
from jaxattn.models.gemma3.checkpoint import load_config
from jaxattn.models.gemma3.tokenizer import load_tokenizer
from tests import image_checkpoint
from tests.image_checkpoint import picture
from tests.test_gemma3_chat import TEMPLATE

IMAGE = "<image_soft_token>"  # only theirs has it: behind our vocabulary, where our images are
TALL, SQUARE, WIDE = picture(0, 300, 600), picture(1), picture(2, 900, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_checkpoint.write(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def processor(folder) -> Gemma3Processor:
    config = load_config(str(folder))
    vision = config.vision
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<bos>",
        extra_special_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": IMAGE,
        },
    )
    assert tokenizer.image_token_id == config.vocab_size
    size = {"height": vision.image_size, "width": vision.image_size}
    return Gemma3Processor(
        Gemma3ImageProcessorPil(size=size),
        tokenizer,
        chat_template=TEMPLATE,
        image_seq_length=vision.tokens_per_image,
    )


def encoder(folder, *, pan_and_scan: bool) -> PromptEncoder:
    config = load_config(str(folder))
    return PromptEncoder(load_tokenizer(folder), config, pan_and_scan=pan_and_scan)


def assert_same(ours: EncodedPrompt, theirs, processor: Gemma3Processor, *, views: int) -> None:
    [expected] = theirs["input_ids"].tolist()
    image = processor.tokenizer.image_token_id
    assert [min(token, image) for token in ours.token_ids] == expected
    assert expected.count(image) == processor.image_seq_length * views
    pixels = np.stack([each.image.pixels for each in ours.images])
    numbers = pixels.astype(np.float32) / 127.5 - 1  # as the tower begins
    assert np.array_equal(numbers.transpose(0, 3, 1, 2), theirs["pixel_values"])
    assert len(pixels) == views


each_pan_and_scan = pytest.mark.parametrize(("pan_and_scan", "views"), [(False, 3), (True, 8)])


@each_pan_and_scan
def test_text_with_images(folder, processor, pan_and_scan, views):
    text = "a<start_of_image>the hen<start_of_image><start_of_image> the"
    images = [TALL, SQUARE, WIDE]
    theirs = processor(
        text=f"<bos>{text}", images=images, do_pan_and_scan=pan_and_scan, return_tensors="np"
    )
    ours = encoder(folder, pan_and_scan=pan_and_scan).encode(text, images)
    assert_same(ours, theirs, processor, views=views)


@each_pan_and_scan
def test_a_conversation_with_images(folder, processor, pan_and_scan, views):
    def text(content):
        return {"type": "text", "text": content}

    def image(picture):
        return {"type": "image", "image": picture}

    messages = [
        {"role": "system", "content": [text("the hen")]},
        {"role": "user", "content": [image(TALL), text(" a "), image(SQUARE), text("b")]},
        {"role": "assistant", "content": [text("the")]},
        {"role": "user", "content": [text("c"), image(WIDE)]},
    ]
    theirs = processor.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="np",
        processor_kwargs={"do_pan_and_scan": pan_and_scan},
    )
    ours = encoder(folder, pan_and_scan=pan_and_scan).chat(messages)
    assert_same(ours, theirs, processor, views=views)
