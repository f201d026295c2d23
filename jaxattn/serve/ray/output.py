"""The results of a batch on Ray: a folder with a file for every part that has any."""

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxattn.serve.offline.format import custom_id_in, encode_line, line_of_result
from jaxattn.serve.offline.jsonl import read_lines
from jaxattn.serve.ray.input import FORMATS, BatchInput

MAX_ATTEMPTS = 8  # of a part whose workers are lost: it may be the part that kills them
_UNFINISHED = ".unfinished"
_ATTEMPTS = ".attempts"


def result_ids(path: Path) -> Iterator[str | None]:
    """The custom_id of every result in a part's file; none if there is no such file."""
    if not path.exists():
        return
    if path.suffix == ".jsonl":
        yield from (custom_id_in(raw) for _, raw in read_lines(path))
        return
    from pyarrow import parquet

    yield from parquet.read_table(path, columns=["custom_id"])["custom_id"].to_pylist()


def add_results(path: Path, records: list[dict[str, Any]]) -> None:
    """Put a file with more results in the place of a part's file, at once or not at all."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_UNFINISHED}")
    try:
        if path.suffix == ".jsonl":
            there = path.read_bytes() if path.exists() else b""
            partial.write_bytes(there + b"".join(map(encode_line, records)))
        else:
            _write_parquet(path, partial, records)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def begin_attempt(path: Path) -> int:
    """Note on the disk that a part is being done. Returns how often that has begun in this run."""
    with open(_attempts(path), "ab") as file:
        file.write(b".")
        file.flush()
        return os.fstat(file.fileno()).st_size


def end_attempts(path: Path) -> None:
    """The part was done."""
    _attempts(path).unlink(missing_ok=True)


def _attempts(path: Path) -> Path:
    return path.with_name(f".{path.name}{_ATTEMPTS}")


def count_finished(folder: Path, plan: BatchInput, *, extension: str, input: Path) -> list[int]:
    """How many results each part has. Removes what a lost worker left unfinished.

    Raises ValueError for results of another input, or of parts of another size.
    """
    for kind in (_UNFINISHED, _ATTEMPTS):
        for path in folder.glob(f".*{kind}"):
            path.unlink(missing_ok=True)
    done = set[int]()
    counts = [0] * len(plan.parts)
    for path in sorted(each for format in FORMATS for each in folder.glob(f"[!.]*.{format}")):
        for row, custom_id in enumerate(result_ids(path), 1):
            where = f"{path}, row {row},"
            place = line_of_result(custom_id, plan.index, done, where=where, input=input)
            number = plan.part_of(place)
            if path.name != f"{plan.parts[number].name}.{extension}":
                raise ValueError(
                    f"{where} is for {plan.where(place)}, but the result belongs in "
                    f"{plan.parts[number].name}.{extension}: give the format and --rows-per-part "
                    "of the first run, or name another output"
                )
            done.add(place)
            counts[number] += 1
    return counts


def _write_parquet(path: Path, partial: Path, records: list[dict[str, Any]]) -> None:
    """Columns as the keys of a result; the body of a response is a string of JSON."""
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.string()
    response = {"status_code": pyarrow.int64(), "request_id": text, "body": text}
    schema = pyarrow.schema(
        {"id": text, "custom_id": text, "response": pyarrow.struct(response), "error": text}
    )
    rows = []
    for record in records:
        body = json.dumps(record["response"]["body"], ensure_ascii=False)
        rows.append(record | {"response": record["response"] | {"body": body}})
    table = pyarrow.Table.from_pylist(rows, schema)
    if path.exists():
        table = pyarrow.concat_tables([parquet.read_table(path), table])
    parquet.write_table(table, partial)
