"""What a TPU chip is, and the tile sizes that follow from it and from a layer's shape.

The rules are short enough to check by hand and every number in them can be overridden: pass
`DecodeTiles` or `PrefillTiles` of your own.
"""

from dataclasses import dataclass
from math import lcm

import jax.numpy as jnp

from jaxattn.kernels.layout import LANES, KVLayout
from jaxattn.kernels.pallas.products import compute_dtype


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Published facts of one TPU core."""

    name: str
    device_kinds: tuple[str, ...]  # as JAX names it
    vmem_bytes: int
    hbm_gb_per_s: int
    bf16_tflops: int
    float8: bool  # whether the compiler converts float8 here

    @property
    def usable_vmem_bytes(self) -> int:
        """What a kernel may take: the compiler keeps some."""
        return self.vmem_bytes * 15 // 16


MIB = 2**20
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            device_kinds=("TPU v5 lite", "TPU v5e"),
            vmem_bytes=128 * MIB,
            hbm_gb_per_s=820,
            bf16_tflops=197,
            float8=False,
        ),
        Chip(
            name="v5p",
            device_kinds=("TPU v5", "TPU v5p"),
            vmem_bytes=64 * MIB,
            hbm_gb_per_s=1230,
            bf16_tflops=230,
            float8=False,
        ),
        Chip(
            name="v6e",
            device_kinds=("TPU v6 lite", "TPU v6e"),
            vmem_bytes=128 * MIB,
            hbm_gb_per_s=1640,
            bf16_tflops=918,
            float8=True,
        ),
        Chip(
            name="tpu7x",
            device_kinds=("TPU7x",),
            vmem_bytes=64 * MIB,
            hbm_gb_per_s=3700,
            bf16_tflops=1155,
            float8=True,
        ),
    )
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls this, or None."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)


SMEM_ENTRIES = 2**17  # of a page table: half of 1 MiB, the other half is the compiler's
TILE_BYTES = 9 * MIB // 2
MAX_TOKENS = 2560  # of a tile: its copies and products are straight code
CLEARED = 8  # rows of a tile that are cleared at once, so that a tile has as many to spare
MAX_SEQS = 32  # sequences of one block: their queries and outputs travel together
LATENCY_US = 1.5  # of one copy from HBM, as measured by others: decides how many are in flight


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below."""
    return -(-value // multiple) * multiple


def odd(rows: int) -> int:
    """Rows of a token in VMEM: an odd stride spreads strided loads over all banks."""
    return rows | 1


@dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """Sizes of the decode kernel.

    `tile_tokens`: visible tokens of one copy; a window of at most this many is one tile.
    `slots`: tiles in flight or in use. `block_seqs`: sequences whose queries and outputs travel
    together.
    """

    tile_tokens: int
    slots: int
    block_seqs: int

    def __post_init__(self) -> None:
        if self.tile_tokens < 1 or self.block_seqs < 1 or self.slots < 2:
            raise ValueError(f"{self}: expected at least 1 token, 1 sequence and 2 slots")

    def columns(self, layout: KVLayout) -> int:
        """Tokens that a tile has room for: whole registers of scores, and whole pages of scales."""
        if not layout.is_quantized:
            return round_up(self.tile_tokens, LANES // layout.pack)
        return round_up(self.tile_tokens + layout.page_size - 1, layout.page_size)

    def slot_bytes(self, layout: KVLayout) -> int:
        """VMEM of one slot."""
        tokens = self.columns(layout)
        scales = 0
        if layout.is_quantized:
            pages = tokens // layout.page_size
            lanes = round_up(layout.page_size * layout.pack, LANES)
            scales = pages * round_up(layout.scale_rows, 8) * lanes * 4
        return (tokens + CLEARED) * odd(layout.rows) * LANES * 4 + scales


@dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """Sizes of the prefill kernel.

    `block_q`: queries whose tiles are walked together, a multiple of 128 (lanes). `blocks`:
    consecutive blocks of a sequence that share a tile once it is fetched and unpacked.
    `block_kv`: keys of a tile, a multiple of 128.
    """

    block_q: int = 128
    blocks: int = 4
    block_kv: int = 512

    def __post_init__(self) -> None:
        if min(self.block_q, self.blocks, self.block_kv) < 1:
            raise ValueError(f"{self}: expected sizes of at least 1")

    @property
    def queries(self) -> int:
        """Queries that travel together."""
        return self.block_q * self.blocks


def decode_vmem_bytes(
    layout: KVLayout, num_q_heads: int, query_dtype: str, tiles: DecodeTiles
) -> int:
    """VMEM of the decode kernel: the ring, queries and outputs twice, scores, state and spills."""
    query_bytes = jnp.dtype(query_dtype).itemsize
    rows = round_up(num_q_heads, 8 * 4 // query_bytes)
    lanes = layout.lane_tiles * LANES
    queries = 4 * tiles.block_seqs * rows * lanes * query_bytes
    state = num_q_heads * (lanes + 2 * LANES) * 4
    columns = tiles.columns(layout) * layout.pack
    # Scores and weights of every product, and one tile's words: what may be spilt at once.
    scores = 3 * round_up(num_q_heads, 8) * columns * 4
    wide = compute_dtype(layout, query_dtype).itemsize
    words = 2 * tiles.columns(layout) * layout.rows * layout.pack * LANES * wide
    return tiles.slots * tiles.slot_bytes(layout) + queries + state + scores + words


def decode_tiles(
    layout: KVLayout, *, most_tokens: int | None, num_seqs: int, chip: Chip
) -> DecodeTiles:
    """Tiles for a chip.

    A window of up to 2560 tokens is one tile if three of them fit half the VMEM. Otherwise a tile
    has up to 4.5 MiB and at most 2560 tokens: then its copies take longer than one copy's latency,
    and its products hide the bookkeeping. Slots: bytes in flight to cover twice the latency, at
    least 3.
    """
    page_size = layout.page_size
    token_bytes = odd(layout.rows) * LANES * 4
    budget = chip.vmem_bytes // 2
    fits = most_tokens is not None and 3 * (most_tokens + page_size) * token_bytes <= budget
    if most_tokens is not None and most_tokens <= MAX_TOKENS and fits:
        tile_tokens = most_tokens
    else:
        tokens = min(MAX_TOKENS, max(128, TILE_BYTES // token_bytes))
        whole = lcm(page_size, LANES // layout.pack)  # pages, and registers of scores
        step = whole if whole <= tokens else page_size
        tile_tokens = max(tokens // step, 1) * step
    block_seqs = min(num_seqs, MAX_SEQS)
    one = DecodeTiles(tile_tokens=tile_tokens, slots=2, block_seqs=block_seqs)
    in_flight = 2 * LATENCY_US * chip.hbm_gb_per_s * 1000
    slots = 2 + int(in_flight // (tile_tokens * layout.rows * LANES * 4))
    most = max(3, budget // one.slot_bytes(layout))
    return DecodeTiles(
        tile_tokens=tile_tokens, slots=max(3, min(slots, most, 128)), block_seqs=block_seqs
    )


def prefill_vmem_bytes(
    layout: KVLayout, num_q_heads: int, query_dtype: str, tiles: PrefillTiles
) -> int:
    """VMEM of the prefill kernel: what is copied, what is computed with, and a tenth for spills."""
    query_bytes = jnp.dtype(query_dtype).itemsize
    compute_bytes = compute_dtype(layout, query_dtype).itemsize
    lanes, heads = layout.lane_tiles * LANES, layout.num_kv_heads
    padded_heads = round_up(num_q_heads, 8 * 4 // query_bytes)
    queries = tiles.queries * padded_heads * lanes * (3 * query_bytes + compute_bytes)
    tile = 2 * tiles.block_kv * odd(layout.rows) * LANES * 4
    keys = heads * tiles.block_kv * lanes * compute_bytes
    values = 3 * heads * (lanes + 16) * tiles.block_kv * compute_bytes
    scores = 4 * tiles.block_kv * 2 * LANES * (4 + compute_bytes) + tiles.block_kv * LANES * 4
    scales = 0
    if layout.is_quantized:  # as they arrive, and turned
        columns = (tiles.block_kv + 2 * layout.page_size) * layout.pack
        scales = columns * (2 * round_up(layout.scale_rows, 8) + LANES) * 4
    state = (tiles.queries * num_q_heads + 8 * LANES) * (lanes + 24) * 4
    return (queries + tile + keys + values + scores + scales + state) * 11 // 10


def prefill_tiles(layout: KVLayout, num_q_heads: int, query_dtype: str, chip: Chip) -> PrefillTiles:
    """Tiles for a chip: 512 queries against 512 keys at a time, fewer where half the VMEM is less.

    Queries go first: a tile that fewer queries share is fetched and unpacked more often.
    """
    sizes = [(4, 512), (4, 256), (2, 512), (2, 256), (1, 256), (1, 128)]
    for blocks, block_kv in sizes:
        tiles = PrefillTiles(blocks=blocks, block_kv=block_kv)
        needed = prefill_vmem_bytes(layout, num_q_heads, query_dtype, tiles)
        if needed <= chip.vmem_bytes // 2:
            break
    return tiles


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of both kernels; None: by rule."""

    decode: DecodeTiles | None = None
    prefill: PrefillTiles | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.decode, DecodeTiles | None):
            raise TypeError(f"decode={self.decode!r}: expected DecodeTiles or None")
        if not isinstance(self.prefill, PrefillTiles | None):
            raise TypeError(f"prefill={self.prefill!r}: expected PrefillTiles or None")


def choose_tiles(
    layout: KVLayout,
    *,
    most_tokens: int | None,
    num_q_heads: int,
    query_dtype: str,
    chip: Chip,
    override: Tiles,
    num_seqs: int = MAX_SEQS,
) -> tuple[DecodeTiles, PrefillTiles]:
    """The sizes to run with: those given, else by rule. `most_tokens`: a decode query's keys."""
    decode = override.decode or decode_tiles(
        layout, most_tokens=most_tokens, num_seqs=num_seqs, chip=chip
    )
    return decode, override.prefill or prefill_tiles(layout, num_q_heads, query_dtype, chip)
