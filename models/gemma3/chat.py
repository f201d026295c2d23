"""Gemma 3's turn format: what instruction-tuned checkpoints expect to read."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

IMAGE_MARKER = "<start_of_image>"
_TURN_NAMES = {"user": "user", "assistant": "model", "model": "model"}


def render_chat(
    messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> str:
    """The text of a conversation, without <bos> (the encoder puts it in front, once).

        <start_of_turn>user
        {system, blank line}{content}<end_of_turn>
        <start_of_turn>model

    A message is `{"role": ..., "content": ...}`; content is a string or a list of parts:

        {"type": "text", "text": ...}
        {"type": "image", "image": ...}                       (what `images.load_image` takes)
        {"type": "image_url", "image_url": {"url": ...}}      (data: or http(s):)

    White space around each text of a turn is dropped; an image of a user's turn is an
    IMAGE_MARKER, see `chat_images`. Roles are user and assistant (or model) in turns, beginning
    with user; one system message may come first and is folded, as it is, into the first user turn.
    Its content is one text: of several the published template keeps the first alone, so that they
    are refused here.

    Control tokens that a content spells out, such as <end_of_turn>, are not escaped.

    Raises ValueError for roles out of turn, unknown roles, keys or parts, a system message that is
    not one text, and no messages.
    """
    if not messages:
        raise ValueError("messages is empty: give at least one user message")
    roles = [_role(index, message) for index, message in enumerate(messages)]
    parts = [_texts(index, message) for index, message in enumerate(messages)]
    prefix, first = "", 0
    if roles[0] == "system":
        if len(parts[0]) != 1:
            raise ValueError(
                f"message 0: a system message is one text, got {len(parts[0])} parts (the "
                "published template would keep the first alone): join them into one"
            )
        prefix, first = parts[0][0] + "\n\n", 1
        if len(messages) == 1:
            raise ValueError("a system message alone has no turn to go into: add a user message")
    text = ""
    for index in range(first, len(messages)):
        role, content = roles[index], "".join(part.strip() for part in parts[index])
        expected = ("user", "model")[(index - first) % 2]
        if _TURN_NAMES.get(role) != expected:
            raise ValueError(
                f"message {index} has role {role!r}, expected "
                f"{'user' if expected == 'user' else 'assistant'!r}: one system message may come "
                "first, then user and assistant alternate"
            )
        text += f"<start_of_turn>{expected}\n{prefix}{content}<end_of_turn>\n"
        prefix = ""
    return text + "<start_of_turn>model\n" if add_generation_prompt else text


def chat_images(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What stands for the images of messages that `render_chat` takes, in order."""
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    return [
        part["image"] if part["type"] == "image" else part["image_url"]["url"]
        for part in parts
        if part["type"] != "text"
    ]


def _role(index: int, message: Mapping[str, Any]) -> str:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise ValueError(f"message {index}: expected the keys role and content, got {message!r}")
    role = message["role"]
    if role not in ("system", *_TURN_NAMES):
        raise ValueError(f"message {index}: unknown role {role!r}; use system, user or assistant")
    return role


def _texts(index: int, message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content, markers for its images."""
    content = message["content"]
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise ValueError(f"message {index}: content is a string or a list of parts")
    texts = [_text(index, part) for part in content]
    if message["role"] != "user" and any(part["type"] != "text" for part in content):
        raise ValueError(
            f"message {index} of role {message['role']!r} has an image: only a user's may have one"
        )
    return texts


def _text(index: int, part: Any) -> str:
    """The text of a part, after a check."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and set(part) == {"type", "text"} and isinstance(part["text"], str):
        return part["text"]
    if kind == "image" and set(part) == {"type", "image"}:
        return IMAGE_MARKER
    if kind == "image_url" and set(part) == {"type", "image_url"}:
        _check_url(index, part["image_url"])
        return IMAGE_MARKER
    raise ValueError(
        f'message {index}: a part is {{"type": "text", "text": ...}}, {{"type": "image", "image": '
        f'...}} or {{"type": "image_url", "image_url": {{"url": ...}}}}, got {reprlib.repr(part)}'
    )


def _check_url(index: int, image_url: Any) -> None:
    """Raise ValueError unless this is `{"url": ...}`; a file is not to be had that way."""
    given = dict(image_url) if isinstance(image_url, Mapping) else {}
    url, detail = given.pop("url", None), given.pop("detail", None)
    if given or detail not in (None, "auto"):
        raise ValueError(
            f"message {index}: image_url={reprlib.repr(image_url)}: a url is all it may have "
            "(every image is seen in the one resolution that the model has)"
        )
    if not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")):
        raise ValueError(
            f"message {index}: the url of an image begins with data:, http:// or https://, got "
            f"{reprlib.repr(url)}"
        )
