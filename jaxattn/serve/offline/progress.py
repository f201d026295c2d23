"""What a batch has done so far: a bar on standard error, and a summary at the end."""

import time
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class BatchProgress:
    """Counts of a run, shown while the context is open.

    Args:
        console: where to.
        total: requests of the input, those that are no good included.
        there: requests that had results before this run.
        preparing: what goes on until tokens come.

    Attributes:
        done, failed: requests of this run.
        tokens: generated in this run.
    """

    def __init__(self, console: Console, *, total: int, there: int, preparing: str):
        self.total, self.there = total, there
        self.done = self.failed = self.tokens = 0
        self.seconds = 0.0
        self._preparing = preparing
        self._console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        self._bar = Progress(*columns, console=console)

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._task = self._bar.add_task("requests", total=self.total)
        self.show()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.show()
        self._bar.stop()

    def show(self) -> None:
        """Bring the bar up to date."""
        self.seconds = time.monotonic() - self._start
        self._bar.update(
            self._task,
            completed=self.there + self.done + self.failed,
            speed=f"{self._speed:,.1f} tokens/s" if self.tokens else self._preparing,
        )

    @property
    def _speed(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def print_summary(self, *, results: Path, errors: Path) -> None:
        """What was done, how fast, and where it is."""
        parts = [f"{self.done:,} done", f"{self.there:,} already there", f"{self.failed:,} failed"]
        left = self.total - self.there - self.done - self.failed
        if left:
            parts.append(f"{left:,} left, which the same command goes on with")
        text = f"{', '.join(parts)}; {self.tokens:,} tokens in {self.seconds:,.1f} s"
        if self.tokens:
            text += f", {self._speed:,.1f} tokens/s"
        text += f"\nresults are in {results}"
        if self.failed:
            text += f", errors in {errors}"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
