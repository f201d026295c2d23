"""A runner without a model: its keys are hashes of all tokens up to there.

Every key that a query would see is read back through the page tables and compared, so that one
wrong page, slot or length shows in the step that uses it. Thousands of times as quick as a model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxattn.engine.runner import Results

VOCAB = 300
_FIRST = 3  # lower ids are special
_POWERS = np.cumprod(np.full(4096, 6364136223846793005, np.uint64)) | np.uint64(1)


def hashes(tokens):
    """uint64[len(tokens)]: of each beginning of `tokens`."""
    tokens = np.asarray(tokens, np.uint64) + np.uint64(1)
    return np.cumsum(tokens * _POWERS[: len(tokens)], dtype=np.uint64)


def next_token(mark):
    """The token after a beginning with this hash."""
    return _FIRST + int(mark >> np.uint64(17)) % (VOCAB - _FIRST)


def continuation(prompt, count):
    """The `count` tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(hashes(tokens)[-1]))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Row:
    """What the host said of a sequence in a step."""

    slot: int
    tokens: tuple[int, ...] | None  # of a sequence that was just admitted
    start: int
    end: int
    samples: bool
    tables: list[tuple[np.ndarray, int]]  # of each group: pages, and the first one's index


@dataclass(frozen=True)
class Dispatched:
    shares: list
    fetch: Callable[[], Results]


class ShadowRunner:
    """Like `Runner`. A step runs when it is fetched, so that nothing may change under it."""

    num_replicas = 1
    buffers = ()

    def __init__(self, model, plan, *, num_pages, widths, max_num_seqs, **unused):
        self.plan, self.num_pages, self.widths = plan, num_pages, widths
        self.windows = [group.store.retention for group in plan.groups]
        self._max_num_seqs = max_num_seqs
        self.times_asked = 0
        self.reset()

    def reset(self):
        self.pools = [
            [
                np.zeros((pages, group.store.page_size), np.uint64)
                for pages, group in zip(self.num_pages, self.plan.groups, strict=True)
            ]
            for _ in range(self.num_replicas)
        ]
        self.slots = np.zeros((self.num_replicas, self._max_num_seqs, self.plan.max_len), int)

    def load(self, tokens):
        return tuple(tokens)

    def is_compiled(self, shares):
        """Now and then a step must wait for the one before it."""
        self.times_asked += 1
        return self.times_asked % 5 > 0

    def dispatch(self, shares, allocators):
        replicas = []
        for step, allocator in zip(shares, allocators, strict=True):
            ids = [share.sequence.id for share in step]
            tables = [
                allocator.page_table(group, ids, rows=len(ids), width=width)
                for group, width in enumerate(self.widths)
            ]
            replicas.append(
                [
                    Row(
                        slot=share.sequence.slot,
                        tokens=self.load(share.sequence.tokens) if share.fresh else None,
                        start=share.start,
                        end=share.start + share.num_tokens,
                        samples=share.samples,
                        tables=[(pages[index], first[index]) for pages, first in tables],
                    )
                    for index, share in enumerate(step)
                ]
            )
        return Dispatched(shares, lambda: self._run(replicas))

    def _run(self, replicas):
        chosen = np.zeros((self.num_replicas, self._max_num_seqs), np.int32)
        for replica, rows in enumerate(replicas):
            marks = [self._marks(self.slots[replica, row.slot], row) for row in rows]
            for row, own in zip(rows, marks, strict=True):
                for pool, _, table in self._groups(replica, row):
                    pool[places(pool, table, row.start, row.end)] = own[row.start :]
            for index, (row, own) in enumerate(zip(rows, marks, strict=True)):
                for pool, window, table in self._groups(replica, row):
                    seen = 0 if window is None else max(0, row.start - window + 1)
                    read = pool[places(pool, table, seen, row.end)]
                    assert (read == own[seen:]).all(), f"wrong keys: {window=}, {row=}"
                if row.samples:
                    chosen[replica, index] = token = next_token(own[-1])
                    self.slots[replica, row.slot, row.end] = token
        return Results(chosen, None, None)

    @staticmethod
    def _marks(slot, row):
        if row.tokens is not None:
            slot[:] = 0
            slot[: len(row.tokens)] = row.tokens
        return hashes(slot[: row.end])

    def _groups(self, replica, row):
        return zip(self.pools[replica], self.windows, row.tables, strict=True)


def places(pool, table, start, end):
    """Where the positions from `start` to `end` lie in a pool: pages and offsets."""
    pages, first_page = table
    positions = np.arange(start, end)
    columns = positions // pool.shape[1] - first_page
    assert (columns >= 0).all() and (pages[columns] > 0).all(), "a page that is seen is missing"
    return pages[columns], positions % pool.shape[1]
