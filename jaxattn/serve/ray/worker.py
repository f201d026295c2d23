"""A worker of a batch on Ray: an engine that completes parts, several at a time."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

from jaxattn.engine.llm import LLM
from jaxattn.serve.offline.format import Failure, Result, custom_id_in
from jaxattn.serve.offline.run import OfflineBatch
from jaxattn.serve.openai.errors import RequestError
from jaxattn.serve.ray.output import (
    MAX_ATTEMPTS,
    add_results,
    begin_attempt,
    end_attempts,
    result_ids,
)


class Worker:
    """A callable class for `ray.data.Dataset.map_batches`, with one part to a batch.

    Calls overlap and share the engine, which is thereby kept full from one part to the next;
    they take turns on one event loop, so that one thread steps it.

    Args:
        llm: keywords of `LLM`.
        model: the name that bodies must ask for.
        folder: where the parts' files are.
        window: continuations in the engine at a time.
    """

    def __init__(self, *, llm: dict[str, Any], model: str, folder: str, window: int):
        self._folder = Path(folder)
        self._window = window
        self._tokens_reported = 0
        self._error: Exception | None = None
        try:
            self._batch = OfflineBatch(LLM(**llm, progress=False), model=model, seed=llm["seed"])
        except Exception as error:  # for the first part to report: Ray would start it again
            self._error = error

    async def __call__(self, table: Any) -> dict[str, list[str]]:
        """Complete a part, less the results that its file has.

        Args:
            table: of Arrow, with one row: the part's number, file, first line and text.

        Returns a row of JSON: how many results the part has, what failed, and tokens that were
        generated since the last report; or an error that all parts would meet.
        """
        [part] = table.to_pylist()
        try:
            report = await self._part(part["file"], part["first"], part["text"])
        except Exception as error:  # Ray would tell it on hundreds of lines
            report = {"error": f"{type(error).__name__}: {error}"}
        return {"report": [json.dumps({"part": part["part"]} | report)]}

    async def _part(self, file: str, first: int, text: bytes) -> dict[str, Any]:
        if self._error is not None:
            raise self._error
        path = self._folder / file
        there = set(result_ids(path))
        lines = [
            (line, raw)
            for line, raw in enumerate(io.BytesIO(text), first)
            if raw.strip() and custom_id_in(raw) not in there
        ]
        outcomes: list[Result | Failure]
        if begin_attempt(path) > MAX_ATTEMPTS:
            outcomes = [_given_up(line, raw) for line, raw in lines]
        else:
            outcomes = await self._complete(lines)
        results = [each.record() for each in outcomes if isinstance(each, Result)]
        if results:
            add_results(path, results)
        end_attempts(path)
        tokens, self._tokens_reported = self._tokens_reported, self._batch.num_tokens
        return {
            "finished": len(there) + len(results),
            "failures": [each.record() for each in outcomes if isinstance(each, Failure)],
            "tokens": self._tokens_reported - tokens,
        }

    async def _complete(self, lines: list[tuple[int, bytes]]) -> list[Result | Failure]:
        outcomes: list[Result | Failure] = []
        for line, raw in lines:
            self._batch.add(line, raw, outcomes.append)
            while self._batch.num_sequences >= self._window:
                await self._step()
        while len(outcomes) < len(lines):
            await self._step()
        return outcomes

    async def _step(self) -> None:
        self._batch.step()
        await asyncio.sleep(0)  # the other parts' turn


def _given_up(line: int, raw: bytes) -> Failure:
    error = RequestError(
        500,
        f"{MAX_ATTEMPTS} workers were lost while they had this part of the input: one of its "
        "requests may be what they cannot bear",
        code="worker_lost",
    )
    return Failure(line, custom_id_in(raw), error.body()["error"])
