"""schemathesis makes requests from our OpenAPI document, right and wrong ones: none is a 500."""

import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import tiny_model
from tests.live_server import MODEL, live_server, make_llm, wait_until

KEY = "a-key"
EXAMPLES = 20  # of each url, right and wrong


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    path = tiny_model.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    llm = make_llm(path, max_model_len=64)
    with live_server(llm, max_waiting=16, api_key=KEY) as live:
        yield live
        wait_until(live.is_empty)


def get(live, path):
    return live.request("GET", path, authorization=f"Bearer {KEY}")[2]


def test_no_request_is_a_500(live, tmp_path):
    """All checks but one: the document cannot say how long a prompt may be."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{live.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {KEY}", "--no-color"]
    command += ["--exclude-checks", "positive_data_acceptance", "--warnings", "off"]
    command += ["--max-examples", str(EXAMPLES), "--generation-deterministic"]
    command += ["--request-timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    statuses: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(get(live, "/metrics")):
        for sample in family.samples:
            if sample.name == "jaxattn_http_requests_total":
                key = sample.labels["path"], sample.labels["status"]
                statuses[key] = statuses.get(key, 0) + sample.value
    assert not any(status >= "500" for _, status in statuses), statuses
    for path in ("/v1/completions", "/v1/chat/completions"):  # the fuzz reached the engine
        for status in ("200", "400", "405", "415"):
            assert statuses.get((path, status), 0) > 0, (path, status, statuses)


def test_the_document_describes_the_bodies(live):
    document = get(live, "/openapi.json")
    assert document["openapi"].startswith("3.1")
    assert [*document["paths"]] == [
        *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}"),
        *("/health", "/metrics"),
    ]
    body = document["components"]["schemas"]["CompletionBody"]
    assert body["additionalProperties"] is False and body["required"] == ["model", "prompt"]
    assert body["properties"]["model"]["enum"] == [MODEL]
