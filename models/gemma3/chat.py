"""Gemma 3's turn format: what instruction-tuned checkpoints expect to read."""

from collections.abc import Mapping, Sequence
from typing import Any

_TURN_NAMES = {"user": "user", "assistant": "model", "model": "model"}


def render_chat(
    messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> str:
    """The text of a conversation, without <bos> (the encoder puts it in front, once).

        <start_of_turn>user
        {system, blank line}{content}<end_of_turn>
        <start_of_turn>model

    A message is `{"role": ..., "content": ...}`; content is a string or a list of
    `{"type": "text", "text": ...}`; white space around each text of a turn is dropped. Roles are
    user and assistant (or model) in turns, beginning with user; one system message may come first
    and is folded, as it is, into the first user turn.

    Control tokens that a content spells out, such as <end_of_turn>, are not escaped.

    Raises ValueError for roles out of turn, unknown roles or keys, images, and no messages.
    """
    if not messages:
        raise ValueError("messages is empty: give at least one user message")
    roles = [_role(index, message) for index, message in enumerate(messages)]
    parts = [_parts(index, message) for index, message in enumerate(messages)]
    prefix, first = "", 0
    if roles[0] == "system":
        prefix, first = "".join(parts[0]) + "\n\n", 1
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


def _role(index: int, message: Mapping[str, Any]) -> str:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise ValueError(f"message {index}: expected the keys role and content, got {message!r}")
    role = message["role"]
    if role not in ("system", *_TURN_NAMES):
        raise ValueError(f"message {index}: unknown role {role!r}; use system, user or assistant")
    return role


def _parts(index: int, message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content."""
    content = message["content"]
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise ValueError(f"message {index}: content is a string or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image":
            raise ValueError(f"message {index} has an image: images are not supported yet")
        if kind != "text" or set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(
                f'message {index}: a part is {{"type": "text", "text": ...}}, got {part!r}'
            )
    return [part["text"] for part in content]
