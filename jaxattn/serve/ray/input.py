"""The input of a batch on Ray, cut into parts: ranges of lines, each with one file of results.

A line belongs to one part for good, and a part's file is replaced as a whole. Whatever is lost
and done again, by whomever, no line has two results, and half a file is never seen.
"""

import bisect
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxattn.serve.offline.format import custom_id_in, index_ids
from jaxattn.serve.offline.jsonl import check_regular

FORMATS = ("jsonl", "parquet")  # also the files' extensions
_COLUMNS = {"custom_id", "method", "url", "body"}
Ids = list[tuple[int, str | None]]  # line numbers, and the custom_id if there is one


@dataclass(frozen=True)
class Part:
    """A range of lines (of Parquet: rows) of one input file.

    `first`: number of its first line, from 1. `count`: its lines that are not blank. `start`:
    where it is, a byte of a JSONL file or a row group of a Parquet file; `skip`: rows of that
    group before it.
    """

    source: str
    first: int
    count: int
    start: int
    skip: int = 0

    @property
    def name(self) -> str:
        """Of its file of results, less the extension."""
        return f"{Path(self.source).stem}-{self.first:09}"


@dataclass
class BatchInput:
    """The parts of an input, and where every custom_id is.

    A place is a line's number, counted through all files; part p begins at `starts[p]`.
    """

    format: str
    parts: list[Part] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Requests, those that are no good included."""
        return sum(part.count for part in self.parts)

    def part_of(self, place: int) -> int:
        """The number of the part that a place is in."""
        return bisect.bisect_right(self.starts, place) - 1

    def where(self, place: int) -> str:
        """A place, for a person."""
        number = self.part_of(place)
        part = self.parts[number]
        return f"line {part.first + place - self.starts[number]} of {part.source}"


def plan_input(path: Path, rows_per_part: int) -> BatchInput:
    """Cut a file, or the files of a folder, into parts.

    Raises ValueError for other kinds of files, other columns, and a custom_id that is there twice.
    """
    if rows_per_part < 1:
        raise ValueError(f"{rows_per_part=}: expected at least 1")
    format, files = _files(path)
    cut = _cut_jsonl if format == "jsonl" else _cut_parquet
    plan = BatchInput(format)

    def places() -> Iterator[tuple[int, str | None]]:
        before = last = 0
        for file in files:
            before = last
            for part, ids in cut(file, rows_per_part):
                plan.parts.append(part)
                plan.starts.append(before + part.first)
                for number, custom_id in ids:
                    last = before + number
                    yield last, custom_id

    plan.index = index_ids(places(), plan.where)
    return plan


def read_part_texts(parts: list[Part]) -> Iterator[tuple[Part, bytes]]:
    """The lines of parts, as JSONL from each one's first line on.

    The parts are of one JSONL file, or of one row group of a Parquet file, in their order. Raises
    ValueError for a file that has become shorter.
    """
    if not parts[0].source.endswith(".parquet"):
        with open(parts[0].source, "rb") as file:
            for part in parts:
                file.seek(part.start)
                lines, found = [], 0
                while found < part.count:
                    lines.append(file.readline())
                    if not lines[-1]:
                        raise ValueError(f"{part.source} became shorter while it was read")
                    found += bool(lines[-1].strip())
                yield part, b"".join(lines)
        return
    rows, at = _rows(parts[0].source, parts[0].start), 0
    for part in parts:
        wanted = list(itertools.islice(rows, part.skip - at, part.skip - at + part.count))
        if len(wanted) < part.count:
            raise ValueError(f"{part.source} became shorter while it was read")
        yield part, b"".join(map(_row_text, wanted))
        at = part.skip + part.count


def _files(path: Path) -> tuple[str, list[Path]]:
    """The format, and the files in the order of their names."""
    if not path.is_dir():
        check_regular(path, "an input is read twice")
        if path.suffix[1:] not in FORMATS:
            raise ValueError(f"{path}: expected a name that ends in .jsonl or .parquet")
        return path.suffix[1:], [path]
    found = {each: sorted(path.glob(f"*.{each}")) for each in FORMATS}
    kinds = [each for each in FORMATS if found[each]]
    if len(kinds) != 1:
        raise ValueError(
            f"{path} has {len(found['jsonl'])} files *.jsonl and {len(found['parquet'])} "
            "*.parquet: expected files of one kind"
        )
    return kinds[0], found[kinds[0]]


def _cut_jsonl(path: Path, rows_per_part: int) -> Iterator[tuple[Part, Ids]]:
    with open(path, "rb") as file:
        start = end = 0
        ids: Ids = []
        for number, raw in enumerate(file, 1):
            if raw.strip():
                if not ids:
                    start = end
                ids.append((number, custom_id_in(raw)))
            end += len(raw)
            if len(ids) == rows_per_part:
                yield Part(str(path), ids[0][0], len(ids), start), ids
                ids = []
        if ids:
            yield Part(str(path), ids[0][0], len(ids), start), ids


def _cut_parquet(path: Path, rows_per_part: int) -> Iterator[tuple[Part, Ids]]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        if set(columns) != _COLUMNS:
            raise ValueError(f"{path} has the columns {columns}: expected {sorted(_COLUMNS)}")
        first = 1
        for group in range(file.num_row_groups):
            column = file.read_row_group(group, columns=["custom_id"])["custom_id"].to_pylist()
            for skip in range(0, len(column), rows_per_part):
                ids = list(enumerate(column[skip : skip + rows_per_part], first + skip))
                yield Part(str(path), first + skip, len(ids), group, skip), ids
            first += len(column)


def _rows(path: str, group: int) -> Iterator[dict[str, Any]]:
    """Rows of a row group, read some at a time."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256, row_groups=[group]):
            yield from batch.to_pylist()


def _row_text(row: dict[str, Any]) -> bytes:
    """A row as a line of JSONL. A body is a string of JSON, or a struct, whose nulls are absent."""
    body = row["body"]
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError):
            pass  # stays a string, which the check of the line refuses
    elif isinstance(body, dict):
        body = {name: value for name, value in body.items() if value is not None}
    return json.dumps(row | {"body": body}, default=repr).encode() + b"\n"
