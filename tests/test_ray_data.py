"""`jaxattn batch --ray` on a real cluster of this machine: two workers, of which one is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow import parquet

from jaxattn.cli import main
from tests import tiny_model
from tests.offline_cases import (
    ENGINE_FLAGS,
    MODEL,
    answers,
    mixed,
    read_records,
    request,
    write_lines,
)

ROOT = Path(__file__).parent.parent
COMMAND = "import sys; from jaxattn.cli import main; sys.exit(main())"
TIMEOUT = 300  # seconds; the whole test took 100 on two cores with a load of 9


def processes():
    """Parent and name of every process."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                found[int(folder.name)] = parent, (folder / "cmdline").read_bytes().decode()
            except (OSError, ValueError):
                pass  # it is gone
    return found


def workers_of(driver):
    """The processes of a driver's Ray workers that hold an engine."""
    found = processes()

    def is_below(process):
        while process in found and process != driver:
            process = found[process][0]
        return process == driver

    return [
        process
        for process, (_, name) in found.items()
        if name.startswith("ray::MapWorker") and is_below(process)
    ]


def read_folder(folder):
    records = []
    for path in folder.glob("[!.]*.parquet"):
        for row in parquet.read_table(path).to_pylist():
            row["response"]["body"] = json.loads(row["response"]["body"])
            records.append(row)
    return records


@pytest.mark.slow  # two minutes
def test_two_workers_of_which_one_is_killed(tmp_path):
    model = str(tiny_model.write_gguf(tmp_path / "tiny.gguf"))
    requests = mixed(120, more_tokens=40)
    write_lines(tmp_path / "in.jsonl", [*requests, request("bad", "a", temperatur=1)])
    options = ["--model", model, "--served-model-name", MODEL, *ENGINE_FLAGS]
    alone = ["batch", f"{tmp_path}/in.jsonl", f"{tmp_path}/alone.jsonl", *options]
    assert main(alone) == 1  # also: compiled steps are kept for the workers
    expected = answers(read_records(tmp_path / "alone.jsonl"))
    assert len(expected) == 120

    output = tmp_path / "out.parquet"
    command = ["batch", "--ray", "--workers", "2", "--rows-per-part", "5", *options]
    command += [f"{tmp_path}/in.jsonl", str(output)]
    driver = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *command],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": "local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + TIMEOUT
        while driver.poll() is None and len(list(output.glob("[!.]*"))) < 4:
            assert time.monotonic() < deadline, "no part was written"
            time.sleep(0.02)
        assert driver.poll() is None, driver.communicate()[0].decode()
        finished = len(read_folder(output))
        workers = workers_of(driver.pid)
        os.kill(workers[0], signal.SIGKILL)
        text, _ = driver.communicate(timeout=TIMEOUT)
    finally:
        driver.kill()
    text = text.decode()
    assert driver.returncode == 1, text
    assert len(workers) == 2
    assert 20 <= finished < 110, "the worker was not killed in the middle"
    assert answers(read_folder(output)) == expected
    assert "120 done, 0 already there, 1 failed; " in text, text
    (report,) = read_records(tmp_path / "out.errors.jsonl")
    assert (report["line"], report["custom_id"]) == (121, "bad")
