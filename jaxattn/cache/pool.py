"""The physical pages of one group: free, held by sequences, or kept for whoever asks again."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from jaxattn.cache.prefix import Block

NULL_PAGE = 0


class PagePool:
    """Counts who holds each page. Host only, deterministic.

    A page is *free* (last in, first out), *held* by one sequence or more, or *kept*: held by
    nobody, but its tokens are in the prefix tree. Kept pages are taken when no free one is left,
    the one that was longest unused first. Page 0 is the null page and none of these.
    """

    def __init__(self, group: int, num_pages: int) -> None:
        self.group = group
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._holders = [0] * num_pages
        self._blocks: dict[int, Block] = {}  # of pages whose tokens are in the prefix tree
        self._kept: OrderedDict[int, None] = OrderedDict()  # longest unused first

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    def idle(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody holds: holding them makes fewer available."""
        return sum(self._holders[page] == 0 for page in pages)

    def take(self, count: int) -> list[int]:
        """Hold `count` pages of unknown contents; at most `available` may be asked for."""
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._kept.popitem(last=False)
                self._blocks.pop(page).forget(self.group)
            self._holders[page] = 1
            taken.append(page)
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """Hold pages that are in the prefix tree, once more."""
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Hold pages once less; the first of them is the first to be taken again."""
        unknown = []
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._blocks:
                    self._kept[page] = None
                else:
                    unknown.append(page)
        self._free.extend(reversed(unknown))

    def keep(self, page: int, block: Block) -> None:
        """The page, which is held, has a block's tokens; others may find it there."""
        if block.pages[self.group] is None and page not in self._blocks:
            block.pages[self.group] = page
            self._blocks[page] = block

    def check(self, held: list[int]) -> None:
        """Assert every invariant; `held` are the pages of all sequences, as often as held."""
        counts = Counter(held)
        assert self._holders == [counts[page] for page in range(self.num_pages)], self.group
        # a sorted list, not a set: a page that is in two places, lost or null shows
        places = sorted([*counts, *self._free, *self._kept])
        assert places == list(range(NULL_PAGE + 1, self.num_pages)), (self.group, places)
        assert self._blocks.keys() >= self._kept.keys(), self.group
        for page, block in self._blocks.items():
            assert block.pages[self.group] == page, (self.group, page)
            assert block.is_reachable, (self.group, page)
