"""Parts of a batch on Ray, without Ray: inputs, results, and the worker that completes them."""

import asyncio
import io
import json
import sys

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from jaxattn import LLM
from jaxattn.cli import main
from jaxattn.serve.offline.format import Result, custom_id_in
from jaxattn.serve.offline.jsonl import read_lines
from jaxattn.serve.ray.input import Part, plan_input, read_part_texts
from jaxattn.serve.ray.output import (
    MAX_ATTEMPTS,
    add_results,
    begin_attempt,
    count_finished,
    end_attempts,
    result_ids,
)
from jaxattn.serve.ray.worker import Worker
from tests import tiny_model
from tests.offline_cases import ENGINE, MODEL, answers, mixed, read_records, request, write_lines

FORMATS = ("jsonl", "parquet")


def write_parquet(path, requests, *, row_group_size=100, struct=False):
    rows = [each if struct else each | {"body": json.dumps(each["body"])} for each in requests]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def lines_of(plan):
    """Numbers and lines of all parts, each read on its own."""
    found = []
    for part in plan.parts:
        ((same, text),) = read_part_texts([part])
        assert same == part
        lines = list(enumerate(io.BytesIO(text), part.first))
        lines = [(number, raw) for number, raw in lines if raw.strip()]
        assert len(lines) == part.count
        found += [(part.source, number, raw) for number, raw in lines]
    return found


@given(st.data())
def test_parts_of_a_file_are_its_lines(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("parts") / "in.jsonl"
    lines = st.sampled_from([b"", b"  ", b"{", b'{"custom_id": 1}', b"\x0b"]) | st.integers(
        0, 10**6
    ).map(lambda number: json.dumps({"custom_id": f"id-{number}"}).encode())
    ends = st.sampled_from([b"\n", b"\r\n"])
    content = data.draw(st.lists(st.tuples(lines, ends), max_size=20, unique=True))
    ids = [custom_id_in(line) for line, _ in content if custom_id_in(line)]
    raw = b"".join(line + end for line, end in content)
    path.write_bytes(raw[: len(raw) - data.draw(st.integers(0, 1))])
    rows = data.draw(st.integers(1, 7), label="rows per part")
    if len(set(ids)) < len(ids):
        with pytest.raises(ValueError, match="custom_id 'id-"):
            plan_input(path, rows)
        return
    plan = plan_input(path, rows)
    assert [each[1:] for each in lines_of(plan)] == list(read_lines(path))
    assert all(part.count == rows for part in plan.parts[:-1])
    assert {number: custom_id for custom_id, number in plan.index.items()} == {
        number: custom_id_in(line) for number, line in read_lines(path) if custom_id_in(line)
    }
    for place in plan.index.values():
        part = plan.parts[plan.part_of(place)]
        assert part.first <= place
        assert plan.where(place) == f"line {place} of {path}"


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_becomes_shorter(tmp_path, format):
    write, path = {"jsonl": write_lines, "parquet": write_parquet}[format], tmp_path / f"a.{format}"
    plan = plan_input(write(path, mixed(4)), 3)
    write(path, mixed(2))
    with pytest.raises(ValueError, match=rf"a\.{format} became shorter while it was read"):
        list(read_part_texts(plan.parts[:1]))


@pytest.mark.parametrize("struct", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 100])
def test_parquet_holds_the_same_requests(tmp_path, struct, rows):
    requests = [each for each in mixed(22) if struct <= ("prompt" in each["body"])]
    write_parquet(tmp_path / "in.parquet", requests, row_group_size=9, struct=struct)
    plan = plan_input(tmp_path / "in.parquet", rows)
    found = lines_of(plan)
    assert [json.loads(raw) for *_, raw in found] == requests
    assert [number for _, number, _ in found] == list(range(1, len(requests) + 1))
    assert list(plan.index.items()) == [
        (each["custom_id"], number) for number, each in enumerate(requests, 1)
    ]
    groups = [part.start for part in plan.parts]
    assert groups == sorted(groups) and max(part.count for part in plan.parts) <= rows
    by_group = [[part for part in plan.parts if part.start == group] for group in set(groups)]
    pieces = [text for parts in by_group for _, text in read_part_texts(parts[::2])]
    wanted = [part for parts in by_group for part in parts[::2]]
    assert pieces == [text for part in wanted for _, text in read_part_texts([part])]


def test_nulls_of_a_struct_are_absent(tmp_path):
    requests = [request("a", "the hen", top_k=3), request("b", "the hen", seed=1)]
    write_parquet(tmp_path / "in.parquet", requests, struct=True)
    found = lines_of(plan_input(tmp_path / "in.parquet", 10))
    assert [json.loads(raw) for *_, raw in found] == requests


