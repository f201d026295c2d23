"""Ctrl-C that lets a step end, so that what is finished can be written."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_asked() -> Iterator[Callable[[], bool]]:
    """Inside, a first Ctrl-C makes the yielded function return True; a second one interrupts.

    For the main thread. Where Ctrl-C is ignored, as in a shell script's background, it stays so.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("\nstopping after this step; Ctrl-C again stops at once", file=sys.stderr)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
