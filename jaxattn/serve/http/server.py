"""uvicorn with an end that drains: requests that run are finished, new ones are refused."""

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from jaxattn.serve.http.app import create_app
from jaxattn.serve.http.service import Service

_CLOSE_SECONDS = 5  # for clients that do not read the end of their response


class Server(uvicorn.Server):
    """Serves until the first SIGINT or SIGTERM, then drains; the second cancels what is left.

    The third has its default effect. `ready` is called once requests are taken.
    """

    def __init__(self, service: Service, *, ready: Callable[[], None]):
        super().__init__(
            uvicorn.Config(
                create_app(service),
                ws="none",
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )
        self._service = service
        self._ready = ready
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._asyncio = asyncio.get_running_loop()
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._num_signals += 1
        if self._num_signals > 2 or not self.started:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        elif self._num_signals == 2:
            self._asyncio.call_soon_threadsafe(self._service.hurry)
        else:
            self._asyncio.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """End, after the requests that run."""
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 is a free one. Refuses connections until a server takes it over.

    Raises OSError.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {host}, port {port}: {error}") from None
    return bound


def url_of(bound: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
