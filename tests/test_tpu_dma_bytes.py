"""Bytes that the TPU kernels really copy, counted in the interpreter copy by copy."""

from contextlib import contextmanager
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from jaxattn.kernels.pallas import tpu, tpu_decode_copies, tpu_prefill_copies
from jaxattn.kernels.pallas.tiles import DecodeTiles, Tiles
from jaxattn.kernels.pallas.tpu_prefill_shape import PrefillTiles
from tests.attention_cases import Case, fresh_call, run

CONTEXT = 32768
TOKEN_BYTES = 512  # one kv head of 128 in bfloat16: a key and a value
# Copies are made when started; races are looked for elsewhere, at ten times the cost.
INTERPRET = pltpu.InterpretParams(dma_execution_mode="eager")


@dataclass(frozen=True)
class Copied:
    """Bytes between kinds of memory: "pages", "new" (tokens) and "other" in HBM, or "vmem"."""

    source: str
    target: str
    num_bytes: int


@contextmanager
def copies(pool_shape, new_shape):
    """A list that every copy made inside is added to."""
    made = []
    execute_read = interpreter.DMA.execute_read

    def kind(space, buffer, device):
        name = interpreter.TPU_MEMORY_SPACE_NAMES[space]
        if name != "hbm":
            return name
        shape = interpreter._get_shared_memory().mem[(name, buffer, device, 0)].shape
        return {pool_shape: "pages", new_shape: "new"}.get(tuple(shape), "other")

    def recorded(self):
        execute_read(self)
        if self.data is not None:
            made.append(
                Copied(
                    kind(self.src_memory_space, self.src_buffer_id, self.src_device_id),
                    kind(self.dst_memory_space, self.dst_buffer_id, self.dst_device_id),
                    self.data_size,
                )
            )

    interpreter.DMA.execute_read = recorded
    try:
        yield made
    finally:
        interpreter.DMA.execute_read = execute_read


def fetched(made):
    """Bytes of keys and values that came to the fast memory."""
    return sum(
        copy.num_bytes for copy in made if copy.source in ("pages", "new") and copy.target == "vmem"
    )


def written(made):
    """Bytes that went to pages."""
    return sum(copy.num_bytes for copy in made if copy.target == "pages")


