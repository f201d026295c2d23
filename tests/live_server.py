"""A server in a thread of the test, with a real socket, on a tiny model whose steps can be held."""

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from typing import Any

from jaxattn import LLM
from jaxattn.serve.http.server import Server, listen, url_of
from jaxattn.serve.http.service import Service
from jaxattn.serve.http.settings import ServerSettings

MODEL = "tiny"
TIMEOUT = 60


def make_llm(path, **options) -> LLM:
    defaults = dict(
        dtype="float32",
        page_size=4,
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        progress=False,
    )
    return LLM(path, **defaults | options)


class Live:
    """A running server. `steps` holds the engine: see `held`."""

    def __init__(self, llm: LLM, **settings: Any):
        self.llm = llm
        self.service = Service(llm, ServerSettings(**{"model_name": MODEL} | settings))
        self._bound = listen("127.0.0.1", 0)
        self.url = url_of(self._bound)
        self._ready = threading.Event()
        self.server = Server(self.service, ready=self._ready.set)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._bound]})

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(TIMEOUT)

    def drain(self) -> None:
        if self._thread.is_alive():
            self.call(self.server.drain)

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function in the asyncio thread."""
        self.server._asyncio.call_soon_threadsafe(function)

    def join(self) -> None:
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        self._bound.close()

    def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict, dict]:
        """Status, headers and decoded body of a POST; bytes are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, **headers)

    def request(
        self, method: str, path: str, data: bytes | None = None, **headers: str
    ) -> tuple[int, dict, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None:
            named.setdefault("content-type", "application/json")
        request = urllib.request.Request(self.url + path, data, named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                status, told, text = answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, told, text = error.code, dict(error.headers), error.read()
        told = {name.lower(): value for name, value in told.items()}
        plain = told["content-type"] != "application/json"
        return status, told, text.decode() if plain else json.loads(text)

    def is_empty(self) -> bool:
        """Whether nothing waits, runs or holds a page."""
        stats = self.service.loop.stats
        return not (stats.waiting or stats.running or any(stats.pages_used))

    @contextlib.contextmanager
    def held(self) -> Generator["Gate"]:
        """The engine waits before each step until the gate lets it go on."""
        engine, step, gate = self.llm.engine, self.llm.engine.step, Gate()

        def wait_and_step():
            gate.wait()
            return step()

        engine.step = wait_and_step  # type: ignore[method-assign]
        try:
            yield gate
        finally:
            gate.open()
            del engine.step


class Gate:
    """Lets the engine make one step after another."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self._is_open = False

    def wait(self) -> None:
        if not self._is_open:
            self._arrived.release()
            assert self._allowed.acquire(timeout=TIMEOUT)

    def step(self, count: int = 1) -> None:
        """Let the engine make steps, and wait until it is about to make the first."""
        for _ in range(count):
            self.arrive()
            self._allowed.release()

    def arrive(self) -> None:
        """Wait until the engine is about to make a step."""
        assert self._arrived.acquire(timeout=TIMEOUT)

    def open(self) -> None:
        self._is_open = True
        self._allowed.release(1000)


@contextlib.contextmanager
def live_server(llm: LLM, **settings: Any) -> Generator[Live]:
    live = Live(llm, **settings)
    live.start()
    try:
        yield live
    finally:
        live.drain()
        live.join()


def wait_until(holds: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
