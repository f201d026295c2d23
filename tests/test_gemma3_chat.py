"""Conversations as token ids, against literals and against transformers' own rendering."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jaxattn.models.gemma3.chat import chat_images, render_chat
from jaxattn.models.gemma3.packaged import packaged_gguf
from jaxattn.models.gemma3.tokenizer import Tokenizer, load_tokenizer

START, END, NEWLINE, USER, MODEL = 105, 106, 107, 2364, 4368
HELLO, WORLD = 9259, 1902  # "Hello", " world"

# What the format says, in the language that transformers reads.
TEMPLATE = """\
{{ bos_token }}\
{%- if messages[0]['role'] == 'system' -%}\
{%- set system = messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text'] -%}\
{%- set first = system + '\n\n' -%}{%- set turns = messages[1:] -%}\
{%- else -%}{%- set first = '' -%}{%- set turns = messages -%}{%- endif -%}\
{%- for turn in turns -%}\
{{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\n' + (first if loop.first else '') }}\
{%- if turn['content'] is string -%}{{ turn['content'] | trim }}\
{%- else -%}{%- for part in turn['content'] -%}{%- if part['type'] == 'image' -%}{{ '<start_of_image>' }}\
{%- else -%}{{ part['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}\
{{ '<end_of_turn>\n' }}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}\
"""  # noqa: E501


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(packaged_gguf())


def message(role, content):
    return {"role": role, "content": content}


SYSTEM = message("system", "Hello")
TURNS = [message("user", "Hello world"), message("assistant", "Hello"), message("user", "Hello")]


def test_ids_of_one_turn(tokenizer):
    ids = tokenizer.encode(render_chat(TURNS[:1]))
    turn = [START, USER, NEWLINE, HELLO, WORLD, END, NEWLINE]
    assert ids == [2, *turn, START, MODEL, NEWLINE]
    assert tokenizer.encode(render_chat(TURNS[:1], add_generation_prompt=False)) == [2, *turn]


def test_ids_of_two_turns(tokenizer):
    assert tokenizer.encode(render_chat(TURNS)) == [
        2,
        *[START, USER, NEWLINE, HELLO, WORLD, END, NEWLINE],
        *[START, MODEL, NEWLINE, HELLO, END, NEWLINE],
        *[START, USER, NEWLINE, HELLO, END, NEWLINE],
        *[START, MODEL, NEWLINE],
    ]


def test_the_system_message_goes_into_the_first_turn_only(tokenizer):
    blank_line = 108
    assert tokenizer.encode(render_chat([SYSTEM, *TURNS])) == [
        2,
        *[START, USER, NEWLINE, HELLO, blank_line, HELLO, WORLD, END, NEWLINE],
        *[START, MODEL, NEWLINE, HELLO, END, NEWLINE],
        *[START, USER, NEWLINE, HELLO, END, NEWLINE],
        *[START, MODEL, NEWLINE],
    ]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        TURNS[:1],
        TURNS,
        [SYSTEM, *TURNS],
        [message("system", "  Be kind.\n"), *TURNS],
        [message("system", ""), *TURNS],
        [message("system", parts("Be kind. ")), *TURNS],
        [message("user", "  a \n\n b\t\n")],
        [message("user", parts(" one ", "\ntwo"))],
        [message("user", "")],
    ],
)
def test_text_is_what_transformers_renders(messages, prompt):
    rendered, _ = render_jinja_template(
        [messages], chat_template=TEMPLATE, add_generation_prompt=prompt, bos_token=""
    )
    assert render_chat(messages, add_generation_prompt=prompt) == rendered[0]


def test_model_is_another_word_for_assistant():
    assert render_chat([TURNS[0], message("model", "Hello"), TURNS[2]]) == render_chat(TURNS)


IMAGE = {"type": "image", "image": "a.png"}


def url(where, **more):
    return {"type": "image_url", "image_url": {"url": where, **more}}


def test_images_are_markers():
    """White space around the texts is dropped, as the published template does."""
    content = [*parts(" Hello \n"), IMAGE, *parts("\n and ", ""), url("data:,"), url("https://a")]
    messages = [message("user", content), TURNS[1], message("user", [IMAGE])]
    rendered, _ = render_jinja_template(
        [
            [
                each
                if isinstance(each["content"], str)
                else message(
                    each["role"],
                    [
                        part if part["type"] == "text" else {"type": "image"}
                        for part in each["content"]
                    ],
                )
                for each in messages
            ]
        ],
        chat_template=TEMPLATE,
        add_generation_prompt=True,
        bos_token="",
    )
    assert render_chat(messages) == rendered[0]
    assert "user\nHello<start_of_image>and<start_of_image><start_of_image><end" in rendered[0]
    assert chat_images(messages) == ["a.png", "data:,", "https://a", "a.png"]
    assert chat_images(TURNS) == []


ROLES = {"u": "user", "a": "assistant", "s": "system", "m": "model"}


@pytest.mark.parametrize(
    ("roles", "wrong", "expected"),
    [
        ("a", 0, "user"),
        ("uu", 1, "assistant"),
        ("uaa", 2, "user"),
        ("sa", 1, "user"),
        ("suu", 2, "assistant"),
        ("us", 1, "assistant"),
        ("ss", 1, "user"),
        ("umm", 2, "user"),
    ],
)
def test_roles_out_of_turn(roles, wrong, expected):
    messages = [message(ROLES[role], "x") for role in roles]
    with pytest.raises(
        ValueError, match=f"message {wrong} has role '{ROLES[roles[wrong]]}', expected '{expected}'"
    ):
        render_chat(messages)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "messages is empty"),
        ([SYSTEM], "a system message alone has no turn"),
        ([message("tool", "x")], "message 0: unknown role 'tool'"),
        ([message(None, "x")], "message 0: unknown role None"),
        ([message(["user"], "x")], r"message 0: unknown role \['user'\]"),
        ([{"role": "user"}], "message 0: expected the keys role and content"),
        ([message("user", "x") | {"name": "Ann"}], "message 0: expected the keys role and content"),
        (["Hello"], "message 0: expected the keys role and content, got 'Hello'"),
        ([message("user", None)], "message 0: content is a string or a list"),
        ([message("user", 3)], "message 0: content is a string or a list"),
        ([message("user", [{"type": "image", "url": "x"}])], "message 0: a part is"),
        ([message("user", [{"type": "image_url", "image_url": "data:"}])], "begins with data:"),
        ([message("user", [url("data:", detail="high")])], r"a url is all it may have \(every"),
        ([message("user", [url("/etc/passwd")])], "begins with data:, http:// or https://, got"),
        ([message("user", [url("file:///a.png")])], "begins with data:, http:// or https://, got"),
        ([message("user", [url(None)])], "begins with data:, http:// or https://, got None"),
        ([message("system", [IMAGE]), *TURNS], "message 0 of role 'system' has an image"),
        ([TURNS[0], message("assistant", [IMAGE])], "message 1 of role 'assistant' has an image"),
        ([message("system", parts("a", "b")), *TURNS], "a system message is one text, got 2 parts"),
        ([message("system", []), *TURNS], "a system message is one text, got 0 parts"),
        ([message("user", [{"type": "text"}])], "message 0: a part is"),
        ([message("user", [{"type": "text", "text": 3}])], "message 0: a part is"),
        ([message("user", ["x"])], "message 0: a part is"),
        ([*TURNS[:2], message("user", [{"type": "audio"}])], "message 2: a part is"),
    ],
)
def test_messages_that_cannot_be_rendered(messages, error):
    with pytest.raises(ValueError, match=error):
        render_chat(messages)