def long_case(lengths, page_size, decode):
    """Sequences in pages of their own, one after the other; keys and values are zeros."""
    q_lens = [q_len for q_len, _ in lengths]
    width = max(-(-kv_len // page_size) for _, kv_len in lengths)
    table = 1 + np.arange(len(lengths) * width, dtype=np.int32).reshape(len(lengths), width)
    tokens = np.zeros((sum(q_lens), 1, 128), jnp.bfloat16)
    return Case(
        queries=np.zeros((sum(q_lens), 2, 128), jnp.bfloat16),
        keys=tokens,
        values=tokens,
        pool=np.zeros((table.size + 1, page_size, 2, 1, 128), jnp.bfloat16),
        scales=None,
        kv_lens=np.array([kv_len for _, kv_len in lengths], np.int32),
        table=table,
        cu_q_lens=np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
        distribution=np.array([decode, decode, len(lengths)], np.int32),
        lengths=lengths,
        stored=(),
    )


def decode_only(monkeypatch):
    """Leave out the prefill kernel, which has nothing to do: half the time."""
    monkeypatch.setattr(
        tpu, "prefill", lambda queries, new, pages, scales, out, *_, **__: (out, pages)
    )


def prefill_only(monkeypatch):
    """Leave out the decode kernel."""
    monkeypatch.setattr(
        tpu, "decode", lambda queries, new, pages, *_, **__: (jnp.zeros_like(queries), pages)
    )


def count(case, tiles, **options):
    """All copies of a call."""
    new_shape = (len(case.keys), 1, 2, 128)
    with copies(case.pages().shape, new_shape) as made:
        options |= {"tiles": tiles, "interpret": INTERPRET}
        run(case, "pallas_tpu", jitted=fresh_call(), **options)
    return made


def check_decode(case, page_size, window, most):
    tile = min(window or CONTEXT, 64 * page_size)  # its copies are straight code: not too many
    tiles = Tiles(decode=DecodeTiles(tile_tokens=tile, slots=3, block_seqs=2))
    made = count(case, tiles, sliding_window=window)
    visible = sum(min(kv_len, window or kv_len) for _, kv_len in case.lengths) * TOKEN_BYTES
    assert visible <= fetched(made) <= most * visible
    assert written(made) == len(case.lengths) * TOKEN_BYTES


@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("window", [128, 512, 1024, 4096])
def test_windowed_decode(monkeypatch, window, page_size):
    """Three sequences, with their windows on and off the edges of pages; one short of a window."""
    decode_only(monkeypatch)
    lengths = ((1, CONTEXT), (1, CONTEXT - 7), (1, window - 1))
    check_decode(long_case(lengths, page_size, decode=3), page_size, window, 1.05)


@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_global_decode(monkeypatch, page_size):
    decode_only(monkeypatch)
    case = long_case(((1, CONTEXT - 7),), page_size, decode=1)
    check_decode(case, page_size, None, 1.02)


def check_prefill(tokens, most):
    """New tokens after 2048, in blocks of 512 queries that share what they fetch."""
    window, tiles = 1024, PrefillTiles(blocks=4, block_kv=512)
    case = long_case(((tokens, 2048 + tokens),), 32, decode=0)
    made = count(case, Tiles(prefill=tiles), sliding_window=window)
    union = tokens // tiles.queries * (tiles.queries + window - 1) * TOKEN_BYTES
    assert union <= fetched(made) <= most * union
    assert written(made) == tokens * TOKEN_BYTES


def test_prefill(monkeypatch):
    prefill_only(monkeypatch)
    check_prefill(4096, 1.5)


def test_new_tokens_alone_are_written_and_each_once(monkeypatch):
    """Both kernels in one batch; a token without a page is written nowhere."""
    case = long_case(((1, 40), (1, 64), (1, 33), (9, 41), (70, 100), (0, 50)), 16, decode=3)
    case.table[1, 3] = 0
    case.table[4, 100 // 16] = len(case.pool) + 5  # of its last four tokens
    tiles = Tiles(
        decode=DecodeTiles(tile_tokens=64, slots=3, block_seqs=2),
        prefill=PrefillTiles(block_q=8, blocks=2, block_kv=16),
    )
    made = count(case, tiles, sliding_window=20)
    assert written(made) == (3 + 9 + 70 - 1 - 4) * TOKEN_BYTES
    assert {copy.source for copy in made if copy.target == "pages"} == {"new"}
    made = count(case, tiles, sliding_window=20, update_kv_cache=False)
    assert written(made) == 0


# The count can fail.


def test_a_tile_fetched_twice_is_counted(monkeypatch):
    def twice(fetch):
        return lambda *arguments: (fetch(*arguments), fetch(*arguments))

    decode_only(monkeypatch)
    monkeypatch.setattr(tpu_decode_copies.Ring, "fetch", twice(tpu_decode_copies.Ring.fetch))
    with pytest.raises(AssertionError):
        check_decode(long_case(((1, 1000),), 16, decode=1), 16, 128, 1.05)
    monkeypatch.undo()
    prefill_only(monkeypatch)
    copies_class = tpu_prefill_copies.Copies
    monkeypatch.setattr(copies_class, "fetch_tile", twice(copies_class.fetch_tile))
    with pytest.raises(AssertionError):
        check_prefill(512, 1.5)


def test_a_window_that_starts_at_a_page_is_counted(monkeypatch):
    """Whole pages instead of tokens: up to a page more, which is a lot of a small window."""
    first_visible = tpu._first_visible

    def at_a_page(kv_lens, window, spans):
        return first_visible(kv_lens, window, spans) // 128 * 128

    decode_only(monkeypatch)
    monkeypatch.setattr(tpu, "_first_visible", at_a_page)
    case = long_case(((1, 2000),), 128, decode=1)
    tiles = Tiles(decode=DecodeTiles(tile_tokens=128, slots=3, block_seqs=2))
    made = count(case, tiles, sliding_window=256)
    assert fetched(made) > 1.05 * 256 * TOKEN_BYTES
