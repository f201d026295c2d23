"""Which pages hold which tokens: a tree of blocks, for requests that begin alike.

A block is one page of tokens after the blocks above it. It has at most one physical page of each
group; windowed groups lose theirs first. Children are found by their token ids, compared one by
one (a dict of tuples), never by a hash alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxattn.cache.sizing import live_pages
from jaxattn.spec import StoreSpec


class Block:
    """A node of the tree: `pages[group]` is the page with this block's keys and values, or None.

    `users`: sequences whose last whole block this is; they will put children below it.
    """

    def __init__(self, parent: "Block | None", tokens: tuple[int, ...], num_groups: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages: list[int | None] = [None] * num_groups
        self.children: dict[tuple[int, ...], Block] = {}
        self.users = 0

    def child(self, tokens: tuple[int, ...]) -> "Block":
        """The block of `tokens` after this one, made if there is none."""
        if tokens not in self.children:
            self.children[tokens] = Block(self, tokens, len(self.pages))
        return self.children[tokens]

    def forget(self, group: int) -> None:
        """The group's page is taken for something else."""
        self.pages[group] = None
        self.prune()

    def prune(self) -> None:
        """Leave the tree if nothing is known here or below, and nobody is about to add to it."""
        block = self
        while (
            block.parent is not None
            and not block.users
            and not block.children
            and all(page is None for page in block.pages)
        ):
            del block.parent.children[block.tokens]
            block = block.parent

    @property
    def is_reachable(self) -> bool:
        """Whether a search from the root finds this block."""
        block = self
        while block.parent is not None:
            if block.parent.children.get(block.tokens) is not block:
                return False
            block = block.parent
        return True


class Match(NamedTuple):
    """The longest beginning of a prompt that all groups can serve, and its live pages."""

    num_tokens: int
    block: Block
    pages: tuple[list[int], ...]  # of each group, oldest first


def find_prefix(root: Block, stores: Sequence[StoreSpec], tokens: Sequence[int]) -> Match:
    """The longest reusable beginning of `tokens`, at most all but the last of them.

    A boundary counts if every group can serve it: the page of every block that the next query
    sees, the last `cdiv(W - 1, page_size)` for a window of W, all for a group that keeps all.
    """
    page_size = stores[0].page_size
    path, best = [root], 0
    unbroken = [0] * len(stores)  # pages in a row up to here, of each group
    for start in range(0, len(tokens) - page_size, page_size):
        block = path[-1].children.get(tuple(tokens[start : start + page_size]))
        if block is None:
            break
        path.append(block)
        unbroken = [
            0 if page is None else run + 1 for page, run in zip(block.pages, unbroken, strict=True)
        ]
        depth = len(path) - 1
        seen = [live_pages(store, depth * page_size, depth * page_size) for store in stores]
        if all(run >= len(live) for run, live in zip(unbroken, seen, strict=True)):
            best = depth
    pages = tuple(
        [path[1 + index].pages[group] for index in live_pages(store, *(best * page_size,) * 2)]
        for group, store in enumerate(stores)
    )
    return Match(best * page_size, path[best], pages)  # type: ignore[arg-type]