def test_a_body_that_is_not_json_is_for_the_check_of_the_line(tmp_path):
    requests = [request("a", "the hen") | {"body": "{"}]
    parquet.write_table(pyarrow.Table.from_pylist(requests), tmp_path / "in.parquet")
    ((_, _, raw),) = lines_of(plan_input(tmp_path / "in.parquet", 10))
    assert json.loads(raw)["body"] == "{"


@pytest.mark.parametrize("format", FORMATS)
def test_files_of_a_folder(tmp_path, format):
    write = {"jsonl": write_lines, "parquet": write_parquet}[format]
    requests = mixed(9)
    for name, part in (("b", requests[5:]), ("a", requests[:5])):
        write(tmp_path / f"{name}.{format}", part)
    (tmp_path / "README").write_text("notes")
    plan = plan_input(tmp_path, 3)
    assert [part.name for part in plan.parts] == [
        "a-000000001",
        "a-000000004",
        "b-000000001",
        "b-000000004",
    ]
    assert [json.loads(raw) for *_, raw in lines_of(plan)] == requests
    assert plan.total == 9
    assert plan.where(plan.index["id-6"]) == f"line 2 of {tmp_path}/b.{format}"
    write(tmp_path / f"c.{format}", [requests[6]])
    place = rf"custom_id 'id-6' is on line 2 of .*/b.{format} and on line 1 of .*/c.{format}"
    with pytest.raises(ValueError, match=place):
        plan_input(tmp_path, 3)


