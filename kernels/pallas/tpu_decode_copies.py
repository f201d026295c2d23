"""The copies of the decode kernel: which tokens of which sequence go to which slot of the ring."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from jaxattn.kernels.pallas.scalars import ceil_quotient
from jaxattn.kernels.pallas.tiles import CLEARED
from jaxattn.kernels.pallas.tpu_decode_shape import DecodeShape
from jaxattn.kernels.pallas.words import Ref

Scalar = Int32[Array, ""]


class Ring:
    """The copies: which tokens of which sequence go to which slot."""

    def __init__(self, shape: DecodeShape, refs: Any):
        self.shape, self.refs = shape, refs

    def _tile(self, slot: Scalar, first: Any, count: Any) -> Ref:
        rows = self.shape.layout.rows
        return self.refs.tile.at[slot, pl.ds(first, count), pl.ds(0, rows)]

    def span(self, seq: Scalar, index: Scalar | int) -> tuple[Scalar, Scalar]:
        """Tokens `first .. stop` of a sequence that its tile number `index` holds."""
        first = self.refs.starts[seq] + index * self.shape.full_tokens
        return first, jnp.minimum(first + self.shape.full_tokens, self.refs.kv_lens[seq])

    def offset(self, seq: Scalar) -> Scalar | int:
        """Where in its page a sequence's every tile starts."""
        return 0 if self.shape.from_zero else self.refs.offsets[seq]

    def base(self, seq: Scalar) -> Scalar | int:
        """Row of a tile's first token: pages of scales stay whole, so quantised tiles do too."""
        return self.offset(seq) if self.shape.layout.is_quantized else 0

    def fetch(self, seq: Scalar, index: Scalar | int, slot: Scalar) -> None:
        """Start the copies of a tile."""
        shape, refs, page_size = self.shape, self.refs, self.shape.layout.page_size
        first, stop = self.span(seq, index)
        paged = jnp.minimum(stop, refs.kv_lens[seq] - 1) if shape.update_kv_cache else stop
        offset, base = self.offset(seq), self.base(seq)
        width = refs.table.shape[0] // refs.starts.shape[0]
        column = seq * width + index * (shape.full_tokens // page_size)

        def copy(column: Scalar, offset: Any, target: Any, count: Any) -> None:
            source = refs.pages.at[refs.table[column], pl.ds(offset, count)]
            pltpu.make_async_copy(
                source, self._tile(slot, target, count), refs.arrived.at[slot]
            ).start()

        def copy_all() -> None:  # straight code: a loop takes three times the cycles
            total = shape.paged_tokens
            head = _minimum(page_size - offset, total)
            whole = max(total // page_size - 1, 0)
            copy(column, offset, base, head)
            for page in range(whole):
                copy(column + 1 + page, 0, base + head + page * page_size, page_size)
            rest = total - head - whole * page_size
            done = head + whole * page_size
            _when(
                rest > 0,
                lambda: copy(column + 1 + whole, 0, base + done, _minimum(rest, page_size)),
            )
            _when(
                rest > page_size,
                lambda: copy(column + 2 + whole, 0, base + done + page_size, rest - page_size),
            )

        def copy_some() -> None:
            def body(state: tuple) -> tuple:
                done, column, offset = state
                count = jnp.minimum(page_size - offset, paged - first - done)
                copy(column, offset, base + done, count)
                return done + count, column + 1, jnp.int32(0)

            start = jnp.int32(0), column, jnp.asarray(offset, jnp.int32)
            jax.lax.while_loop(lambda state: state[0] < paged - first, body, start)

        if shape.paged_tokens == 0:
            copy_some()
        else:
            full = paged - first == shape.paged_tokens
            either(full, copy_all, copy_some)

        def copy_new() -> None:
            source = refs.new_kv.at[pl.ds(seq, 1)]
            target = self._tile(slot, base + stop - 1 - first, 1)
            pltpu.make_async_copy(source, target, refs.arrived.at[slot]).start()

        def copy_scales(page: Scalar) -> None:
            source = refs.scales.at[refs.table[column + page]]
            target = refs.tile_scales.at[slot, page]
            pltpu.make_async_copy(source, target, refs.scales_arrived.at[slot]).start()

        if shape.update_kv_cache:
            pl.when(stop == refs.kv_lens[seq])(copy_new)
        if shape.layout.is_quantized:
            pl.loop(0, ceil_quotient(base + stop - first, page_size))(copy_scales)

    def wait(self, slot: Scalar, tokens: Any, scaled_tokens: Any) -> None:
        """Wait for all copies of a tile at once: semaphores count bytes."""
        refs = self.refs
        tile = self._tile(slot, 0, tokens)
        pltpu.make_async_copy(tile, tile, refs.arrived.at[slot]).wait()
        if scaled_tokens is not None:
            count = ceil_quotient(scaled_tokens, self.shape.layout.page_size)
            pages = refs.tile_scales.at[slot, pl.ds(0, count)]
            pltpu.make_async_copy(pages, pages, refs.scales_arrived.at[slot]).wait()

    def clear(self, slot: Scalar, first: Scalar | int, end: Scalar) -> None:
        """Zeros to the rows of a tile outside `first .. end`: 0 * NaN would reach the output.

        What a tile leaves behind is only in the way of a shorter one: nothing to do in a window
        that is full, and once a sequence otherwise.
        """
        refs = self.refs

        def clear_from(row: Scalar) -> None:
            rows = refs.tile.at[slot, pl.ds(row, CLEARED)]
            rows[...] = jnp.zeros(rows.shape, rows.dtype)

        @pl.when(end < refs.dirty[slot])
        def _() -> None:
            count = ceil_quotient(refs.dirty[slot] - end, CLEARED)
            pl.loop(0, count)(lambda index: clear_from(end + index * CLEARED))

        refs.dirty[slot] = end
        if not isinstance(first, int) and "float" in self.shape.layout.dtype:

            @pl.loop(0, first)
            def _(row: Scalar) -> None:
                blank = refs.tile.at[slot, row]
                blank[...] = jnp.zeros(blank.shape, blank.dtype)


def _minimum(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def either(condition: Scalar, usual: Callable[[], None], rare: Callable[[], None]) -> None:
    """One of two bodies; the usual one is what a long context runs."""
    pl.when(condition)(usual)
    with jax.named_scope("partial_tile"):  # benchmarks tell the two apart by it
        pl.when(jnp.logical_not(condition))(rare)


def _when(condition: Any, body: Callable[[], None]) -> None:
    """`pl.when`, decided now if it can be."""
    if isinstance(condition, bool):
        if condition:
            body()
    else:
        pl.when(condition)(body)
