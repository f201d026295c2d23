"""One step's ragged batch: what all layers share (lengths) and what a group shares (its table)."""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Int32

from jaxattn.kernels.ragged import TokenPlaces, token_places


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """Where the pages of a group's sequences are. A group shares this, and no mask attribute.

    `page_indices[s, c]` is the physical page of sequence s's page `first_page[s] + c`; unused
    entries are the null page 0.
    """

    page_indices: Int32[Array, "seqs pages_per_seq"]
    first_page: Int32[Array, "seqs"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """The flat new tokens of several sequences, decode sequences first, padding last.

    `kv_lens` include the new tokens; sequence s owns rows `cu_q_lens[s] : cu_q_lens[s + 1]`;
    `distribution` is the cumulative `(decode, prefill, total)`; one table per cache group.
    Pass it to a jitted function as an argument: its lengths change, its shapes do not.
    """

    kv_lens: Int32[Array, "seqs"]
    cu_q_lens: Int32[Array, "seqs_plus_1"]
    distribution: Int32[Array, "3"]
    tables: tuple[PageTable, ...]

    def places(self, num_tokens: int) -> TokenPlaces:
        """Sequence, absolute position and realness of each of `num_tokens` flat tokens."""
        return token_places(num_tokens, self.kv_lens, self.cu_q_lens, self.distribution)

    def last_rows(self) -> Int32[Array, "seqs"]:
        """Flat row of each sequence's last new token (0 for a sequence without one)."""
        return (self.cu_q_lens[1:] - 1).clip(0)

    def check(self, num_pages: tuple[int, ...]) -> None:
        """Raise ValueError unless the host values fit together (not for traced values).

        `num_pages`: size of each group's pool. A page id beyond the pool would be dropped when
        written and read as zeros, so it is refused here, before any device work.
        """
        kv_lens, cu_q_lens, distribution = map(
            np.asarray, (self.kv_lens, self.cu_q_lens, self.distribution)
        )
        decode, prefill, total = distribution.tolist()
        if not 0 <= decode <= prefill <= total <= len(kv_lens):
            raise ValueError(f"{distribution=}: expected 0 <= decode <= prefill <= total <= seqs")
        q_lens = np.diff(cu_q_lens)
        if cu_q_lens[0] != 0 or (q_lens < 0).any():
            raise ValueError(f"{cu_q_lens=}: expected to start at 0 and never to fall")
        if (q_lens[:decode] != 1).any():
            raise ValueError(f"{q_lens[:decode]=}: a decode sequence has exactly one new token")
        if (kv_lens[:total] < q_lens[:total]).any():
            raise ValueError(f"{kv_lens=} must include the new tokens {q_lens=}")
        if len(self.tables) != len(num_pages):
            raise ValueError(f"{len(self.tables)} page tables for {len(num_pages)} groups")
        for group, (table, size) in enumerate(zip(self.tables, num_pages, strict=True)):
            ids = np.asarray(table.page_indices)
            if (ids < 0).any() or (ids >= size).any():
                raise ValueError(f"group {group}: page ids outside 0 to {size - 1}: {ids=}")
