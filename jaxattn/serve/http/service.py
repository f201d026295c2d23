"""What all requests of a server share: the model, the engine's thread, limits, the way to end."""

import asyncio

from jaxattn.engine.llm import LLM
from jaxattn.serve.http.loop import EngineLoop
from jaxattn.serve.http.metrics import Metrics
from jaxattn.serve.http.settings import ServerSettings
from jaxattn.serve.openai.errors import RequestError

_LAST_WORDS_SECONDS = 2.0  # for cancelled requests to tell their clients


class Service:
    """A model that is served. `start` and `stop` it in an asyncio loop."""

    def __init__(self, llm: LLM, settings: ServerSettings):
        self.llm = llm
        self.settings = settings
        self.metrics = Metrics()
        self.loop = EngineLoop(llm, self.metrics, max_waiting=settings.max_waiting)
        self.metrics.watch(lambda: self.loop.stats)
        self.draining = False
        self._hurry = asyncio.Event()

    def start(self) -> None:
        """Start the engine's thread."""
        self.loop.start()

    async def stop(self) -> None:
        """End the engine's thread."""
        await self.loop.stop()

    def check_ready(self) -> None:
        """Raise RequestError (503) if there is no more to be had."""
        if self.draining:
            raise RequestError(503, "the server is shutting down", code="shutting_down")
        self.loop.check_alive()

    def check_model(self, name: str) -> None:
        """Raise RequestError (404) for any name but the model's."""
        if name != self.settings.model_name:
            raise RequestError(
                404,
                f"there is no model {name!r} here, only {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def drain(self) -> None:
        """Refuse new requests; wait for the others up to `drain_seconds`, then cancel them."""
        self.draining = True
        ends = [asyncio.create_task(each) for each in (self.loop.idle(), self._hurry.wait())]
        await asyncio.wait(
            ends, timeout=self.settings.drain_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        self.loop.fail_all(
            RequestError(503, "cancelled: the server is shutting down", code="shutting_down")
        )
        await asyncio.wait(ends[:1], timeout=_LAST_WORDS_SECONDS)
        for each in ends:
            each.cancel()

    def hurry(self) -> None:
        """Let `drain` cancel what it waits for."""
        self._hurry.set()