def test_inputs_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"0 files \*.jsonl and 0 \*.parquet: expected files of"):
        plan_input(tmp_path, 3)
    write_lines(tmp_path / "a.jsonl", mixed(1))
    parquet.write_table(pyarrow.table({"custom_id": ["a"], "text": ["b"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"1 files \*.jsonl and 1 \*.parquet: expected files of"):
        plan_input(tmp_path, 3)
    with pytest.raises(ValueError, match=r"b.parquet has the columns \['custom_id', 'text'\]"):
        plan_input(tmp_path / "b.parquet", 3)
    with pytest.raises(ValueError, match=r"expected a name that ends in \.jsonl or \.parquet"):
        plan_input(write_lines(tmp_path / "a.txt", []), 3)
    with pytest.raises(ValueError, match="rows_per_part=0: expected at least 1"):
        plan_input(tmp_path / "a.jsonl", 0)


# --- results


def records(ids):
    return [Result(0, each, f"r{each}", {"text": f"é {each}"}).record() for each in ids]


def read_results(path):
    """The records of a part's file, as those of JSONL."""
    if path.suffix == ".jsonl":
        return read_records(path)
    rows = parquet.read_table(path).to_pylist()
    for row in rows:
        row["response"]["body"] = json.loads(row["response"]["body"])
    return rows


@pytest.mark.parametrize("format", FORMATS)
def test_results_are_added(tmp_path, format):
    path = tmp_path / f"part.{format}"
    assert list(result_ids(path)) == []
    add_results(path, records("ab"))
    add_results(path, records("c"))
    assert list(result_ids(path)) == ["a", "b", "c"]
    assert read_results(path) == records("abc")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("format", FORMATS)
def test_results_are_added_at_once_or_not_at_all(tmp_path, format, monkeypatch):
    path = tmp_path / f"part.{format}"
    add_results(path, records("ab"))
    before = path.read_bytes()

    def lost(fd):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", lost)
    with pytest.raises(OSError, match="no space left"):
        add_results(path, records("c"))
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("format", FORMATS)
def test_a_reader_never_sees_half_a_file(tmp_path, format):
    path = tmp_path / f"part.{format}"
    add_results(path, records("ab"))
    before = path.read_bytes()
    with open(path, "rb") as file:
        add_results(path, records("c"))
        assert file.read() == before  # another file is in its place


def planned(tmp_path, count=6, rows=3):
    """An input of parts of `rows` lines, and an empty folder."""
    plan = plan_input(write_lines(tmp_path / "in.jsonl", mixed(count)), rows)
    (tmp_path / "out").mkdir()
    return plan, tmp_path / "out"


@pytest.mark.parametrize("format", FORMATS)
def test_finished_lines_are_counted(tmp_path, format):
    plan, folder = planned(tmp_path)
    options = dict(extension=format, input=tmp_path / "in.jsonl")
    assert count_finished(folder, plan, **options) == [0, 0]
    add_results(folder / f"in-000000004.{format}", records(["id-5", "id-3"]))
    (folder / f".in-000000001.{format}.123.unfinished").write_bytes(b"half a fi")
    (folder / "_SUCCESS").touch()
    begin_attempt(folder / f"in-000000001.{format}")
    assert count_finished(folder, plan, **options) == [0, 2]
    assert {each.name for each in folder.iterdir()} == {f"in-000000004.{format}", "_SUCCESS"}


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        ("in-000000001.jsonl", ["other"], "row 1, is the result of 'other', which is not in"),
        ("in-000000001.jsonl", ["id-0", "id-0"], "row 2, is the second result of 'id-0'"),
        ("in-000000001.jsonl", ["id-3"], "but the result belongs in in-000000004.jsonl: give"),
        ("in-000000005.jsonl", ["id-4"], "but the result belongs in in-000000004.jsonl: give"),
        ("in-000000001.parquet", ["id-0"], "but the result belongs in in-000000001.jsonl: give"),
    ],
)
def test_results_that_do_not_fit(tmp_path, name, ids, message):
    plan, folder = planned(tmp_path)
    add_results(folder / name, records(ids))
    with pytest.raises(ValueError, match=message):
        count_finished(folder, plan, extension="jsonl", input=tmp_path / "in.jsonl")
    assert (folder / name).exists()


def test_attempts_are_counted_on_the_disk(tmp_path):
    path = tmp_path / "part.jsonl"
    assert [begin_attempt(path) for _ in range(3)] == [1, 2, 3]
    end_attempts(path)
    end_attempts(path)
    assert begin_attempt(path) == 1


# --- the worker


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_model.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return LLM(path, **ENGINE, progress=False)


@pytest.fixture
def worker(llm, tmp_path, monkeypatch):
    """`worker(folder)`, with the LLM that is already there."""
    monkeypatch.setattr("jaxattn.serve.ray.worker.LLM", lambda **options: llm)
    return lambda folder: Worker(llm={"seed": 0}, model=MODEL, folder=str(folder), window=8)


def complete(worker, plan, format="jsonl"):
    """Reports of all parts, which the worker gets at once."""

    async def every_part():
        calls = []
        for number, part in enumerate(plan.parts):
            ((_, text),) = read_part_texts([part])
            row = {"part": number, "file": f"{part.name}.{format}", "first": part.first}
            calls.append(worker(pyarrow.Table.from_pylist([row | {"text": text}])))
        return await asyncio.gather(*calls)

    reports = [json.loads(each["report"][0]) for each in asyncio.run(every_part())]
    assert [each["part"] for each in reports] == list(range(len(plan.parts)))
    return reports


def merged(folder):
    return answers([record for path in sorted(folder.iterdir()) for record in read_results(path)])


def run_alone(llm, tmp_path, monkeypatch):
    """The answers to `in.jsonl` of a run without Ray."""
    monkeypatch.setattr("jaxattn.engine.llm.LLM", lambda **options: llm)
    command = ["batch", f"{tmp_path}/in.jsonl", f"{tmp_path}/alone.jsonl"]
    main([*command, "--served-model-name", MODEL])
    return answers(read_records(tmp_path / "alone.jsonl"))


@pytest.mark.parametrize("format", FORMATS)
def test_parts_at_once_give_the_results_of_a_run_alone(llm, worker, tmp_path, monkeypatch, format):
    plan, folder = planned(tmp_path, count=22, rows=5)
    reports = complete(worker(folder), plan, format)
    assert [each["finished"] for each in reports] == [5, 5, 5, 5, 2]
    assert all(each["failures"] == [] for each in reports)
    assert merged(folder) == run_alone(llm, tmp_path, monkeypatch)
    tokens = sum(each["body"]["max_tokens"] for each in mixed(22))
    assert sum(each["tokens"] for each in reports) == tokens
    counts = count_finished(folder, plan, extension=format, input=tmp_path / "in.jsonl")
    assert counts == [5, 5, 5, 5, 2]


def test_the_engine_stays_full_from_part_to_part(llm, worker, tmp_path, monkeypatch):
    plan, folder = planned(tmp_path, count=24, rows=4)
    step, running = llm.engine.step, []

    def counted():
        news = step()
        running.append(llm.engine.stats().running)
        return news

    monkeypatch.setattr(llm.engine, "step", counted)
    complete(worker(folder), plan)
    assert sum(running) / len(running) > 3.2  # of 4; part by part it is less than 2.9


@pytest.mark.parametrize("format", FORMATS)
def test_only_missing_rows_are_done(llm, worker, tmp_path, format):
    plan, folder = planned(tmp_path, count=5, rows=5)
    path = folder / f"in-000000001.{format}"
    add_results(path, records(["id-3", "id-1"]))
    (report,) = complete(worker(folder), plan, format)
    assert report["finished"] == 5
    results = read_results(path)
    assert results[:2] == records(["id-3", "id-1"])
    assert {each["custom_id"] for each in results[2:]} == {"id-0", "id-2", "id-4"}
    before = path.read_bytes()
    (report,) = complete(worker(folder), plan, format)
    assert (report["finished"], report["tokens"]) == (5, 0)
    assert path.read_bytes() == before


def test_failures_have_the_numbers_of_the_file(llm, worker, tmp_path):
    lines = [*mixed(3), "", "{", mixed(4)[3], request("bad", "a", temperatur=1)]
    plan = plan_input(write_lines(tmp_path / "in.jsonl", lines), 2)
    folder = tmp_path / "out"
    folder.mkdir()
    reports = complete(worker(folder), plan)
    failures = [failure for each in reports for failure in each["failures"]]
    assert [(each["line"], each["custom_id"]) for each in failures] == [(5, None), (7, "bad")]
    assert failures[1]["error"]["param"] == "temperatur"
    assert [each["finished"] for each in reports] == [2, 1, 1]


def test_a_part_that_its_workers_do_not_survive_is_given_up(llm, worker, tmp_path):
    plan, folder = planned(tmp_path)
    path = folder / "in-000000001.jsonl"
    for _ in range(MAX_ATTEMPTS):
        begin_attempt(path)
    given_up, other = complete(worker(folder), plan)
    assert [each["custom_id"] for each in given_up["failures"]] == ["id-0", "id-1", "id-2"]
    assert [each["line"] for each in given_up["failures"]] == [1, 2, 3]
    assert given_up["failures"][0]["error"]["code"] == "worker_lost"
    assert (given_up["finished"], other["finished"]) == (0, 3)
    assert complete(worker(folder), plan)[0]["finished"] == 3  # the next run tries it again


def test_what_every_part_would_meet_is_reported(tmp_path, monkeypatch):
    def broken(**options):
        raise ValueError("max_num_seqs=0: expected at least 1")

    monkeypatch.setattr("jaxattn.serve.ray.worker.LLM", broken)
    plan, folder = planned(tmp_path)
    worker = Worker(llm={"seed": 0}, model=MODEL, folder=str(folder), window=8)
    for report in complete(worker, plan):
        assert report["error"] == "ValueError: max_num_seqs=0: expected at least 1"
    assert list(folder.iterdir()) == []


# --- the command, as far as it goes without a cluster


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers 0: expected at least 1"),
        (["--rows-per-part", "0"], "rows_per_part=0: expected at least 1"),
        (["--model", "nothing"], "'nothing' is neither a file nor a folder"),
    ],
)
def test_arguments_that_are_refused(tmp_path, capsys, arguments, message):
    write_lines(tmp_path / "in.jsonl", mixed(2))
    command = ["batch", "--ray", f"{tmp_path}/in.jsonl", f"{tmp_path}/out"]
    assert main([*command, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_an_output_that_is_a_file(tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", mixed(2))
    (tmp_path / "out").write_text("notes")
    assert main(["batch", "--ray", f"{tmp_path}/in.jsonl", f"{tmp_path}/out"]) == 1
    assert "is a file: --ray writes a folder of part files" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "notes"


@pytest.mark.parametrize("text", ["{", "[1]", '{"TPU": "4"}', '{"TPU": -1}', '{"TPU": true}'])
def test_resources_that_are_refused(tmp_path, capsys, text):
    with pytest.raises(SystemExit) as exit:
        main(["batch", "--ray", "in.jsonl", "out", "--worker-resources", text])
    assert exit.value.code == 2
    assert "--worker-resources" in capsys.readouterr().err


def test_ray_that_is_not_installed(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    write_lines(tmp_path / "in.jsonl", mixed(2))
    assert main(["batch", "--ray", f"{tmp_path}/in.jsonl", f"{tmp_path}/out"]) == 1
    assert "--ray needs Ray Data" in (err := capsys.readouterr().err)
    assert "pip install 'jaxattn[ray]'" in err
    assert not (tmp_path / "out").exists()


def test_the_name_of_a_part():
    assert Part("/a/b.c.jsonl", first=12, count=1, start=0).name == "b.c-000000012"
