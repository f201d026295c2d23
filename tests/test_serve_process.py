"""`jaxattn serve` as a process: it says where it is, drains at a signal, and ends with status 0."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from jaxattn.serve.http.command import warn_of_strangers
from jaxattn.serve.http.server import listen, url_of
from jaxattn.serve.http.settings import ServerSettings
from tests import tiny_model
from tests.live_server import MODEL, wait_until

FLAGS = "--dtype float32 --page-size 4 --max-model-len 2048 --max-num-seqs 4".split()
FLAGS += ["--max-num-batched-tokens", "8", "--served-model-name", MODEL, "--port", "0"]
FLAGS += ["--no-precompile"]
KEY = "a secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


class Process:
    """`jaxattn serve`, ready."""

    def __init__(self, model, *flags):
        command = [sys.executable, "-m", "jaxattn", "serve", "--model", str(model)]
        self.popen = subprocess.Popen(
            [*command, *FLAGS, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read_errors)
        self._reader.start()
        self.ready = self.popen.stdout.readline()

    def _read_errors(self):
        for line in self.popen.stderr:
            self.lines.append(line)

    @property
    def url(self) -> str:
        match = re.fullmatch(r"serving tiny at (http://[\d.]+:\d+)/v1\n", self.ready)
        assert match, (self.ready, self.lines)
        return match[1]

    def stream(self, max_tokens):
        """A streamed response of which the first line has come."""
        body = {"model": MODEL, "prompt": "the hen", "max_tokens": max_tokens, "ignore_eos": True}
        answer = self.post(body | {"stream": True})
        assert answer.readline().startswith(b"data: ")
        return answer

    def post(self, body):
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
        )
        return urllib.request.urlopen(request, timeout=60)

    def health(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def wait(self) -> int:
        status = self.popen.wait(timeout=60)
        self._reader.join()
        self.popen.stdout.close()
        self.popen.stderr.close()
        return status

    def end(self):
        if self.popen.poll() is None:
            self.popen.kill()
            self.wait()


@pytest.fixture
def start(model):
    started = []

    def start(*flags):
        started.append(Process(model, *flags))
        return started[-1]

    yield start
    for process in started:
        process.end()


def test_sigterm_drains(start):
    process = start()
    with process.stream(2000) as answer:
        process.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: process.health() == 503)
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            process.post({"model": MODEL, "prompt": "a"})
        refused.value.close()
        events = answer.read().decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert process.wait() == 0, process.lines


def test_a_second_signal_cancels(start, tmp_path):
    key = tmp_path / "key"
    key.write_text(f"{KEY}\n")
    process = start("--drain-seconds", "3000", "--api-key-file", str(key), "--max-body", "200")
    with pytest.raises(urllib.error.HTTPError, match="413") as refused:
        process.post({"model": MODEL, "prompt": "a" * 200})
    refused.value.close()
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(f"{process.url}/v1/models", timeout=60)
    refused.value.close()
    with process.stream(2000) as answer:
        process.popen.send_signal(signal.SIGINT)
        wait_until(lambda: process.health() == 503)
        process.popen.send_signal(signal.SIGINT)
        last = answer.read().decode().strip().split("\n\n")[-1]
    assert "shutting_down" in last
    assert process.wait() == 0, process.lines


def test_a_port_that_is_taken(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start("--port", port)
        assert process.wait() == 1
    assert process.ready == ""
    assert f"cannot listen on 127.0.0.1, port {port}" in process.lines[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_name": ""}, "model_name is empty"),
        ({"api_key": ""}, "api_key is empty"),
        ({"max_body_bytes": 0}, "max_body_bytes=0: expected at least 1"),
        ({"max_waiting": 0}, "max_waiting=0: expected at least 1"),
        ({"timeout_seconds": 0}, "timeout_seconds=0: expected more than 0"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds=nan"),
        ({"drain_seconds": -1}, "drain_seconds=-1: expected at least 0"),
        ({"drain_seconds": float("inf")}, "drain_seconds=inf"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ServerSettings(**{"model_name": MODEL} | settings)


@pytest.mark.parametrize(
    ("address", "key", "warns"),
    [("127.0.0.1", None, False), ("::1", None, False), ("0.0.0.0", None, True), ("::", "k", False)],
)
def test_strangers_are_warned_of(capsys, address, key, warns):
    warn_of_strangers(address, key)
    assert ("open to all who reach it" in capsys.readouterr().err) == warns


def test_addresses():
    with listen("localhost", 0) as bound:
        assert re.fullmatch(r"http://(127\.0\.0\.1|\[::1\]):\d+", url_of(bound))
    with pytest.raises(OSError, match=r"cannot listen on 203\.0\.113\.1, port 0"):
        listen("203.0.113.1", 0)
