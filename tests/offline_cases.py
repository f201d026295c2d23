"""Inputs of batches for the tiny model, and what their outputs say."""

import json
from pathlib import Path
from typing import Any

MODEL = "tiny"
ENGINE: dict[str, Any] = dict(
    dtype="float32", max_model_len=96, max_num_seqs=4, max_num_batched_tokens=16
)
ENGINE_FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def request(custom_id: str, prompt: str, *, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    """A greedy request of a few tokens, unless the body says otherwise."""
    text = {"prompt": prompt}
    if url == CHAT:
        text = {"messages": [{"role": "user", "content": prompt}]}
    defaults = {"model": MODEL, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": text | defaults | body,
    }


def mixed(count: int, *, more_tokens: int = 0) -> list[dict[str, Any]]:
    """Requests of both kinds, and of several lengths."""
    return [
        request(
            f"id-{number}",
            "the hen " * (number % 4 + 1),
            url=(COMPLETIONS, CHAT)[number % 2],
            max_tokens=8 + number % 13 + more_tokens,
        )
        for number in range(count)
    ]


def write_lines(path: Path, lines: list[Any]) -> Path:
    """Objects as JSON, strings as they are."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{line}\n" for line in text))
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def answers(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What was answered, by custom_id, each of which must be there once."""
    found = {}
    for record in records:
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert record["error"] is None and record["response"]["status_code"] == 200
        body = record["response"]["body"]
        assert record["custom_id"] not in found, f"{record['custom_id']} is there twice"
        found[record["custom_id"]] = (body["choices"], body["usage"]["completion_tokens"])
    return found
