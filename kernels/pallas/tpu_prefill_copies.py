"""The copies of the prefill kernel: exactly the tokens that are needed, from wherever they are.

A token that the cache already holds comes from its page; a new one comes straight from the
arguments, so that no read waits for a write. Tokens are not tiled in memory: a copy may start at
any of them.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from jaxattn.kernels.layout import LANES
from jaxattn.kernels.pallas.scalars import ceil_quotient, quotient, remainder
from jaxattn.kernels.pallas.tpu_prefill_shape import PrefillShape
from jaxattn.kernels.pallas.words import Ref

UNROLLED = 4  # pages a loop: half the cycles of one at a time
Scalar = Int32[Array, ""]


def start_copy(source: Ref, target: Ref, semaphore: Ref) -> None:
    """Start a copy."""
    pltpu.make_async_copy(source, target, semaphore).start()


def wait_copies(like: Ref, semaphore: Ref) -> None:
    """Wait for all copies on a semaphore, as many bytes as `like` has."""
    pltpu.make_async_copy(like, like, semaphore).wait()


class Copies:
    """Starts the copies of a sequence's tokens, and waits for them."""

    def __init__(self, shape: PrefillShape, refs: Any):
        self.shape, self.refs = shape, refs

    def q_len(self, seq: Scalar) -> Scalar:
        """New tokens of a sequence."""
        return self.refs.cu_q_lens[seq + 1] - self.refs.cu_q_lens[seq]

    def stored(self, seq: Scalar) -> Scalar:
        """Tokens of a sequence that are read from pages."""
        kv_len = self.refs.kv_lens[seq]
        return kv_len - self.q_len(seq) if self.shape.update_kv_cache else kv_len

    def _each_page(
        self, seq: Scalar, first: Scalar, end: Scalar, copy: Callable[..., None]
    ) -> None:
        """`copy(page, row, position, count)` for the pages of tokens `first .. end`.

        `page` is 0, the null page, where the table has none.
        """
        refs, page_size = self.refs, self.shape.layout.page_size
        width = self.shape.table_width
        start, stop = quotient(first, page_size), quotient(end, page_size)  # of whole pages: stop
        base = seq * width - refs.first_page[seq]

        def page(index: Scalar) -> Scalar:
            inside = jnp.clip(base + index, seq * width, seq * width + width - 1)
            return jnp.where(inside == base + index, refs.table[inside], 0)

        def part(index: Scalar, begin: Scalar, end: Scalar) -> None:
            @pl.when(begin < end)
            def _() -> None:
                copy(page(index), begin - index * page_size, begin, end - begin)

        whole = start + (first > start * page_size).astype(jnp.int32)
        part(start, first, jnp.minimum(whole * page_size, end))
        some = jnp.maximum(stop - whole, 0)

        def copy_whole(index: Scalar) -> None:
            copy(page(index), 0, index * page_size, page_size)

        @pl.loop(0, quotient(some, UNROLLED))
        def _(group: Scalar) -> None:
            for each in range(UNROLLED):
                copy_whole(whole + group * UNROLLED + each)

        pl.loop(stop - remainder(some, UNROLLED), jnp.where(whole < stop, stop, 0))(copy_whole)
        part(stop, jnp.maximum(stop * page_size, whole * page_size), end)

    def _tile(self, slot: Scalar | int, first: Scalar | int, count: Scalar) -> Ref:
        rows = self.shape.layout.rows
        return self.refs.tile.at[slot, pl.ds(first, count), pl.ds(0, rows)]

    def fetch_tile(self, seq: Scalar, first: Scalar, end: Scalar, slot: Scalar | int) -> None:
        """Start the copies of tokens `first .. end` of a sequence to a slot."""
        refs, stored = self.refs, self.stored(seq)
        arrived = refs.arrived.at[slot]

        def copy(page: Scalar, row: Scalar, position: Scalar, count: Scalar) -> None:
            source = refs.pages.at[page, pl.ds(row, count)]
            start_copy(source, self._tile(slot, position - first, count), arrived)

        self._each_page(seq, first, jnp.minimum(end, stored), copy)
        if self.shape.update_kv_cache:
            begin = jnp.maximum(first, stored)

            @pl.when(begin < end)
            def _() -> None:
                token = refs.cu_q_lens[seq] + begin - stored
                source = refs.new_kv.at[pl.ds(token, end - begin)]
                start_copy(source, self._tile(slot, begin - first, end - begin), arrived)

        if refs.scales is not None:  # whole pages of them: they lie along lanes
            page_size = self.shape.layout.page_size
            first_page = quotient(first, page_size)

            def copy_scales(page: Scalar, row: Scalar, position: Scalar, count: Scalar) -> None:
                index = quotient(position, page_size) - first_page
                target = self._scales(slot, index, 1)
                start_copy(refs.scales.at[pl.ds(page, 1)], target, refs.scales_arrived.at[slot])

            self._each_page(seq, first, end, copy_scales)

    def _scales(self, slot: Scalar | int, page: Scalar | int, count: Scalar | int) -> Ref:
        return self.refs.scale_tile.at[slot, pl.ds(page, count)]

    def scale_pages(self, first: Scalar, end: Scalar) -> Scalar:
        """Pages that tokens `first .. end` are in."""
        page_size = self.shape.layout.page_size
        return ceil_quotient(end, page_size) - quotient(first, page_size)

    def wait_tile(self, first: Scalar, end: Scalar, slot: Scalar) -> None:
        """Wait for tokens `first .. end`."""
        refs = self.refs
        wait_copies(self._tile(slot, 0, end - first), refs.arrived.at[slot])
        if refs.scales is not None:
            pages = self.scale_pages(first, end)
            wait_copies(self._scales(slot, 0, pages), refs.scales_arrived.at[slot])

    def write_new(self, seq: Scalar) -> None:
        """Start the copies of a sequence's new tokens to their pages."""
        refs, stored = self.refs, self.stored(seq)

        def copy(page: Scalar, row: Scalar, position: Scalar, count: Scalar) -> None:
            @pl.when(page > 0)
            def _() -> None:
                token = refs.cu_q_lens[seq] + position - stored
                target = refs.pages.at[page, pl.ds(row, count)]
                start_copy(refs.new_kv.at[pl.ds(token, count)], target, refs.written)
                refs.progress[0] += count

        self._each_page(seq, stored, refs.kv_lens[seq], copy)

    def wait_written(self) -> None:
        """Wait for all new tokens to be in their pages."""
        count = self.refs.progress[0]

        @pl.when(count > 0)
        def _() -> None:
            wait_copies(self.refs.new_kv.at[pl.ds(0, count)], self.refs.written)

    def fetch_queries(self, token: Scalar, count: Scalar, slot: Scalar | int) -> None:
        """Start the copies of queries `token .. token + count`, and of their image spans."""
        refs = self.refs
        arrived = refs.queries_arrived.at[slot]
        for tile in range(self.shape.layout.lane_tiles):
            source = refs.queries.at[pl.ds(token, count), :, pl.ds(tile * LANES, LANES)]
            start_copy(source, refs.query_tile.at[slot, tile, pl.ds(0, count)], arrived)
        if refs.spans is not None:
            # Lanes are tiled: copy whole registers, turn them into place after arrival.
            source = refs.spans.at[
                :,
                pl.ds(
                    pl.multiple_of(quotient(token, LANES) * LANES, LANES), refs.span_tile.shape[2]
                ),
            ]
            start_copy(source, refs.span_tile.at[slot], refs.spans_arrived.at[slot])

    def wait_queries(self, count: Scalar, slot: Scalar) -> None:
        """Wait for the `count` queries of a slot."""
        refs = self.refs
        for tile in range(self.shape.layout.lane_tiles):
            like = refs.query_tile.at[slot, tile, pl.ds(0, count)]
            wait_copies(like, refs.queries_arrived.at[slot])
        if refs.spans is not None:
            wait_copies(refs.span_tile.at[slot], refs.spans_arrived.at[slot])

    def send(self, token: Scalar, count: Scalar) -> None:
        """Start the copies of outputs to rows `token .. token + count`."""
        refs = self.refs
        for tile in range(self.shape.layout.lane_tiles):
            target = refs.out.at[pl.ds(token, count), :, pl.ds(tile * LANES, LANES)]
            start_copy(refs.out_tile.at[tile, pl.ds(0, count)], target, refs.sent)

    def wait_sent(self, count: Scalar) -> None:
        """Wait for outputs of `count` rows, so that their buffer is free; 0: nothing was sent."""

        @pl.when(count > 0)
        def _() -> None:
            for tile in range(self.shape.layout.lane_tiles):
                wait_copies(self.refs.out_tile.at[tile, pl.ds(0, count)], self.refs.sent)

    def clear_padding(self, first: Scalar) -> None:
        """Zeros to rows `first ..` of the output."""
        refs = self.refs
        tokens, queries = refs.out.shape[0], self.shape.tiles.queries
        most = min(tokens, queries)

        @pl.when(first < tokens)
        def _() -> None:
            blank = refs.out_tile.at[:, pl.ds(0, most)]
            blank[...] = jnp.zeros(blank.shape, blank.dtype)

        @pl.loop(0, ceil_quotient(tokens - first, queries))
        def _(index: Scalar) -> None:
            row = first + index * queries
            count = jnp.minimum(queries, tokens - row)
            self.send(row, count)
            self.wait_sent(count)
