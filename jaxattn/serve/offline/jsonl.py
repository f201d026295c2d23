"""Files of lines: an input that is streamed, an output that grows by whole lines or not at all."""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

_SYNC_SECONDS = 2.0  # of results, what a power cut may cost


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and bytes of every line that is not blank."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


def check_regular(path: Path, use: str) -> None:
    """Raise ValueError for what is there and cannot be read again: a pipe, a terminal, a folder."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file: {use}")


def lock(fd: int, path: Path) -> None:
    """Lock an open file or folder until it is closed. Raises OSError if another process has it."""
    import fcntl  # Windows has none, and can do without batches, not without the other commands

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(
            f"{path} is in use by another run: wait for its end, or name another output"
        ) from error


class LineFile:
    """A file that one process at a time appends lines to.

    Whatever stops the process, the file holds whole lines, but for the last: `whole_lines` knows
    one that is torn by its missing end and cuts it off.

    Args:
        path: made if it is not there.
        begins: how every line of this kind begins. A file with other content is never cut:
            ValueError.

    Raises OSError if another process has it open as a LineFile.
    """

    def __init__(self, path: Path, *, begins: bytes):
        self.path = path
        self._begins = begins
        check_regular(path, "its lines are read again when a run continues")
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o666)
        try:
            lock(self._fd, path)
            if not _same_file(self._fd, path):
                raise OSError(f"{path} was removed by a run that ended just now: try again")
            self._check_beginning()
        except BaseException:
            os.close(self._fd)
            raise
        self._size = os.fstat(self._fd).st_size
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_beginning(self) -> None:
        start = os.pread(self._fd, len(self._begins), 0)
        if not self._is_ours(start):
            raise ValueError(
                f"{self.path} begins with {start!r}: it is not a file that this command wrote, "
                "and is left as it is; name another file"
            )

    def _is_ours(self, line: bytes) -> bool:
        """Whether a line, or what there is of it, is of this file's kind; NULs are lost writes."""
        line = line.rstrip(b"\0")[: len(self._begins)]
        return self._begins.startswith(line)

    def whole_lines(self) -> Iterator[tuple[int, bytes]]:
        """Number, from 1, and bytes of every line. At the end a torn one is cut off the file."""
        with open(self.path, "rb") as file:
            size = 0
            for number, raw in enumerate(file, 1):
                if raw.endswith(b"\n"):
                    size += len(raw)
                    yield number, raw
                elif not self._is_ours(raw):
                    raise ValueError(
                        f"{self.path}, line {number} has no end and begins with {raw[:20]!r}: it "
                        "is not half of a result, and is left as it is"
                    )
        if size < self._size:
            self._cut(size)

    def clear(self) -> None:
        """Drop all lines."""
        self._cut(0)

    def _cut(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        self._size = size

    def append(self, line: bytes) -> None:
        """Write a line in one piece. It stays whole if the process is killed.

        Raises OSError, for example for a full disk; the file is then as it was before.
        """
        assert line.endswith(b"\n") and line.startswith(self._begins)
        try:
            written = os.write(self._fd, line)
            while written < len(line):  # the disk is nearly full: get told so
                written += os.write(self._fd, line[written:])
            self._size += len(line)
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                self.sync()
        except OSError as error:
            self._cut(self._size)
            raise OSError(
                error.errno,
                f"{error.strerror}: the lines before are whole and kept; make it possible to "
                "write there and give the same command again",
                str(self.path),
            ) from error

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._fd)
        self._synced = time.monotonic()

    def remove_if_empty(self) -> None:
        """Take the file away if it has no lines."""
        if os.fstat(self._fd).st_size == 0 and _same_file(self._fd, self.path):
            self.path.unlink()

    def close(self) -> None:
        """Sync, and give up the lock."""
        try:
            self.sync()
        finally:
            os.close(self._fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(there.st_mode) and os.path.samestat(there, os.fstat(fd))
