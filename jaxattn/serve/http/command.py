"""`jaxattn serve`."""

import argparse
import ipaddress
import sys
from typing import Any

from jaxattn.options import add_engine_options, engine_options, memory_size
from jaxattn.serve.http.settings import ServerSettings


def add_parser(commands: Any) -> None:
    """Add the command to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser("serve", help="serve a model by OpenAI's HTTP API")
    parser.set_defaults(run=_serve)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (%(default)s: this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 is a free one (%(default)s)")
    parser.add_argument("--served-model-name", help="what requests call it (as --model)")
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key", help="what requests must bear (none: everyone may ask)")
    key.add_argument("--api-key-file", help="a file with the key, which `ps` does not show")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-body",
        type=memory_size,
        default=ServerSettings.max_body_bytes,
        help="of a request (20MiB)",
    )
    limits.add_argument(
        "--max-waiting",
        type=int,
        default=512,
        help="continuations in the queue; more are refused with status 429 (%(default)s)",
    )
    limits.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for a request (%(default)g)"
    )
    limits.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="for running requests after SIGTERM or Ctrl-C (%(default)g); a second signal cancels",
    )
    parser.add_argument(
        "--no-precompile",
        dest="precompile",
        action="store_false",
        help="start sooner, and compile the shapes of steps when they first come",
    )
    add_engine_options(parser)


def _serve(options: argparse.Namespace) -> int:
    settings = ServerSettings(
        model_name=options.served_model_name or options.model,
        api_key=_api_key(options),
        max_body_bytes=options.max_body,
        max_waiting=options.max_waiting,
        timeout_seconds=options.timeout,
        drain_seconds=options.drain_seconds,
    )
    try:
        from jaxattn.serve.http.server import Server, listen, url_of
    except ModuleNotFoundError as error:
        raise ImportError(f"the server needs {error.name}: pip install 'jaxattn[serve]'") from error
    from jaxattn.engine.llm import LLM
    from jaxattn.serve.http.service import Service

    with listen(options.host, options.port) as bound:
        warn_of_strangers(bound.getsockname()[0], settings.api_key)
        llm = LLM(**engine_options(options))
        try:
            llm.prompts.check_images()  # not only when the first comes
        except ImportError as error:
            raise ImportError(f"{error}; or serve text alone: --no-images") from error
        print(llm.engine.describe_cache(), file=sys.stderr)
        if options.precompile:
            llm.precompile()
        service = Service(llm, settings)
        url = url_of(bound)
        server = Server(
            service,
            ready=lambda: print(f"serving {settings.model_name} at {url}/v1", flush=True),
        )
        server.run(sockets=[bound])
    return 0


def _api_key(options: argparse.Namespace) -> str | None:
    if options.api_key_file is None:
        return options.api_key
    with open(options.api_key_file, encoding="utf-8") as file:
        return file.read().strip()


def warn_of_strangers(address: str, api_key: str | None) -> None:
    """Say so if other machines may ask without a key."""
    if api_key is None and not ipaddress.ip_address(address).is_loopback:
        print(f"jaxattn: {address} is open to all who reach it: give an --api-key", file=sys.stderr)
