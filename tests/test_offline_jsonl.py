"""Files of whole lines: whatever stops the writer, and whoever wrote the file before."""

import errno
import os
import resource
import signal
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxattn.serve.offline import jsonl
from jaxattn.serve.offline.jsonl import LineFile, check_regular, read_lines

BEGINS = b'{"id": "'
LINES = [b'{"id": "a", "text": "%s"}\n' % (b"x" * size) for size in (0, 3, 40)]


def lines_of(path, begins=BEGINS):
    with LineFile(path, begins=begins) as file:
        return [line for _, line in file.whole_lines()]


@contextmanager
def file_size_limit(size):
    """What a write past `size` bytes meets: part of it is written, and then an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_read_lines_numbers_what_is_not_blank(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"a\r\n\n  \nb\x0bc\rd\n\ne")
    assert list(read_lines(path)) == [(1, b"a\r\n"), (4, b"b\x0bc\rd\n"), (6, b"e")]


def test_appended_lines_are_there_at_once(tmp_path):
    path = tmp_path / "out"
    with LineFile(path, begins=BEGINS) as file:
        for number, line in enumerate(LINES, 1):
            file.append(line)
            assert path.read_bytes() == b"".join(LINES[:number])
    assert lines_of(path) == LINES


def test_a_line_is_one_write(tmp_path, monkeypatch):
    written = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(data) or write(fd, data))
    with LineFile(tmp_path / "out", begins=BEGINS) as file:
        for line in LINES:
            file.append(line)
    assert written == LINES


@given(st.data())
def test_a_last_line_that_is_torn_anywhere_is_cut_off(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("torn") / "out"
    size = data.draw(st.integers(0, sum(map(len, LINES))), label="size")
    path.write_bytes(b"".join(LINES)[:size])
    whole = [line for end, line in enumerate(LINES, 1) if sum(map(len, LINES[:end])) <= size]
    assert lines_of(path) == whole
    assert path.read_bytes() == b"".join(whole)


def test_every_byte_of_the_last_line(tmp_path):
    before, last = LINES[:2], LINES[2]
    for size in range(len(last)):
        path = tmp_path / f"out-{size}"
        path.write_bytes(b"".join(before) + last[:size])
        with LineFile(path, begins=BEGINS) as file:
            assert [line for _, line in file.whole_lines()] == before
            file.append(last)
        assert path.read_bytes() == b"".join(LINES)


@pytest.mark.parametrize("torn", [b"\0" * 7, BEGINS + b"b\0\0\0", BEGINS[:3] + b"\0"])
def test_zeros_after_a_power_cut_are_cut_off(tmp_path, torn):
    path = tmp_path / "out"
    path.write_bytes(LINES[0] + torn)
    assert lines_of(path) == LINES[:1]
    assert path.read_bytes() == LINES[0]


@pytest.mark.parametrize("content", [b"GGUF\x03", b"a text\n", b'{"idea": 1}', b'{"line": 1}\n'])
def test_a_file_of_someone_else_is_left_alone(tmp_path, content):
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a file that this command wrote, and is left as"):
        LineFile(path, begins=BEGINS)
    assert path.read_bytes() == content


def test_an_end_of_someone_else_is_left_alone(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(LINES[0] + b"# my notes")
    with pytest.raises(ValueError, match="line 2 has no end and begins with b'# my notes'"):
        lines_of(path)
    assert path.read_bytes() == LINES[0] + b"# my notes"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_only_regular_files(tmp_path, make):
    path = tmp_path / "out"
    make(path)
    with pytest.raises(ValueError, match=r"out is not a regular file: its lines are read again"):
        LineFile(path, begins=BEGINS)
    with pytest.raises(ValueError, match="is not a regular file: because"):
        check_regular(path, "because")


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "out"
    with LineFile(path, begins=BEGINS) as file:
        file.append(LINES[0])
        with pytest.raises(OSError, match="out is in use by another run"):
            LineFile(path, begins=BEGINS)
    with LineFile(path, begins=BEGINS) as file:
        file.append(LINES[1])
    assert path.read_bytes() == LINES[0] + LINES[1]


def test_a_lock_on_a_file_that_was_removed_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "out"
    lock = jsonl.lock
    monkeypatch.setattr(jsonl, "lock", lambda fd, path: path.unlink() or lock(fd, path))
    with pytest.raises(OSError, match="was removed by a run that ended just now"):
        LineFile(path, begins=BEGINS)


def test_clear_and_remove(tmp_path):
    path = tmp_path / "errors"
    path.write_bytes(LINES[0])
    with LineFile(path, begins=BEGINS) as file:
        file.remove_if_empty()
        assert path.exists()
        file.clear()
        assert path.read_bytes() == b""
        file.append(LINES[1])
        assert path.read_bytes() == LINES[1]
        file.clear()
        file.remove_if_empty()
    assert not path.exists()


@pytest.mark.parametrize("room", range(len(LINES[2])))
def test_a_full_disk_leaves_whole_lines(tmp_path, room):
    path = tmp_path / "out"
    before = b"".join(LINES[:2])
    with LineFile(path, begins=BEGINS) as file:
        for line in LINES[:2]:
            file.append(line)
        with (
            file_size_limit(len(before) + room),
            pytest.raises(OSError, match="the lines before are whole and kept") as raised,
        ):
            file.append(LINES[2])
        assert raised.value.errno == errno.EFBIG
        assert raised.value.filename == str(path)
        assert path.read_bytes() == before
        file.append(LINES[2])  # there is room again
    assert path.read_bytes() == before + LINES[2]


def test_lines_are_synced_now_and_then(tmp_path, monkeypatch):
    synced, now, size = [], [0.0], len(LINES[0])
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size // size))
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with LineFile(tmp_path / "out", begins=BEGINS) as file:
        for _ in range(8):
            now[0] += 0.75
            file.append(LINES[0])
    assert synced == [3, 6, 8]
