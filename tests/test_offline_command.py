"""`jaxattn batch`: files, interruptions, and what it tells."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxattn import LLM
from jaxattn.cli import main
from tests import tiny_model
from tests.offline_cases import (
    ENGINE,
    ENGINE_FLAGS,
    MODEL,
    answers,
    mixed,
    read_records,
    request,
    write_lines,
)
from tests.test_offline_jsonl import file_size_limit

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    return tiny_model.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def shared_llm(gguf_path):
    return LLM(gguf_path, **ENGINE, progress=False)


@pytest.fixture
def llm(shared_llm, monkeypatch):
    """The LLM that commands in this process get, whatever they ask for."""
    monkeypatch.setattr("jaxattn.engine.llm.LLM", lambda **options: shared_llm)
    return shared_llm


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"


def batch(*arguments):
    return main(["batch", *map(str, arguments), "--served-model-name", MODEL, *ENGINE_FLAGS])


def last_lines(capsys):
    """The summary and what follows it; nothing is on standard output."""
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    lines = [line for line in err.splitlines() if line.strip()]
    summary = [at for at, line in enumerate(lines) if re.match(r"[\d,]+ done, ", line)]
    return lines[summary[0] :] if summary else lines[-1:]


@pytest.fixture
def expected(llm, tmp_path_factory):
    """`expected(requests)`: the answers of one run that nothing disturbs."""

    def run(requests):
        folder = tmp_path_factory.mktemp("expected")
        write_lines(folder / "in.jsonl", requests)
        assert batch(folder / "in.jsonl", folder / "out.jsonl") == 0
        return answers(read_records(folder / "out.jsonl"))

    return run


def test_all_lines_get_results(llm, paths, capsys):
    input, output, errors = paths
    requests = mixed(12)
    write_lines(input, ["", *requests[:5], "   ", *requests[5:]])
    assert batch(input, output) == 0
    found = answers(read_records(output))
    assert set(found) == {each["custom_id"] for each in requests}
    tokens = sum(each["body"]["max_tokens"] for each in requests)
    assert sum(count for _, count in found.values()) == tokens
    summary, where = last_lines(capsys)
    assert re.fullmatch(
        rf"12 done, 0 already there, 0 failed; {tokens} tokens in [\d.]+ s, [\d,.]+ tokens/s",
        summary,
    )
    assert where == f"results are in {output}"
    assert not errors.exists()


def test_a_second_run_has_nothing_to_do(llm, paths, capsys, monkeypatch):
    input, output, _ = paths
    write_lines(input, mixed(3))
    assert batch(input, output) == 0
    before = output.read_bytes()
    capsys.readouterr()
    monkeypatch.setattr("jaxattn.engine.llm.LLM", None)  # not even loaded
    assert batch(input, output) == 0
    assert output.read_bytes() == before
    assert last_lines(capsys)[0].startswith("0 done, 3 already there, 0 failed; 0 tokens in")


def test_lines_that_were_added_to_the_input(llm, paths, capsys, expected):
    input, output, _ = paths
    requests = mixed(8)
    for count, there in ((3, 0), (8, 3)):
        write_lines(input, requests[:count])
        assert batch(input, output) == 0
        assert f"{count - there} done, {there} already there" in last_lines(capsys)[0]
    assert answers(read_records(output)) == expected(requests)


BAD = [
    "{not json",
    request("unknown", "a", temperatur=1),
    request("long", "the " * 200),
    request("streams", "a", stream=True),
    request("elsewhere", "a", url="/v1/embeddings"),
]


def test_bad_lines_are_reported_with_their_numbers(llm, paths, capsys):
    input, output, errors = paths
    good = mixed(4)
    write_lines(input, [BAD[0], good[0], "", *BAD[1:3], *good[1:], *BAD[3:]])
    for there in (0, 4):  # the second run reports the same again
        assert batch(input, output) == 1
        assert set(answers(read_records(output))) == {each["custom_id"] for each in good}
        reports = read_records(errors)
        assert all(set(each) == {"line", "custom_id", "error"} for each in reports)
        assert [(each["line"], each["custom_id"]) for each in reports] == [
            (1, None),
            (4, "unknown"),
            (5, "long"),
            (9, "streams"),
            (10, "elsewhere"),
        ]
        for each in reports:
            assert set(each["error"]) == {"message", "type", "param", "code"}
        assert reports[1]["error"]["param"] == "temperatur"
        summary, where = last_lines(capsys)
        assert summary.startswith(f"{4 - there} done, {there} already there, 5 failed; ")
        assert where == f"results are in {output}, errors in {errors}"


def test_a_line_that_was_repaired(llm, paths, capsys):
    input, output, errors = paths
    write_lines(input, [*mixed(2), BAD[1]])
    assert batch(input, output) == 1
    write_lines(input, [*mixed(2), request("unknown", "a")])
    assert batch(input, output) == 0
    assert set(answers(read_records(output))) == {"id-0", "id-1", "unknown"}
    assert not errors.exists()


def test_errors_may_be_elsewhere(llm, paths, tmp_path):
    input, output, errors = paths
    write_lines(input, [*mixed(1), BAD[1]])
    assert batch(input, output, "--errors", tmp_path / "elsewhere") == 1
    assert len(read_records(tmp_path / "elsewhere")) == 1
    assert not errors.exists()


def test_a_request_that_failed_is_tried_again(llm, paths, capsys, monkeypatch, expected):
    input, output, errors = paths
    requests = mixed(20)
    write_lines(input, requests)
    dispatch, calls = llm.engine.runner.dispatch, []

    def sometimes(*arguments):
        calls.append(arguments)
        if len(calls) == 20:
            raise RuntimeError("the device is gone")
        return dispatch(*arguments)

    monkeypatch.setattr(llm.engine.runner, "dispatch", sometimes)
    assert batch(input, output) == 1
    reports = read_records(errors)
    assert 1 <= len(reports) <= 4 + 4
    assert all("the device is gone" in each["error"]["message"] for each in reports)
    done = set(answers(read_records(output)))
    assert done | {each["custom_id"] for each in reports} == {r["custom_id"] for r in requests}
    assert batch(input, output) == 0
    assert answers(read_records(output)) == expected(requests)
    assert not errors.exists()


@pytest.mark.parametrize("size", [0, 1, 10, 200, -2, -1])
def test_a_torn_last_line_is_done_again(llm, paths, expected, size):
    input, output, _ = paths
    requests = mixed(5)
    write_lines(input, requests)
    assert batch(input, output) == 0
    *before, last = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(before) + last[:size])
    assert batch(input, output) == 0
    assert answers(read_records(output)) == expected(requests)
    assert output.read_bytes().startswith(b"".join(before))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*mixed(3), mixed(2)[1]], "custom_id 'id-1' is on line 2 and on line 4"),
        (mixed(3)[:2], "is the result of 'id-2', which is not in"),
    ],
)
def test_inputs_that_are_refused(llm, paths, capsys, lines, message):
    input, output, _ = paths
    write_lines(input, mixed(3))
    assert batch(input, output) == 0
    before = output.read_bytes()
    capsys.readouterr()
    write_lines(input, lines)
    assert batch(input, output) == 1
    (last,) = last_lines(capsys)
    assert last.startswith("jaxattn: error: ") and message in last
    assert output.read_bytes() == before


@pytest.mark.parametrize("content", [b"my notes\n", b'{"id": "batch_req_1"}\n'])
def test_outputs_that_are_refused(llm, paths, capsys, content):
    input, output, _ = paths
    write_lines(input, mixed(3))
    output.write_bytes(content)
    assert batch(input, output) == 1
    assert "left as it is" in last_lines(capsys)[-1]
    assert output.read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl", "out.jsonl"], "missing.jsonl does not exist"),
        (["-", "out.jsonl"], "the input is read twice, so it cannot be standard input"),
        (["in.jsonl", "in.jsonl"], "input and output are both"),
        (["in.jsonl", "./out", "--errors", "in.jsonl"], "input and errors are both"),
        (["in.jsonl", "out", "--errors", "out"], "output and errors are both"),
        (["in.jsonl", "gs://bucket/out"], "looks like a URL: give a path of a file system"),
        ([".", "out.jsonl"], "folders and Parquet need --ray"),
        (["in.parquet", "out.jsonl"], "Parquet needs --ray"),
        (["in.jsonl", "no/out.jsonl"], "No such file or directory: 'no/out.jsonl'"),
        (["in.jsonl", "out", "--errors", "notes"], "notes begins with b'Remember ': it is not"),
        (["in.jsonl", "out", "--workers", "2"], "--workers needs --ray"),
        (["in.jsonl", "out", "--rows-per-part", "2"], "--rows-per-part needs --ray"),
    ],
)
def test_arguments_that_are_refused(llm, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ("in.jsonl", "in.parquet"):
        write_lines(tmp_path / name, mixed(2))
    (tmp_path / "notes").write_text("Remember the milk.\n")
    assert batch(*arguments) == 1
    assert message in last_lines(capsys)[-1]
    assert (tmp_path / "notes").read_text() == "Remember the milk.\n"
    assert len(read_records(tmp_path / "in.jsonl")) == 2


def test_the_name_of_the_model(llm, paths, gguf_path):
    input, output, errors = paths
    write_lines(input, [request("a", "the hen", model=str(gguf_path)), request("b", "the hen")])
    assert main(["batch", str(input), str(output), "--model", str(gguf_path)]) == 1
    assert set(answers(read_records(output))) == {"a"}
    (report,) = read_records(errors)
    assert report["custom_id"] == "b" and report["error"]["code"] == "model_not_found"


def test_two_runs_at_a_time(llm, paths, capsys, monkeypatch):
    input, output, _ = paths
    write_lines(input, mixed(2))

    def second_run(**options):
        assert batch(input, output) == 1
        assert "out.jsonl is in use by another run" in last_lines(capsys)[-1]
        return llm

    monkeypatch.setattr("jaxattn.engine.llm.LLM", second_run)
    assert batch(input, output) == 0
    assert len(answers(read_records(output))) == 2


def test_an_input_that_changes_meanwhile(llm, paths, capsys, monkeypatch):
    input, output, _ = paths
    write_lines(input, mixed(2))

    def load(**options):
        write_lines(input, mixed(3))
        return llm

    monkeypatch.setattr("jaxattn.engine.llm.LLM", load)
    assert batch(input, output) == 1
    assert "in.jsonl changed while it was read" in last_lines(capsys)[-1]
    monkeypatch.setattr("jaxattn.engine.llm.LLM", lambda **options: llm)
    assert batch(input, output) == 0
    assert len(answers(read_records(output))) == 3


def test_a_full_disk(llm, paths, capsys, expected):
    input, output, _ = paths
    requests = mixed(12)
    write_lines(input, requests)
    with file_size_limit(3000):
        assert batch(input, output) == 1
    assert output.stat().st_size <= 3000
    done = answers(read_records(output))
    assert 0 < len(done) < 12
    *summary, _, last = last_lines(capsys)
    assert summary[0].startswith(f"{len(done)} done, 0 already there, 0 failed, {12 - len(done)}")
    assert "File too large: the lines before are whole and kept" in last
    assert "give the same command again: " in last and "out.jsonl" in last
    assert batch(input, output) == 0
    assert answers(read_records(output)) == expected(requests)


def test_control_c_lets_a_step_end(llm, paths, capsys, monkeypatch, expected):
    input, output, _ = paths
    requests = mixed(20)
    write_lines(input, requests)
    step, calls = llm.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 30:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert batch(input, output) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(calls) == 30
    done = answers(read_records(output))
    assert 0 < len(done) < 20
    summary, _, last = last_lines(capsys)
    left = 20 - len(done)
    assert f"{len(done)} done, 0 already there, 0 failed, {left} left, which the same" in summary
    assert last == "interrupted"
    assert batch(input, output) == 0
    assert answers(read_records(output)) == expected(requests)


def test_a_second_control_c_does_not_wait(llm, paths, monkeypatch):
    input, output, _ = paths
    write_lines(input, mixed(20))
    step, calls = llm.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 30:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("went on")
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert batch(input, output) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert 0 < len(answers(read_records(output))) < 20


# --- processes of their own

COMMAND = "import sys; from jaxattn.cli import main; sys.exit(main())"


def start(*arguments):
    options = ["--served-model-name", MODEL, *ENGINE_FLAGS]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "batch", *map(str, arguments), *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_kill_and_go_on(gguf_path, llm, paths, expected):
    input, output, errors = paths
    requests = mixed(100)
    write_lines(input, [*requests, BAD[1]])
    kills = 0
    for target in (3, 30, 60):
        process = start(input, output, "--model", gguf_path)
        while process.poll() is None and count_lines(output) < target:
            time.sleep(0.02)
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        there = output.read_bytes()
        assert target <= there.count(b"\n") < 100
        # What the kernel may lose of a write in a crash of the machine, for good measure.
        torn = there[: len(there) - target]
        output.write_bytes(torn)
    assert kills == 3
    process = start(input, output, "--model", gguf_path)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err.decode()
    assert f"{torn.count(b'\n')} already there, 1 failed" in err.decode()
    assert "Warning" not in err.decode()
    assert answers(read_records(output)) == expected(requests)
    assert output.read_bytes().startswith(torn[: torn.rindex(b"\n") + 1])
    (report,) = read_records(errors)
    assert report["line"] == 101
